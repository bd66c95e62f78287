"""The CPU as a device: compute on the calling thread, one thread per copy stream, and real copies.

With `link_bytes_per_s` every copy stream shares one link of that rate: the copies stay real, and each piece of them
is finished no earlier than such a link would have finished it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import torch

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Event, Flag, Stream
from kvlane.transfer.host import touched_bytes
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import HostBytes, KvSafetyError

_MIN_PIECE_BYTES = 256 * 1024
_MAX_PIECE_BYTES = 1024 * 1024
_PIECE_S = 500e-6
_CLOSE_TIMEOUT_S = 30.0


class CopyCancelledError(RuntimeError):
    """The copy was dropped before it was whole, because its load had been given up."""


class CpuEvent:
    """Fired by the thread that reaches it; `time` and `failure` are written before that."""

    __slots__ = ("_lock", "_waiting", "failure", "fired", "recorded", "time")

    def __init__(self) -> None:
        self.recorded = False
        self.fired = threading.Event()
        self.time = 0.0
        self.failure: BaseException | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    def fire(self, at: float, failure: BaseException | None = None) -> None:
        self.time, self.failure = at, failure
        self.fired.set()

    def join(self) -> None:
        """Somebody is going to wait for it: until they `leave` it cannot be reset."""
        with self._lock:
            # CUDA would let this pass as a no-op and read what is not there yet: worse than stopping.
            if not self.recorded:
                raise KvSafetyError("waiting for an event that nobody has recorded")
            self._waiting += 1

    def leave(self) -> None:
        with self._lock:
            self._waiting -= 1

    def reset(self) -> None:
        with self._lock:
            if not self.fired.is_set():
                raise KvSafetyError("an event that has not fired is not free to be recorded again")
            if self._waiting:
                raise KvSafetyError(
                    "an event that is still waited for would let go of whoever waits too late"
                )
            self.recorded = False
            self.failure = None
            self.fired.clear()


class _ComputeStream:
    """The calling thread."""

    name = "compute"


_Work: TypeAlias = Callable[[], None]


class CpuStream:
    """A copy stream: one thread that does what it is given, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready_at = 0.0  # the earliest time the work at the head of the queue could have begun
        self.done_at = 0.0  # when the last copy ended
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self.thread = threading.Thread(target=self._run, name=f"kvlane-{name}", daemon=True)
        self.thread.start()

    def submit(self, work: _Work) -> None:
        with self._lock:
            if self._closed:
                raise KvSafetyError(f"stream {self.name} is closed: what it is given would never run")
            self._work.put(work)

    def finish(self) -> None:
        """Take no more work; the thread ends once what was given so far is done."""
        with self._lock:
            self._closed = True
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            # An idle stream must not keep the memory that its last copy read.
            del work


