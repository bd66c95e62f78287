"""What `kvlane-bench reproduce` does with `--device cuda`: each model in turn, its table, and one file of results."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvlane.bench.device_calibrate import device_lab
from kvlane.bench.device_reproduce import Options, ShapeRun, render, reproduce_shape, to_dict
from kvlane.bench.host import machine
from kvlane.policy.calibration_record import encode

MODELS = ("llama-3.1-8b", "qwen3-32b")


def reproduce_on_device(models: Sequence[str], options: Options, out: Path) -> bool:
    """Writes `results.json`, `report.txt` and a calibration for each model; whether all loads were right to the bit.

    What is done is written before the next model begins. Raises `InputError` naming `device` or `--model`.
    """
    runs: list[ShapeRun] = []
    for model in models or MODELS:
        with device_lab(model, options.capacity_tokens) as here:
            run = reproduce_shape(here.subject, here.lab, options, here.device, time.time(), _say)
        runs.append(run)
        write(runs, out)
        print(render(run))
    return not any(run.problems for run in runs)


def write(runs: Sequence[ShapeRun], out: Path) -> None:
    """What is known so far; a model's calibration as `kvlane decide --calibration` takes it."""
    results = {"machine": machine(), "models": [to_dict(run) for run in runs]}
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
    (out / "report.txt").write_text("\n\n".join(map(render, runs)) + "\n", encoding="utf-8")
    for run in runs:
        (out / f"calibration-{run.subject.name}.json").write_bytes(encode(run.record))


def _say(what: str, work: float) -> None:  # noqa: ARG001  how much of the whole it was is of no use here
    print(what, file=sys.stderr, flush=True)
