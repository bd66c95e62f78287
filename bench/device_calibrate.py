"""`kvlane-bench calibrate --device cuda`: the calibration of `calibrate`, on a backend that has measured its ways to
copy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kvlane.bench.calibrate import SEED, Options, calibrate_lab, total_work
from kvlane.bench.lab import Lab
from kvlane.bench.progress import Steps
from kvlane.bench.subject import Subject, named_subject
from kvlane.policy.calibration_record import Record
from kvlane.streams.cuda import CudaBackend
from kvlane.streams.cuda_methods import MethodTable
from kvlane.streams.cuda_probe import measure_methods

DEFAULT_MODEL = "llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class DeviceLab:
    """A model with random weights on a CUDA device, and how fast the ways to copy there are."""

    subject: Subject
    lab: Lab
    methods: MethodTable
    device: str


@contextmanager
def device_lab(model: str | Path, tokens: int, *, host_grows: bool = False) -> Iterator[DeviceLab]:
    """A lab for prompts of so many tokens; the ways to copy are measured before the model is there.

    `host_grows` is for `check_device_memory`.

    Raises `InputError` naming `device`, or `--model` for one that does not run or fit.
    """
    # The enqueuing thread must not wait 5 ms for the interpreter while the compute thread launches kernels.
    sys.setswitchinterval(5e-4)
    backend = CudaBackend()
    try:
        methods = measure_methods(backend)
        subject = named_subject(model, tokens, SEED, backend.device, host_grows=host_grows)
        lab = Lab(subject.model, tokens, f"seed-{SEED}", backend=backend)
        yield DeviceLab(subject, lab, methods, torch.cuda.get_device_name(backend.device))
    finally:
        backend.close()


def calibrate_device(model: str | Path, options: Options, at_s: float) -> Record:
    """Measures a model on the CUDA device and its link; `at_s` is now, seconds since 1970 UTC.

    Raises `InputError` naming `device`, `--model`, or `samples` when what came out shows no cost.
    """
    with device_lab(model, options.tokens) as here, Steps(total_work(here.subject, options)) as step:
        # What the libraries and kernels do once, they do now.
        here.lab.engine.prefill(list(range(256)))
        return calibrate_lab(here.subject, options, at_s, here.lab, step, here.device)
