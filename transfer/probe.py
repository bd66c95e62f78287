"""Measures how fast bytes move, by the size of one copy: what a link's table of achieved rates is made from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvlane.policy.errors import InputError
from kvlane.transfer.host import touched_bytes
from kvlane.transfer.store import HostBytes

KIB, MIB = 1024, 1024**2

DEFAULT_COPY_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)

SeriesClock: TypeAlias = Callable[[int, int, int], float]
"""Makes `copies` copies of `copy_bytes` beginning at copy `first`, and returns the seconds they took."""


@dataclass(frozen=True, slots=True)
class CopySample:
    """The median series of one copy size.

    Attributes:
        copy_bytes: bytes of one copy.
        copies: copies in a series.
        seconds: median time of a series.
        series: how many series the median is over, the discarded first not among them.
    """

    copy_bytes: int
    copies: int
    seconds: float
    series: int

    @property
    def rate_bytes_per_s(self) -> float:
        """Achieved rate, the fixed cost of each copy included."""
        return self.copy_bytes * self.copies / self.seconds


def probe_series(
    measure: SeriesClock,
    copy_bytes: Sequence[int] = DEFAULT_COPY_BYTES,
    *,
    series_bytes: int = MIB,
    reps: int = 5,
    budget_s: float = 1.5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[CopySample, ...]:
    """Samples of every copy size, from any way of copying that can time a series of copies.

    The first series of a size is discarded: it pays for what is cold. When the budget is spent, the sizes that are
    left get one counted series each.

    Args:
        measure: see `SeriesClock`.
        copy_bytes: the sizes.
        series_bytes: a series moves at least this, and at least one copy.
        reps: counted series per size.
        budget_s: about how long all of it may take.

    Raises:
        InputError: a size or a count below one, or a series whose measured time is not positive.
    """
    if reps < 1:
        raise InputError("reps", f"is {reps}", "at least 1")
    began = clock()
    samples = []
    for done, size in enumerate(copy_bytes):
        if size < 1:
            raise InputError("copy_bytes", f"holds {size}", "at least 1")
        # An equal share of the budget for each size: the slow small ones must not starve the large ones.
        until = began + budget_s * (done + 1) / len(copy_bytes)
        copies = max(1, series_bytes // size)
        measure(size, copies, 0)
        seconds: list[float] = []
        while not seconds or (len(seconds) < reps and clock() < until):
            seconds.append(measure(size, copies, copies * (len(seconds) + 1)))
        median = statistics.median(seconds)
        if median <= 0:
            raise InputError(
                "measure", f"timed {copies} copies of {size} bytes at {median} s", "a positive time"
            )
        samples.append(CopySample(size, copies, median, len(seconds)))
    return tuple(samples)


def probe_memcpy(
    copy_bytes: Sequence[int] = DEFAULT_COPY_BYTES,
    *,
    copy: Callable[[HostBytes, HostBytes], object] = np.copyto,
    working_set_bytes: int = 128 * MIB,
    reps: int = 5,
    budget_s: float = 1.5,
) -> tuple[CopySample, ...]:
    """Samples of copies within host memory, by default plain memcpy on the calling thread.

    Copies walk through buffers larger than the processor's caches, as KV does: copying one small buffer again and
    again would measure the cache.

    Args:
        copy: copies its second argument over its first, both flat bytes of equal length.
        working_set_bytes: size of each of the two buffers; larger copies enlarge it.

    Raises:
        InputError: as `probe_series`.
    """
    room = max(working_set_bytes, *copy_bytes)
    source, destination = touched_bytes(room), touched_bytes(room)

    def measure(size: int, copies: int, first: int) -> float:
        slots = room // size
        views = []
        for index in range(first, first + copies):
            at = index % slots * size
            views.append((destination[at : at + size], source[at : at + size]))
        began = time.perf_counter()
        for to, from_ in views:
            copy(to, from_)
        return time.perf_counter() - began

    return probe_series(measure, copy_bytes, reps=reps, budget_s=budget_s)
