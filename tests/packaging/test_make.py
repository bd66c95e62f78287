"""`make` says in one clear line why it cannot go on, before it does anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not all(shutil.which(tool) for tool in ("make", "bash", "awk", "df")), reason="needs make and a shell"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a fresh checkout as the checks look at."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def run_make(checkout: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    # The suite itself may run under make, whose flags and PYTHON would carry over.
    dropped = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "MIN_FREE_MB")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    if path is not None:
        environment["PATH"] = path
    return subprocess.run(
        [shutil.which("make") or "make", *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def assert_refused(run: subprocess.CompletedProcess[str], checkout: Path, *words: str) -> None:
    assert run.returncode != 0
    assert run.stdout == ""
    # The second line is make's own "*** Error 1".
    line, own = run.stderr.splitlines()
    assert own.startswith("make: ***")
    assert all(word in line for word in words), line
    assert not (checkout / ".venv").exists()


def fake_python(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fake_environment(checkout: Path, script: str) -> Path:
    """A virtual environment made in `checkout`, as far as the Makefile can tell; returns its interpreter."""
    python = fake_python(checkout / ".venv" / "bin", "python", script)
    fake_python(python.parent, "pip", f"exec {python} -m pip")
    return python


# Stands in for Python 3.9: fails the version check, and prints its version when asked for it.
TOO_OLD = 'case "$2" in *sys.exit*) exit 1;; *) echo "is Python 3.9";; esac'


@pytest.mark.parametrize("target", ["check", "venv", "demo", "test", "lint"])
def test_a_python_that_is_too_old(checkout: Path, target: str) -> None:
    python = fake_python(checkout / "bin", "python3.9", TOO_OLD)
    run = run_make(checkout, target, f"PYTHON={python}")
    assert_refused(run, checkout, "needs Python 3.11 or newer", "is Python 3.9", "make PYTHON=")


def test_a_python_that_does_not_run(checkout: Path) -> None:
    run = run_make(checkout, "venv", "PYTHON=/nowhere/python3.12")
    assert_refused(run, checkout, "/nowhere/python3.12 does not run", "make PYTHON=")


def test_no_python_at_all(checkout: Path) -> None:
    tools = checkout / "bin"
    tools.mkdir()
    for tool in ("bash", "sh", "awk", "df", "sed", "cat"):
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(found)
    run = run_make(checkout, "venv", path=str(tools))
    assert_refused(run, checkout, "needs Python 3.11 or newer", "none of", "install it")


@pytest.mark.parametrize("target", ["check", "venv", "demo", "test", "lint"])
def test_too_little_disk(checkout: Path, target: str) -> None:
    run = run_make(checkout, target, "MIN_FREE_MB=999999999")
    assert_refused(run, checkout, "999999999 MB of free disk", str(checkout), "free some space")


def test_shims_that_exist_and_fail_are_passed_over(checkout: Path) -> None:
    shims = checkout / "shims"
    fake_python(shims, "python3.13", 'echo "python3.13: command not found" >&2; exit 127')
    fake_python(shims, "python3.12", TOO_OLD)
    works = fake_python(shims, "python3.11", "exit 0")
    run = run_make(checkout, "check", "MIN_FREE_MB=999999999", path=f"{shims}:{os.environ['PATH']}")
    assert_refused(run, checkout, "free disk")
    database = run_make(checkout, "-pn", "check", path=f"{shims}:{os.environ['PATH']}").stdout
    assert f"PYTHON := {works}" in database


def test_an_interpreter_without_venv(checkout: Path) -> None:
    script = 'case "$*" in *%d*version_info*) echo 3.12;; *ensurepip*|*venv*) exit 1;; *) exit 0;; esac'
    python = fake_python(checkout / "bin", "python3.12", script)
    run = run_make(checkout, "venv", f"PYTHON={python}", "MIN_FREE_MB=0")
    assert run.returncode != 0
    assert "apt install python3.12-venv" in run.stderr
    assert not (checkout / ".venv").exists()


def test_a_failed_install_is_seen_and_leaves_no_mark(checkout: Path) -> None:
    script = """case "$*" in
      *version_info*) echo 3.12 ;;
      *"pip install"*) echo "ERROR: No matching distribution found" >&2; exit 1 ;;
    esac"""
    python = fake_environment(checkout, script)
    (checkout / ".venv" / "installed-key").write_text("of another install\n")
    run = run_make(checkout, "test", f"PYTHON={python}", "MIN_FREE_MB=0")
    assert run.returncode != 0
    assert "No matching distribution found" in run.stderr
    assert "The install failed" in run.stderr
    assert not (checkout / ".venv" / "installed-key").exists()


def test_nothing_is_installed_again_when_nothing_changed(checkout: Path) -> None:
    script = """case "$*" in
      *version_info*) echo 3.12 ;;
      *"pip install"*) echo install >> "$(dirname "$0")/../installs" ;;
    esac"""
    python = fake_environment(checkout, script)
    installs = checkout / ".venv" / "installs"

    def count() -> int:
        run = run_make(checkout, "venv", f"PYTHON={python}", "MIN_FREE_MB=0")
        assert run.returncode == 0, run.stderr
        return len(installs.read_text().splitlines())

    assert count() == 1
    os.utime(checkout / "pyproject.toml")
    assert count() == 1
    with (checkout / "constraints.txt").open("a") as constraints:
        constraints.write("# changed\n")
    assert count() == 2
