"""The simulated device: see the package for what it is, and what it cannot see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeAlias

import torch

from kvlane.streams.backend import Event, Flag, Stream
from kvlane.streams.simulated.choosers import InOrder
from kvlane.streams.simulated.device import (
    Copies,
    Disturbance,
    Kernel,
    Record,
    SimulatedEvent,
    SimulatedStream,
    Wait,
    Work,
)
from kvlane.streams.simulated.host import Chooser, Failing, Scheduler, Task
from kvlane.streams.simulated.links import SimulatedLink
from kvlane.streams.simulated.memory import Bytes, Memory, Place, Span
from kvlane.streams.simulated.order import Access, Kind, OrderError
from kvlane.streams.simulated.sync import SimulatedFlag, SimulatedLock
from kvlane.streams.simulated.threads import HostThreads
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import HostBytes, KvSafetyError

Disturb: TypeAlias = Callable[[str, Sequence[CopyDescriptor]], Disturbance | None]
"""What goes wrong with a batch, by its stream's name and its copies; asked as it is handed over, unless it is one of a
load that was given up."""

ANY = "*"


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds that calls take on the thread that makes them.

    Attributes:
        event_s: each `record`, `wait` and `synchronize`, a wait's own waiting apart.
        copy_s: each `copy`.
        descriptor_s: each copy in it, besides.
    """

    event_s: float = 0.0
    copy_s: float = 0.0
    descriptor_s: float = 0.0


class _ComputeThread:
    """The calling thread."""

    name = "compute"


