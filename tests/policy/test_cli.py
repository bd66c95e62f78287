"""The command's refusals: one clear line on stderr, nothing on stdout, exit status 2; and its two lists."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlane.policy import cli as front_door
from kvlane.policy import machine_names, model_names

Kvlane = Callable[..., "subprocess.CompletedProcess[str]"]
GOOD = {
    "--model": "llama-3.1-8b",
    "--machine": "h100-sxm",
    "--prompt-tokens": "12370",
    "--hit": "host=12368",
}


def decide(**changes: str | Path | None) -> list[str | Path]:
    """The good command with some options changed, None leaving one out."""
    options: dict[str, str | Path | None] = dict(GOOD)
    options.update({f"--{name.replace('_', '-')}": value for name, value in changes.items()})
    return [
        "decide",
        *(part for name, value in options.items() if value is not None for part in (name, value)),
    ]


def assert_refused(run: subprocess.CompletedProcess[str], *words: str) -> None:
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.endswith("\n")
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert run.stderr.startswith("kvlane: ")
    assert "Traceback" not in run.stderr
    for word in words:
        assert word in run.stderr


def test_the_command_these_tests_break_is_good(kvlane: Kvlane) -> None:
    run = kvlane(*decide())
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout


BAD_OPTIONS: list[tuple[dict[str, str | None], tuple[str, ...]]] = [
    ({"prompt_tokens": "-5"}, ("prompt_tokens", "-5")),
    ({"prompt_tokens": "0"}, ("prompt_tokens",)),
    ({"prompt_tokens": "12370.5"}, ("--prompt-tokens",)),
    ({"prompt_tokens": "many"}, ("--prompt-tokens",)),
    ({"prompt_tokens": ""}, ("--prompt-tokens",)),
    ({"prompt_tokens": "9" * 400}, ("prompt_tokens",)),
    ({"prompt_tokens": None}, ("--prompt-tokens",)),
    ({"hit": "host=12371"}, ("hits.host", "12371", "12370")),
    ({"hit": "host=-1"}, ("hits.host", "-1")),
    ({"hit": "host"}, ("--hit", "TIER=TOKENS")),
    ({"hit": "host="}, ("--hit", "TIER=TOKENS")),
    ({"hit": "=12368"}, ("--hit", "TIER=TOKENS")),
    ({"hit": "host=all"}, ("--hit", "TIER=TOKENS")),
    ({"hit": "host=1,2,"}, ("--hit", "TIER=TOKENS")),
    ({"hit": "tape=12368"}, ("tape", "host")),
    ({"resident": "-1"}, ("resident_tokens",)),
    ({"resident": "12370"}, ("resident_tokens",)),
    ({"load_unit": "0"}, ("load_unit_tokens",)),
    ({"prefill_chunk": "0"}, ("prefill_chunk_tokens",)),
    ({"prefill_chunk": "-2048"}, ("prefill_chunk_tokens",)),
    ({"tp": "0"}, ("tp",)),
    ({"tp": "3"}, ("tp", "32 attention heads")),
    ({"kv_dtype": "int3"}, ("kv_dtype", "fp8")),
    ({"executor": "two-ended"}, ("executor", "bulk or layered or two_ended")),
    ({"link": "50"}, ("--link", "unit")),
    ({"link": "50 GB"}, ("--link", "unit")),
    ({"link": "host=50"}, ("--link", "unit")),
    ({"link": "tape=50 GB/s"}, ("tape", "host")),
    ({"link": "-50 GB/s"}, ("--link",)),
    ({"link": "0 GB/s"}, ("--link",)),
    ({"link": "1e999 GB/s"}, ("--link",)),
    ({"model": None}, ("--model",)),
    ({"model": "llama-3.1-8"}, ("model", "did you mean llama-3.1-8b?")),
    ({"model": ""}, ("model",)),
    ({"model": "x" * 5000}, ("model",)),
    ({"model": "two\nlines"}, ("model",)),
    ({"machine": None}, ("--machine",)),
    ({"machine": "h100-smx"}, ("machine", "did you mean h100-sxm?")),
    ({"machine": "x" * 5000}, ("machine",)),
]


@pytest.mark.parametrize(("changes", "words"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_a_bad_option_gives_one_line_and_status_2(
    kvlane: Kvlane, changes: dict[str, str | None], words: tuple[str, ...]
) -> None:
    assert_refused(kvlane(*decide(**changes)), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ("command", "`kvlane --help`")),
        (["deicde"], ("deicde",)),
        (["--colour"], ("--colour",)),
        ([*decide(), "--colour", "red"], ("--colour",)),
        ([*decide(), "extra"], ("extra",)),
        ([*decide(), "--tp"], ("--tp",)),
        ([*decide(), "--hit", "host=5"], ("--hit", "host", "twice")),
        (["models", "--all"], ("--all",)),
    ],
)
def test_a_command_line_that_makes_no_sense_gives_one_line_and_status_2(
    kvlane: Kvlane, arguments: list[str], words: tuple[str, ...]
) -> None:
    assert_refused(kvlane(*arguments), *words)


@pytest.mark.parametrize("kind", ["rwkv7", "llama5", ""])
def test_a_model_of_an_unknown_kind_gives_one_line_and_status_2(
    kvlane: Kvlane, shared: Path, tmp_path: Path, kind: str
) -> None:
    config = json.loads((shared / "models" / "Meta-Llama-3.1-8B.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "model_type": kind}))
    assert_refused(kvlane(*decide(model=file)), "model_type", repr(kind))


# Nested deeper than any parser of nested values goes.
DEEP_JSON = b'{"a":' * 100_000
DEEP_TOML = b"a = " + b"[" * 100_000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b'{"hidden_size": 4096,}',
        b"\x7fELF\x02\x01\x01\x00",
        b"\xff\xfe{}",
        DEEP_JSON,
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_file_that_is_no_model_config_gives_one_line_and_status_2(
    kvlane: Kvlane, tmp_path: Path, raw: bytes
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    assert_refused(kvlane(*decide(model=path)), "config.json")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"name = ",
        b"[device",
        b'name = "x"\nname = "y"',
        b'{"name": 1}',
        b"\x7fELF\x02",
        b"\xff\xfe",
        DEEP_TOML,
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_a_file_that_is_no_machine_profile_gives_one_line_and_status_2(
    kvlane: Kvlane, tmp_path: Path, raw: bytes
) -> None:
    path = tmp_path / "profile.toml"
    path.write_bytes(raw)
    assert_refused(kvlane(*decide(machine=path)), "profile.toml")


@pytest.mark.parametrize("option", ["model", "machine"])
@pytest.mark.parametrize("name", ["folder", "folder.json", "folder.toml"])
def test_a_folder_in_place_of_a_file_gives_one_line_and_status_2(
    kvlane: Kvlane, tmp_path: Path, option: str, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert_refused(kvlane(*decide(**{option: folder})), option, name)


@pytest.mark.parametrize(("option", "name"), [("model", "nowhere.json"), ("machine", "nowhere.toml")])
def test_a_file_that_is_not_there_gives_one_line_and_status_2(
    kvlane: Kvlane, tmp_path: Path, option: str, name: str
) -> None:
    assert_refused(kvlane(*decide(**{option: tmp_path / name})), option, name)


def test_a_json_answer_is_refused_in_the_same_way(kvlane: Kvlane) -> None:
    assert_refused(kvlane(*decide(prompt_tokens="-5"), "--json"), "prompt_tokens")


def test_a_real_process_ends_the_same_way() -> None:
    command = [sys.executable, "-m", front_door.__name__, *map(str, decide(hit="host=12371"))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert_refused(run, "hits.host")


def test_models_are_listed_with_what_they_weigh(kvlane: Kvlane) -> None:
    run = kvlane("models")
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines] == model_names()
    (llama,) = (line for line in lines if line.startswith("llama-3.1-8b"))
    assert "131,072 bytes of KV per token  " in llama
    (mistral,) = (line for line in lines if line.split()[0] == "mistral-7b")
    assert " 0 bytes of KV per token beyond the windows of 32 layers" in mistral
    assert "32 layers" in llama
    assert "bf16" in llama


def test_machines_are_listed_with_their_tiers(kvlane: Kvlane) -> None:
    run = kvlane("machines")
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines] == machine_names()
    (h100,) = (line for line in lines if line.startswith("h100-sxm"))
    assert "host over pcie5-x16 at 52.3 GB/s" in h100


@pytest.mark.parametrize("arguments", [["--help"], ["decide", "--help"]])
def test_help_is_no_refusal(kvlane: Kvlane, arguments: list[str]) -> None:
    run = kvlane(*arguments)
    assert (run.returncode, run.stderr) == (0, "")
    assert "decide" in run.stdout


def test_every_path_that_is_not_there_is_printed_with_its_reason(kvlane: Kvlane) -> None:
    run = kvlane(*decide(hit=None))
    assert run.returncode == 0
    assert "recompute of 12370 tokens" in run.stdout.splitlines()[0]
    assert run.stdout.count("no stored prefix") >= 3
    assert "None" not in run.stdout
