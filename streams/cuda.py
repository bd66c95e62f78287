"""A CUDA device: torch's streams and events, page-locked host memory, copies by whatever way is fastest for their size.

`wait` and `copy` return at once on every stream, `compute` included, and what became of them is known once their
events have fired. Needs a CUDA build of torch; cupy and `cuda.bindings` (the extras `cuda12` and `cuda13`) add the fast
ways to copy into small blocks. Nothing touches a device before a backend is made.

A device that has reported an error (an illegal access, say) answers every later call with it. From then on every event
counts as fired, with a `DeviceLostError` as its failure, and whatever would give the device work raises one: loads in
flight end, nothing waits for ever, and only a new process can use the device again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, SupportsInt

import torch

from kvlane.streams.backend import Event, Flag, Stream
from kvlane.streams.cuda_copies import Copier, Lane
from kvlane.streams.cuda_events import CudaEvent, DeviceClock, Mark
from kvlane.streams.cuda_memory import PinnedMemory
from kvlane.streams.cuda_methods import MethodTable
from kvlane.streams.cuda_runs import runs_of
from kvlane.streams.cuda_setup import check_cuda
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import HostBytes, KvSafetyError

_CLOSE_TIMEOUT_S = 30.0
# Portable and mapped: pinned for every context of the process, and readable by kernels.
_REGISTER_FLAGS = 1 | 2
# CUDA has no timed wait. A waiting thread asks without a pause for the first of these, so that a layer that is nearly
# there is not slept past; then it sleeps for a share of what it has waited already.
_SPIN_S = 200e-6
_SLEEP_SHARE, _LONGEST_SLEEP_S = 0.05, 1e-3

# What a device may still be writing when a backend could not be closed: kept for ever, rather than freed under it.
_abandoned: list[object] = []


class DeviceLostError(RuntimeError):
    """The device has reported an error after which it does nothing more in this process."""


class _Runtime:
    """The CUDA runtime's registration of host memory, as torch offers it. See `Registrar`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        # In the device's context, whichever thread this is.
        with torch.cuda.device(self._device):
            return self._noted(torch.cuda.cudart().cudaHostRegister(address, nbytes, _REGISTER_FLAGS))

    def unregister(self, address: int) -> int:
        with torch.cuda.device(self._device):
            return self._noted(torch.cuda.cudart().cudaHostUnregister(address))

    def describe(self, code: int) -> str:
        return f"CUDA error {code}"

    def _noted(self, code: SupportsInt) -> int:
        if int(code):
            # The runtime keeps a failed call's error for whoever asks next: let that be no kernel of the model's.
            with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
                torch.zeros(1, device=self._device)
        return int(code)