class SimulatedBackend:
    """See `Backend`, and `launch` and `overwrite` for what it must be told.

    The thread that makes it is the main one; it, and the tasks it starts, make all calls. Close it there, or use it as
    a context manager, which raises the first mistake found however the code under test took it.

    Args:
        links: what carries a copy stream's copies, by the stream's name; `*` for every other stream.
        compute: `thread` computes on the calling thread, as a CPU does; `stream` on a stream of the device's, as a GPU
            does, ahead of which the host runs.
        chooser: which thread goes on where several could; by default the running one for as long as it can.
        timed: see `Scheduler`.
        jumps: see `Scheduler`.
        costs: of the host's own calls.
        disturb: what goes wrong with copies.
        threads: to run tasks on; its own if None.
    """

    name = "simulated"

    def __init__(
        self,
        links: Mapping[str, SimulatedLink] | None = None,
        *,
        compute: Literal["thread", "stream"] = "thread",
        chooser: Chooser | None = None,
        timed: bool = True,
        jumps: bool = False,
        costs: HostCosts | None = None,
        disturb: Disturb | None = None,
        threads: HostThreads | None = None,
    ) -> None:
        self._own_threads = HostThreads() if threads is None else None
        self.host = Scheduler(
            chooser or InOrder(), threads or self._own_threads or HostThreads(), timed=timed, jumps=jumps
        )
        self.host.steps = self._steps
        self._links = dict(links or {ANY: SimulatedLink()})
        self._carriers = {name: link.carrier(self.host) for name, link in self._links.items()}
        self._costs = costs or HostCosts()
        self._disturb = disturb
        self._memory = Memory()
        self._streams: list[SimulatedStream] = []
        self._draining: list[Task] = []
        self._running = False
        self._events = 0
        self._closed = False
        self._failing = Failing(self.host)
        self._device = None if compute == "thread" else self._new_stream("compute")
        self.compute: Stream = _ComputeThread() if self._device is None else self._device

    # The host.

    def now(self) -> float:
        return self.host.now()

    def start(self, task: Callable[[], None], name: str) -> None:
        self.host.point()
        self._check_open()
        self.host.start(task, name)

    def flag(self) -> Flag:
        return SimulatedFlag(self.host)

    @contextmanager
    def watched_locks(self) -> Iterator[None]:
        """Every `threading.Lock` made inside is one of this backend's: it orders threads and lets others come in."""
        ordinary = threading.Lock
        threading.Lock = lambda: SimulatedLock(self.host)  # type: ignore[assignment,return-value]
        try:
            yield
        finally:
            threading.Lock = ordinary

    def join(self) -> None:
        """The main thread waits for every task that was started."""
        self.host.join_all()

    def sleep(self, seconds: float) -> None:
        """The calling thread is busy, or stands still, for a time of the virtual clock."""
        self.host.sleep(seconds)

    # Memory.

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        # Made under inference mode it could not be written outside it.
        with torch.inference_mode(False):
            return torch.from_numpy(self._memory.add("device", nbytes).data)

    def host_bytes(self, nbytes: int) -> HostBytes:
        return self._memory.add("host", nbytes).data

    def read(self, device: torch.Tensor) -> HostBytes:
        self.host.point()
        if self._device is not None:
            point = self._event()
            self._record(self._device, point)
            self._hold(point, None)
        place = self._memory.find(device)
        with self._failing:
            place.block.read(place.low, place.high, self._access("a read by the host"))
        return place.data

    def overwrite(self, memory: Bytes, value: int | HostBytes) -> None:
        """The calling thread writes memory: a source is filled, freed or used for something else."""
        self.host.point()
        place = self._memory.find(memory)
        with self._failing:
            place.block.write(place.low, place.high, self._access("a write by the host"))
        place.data[:] = value

    # The device.

    def launch(
        self,
        what: str,
        seconds: float,
        reads: Sequence[Span] = (),
        writes: Sequence[Span] = (),
        body: Callable[[], None] | None = None,
    ) -> None:
        """Compute for a time, in order on `compute`.

        Args:
            what: for messages.
            reads: memory it may read at any time while it runs.
            writes: memory it may write.
            body: what it does to the bytes, run when it begins.
        """
        self.host.point()
        places = self._memory.find_all(reads), self._memory.find_all(writes)
        if self._device is None:
            with self._failing:
                Kernel({}, what, seconds, *places, body).run(self.host.me)
            self.host.sleep(seconds)
        else:
            self._give(self._device, Kernel(self.host.me.release(), what, seconds, *places, body))

    def stream(self, name: str) -> Stream:
        self.host.point()
        self._check_open()
        return self._new_stream(name)

    def release(self, stream: Stream) -> None:
        self.host.point()
        assert isinstance(stream, SimulatedStream), "only a copy stream is released"
        stream.closed = True
        self.host.touch(stream.thing, "change")

    @property
    def open_streams(self) -> int:
        """Copy streams that were made and not released."""
        return sum(not stream.closed and stream is not self._device for stream in self._streams)

    def event(self) -> Event:
        return self._event()

    def reset(self, event: Event) -> None:
        self.host.point()
        point = _own(event)
        self.host.touch(point.thing, "change")
        with self._failing:
            point.reset_by(self.host.me)

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
        self.host.point()
        self.host.sleep(self._costs.copy_s + len(copies) * self._costs.descriptor_s)
        assert isinstance(stream, SimulatedStream), "only a copy stream copies"
        assert isinstance(cancel, SimulatedFlag)
        self._check_stream(stream)
        first, last = _own(began), _own(done)
        into, out_of = self._memory.find(destination), self._memory.find(source)
        _check_inside(copies, into, out_of)
        with self._failing:
            first.record_by(self.host.me, "record before a copy")
            last.record_by(self.host.me, "record after a copy")
        wrong = None
        if self._disturb is not None and not cancel.value:
            wrong = self._disturb(stream.name, copies)
        knows = self.host.me.release()
        self._give(stream, Copies(knows, into, out_of, copies, cancel, first, last, wrong))

    def record(self, stream: Stream, event: Event) -> None:
        self.host.point()
        self.host.sleep(self._costs.event_s)
        self._record(stream, _own(event))

    def wait(self, stream: Stream, event: Event, timeout_s: float | None = None) -> None:
        if not isinstance(stream, SimulatedStream):
            self.synchronize(event, timeout_s)
            return
        self.host.point()
        self.host.sleep(self._costs.event_s)
        self._check_stream(stream)
        point = _own(event)
        with self._failing:
            point.use(self.host.me, "a wait handed to a stream")
        self._give(stream, Wait(self.host.me.release(), point))

    def synchronize(self, event: Event, timeout_s: float | None = None) -> None:
        self.host.sleep(self._costs.event_s)
        self._hold(_own(event), timeout_s)

    def fired(self, event: Event) -> bool:
        self.host.point()
        point = _own(event)
        with self._failing:
            point.use(self.host.me, "a look whether it has fired")
        self.host.touch(point.thing, "look")
        if point.fired:
            self.host.me.follow(point.clock)
        return point.fired

    def time_of(self, event: Event) -> float:
        return self._asked(event, "asking for its time").time

    def failure(self, event: Event) -> BaseException | None:
        return self._asked(event, "asking for its failure").failure

    def report(self, kind: Kind, message: str) -> None:
        """End the run with a mistake that only the caller could see.

        Raises:
            OrderError: always.
        """
        error = OrderError(kind, message)
        self.host.fail(error)
        raise error

    def close(self) -> None:
        """Finish what was started and give the threads back.

        Raises:
            OrderError: the first mistake found in the whole run.
            BaseException: a task let something escape.
        """
        if self._closed:
            return
        try:
            if self.host.error is None:
                self.host.join_all()
                while not all(stream.idle for stream in self._streams):
                    self.host.block(self._draining, "streams to finish")
                for stream in self._streams:
                    self.host.touch(stream.through, "await")
        finally:
            self.host.end_turn()
            self._closed = True
            self.host.unwind()
            if self._own_threads is not None:
                self._own_threads.close()
        self.host.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # What was under way will not be waited for. A mistake that was found first is the cause of this one.
            self.host.fail(error)
        self.close()

    # Inside.

    def _steps(self) -> Sequence[SimulatedStream]:
        return [stream for stream in self._streams if stream.may_step()]

    def _run_streams(self) -> None:
        """On the clock every stream goes on as far as it can; one may let another go on."""
        if self._running:
            return
        self._running = True
        try:
            while self.host.timed and any(stream.run() for stream in self._streams):
                pass
        finally:
            self._running = False
        if self._draining and all(stream.idle for stream in self._streams):
            self.host.wake(self._draining)

    def _give(self, stream: SimulatedStream, work: Work) -> None:
        stream.give(work)
        with self._failing:
            self._run_streams()

    def _record(self, stream: Stream, event: SimulatedEvent) -> None:
        if isinstance(stream, SimulatedStream):
            self._check_stream(stream)
        with self._failing:
            event.record_by(self.host.me, "record")
            if isinstance(stream, SimulatedStream):
                self._give(stream, Record(self.host.me.release(), event))
            else:
                event.fire(self.host, self.host.me)
                self._run_streams()

    def _access(self, what: str) -> Access:
        return Access(self.host.me, self.host.me.epoch, what)

    def _hold(self, event: SimulatedEvent, timeout_s: float | None) -> None:
        # As with a flag: where it has not fired there is nothing to do before it has.
        if event.fired:
            self.host.point()
        with self._failing:
            event.use(self.host.me, "a thread's wait")
        if not event.fired and not self.host.block(event.threads, event.name, timeout_s, event.thing):
            raise TimeoutError(f"{event.name} not fired within {timeout_s} s")
        self.host.touch(event.thing, "await")
        self.host.me.follow(event.clock)

    def _asked(self, event: Event, what: str) -> SimulatedEvent:
        self.host.check()
        point = _own(event)
        with self._failing:
            point.ask(self.host.me, what)
        return point

    def _event(self) -> SimulatedEvent:
        self._events += 1
        return SimulatedEvent(self.host, f"event {self._events}")

    def _new_stream(self, name: str) -> SimulatedStream:
        key = name if name in self._links else ANY
        if key not in self._links and name != "compute":
            raise KvSafetyError(f"no link carries what stream {name} copies")
        link = self._links.get(key, SimulatedLink())
        carrier = self._carriers.get(key) or link.carrier(self.host)
        self._streams.append(SimulatedStream(self.host, name, link, carrier, self._run_streams))
        return self._streams[-1]

    def _check_open(self) -> None:
        if self._closed:
            raise KvSafetyError("the backend is closed: its threads are gone")

    def _check_stream(self, stream: SimulatedStream) -> None:
        self._check_open()
        if stream.closed:
            raise KvSafetyError(f"stream {stream.name} is closed: what it is given would never run")


def _own(event: Event) -> SimulatedEvent:
    assert isinstance(event, SimulatedEvent), "an event of another backend"
    return event


def _check_inside(copies: Sequence[CopyDescriptor], destination: Place, source: Place) -> None:
    for copy in copies:
        if not (
            0 <= copy.source <= copy.source + copy.nbytes <= source.high - source.low
            and 0 <= copy.destination <= copy.destination + copy.nbytes <= destination.high - destination.low
        ):
            raise KvSafetyError(f"{copy} leaves its memory")
