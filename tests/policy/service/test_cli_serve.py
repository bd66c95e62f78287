"""`kvlane serve`: what it is told, and the one line it says to what cannot be served."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlane.policy import InputError
from kvlane.policy.cli import app, run_app
from kvlane.policy.service.config import decode, is_loopback

ONE = ["--model", "llama-3.1-8b", "--machine", "h100-sxm"]
GOOD = '[[deployments]]\nname = "chat"\nmodel = "llama-3.1-8b"\nmachine = "h100-sxm"\n'


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_app(app, "kvlane", ["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ("model", "missing")),
        (["--model", "llama-3.1-8b"], ("machine", "missing")),
        ([*ONE[:1], "llama-9", *ONE[2:]], ("model", "llama-9")),
        ([*ONE, "--executor", "magic"], ("executor",)),
        ([*ONE, "--tp", "3"], ("tp", "32 attention heads")),
        ([*ONE, "--tp", "0"], ("tensor_parallel_size",)),
        ([*ONE, "--load-unit", "0"], ("load_unit_tokens",)),
        ([*ONE, "--listen", "8780"], ("listen", "HOST:PORT")),
        ([*ONE, "--listen", "127.0.0.1:99999"], ("listen",)),
        ([*ONE, "--listen", "0.0.0.0:8780"], ("listen", "KVLANE_TOKEN", "--insecure")),
        ([*ONE, "--token-file", "/nowhere/token"], ("token_file", "No such file")),
        ([*ONE, "--log-level", "loud"], ("log_level",)),
        ([*ONE, "--config", "serve.toml"], ("--config", "model")),
        (["--config", "/nowhere/serve.toml"], ("--config", "No such file")),
        (["--token", "s3cret", *ONE], ("--token",)),  # never on a command line
    ],
    ids=lambda value: " ".join(value)[-40:],
)
def test_what_cannot_be_served_gives_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: tuple[str, ...],
) -> None:
    monkeypatch.delenv("KVLANE_TOKEN", raising=False)
    said = refused(capsys, *arguments)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "config"),
        ("deployments = []", "deployments"),
        ("[[deployments]]\n", "deployments[0]"),
        ("deployments = 1", "deployments"),
        ("[[[", "config"),
        (GOOD + "colour = 1\n", "deployments[0]"),
        ("flush_s = 0\n" + GOOD, "flush_s"),
        ("limits = { body_bytes = 0 }\n" + GOOD, "limits.body_bytes"),
        ('listen = "nowhere"\n' + GOOD, "config"),
        (GOOD + GOOD, "config"),
        (GOOD + '[[deployments]]\nname = "b"\naliases = ["chat"]\nmodel = "x"\nmachine = "y"\n', "config"),
        ("\x00", "config"),
        ("a = " + "[" * 100_000, "config"),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_a_file_that_is_none_is_refused_with_its_field(text: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        decode(text.encode(), "serve.toml")
    assert caught.value.field == field
    assert "serve.toml" in str(caught.value)


def test_the_file_these_tests_break_is_good() -> None:
    settings = decode(GOOD.encode(), "serve.toml")
    assert settings.loopback
    assert settings.state_dir is None


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ('[deployments.links.token-ring]\nscope = "node"\n', ("links.token-ring", "no such link")),
        ('[deployments.links.pcie5-x16]\nrate = "50"\n', ("links.pcie5-x16.rate", "unit")),
    ],
)
def test_links_are_checked_against_the_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, links: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(GOOD + links)
    said = refused(capsys, "--config", str(file))
    assert "deployments[0]" in said
    for word in words:
        assert word in said


def test_paths_in_a_file_are_meant_from_its_folder(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    served = serve({"token_file": "token", "state_dir": "state"})
    assert (tmp_path / "state" / "lock").exists()
    assert served.ask("GET", "/v1/deployments").status == 401


def test_an_option_beside_a_file_goes_before_it(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve({"listen": "127.0.0.1:1"}, "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "s"))
    assert served.port != 1
    assert (tmp_path / "s" / "lock").exists()


def test_a_port_in_use_is_refused(serve: Callable[..., Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AssertionError, match=r"exit status 2.*in use"):
            serve({"listen": f"127.0.0.1:{taken.getsockname()[1]}"})


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("", False),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_what_loopback_is(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_the_other_commands_do_not_load_the_service() -> None:
    """`kvlane decide` starts as quickly as before: no HTTP, no scipy."""
    heavy = "('aiohttp', 'scipy', 'numpy', 'uvloop')"
    code = f"import sys, kvlane.policy.cli; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
