"""The wheel holds what the repository holds, under kvlane.*, and every module of it imports."""

from __future__ import annotations

import email.message
import email.parser
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("policy", "transfer", "streams", "bench")

# Files of the four folders that stay in the repository. Anything else must ship.
NOT_SHIPPED = ("bench/results/*", "*.md", "*.sh")

# Packages that a module may need and an installation may lack: an import may fail for their absence alone.
OPTIONAL = ("cupy", "cuda", "lmcache", "sglang", "vllm", "uvloop", "prometheus_client")

# Imports each module of the wheel in a fresh interpreter, and says where it came from or what was missing.
IMPORT_ALL = """
import importlib, importlib.metadata, importlib.util, json, sys

target, modules = sys.argv[1], sys.argv[2:]
sys.path.insert(0, target)
report = {"files": {}, "missing": {}, "entry_points": {}}
for name in modules:
    if name.endswith(".__main__"):  # importing it would run it
        report["files"][name] = importlib.util.find_spec(name).origin
        continue
    try:
        report["files"][name] = importlib.import_module(name).__file__
    except ImportError as error:
        while error is not None and not isinstance(error, ModuleNotFoundError):
            error = error.__cause__ or error.__context__
        if error is None:
            raise
        report["missing"][name] = error.name or str(error)
(distribution,) = importlib.metadata.distributions(name="kvlane", path=[target])
for entry in distribution.entry_points:
    try:
        outcome = "callable" if callable(entry.load()) else "not callable"
    except (AttributeError, ImportError) as error:
        outcome = str(error)
    report["entry_points"][f"{entry.group}:{entry.name}"] = outcome
print(json.dumps(report))
"""


def repository_files() -> list[str]:
    """Tracked files, and untracked ones that are not ignored, relative to the root."""
    git = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if git.returncode == 0:
        names = [name for name in git.stdout.split("\0") if name]
    else:  # an unpacked archive
        found = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
        found += [ROOT / name for name in ("pyproject.toml", "LICENSE", "README.md")]
        names = [path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts]
    return sorted(name for name in names if (ROOT / name).is_file())


def shipped_files() -> dict[str, Path]:
    """Name in the wheel -> file of the repository."""
    return {
        f"kvlane/{name}": ROOT / name
        for name in repository_files()
        if name.startswith(tuple(f"{package}/" for package in PACKAGES))
        and not any(fnmatch.fnmatch(name, pattern) for pattern in NOT_SHIPPED)
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that the build's leftovers do not land in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in repository_files():
        if "/" in name and not name.startswith(tuple(f"{package}/" for package in PACKAGES)):
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    build = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run(
        [*pip, "--no-compile", "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    return target


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_repository_files_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        held = {name for name in names if ".dist-info/" not in name}
        expected = shipped_files()
        advice = (
            "list its package, or a pattern under package-data, in pyproject.toml (or name it in NOT_SHIPPED)"
        )
        assert sorted(set(expected) - held) == [], f"left out of the wheel: {advice}"
        assert sorted(held - set(expected)) == [], "in the wheel, but not in the repository"
        assert all(archive.read(name) == path.read_bytes() for name, path in expected.items())


def test_the_wheel_puts_nothing_but_kvlane_into_site_packages(wheel: Path, installed: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {PurePosixPath(name).parts[0] for name in archive.namelist()}
    assert tops == {"kvlane", "kvlane-0.1.0.dist-info"}
    assert {path.name for path in installed.iterdir()} - {"bin"} == tops
    assert not (installed / "kvlane" / "__init__.py").exists(), "kvlane is a namespace package"


def test_the_wheel_is_typed(installed: Path) -> None:
    assert all((installed / "kvlane" / package / "py.typed").is_file() for package in PACKAGES)


@pytest.fixture(scope="module")
def modules(installed: Path) -> list[str]:
    return sorted(
        ".".join(path.relative_to(installed).with_suffix("").parts).removesuffix(".__init__")
        for path in (installed / "kvlane").rglob("*.py")
    )


@pytest.fixture(scope="module")
def report(
    installed: Path, modules: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """What IMPORT_ALL says of the installed wheel."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(installed), *modules],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, str]] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_every_module_of_the_wheel_imports_from_the_wheel(
    installed: Path, modules: list[str], report: dict[str, dict[str, str]]
) -> None:
    assert len(modules) >= len(PACKAGES)
    unexcused = {
        module: missing
        for module, missing in report["missing"].items()
        if missing.partition(".")[0] not in OPTIONAL
    }
    assert not unexcused, "module: what it could not import"
    strayed = {
        name: file for name, file in report["files"].items() if not Path(file).is_relative_to(installed)
    }
    assert not strayed, "imported from elsewhere than the wheel"
    assert set(report["files"]) | set(report["missing"]) == set(modules)


def test_the_commands_are_callable(report: dict[str, dict[str, str]]) -> None:
    commands = ("console_scripts:kvlane", "console_scripts:kvlane-bench")
    assert report["entry_points"] == dict.fromkeys(commands, "callable")


def test_metadata(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "kvlane"
    assert metadata["Version"] == "0.1.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    extras = metadata.get_all("Provides-Extra")
    assert extras is not None
    assert set(extras) == {"serve", "torch", "cuda12", "cuda13", "transformers", "plot", "dev"}


def test_the_license_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        assert b"Apache License" in archive.read(name)
