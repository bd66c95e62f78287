"""Everything that only a CUDA device can show, in one run: `bench/device_check.sh` calls it.

Each part is a process of its own with its own time, since a device error ends a process: what one part loses, the
others keep. The results are written after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import msgspec

# Seconds each part has for itself, in order; what one leaves, the next ones may use.
PARTS = {"copies": 75, "ordering": 45, "llama-3.1-8b": 110, "tests": 90, "qwen3-32b": 150}
TOKENS = 12_370
_ROOT = Path(__file__).resolve().parents[1]
# A part has this long to end by itself before it is killed, and the run this long to write its table.
_SPARE_S = 5.0


def main(words: Sequence[str] | None = None) -> int:
    """Runs every part, or the one named; the exit status says whether all of them went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=470.0, help="for all parts together")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, by name")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part is not None:
        return _run_part(options.part, options.out / f"{options.part}.json")
    return check(options.out, options.seconds, options.parts.split(","))


def check(out: Path, seconds: float, parts: Sequence[str]) -> int:
    """Runs parts one after another and writes `device_check.json`, `.txt` and `.log`; 0 if all went well."""
    until = time.monotonic() + seconds
    results: dict[str, Any] = {"host": _host(), "parts": {}}
    with (out / "device_check.log").open("wb") as log, tempfile.TemporaryDirectory() as folder:
        for at, part in enumerate(parts):
            left = until - time.monotonic() - _SPARE_S
            others = sum(PARTS[other] for other in parts[at + 1 :])
            command = [sys.executable, "-m", "kvlane.bench.device_check", "--part", part, "--out", folder]
            results["parts"][part] = run_part(
                command, Path(folder) / f"{part}.json", min(left, max(PARTS[part], left - others)), log
            )
            raw = msgspec.json.encode(results, enc_hook=str)
            (out / "device_check.json").write_bytes(msgspec.json.format(raw, indent=2))
            (out / "device_check.txt").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))
    return 0 if all(part["ok"] for part in results["parts"].values()) else 1


def run_part(command: Sequence[str], file: Path, seconds: float, log: IO[bytes]) -> dict[str, Any]:
    """Runs a process that leaves its results in a file as it goes; what it left, whatever became of it."""
    if seconds <= 0:
        return {"ok": False, "why": "no time was left", "seconds": 0.0}
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    why = ""
    try:
        status = process.wait(seconds)
        if status:
            why = f"ended with status {status}, see the log"
    except subprocess.TimeoutExpired:
        why = f"took longer than its {seconds:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, Any] = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    problems = [*found.get("problems", []), *([why] if why else [])]
    return {**found, "ok": not problems, "why": "; ".join(problems), "seconds": time.monotonic() - began}


def _host() -> dict[str, Any]:
    """Device, driver, versions and date, without making a device ready in this process."""
    import torch

    from kvlane.bench.host import machine

    query = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = f"nvidia-smi did not answer: {error}"
    versions = {"cuda": torch.version.cuda or "none"}
    for package in ("cupy-cuda12x", "cupy-cuda13x", "cuda-bindings"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        **machine(),
        "versions": versions,
        "gpu": dict(zip(query.split(","), said.split(", "), strict=False)),
    }


def _run_part(part: str, file: Path) -> int:
    """One part in this process. What stops it is one of its problems, beside what it has found."""
    known: dict[str, Any] = {}

    def save(found: dict[str, Any]) -> None:
        known.update(found)
        # Whole or not at all, since it may be killed at any moment.
        fresh = file.with_suffix(".fresh")
        fresh.write_bytes(msgspec.json.encode(known, enc_hook=str))
        fresh.replace(file)

    try:
        if part == "tests":
            _tests(save)
        else:
            from kvlane.bench import device_parts

            device_parts.run(part, TOKENS, save)
    except Exception as error:  # noqa: BLE001  it goes into the results
        traceback.print_exc()
        save({"problems": [*known.get("problems", []), f"{type(error).__name__}: {error}"]})
        return 1
    return 0


def _tests(save: Callable[[dict[str, Any]], None]) -> None:
    """The tests marked `gpu`; that none of them ran is a problem, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/streams"]
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ran:
        assert ran.stdout is not None
        for line in ran.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    save(judge_tests(lines, ran.returncode))


def judge_tests(lines: Sequence[str], status: int) -> dict[str, Any]:
    """What pytest's output comes to: its last line, and a problem for every failure or where nothing ran."""
    summary = next((line for line in reversed(lines) if " in " in line and line.endswith("s")), "")
    problems = [line for line in lines if line.startswith(("FAILED", "ERROR "))]
    if status and not problems:
        problems.append(f"pytest ended with status {status}")
    if " passed" not in f" {summary}":
        problems.append("no test ran")
    return {"lines": [summary], "problems": problems}


def table(results: dict[str, Any]) -> str:
    """What was found, in words."""
    host = results["host"]
    lines = [
        f"device   {', '.join(f'{name} {value}' for name, value in host['gpu'].items())}",
        f"host     torch {host['torch']}, transformers {host['transformers']}, Python {host['python']},"
        f" kvlane {host['kvlane']}, {', '.join(f'{name} {value}' for name, value in host['versions'].items())};"
        f" {host['date']}",
    ]
    for name, part in results["parts"].items():
        lines += ["", f"{name}: {'ok' if part['ok'] else part['why']}, {part['seconds']:.0f} s"]
        lines += [f"  {line}" for line in part.get("lines", [])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