class CudaStream:
    """A copy stream, and what the copies on it still need."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        # Of high priority, so that a kernel that copies need not wait for blocks of the model's kernels. The copy
        # engine knows no priorities: it takes turns among streams, copy by copy, and copies are given to it in pieces
        # (`PIECE_BYTES`), so that a load on a stream of its own is not behind a bulk one.
        self.lane = Lane(torch.cuda.Stream(device, priority=-1))
        self.lock = threading.Lock()
        self.closed = False
        self.in_use: deque[Mark] = deque()  # oldest first


class _ComputeStream:
    name = "compute"

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.torch = stream


class CudaBackend:
    """See `Backend`. Close it, or use it as a context manager: it owns threads.

    `compute` is the current stream of the thread that makes the backend; the model has to run on it. torch hands out
    streams from a pool of 32, so two of very many may turn out to be the same one: that costs overlap, not order.

    Args:
        index: the device's number.
        methods: how fast each way to copy is, by size, as `measure_methods` finds; without it every copy goes by the
            copy engine, one at a time.

    Raises:
        InputError: no such device here, or no CUDA at all.
        RuntimeError: the device does not answer.
    """

    name = "cuda"
    link_bytes_per_s: float | None = None  # its link is the device's own, and paced by nobody

    def __init__(self, index: int = 0, methods: MethodTable | None = None) -> None:
        self.device = check_cuda(index)
        torch.cuda.set_device(self.device)
        self.compute = _ComputeStream(torch.cuda.current_stream(self.device))
        self.clock = DeviceClock(self.device)
        self.pinned = PinnedMemory(_Runtime(self.device))
        self.copier = Copier.on(self.device, self.pinned, methods or MethodTable())
        self._reads = torch.cuda.Stream(self.device)  # the other direction
        self._lock = threading.Lock()
        self._streams: list[CudaStream] = []
        self._tasks: list[threading.Thread] = []
        self._closed = False
        self._lost: DeviceLostError | None = None
        self._losing = threading.Lock()  # taken last

    def now(self) -> float:
        return time.perf_counter()

    def start(self, task: Callable[[], None], name: str) -> None:
        def run() -> None:
            # The current device is a thread's own, and a new one begins at the first.
            # One that is lost is for the task to find out, which has to end either way.
            with contextlib.suppress(RuntimeError):
                torch.cuda.set_device(self.device)
            task()

        thread = threading.Thread(target=run, name=f"kvlane-{name}", daemon=True)
        with self._lock:
            self._check_open()
            self._tasks = [t for t in self._tasks if t.is_alive()]
            thread.start()
            self._tasks.append(thread)

    def _check_open(self) -> None:
        if self._closed:
            raise KvSafetyError("the backend is closed")

    def flag(self) -> Flag:
        return threading.Event()

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """See `Backend`.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """
        # A tensor made under inference mode could not be written by the thread of a copy, which is outside it.
        with torch.inference_mode(False), torch.cuda.stream(self.compute.torch):
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        # Whoever has it may copy into it on any stream: what zeroed it, or read it before it was freed, is over.
        self.compute.torch.synchronize()
        return memory

    def host_bytes(self, nbytes: int) -> HostBytes:
        """See `Backend`. Exactly so many bytes, and a page, are taken and page-locked until the last view goes.

        Raises:
            PinError: the driver refused to lock it.
        """
        return self.pinned.allocate(nbytes)

    def read(self, device: torch.Tensor) -> HostBytes:
        _check_bytes(device)
        self._reads.wait_stream(self.compute.torch)
        with torch.inference_mode(False), torch.cuda.stream(self._reads):
            memory: HostBytes = torch.empty(device.numel(), dtype=torch.uint8).numpy()
            # It returns once the bytes are there.
            torch.from_numpy(memory).copy_(device)
        return memory

    def stream(self, name: str) -> Stream:
        with self._lock:
            self._check_open()
            stream = CudaStream(name, self.device)
            self._streams = [s for s in self._streams if not s.closed or self._used(s)]
            self._streams.append(stream)
            return stream

    def release(self, stream: Stream) -> None:
        # What it was given keeps its memory until somebody asks whether it is done: at the latest with a new stream.
        _copy_stream(stream).closed = True

    def event(self) -> Event:
        return CudaEvent()

    def reset(self, event: Event) -> None:
        point = _cuda(event)
        if not self.fired(point):
            raise KvSafetyError("an event that has not fired is not free to be recorded again")
        point.reset()

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
        lane, first, last = _copy_stream(stream), _cuda(began), _cuda(done)
        _check_bytes(destination)
        first.check_unrecorded()
        last.check_unrecorded()
        runs = runs_of(copies, source.size, destination.numel())
        held: list[object] = [source, destination]
        with lane.lock:
            if lane.closed:
                raise KvSafetyError(f"stream {lane.name} is closed: what it is given would never run")
            self._sweep(lane)
            self._record(first, lane.lane.stream)
            failure: BaseException | None = None
            try:
                self.copier.submit(lane.lane, destination, source, runs, cancel, held)
            except Exception as error:  # noqa: BLE001  it is the event's to tell
                failure = error
            try:
                # By the anchor of `began`: what lies between the two is then the device's own time.
                mark = last.record(lane.lane.stream, self.clock.latest, failure, held)
            except RuntimeError as error:
                # The copies may have been given: it is no error of this call any more.
                last.lose(self.clock.latest, self._lose(error))
                return
            # Until it has fired, however early the caller lets go of its own: the device knows of no references.
            lane.in_use.append(mark)

    def _sweep(self, stream: CudaStream) -> None:
        """Let go of what copies that are done have used; under the stream's lock."""
        while stream.in_use and self._ask(stream.in_use[0]):
            stream.in_use.popleft()

    def _used(self, stream: CudaStream) -> bool:
        """Whether a copy of the stream is not done."""
        # One that is being given may stand behind a copy that does: other streams must not wait for it here.
        if not stream.lock.acquire(blocking=False):
            return True
        try:
            self._sweep(stream)
            return bool(stream.in_use)
        finally:
            stream.lock.release()

    def record(self, stream: Stream, event: Event) -> None:
        point = _cuda(event)
        point.check_unrecorded()
        if isinstance(stream, CudaStream):
            with stream.lock:
                if stream.closed:
                    raise KvSafetyError(f"stream {stream.name} is closed: what it is given would never run")
                self._record(point, stream.lane.stream)
            return
        if torch.cuda.current_stream(self.device) != self.compute.torch:
            # The event would say nothing about the work that this thread gives to its own stream.
            raise KvSafetyError("this thread's current stream is not the one the backend was made on")
        self._record(point, self.compute.torch)

    def _record(self, point: CudaEvent, stream: torch.cuda.Stream) -> None:
        self._check_device()
        try:
            point.record(stream, self.clock.anchor())
        except RuntimeError as error:
            raise self._lose(error) from error

    def wait(self, stream: Stream, event: Event, timeout_s: float | None = None) -> None:  # noqa: ARG002
        """See `Backend`. It returns at once on every stream, and never raises TimeoutError."""
        point = _cuda(event)
        self._check_device()
        point.join()
        try:
            point.wait_on(stream.lane.stream if isinstance(stream, CudaStream) else self.compute.torch)
        except RuntimeError as error:
            raise self._lose(error) from error
        finally:
            point.leave()

    def synchronize(self, event: Event, timeout_s: float | None = None) -> None:
        point = _cuda(event)
        mark = point.join()
        try:
            if not self._poll(mark, timeout_s):
                raise TimeoutError(f"not fired within {timeout_s} s")
        finally:
            point.leave()

    def _poll(self, mark: Mark, timeout_s: float | None) -> bool:
        began = time.perf_counter()
        while not self._ask(mark):
            waited = time.perf_counter() - began
            if timeout_s is not None and waited >= timeout_s:
                return False
            # Even without a pause the others get the interpreter.
            time.sleep(0 if waited < _SPIN_S else min(waited * _SLEEP_SHARE, _LONGEST_SLEEP_S))
        return True

    def _ask(self, mark: Mark) -> bool:
        try:
            if self._lost is None:
                return mark.ask()
        except RuntimeError as error:
            self._lose(error)
        assert self._lost is not None
        mark.lose(self._lost)
        return True

    def fired(self, event: Event) -> bool:
        mark = _cuda(event).mark
        return mark is not None and self._ask(mark)

    def time_of(self, event: Event) -> float:
        at = self._fired(event).fired_s
        assert at is not None
        return at

    def failure(self, event: Event) -> BaseException | None:
        return self._fired(event).failure

    def _fired(self, event: Event) -> Mark:
        mark = _cuda(event).mark
        if mark is None or not self._ask(mark):
            raise KvSafetyError("the event has not fired: nothing is known about it yet")
        return mark

    def _check_device(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _lose(self, error: BaseException) -> DeviceLostError:
        with self._losing:
            if self._lost is None:
                self._lost = DeviceLostError(f"{self.device} is lost to this process: {error}")
            return self._lost

    def close(self) -> None:
        """Wait for what was started, and let go of its memory.

        Raises:
            TimeoutError: a thread or a copy did not end; what it uses is kept for as long as the process lives.
        """
        with self._lock:
            self._closed = True
            streams, self._streams = self._streams, []
            tasks, self._tasks = self._tasks, []
        until = time.perf_counter() + _CLOSE_TIMEOUT_S
        # The tasks first: they still give work to the streams.
        for task in tasks:
            task.join(max(0.0, until - time.perf_counter()))
        for stream in streams:
            stream.closed = True
            for mark in list(stream.in_use):
                if not self._poll(mark, max(0.0, until - time.perf_counter())):
                    _abandoned.append((self, streams))
                    raise TimeoutError(f"a copy on {stream.name} did not end within {_CLOSE_TIMEOUT_S} s")
            self._used(stream)
        for task in tasks:
            if task.is_alive():
                raise TimeoutError(f"thread {task.name} did not end within {_CLOSE_TIMEOUT_S} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_bytes(device: torch.Tensor) -> None:
    if device.dtype != torch.uint8 or not device.is_contiguous():
        raise KvSafetyError(f"device memory is handed around as flat bytes, not as {device.dtype}")


def _cuda(event: Event) -> CudaEvent:
    assert isinstance(event, CudaEvent)
    return event


def _copy_stream(stream: Stream) -> CudaStream:
    assert isinstance(stream, CudaStream), "only a copy stream copies"
    return stream
