"""Measures a backend's host-to-device link by copy size, with the copies a load makes and the device's own times."""

from __future__ import annotations

from collections.abc import Sequence

from kvlane.streams.backend import Backend
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.probe import DEFAULT_COPY_BYTES, MIB, CopySample, probe_series


def probe_link(
    backend: Backend,
    copy_bytes: Sequence[int] = DEFAULT_COPY_BYTES,
    *,
    working_set_bytes: int = 128 * MIB,
    series_bytes: int = MIB,
    reps: int = 5,
    budget_s: float = 1.5,
    timeout_s: float = 60.0,
) -> tuple[CopySample, ...]:
    """Samples of copies on a copy stream of the backend, from the first byte to the last.

    Args:
        copy_bytes: the sizes; on a slow paced link choose few and small ones.
        working_set_bytes: size of the host and of the device buffer that copies walk through.
        series_bytes: a series moves at least this.
        reps: counted series per size.
        budget_s: about how long all of it may take.
        timeout_s: longest wait for one series.

    Raises:
        InputError: as `probe_series`.
        TimeoutError: a series took longer than `timeout_s`.
    """
    room = max(working_set_bytes, *copy_bytes)
    source, destination = backend.host_bytes(room), backend.device_bytes(room)
    stream = backend.stream("probe")
    never = backend.flag()

    def measure(size: int, copies: int, first: int) -> float:
        slots = room // size
        places = [index % slots * size for index in range(first, first + copies)]
        descriptors = [CopyDescriptor(0, at, at, size) for at in places]
        began, ended = backend.event(), backend.event()
        backend.copy(stream, destination, source, descriptors, never, began, ended)
        backend.synchronize(ended, timeout_s)
        failure = backend.failure(ended)
        if failure is not None:
            raise failure
        return backend.time_of(ended) - backend.time_of(began)

    try:
        return probe_series(
            measure, copy_bytes, series_bytes=series_bytes, reps=reps, budget_s=budget_s, clock=backend.now
        )
    finally:
        backend.release(stream)
