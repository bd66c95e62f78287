"""Measures on the device how fast each way to copy is, by the size of a copy, and so which one is for which size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvlane.policy.errors import InputError
from kvlane.streams.cuda import CudaBackend, DeviceLostError
from kvlane.streams.cuda_methods import Method, MethodTable
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.probe import KIB, MIB, CopySample, probe_series
from kvlane.transfer.store import HostBytes

SIZES = (2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 16 * MIB)
# Of one series: enough for the device to be busy most of the time, few enough for the slowest way to end.
_MOST_COPIES = 4096


def measure_methods(
    backend: CudaBackend,
    sizes: Sequence[int] = SIZES,
    *,
    series_bytes: int = 64 * MIB,
    reps: int = 3,
    budget_s: float = 4.0,
) -> MethodTable:
    """Rates of all ways that can be used here, of copies out of one stretch of memory into places in no order.

    Nothing else should use the device meanwhile. The backend copies by what was found from then on.

    Args:
        sizes: copy sizes in bytes, multiples of 16.
        series_bytes: a series moves at most this, and at most so many copies as matter.
        budget_s: about how long all of it may take.

    A way that fails is left out, and `copier.missing` then says why.

    Raises:
        InputError: as `probe_series`.
        TimeoutError: a series did not end.
        DeviceLostError: the device failed.
    """
    source, destination = backend.host_bytes(series_bytes), backend.device_bytes(series_bytes)
    copier, before = backend.copier, backend.copier.methods
    rates: dict[Method, dict[int, float]] = {}
    possible = copier.possible
    try:
        for method in possible:
            copier.methods = MethodTable.only(method)
            try:
                samples = probe_paged(
                    backend, source, destination, sizes, reps=reps, budget_s=budget_s / len(possible)
                )
            except (DeviceLostError, InputError, TimeoutError):
                raise
            except Exception as error:  # noqa: BLE001  what cupy raises for a kernel it cannot compile is no RuntimeError
                copier.missing[method] = f"copies by {method} failed: {error}"
            else:
                rates[method] = {sample.copy_bytes: sample.rate_bytes_per_s for sample in samples}
    except BaseException:
        copier.methods = before
        raise
    copier.methods = MethodTable(rates)
    return copier.methods


def probe_paged(
    backend: CudaBackend,
    source: HostBytes,
    destination: torch.Tensor,
    sizes: Sequence[int],
    *,
    reps: int = 3,
    budget_s: float = 1.0,
    timeout_s: float = 30.0,
) -> tuple[CopySample, ...]:
    """Samples of copies by the backend's present choice, by the device's own times.

    Args:
        source: page-locked, uint8.
        destination: as long, on the device.

    Raises:
        InputError: as `probe_series`.
        TimeoutError: a series took longer than `timeout_s`.
        RuntimeError: a copy failed.
    """
    stream, never = backend.stream("probe"), backend.flag()

    def measure(size: int, copies: int, first: int) -> float:
        descriptors = scattered(size, copies, source.size, first)
        began, ended = backend.event(), backend.event()
        backend.copy(stream, destination, source, descriptors, never, began, ended)
        backend.synchronize(ended, timeout_s)
        failure = backend.failure(ended)
        if failure is not None:
            raise failure
        return backend.time_of(ended) - backend.time_of(began)

    samples: list[CopySample] = []
    try:
        for size in sizes:
            series = min(source.size, size * _MOST_COPIES)
            samples += probe_series(
                measure,
                [size],
                series_bytes=series,
                reps=reps,
                budget_s=budget_s / len(sizes),
                clock=backend.now,
            )
    finally:
        backend.release(stream)
    return tuple(samples)


def scattered(size: int, copies: int, room: int, seed: int) -> list[CopyDescriptor]:
    """Copies of one stretch from byte 0, into as many of the `room`'s places of that size, in no order."""
    places = np.random.default_rng(seed).permutation(room // size)[:copies]
    return [CopyDescriptor(0, at * size, place * size, size) for at, place in enumerate(places.tolist())]
