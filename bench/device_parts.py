"""The parts of the device check that need the device in their own process. Each saves what it has as it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kvlane.bench import device_ordering
from kvlane.bench.device_calibrate import device_lab
from kvlane.bench.device_copies import (
    BLOCK_TOKENS,
    beside_copies,
    load_rate,
    plain_rate,
    random_bytes,
    regions,
)
from kvlane.bench.device_reproduce import Options, render, reproduce_shape, to_dict
from kvlane.bench.lab import Lab
from kvlane.bench.shape import Shape, build_model
from kvlane.policy.units import show_bytes, show_rate, show_seconds
from kvlane.streams.cuda import CudaBackend, DeviceLostError
from kvlane.streams.cuda_methods import Method
from kvlane.streams.cuda_probe import measure_methods
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.paged import BlockForm
from kvlane.transfer.probe import MIB

Save = Callable[[dict[str, Any]], None]

_TOKENS = 12_368  # whole blocks of the published prompt
_FORMS = {
    "contiguous": None,
    f"blocks of {BLOCK_TOKENS}": BlockForm(BLOCK_TOKENS),
    f"blocks of {BLOCK_TOKENS}, heads first": BlockForm(BLOCK_TOKENS, order="head"),
}


def run(part: str, tokens: int, save: Save) -> None:
    """A part by its name; every other name is a model's."""
    if part == "copies":
        copies(save)
    elif part == "ordering":
        ordering(save)
    else:
        shape(part, tokens, save)


def copies(save: Save) -> None:
    """Copy rates by size and method, and of a whole prompt's KV, each beside a plain page-locked memcpy."""
    sys.setswitchinterval(5e-4)
    with CudaBackend() as backend:
        plain = plain_rate(backend)
        found: dict[str, Any] = {
            "plain_bytes_per_s": plain,
            "missing": backend.copier.missing,
            "problems": [],
            "lines": [f"plain page-locked memcpy of 256 MiB: {show_rate(plain)}"],
        }
        found["lines"] += [f"no {method}: {why}" for method, why in backend.copier.missing.items()]
        save(found)
        known = set(backend.copier.missing)
        chosen = measure_methods(backend, budget_s=8.0)
        for method, why in backend.copier.missing.items():
            if method not in known:
                found["problems"].append(f"no {method}: {why}")
        found["by_size"] = chosen.rates
        for method, rates in found["by_size"].items():
            said = ", ".join(f"{show_bytes(size)} {rate / plain:.0%}" for size, rate in rates.items())
            found["lines"].append(f"{method} by copy size, of plain: {said}")
        found["thresholds"] = chosen.thresholds()
        found["lines"].append(
            "chosen: "
            + ", ".join(f"{method} from {show_bytes(size)}" for size, method in chosen.thresholds())
        )
        save(found)
        found["loads"] = {}
        source, _ = regions(_TOKENS, None)
        host = random_bytes(backend, source.nbytes)
        for name, form in _FORMS.items():
            _, target = regions(_TOKENS, form)
            methods: list[Method | None] = [None, *backend.copier.possible]
            if form is not None and form.order == "head":
                methods = [None]
            for way in methods:
                try:
                    row = load_rate(backend, way, host, source, target, _TOKENS)
                except DeviceLostError:
                    raise
                except RuntimeError as error:
                    # One way's failure is no other's.
                    found["problems"].append(f"{name}, {way or 'chosen'}: {error}")
                    save(found)
                    continue
                found["loads"][f"{name}, {way or 'chosen'}"] = row
                found["lines"].append(
                    f"8B KV of {_TOKENS:,} tokens, {name}, {way or 'chosen'}: {show_rate(row['bytes_per_s'])},"
                    f" {row['bytes_per_s'] / plain:.1%} of plain; enqueued in {show_seconds(row['enqueue_s'])}"
                )
                save(found)
        clock = backend.clock
        found["clock"] = {"error_s": clock.latest.error_s, "drift": clock.drift}
        found["lines"].append(
            f"clock: read to {show_seconds(clock.latest.error_s)}, drift {(clock.drift or 0.0) * 1e6:+.1f} ppm"
        )
        save(found)


def ordering(save: Save) -> None:
    """A small model's loads with every layer's copy late."""
    with device_ordering.LateBackend() as backend:
        model = build_model(Shape(8, 512, 8, 4, 1024, 4096), 1024, 1)
        torch.nn.Module.to(model, backend.device)
        lab = Lab(model, 1024, "seed-1", backend=backend)
        ids = np.random.default_rng(1).integers(0, 4096, 777)
        found = device_ordering.ordering(lab, ids)
        lab.engine.close()
    found["lines"] = [
        "every layer's copy late: "
        + ", ".join(
            f"{mode} {'right' if found[mode] else 'WRONG'}" for mode in ("bulk", "layered", "grouped")
        )
        + f"; without waiting {'right' if found['control'] else 'wrong, as it must be'}"
    ]
    save(found)


def shape(model: str, tokens: int, save: Save) -> None:
    """One model's paths, predicted and measured, and what copies take from its compute."""
    options = Options(tokens)
    # A part that is killed for memory loses no more than one that is refused.
    with device_lab(model, options.capacity_tokens, host_grows=True) as here:
        done = reproduce_shape(here.subject, here.lab, options, here.device, time.time(), _say)
        found = to_dict(done)
        found["thresholds"] = here.methods.thresholds()
        found["lines"] = render(done).splitlines()
        save(found)
        found["beside"] = {}
        backend = here.lab.backend
        assert isinstance(backend, CudaBackend)
        new, held = min(2048, tokens // 4), tokens // 2
        ids = np.random.default_rng(2).integers(0, here.subject.vocab, held + new)
        here.lab.engine.prefill(ids[:held])

        def work() -> float:
            return here.lab.engine.prefill(ids, resident=held).total_s

        for name, size in (("contiguous", 16 * MIB), ("blocks", 32 << 10)):
            batch = [CopyDescriptor(0, at, at, size) for at in range(0, 32 * MIB, size)]
            ways: list[Method] = ["engine"] if name == "contiguous" else list(backend.copier.possible)
            for way in ways:
                beside = beside_copies(backend, way, batch, work)
                found["beside"][f"{name}, {way}"] = {**asdict(beside), "slowdown": beside.slowdown}
                found["lines"].append(
                    f"{new:,} tokens after {held:,} beside copies, {name}, {way}: {beside.slowdown:+.1%}"
                    f" ({show_seconds(beside.alone_s)} to {show_seconds(beside.beside_s)},"
                    f" {show_rate(beside.copied_bytes_per_s)} copied)"
                )
                save(found)
        torch.cuda.synchronize()


def _say(what: str, work: float) -> None:  # noqa: ARG001  how much of the whole it was is of no use here
    print(what, flush=True)