class PacedLink:
    """A link of a fixed rate that several streams may share.

    Deadlines are absolute and follow one another while the link is busy, so what a sleep overshoots is taken back
    by the next piece and never adds up.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, ready_at: float) -> float:
        """Take the link for `nbytes` that were ready at a time; returns when they have passed it."""
        with self._lock:
            self._free_at = max(self._free_at, ready_at) + nbytes / self.bytes_per_s
            return self._free_at

    @property
    def piece_bytes(self) -> int:
        """Small enough to arrive smoothly, large enough that a piece is worth a sleep."""
        return int(min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, self.bytes_per_s * _PIECE_S)))


class CpuBackend:
    """See `Backend`. Close it, or use it as a context manager: it owns threads.

    Args:
        link_bytes_per_s: rate of the host-to-device link, plain memcpy if None.

    Raises:
        InputError: a rate that is not positive.
    """

    name = "cpu"

    def __init__(self, link_bytes_per_s: float | None = None) -> None:
        if link_bytes_per_s is not None and not 0 < link_bytes_per_s < float("inf"):
            raise InputError("link_bytes_per_s", f"is {link_bytes_per_s}", "a positive rate")
        self.compute = _ComputeStream()
        self._link = None if link_bytes_per_s is None else PacedLink(link_bytes_per_s)
        self._lock = threading.Lock()
        self._streams: list[CpuStream] = []
        self._tasks: list[threading.Thread] = []
        self._closed = False

    @property
    def link_bytes_per_s(self) -> float | None:
        return None if self._link is None else self._link.bytes_per_s

    def now(self) -> float:
        return time.perf_counter()

    def start(self, task: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=task, name=f"kvlane-{name}", daemon=True)
        with self._lock:
            self._check_open()
            self._tasks = [t for t in self._tasks if t.is_alive()]
            thread.start()
            self._tasks.append(thread)

    def _check_open(self) -> None:
        if self._closed:
            raise KvSafetyError("the backend is closed: its threads are gone")

    def flag(self) -> Flag:
        return threading.Event()

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        # A tensor made under inference mode could not be written by the thread of a copy, which is outside it.
        with torch.inference_mode(False):
            return torch.from_numpy(touched_bytes(nbytes))

    def host_bytes(self, nbytes: int) -> HostBytes:
        return touched_bytes(nbytes)

    def read(self, device: torch.Tensor) -> HostBytes:
        return _bytes_of(device)

    def stream(self, name: str) -> Stream:
        with self._lock:
            self._check_open()
            stream = CpuStream(name)
            self._streams = [s for s in self._streams if s.thread.is_alive()]
            self._streams.append(stream)
            return stream

    def release(self, stream: Stream) -> None:
        # Its thread ends by itself. Until it has, `close` still waits for it.
        assert isinstance(stream, CpuStream), "only a copy stream is released"
        stream.finish()

    def event(self) -> Event:
        return CpuEvent()

    def reset(self, event: Event) -> None:
        _cpu(event).reset()

    def copy(
        self,
        stream: Stream,
        destination: torch.Tensor,
        source: HostBytes,
        copies: Sequence[CopyDescriptor],
        cancel: Flag,
        began: Event,
        done: Event,
    ) -> None:
        assert isinstance(stream, CpuStream), "only a copy stream copies"
        first, last = _unrecorded(began), _unrecorded(done)
        target = _bytes_of(destination)
        submitted = self.now()

        def work() -> None:
            stream.ready_at = max(stream.ready_at, submitted)
            # A link begins with what is ready; that this thread woke up later is not its time.
            first.fire(self.now() if self._link is None else max(stream.ready_at, stream.done_at))
            failure: BaseException | None = None
            try:
                for piece in self._pieces(copies):
                    if cancel.is_set():
                        raise CopyCancelledError("the load was given up")
                    self._copy_piece(target, source, piece)
                    self._pace(stream, piece.nbytes)
            except BaseException as error:  # noqa: BLE001  it is the event's to tell
                failure = error
            stream.done_at = self.now()
            last.fire(stream.done_at, failure)

        stream.submit(work)
        first.recorded = last.recorded = True

    def _copy_piece(self, destination: HostBytes, source: HostBytes, piece: CopyDescriptor) -> None:
        to = destination[piece.destination : piece.destination + piece.nbytes]
        np.copyto(to, source[piece.source : piece.source + piece.nbytes])

    def _pieces(self, copies: Sequence[CopyDescriptor]) -> Iterator[CopyDescriptor]:
        if self._link is None:
            yield from copies
            return
        step = self._link.piece_bytes
        for copy in copies:
            for at in range(0, copy.nbytes, step):
                yield CopyDescriptor(
                    copy.layer, copy.source + at, copy.destination + at, min(step, copy.nbytes - at)
                )

    def _pace(self, stream: CpuStream, nbytes: int) -> None:
        if self._link is None:
            return
        deadline = self._link.reserve(nbytes, stream.ready_at)
        while (left := deadline - self.now()) > 0:
            time.sleep(left)

    def record(self, stream: Stream, event: Event) -> None:
        point = _unrecorded(event)
        if isinstance(stream, CpuStream):
            stream.submit(lambda: point.fire(self.now()))
        else:
            point.fire(self.now())
        point.recorded = True

    def wait(self, stream: Stream, event: Event, timeout_s: float | None = None) -> None:
        if not isinstance(stream, CpuStream):
            self.synchronize(event, timeout_s)
            return
        point = _cpu(event)

        def work() -> None:
            point.fired.wait()
            stream.ready_at = max(stream.ready_at, point.time)
            point.leave()

        point.join()
        try:
            stream.submit(work)
        except BaseException:
            point.leave()
            raise

    def synchronize(self, event: Event, timeout_s: float | None = None) -> None:
        point = _cpu(event)
        point.join()
        try:
            if not point.fired.wait(timeout_s):
                raise TimeoutError(f"not fired within {timeout_s} s")
        finally:
            point.leave()

    def fired(self, event: Event) -> bool:
        return _cpu(event).fired.is_set()

    def time_of(self, event: Event) -> float:
        return _fired(event).time

    def failure(self, event: Event) -> BaseException | None:
        return _fired(event).failure

    def close(self) -> None:
        """Finish what was started and end the threads.

        Raises:
            TimeoutError: a thread did not end; it is a daemon, so it does not keep the process alive.
        """
        with self._lock:
            self._closed = True
            streams, self._streams = self._streams, []
            tasks, self._tasks = self._tasks, []
        until = self.now() + _CLOSE_TIMEOUT_S
        # The tasks first: they still give work to the streams and wait for it.
        for task in tasks:
            task.join(max(0.0, until - self.now()))
        for stream in streams:
            stream.finish()
        # Only now: a task that does not end, in a call of a store's for one, keeps no stream from ending.
        for thread in (*tasks, *(stream.thread for stream in streams)):
            _join(thread, until)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cpu(event: Event) -> CpuEvent:
    assert isinstance(event, CpuEvent)
    return event


def _unrecorded(event: Event) -> CpuEvent:
    point = _cpu(event)
    if point.recorded:
        raise KvSafetyError("an event is recorded once: whoever waits for it could be let go too early")
    return point


def _fired(event: Event) -> CpuEvent:
    point = _cpu(event)
    if not point.fired.is_set():
        raise KvSafetyError("the event has not fired: nothing is known about it yet")
    return point


def _join(thread: threading.Thread, until: float) -> None:
    thread.join(max(0.0, until - time.perf_counter()))
    if thread.is_alive():
        raise TimeoutError(f"thread {thread.name} did not end within {_CLOSE_TIMEOUT_S} s")


def _bytes_of(device: torch.Tensor) -> HostBytes:
    if device.dtype != torch.uint8 or not device.is_contiguous():
        raise KvSafetyError(f"device memory is handed around as flat bytes, not as {device.dtype}")
    view: HostBytes = device.detach().numpy()
    return view
