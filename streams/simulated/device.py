"""The device: streams that do what they are given in order, and events that say how far they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlane.streams.simulated.host import Scheduler, Task, Timer
from kvlane.streams.simulated.links import Carrier, SimulatedLink
from kvlane.streams.simulated.memory import POISON, Place
from kvlane.streams.simulated.order import Access, Actor, Clock, OrderError
from kvlane.streams.simulated.sync import SimulatedFlag
from kvlane.transfer.layout import CopyDescriptor, total_bytes


class CopyDroppedError(RuntimeError):
    """The copy was dropped before it began, because its load had been given up."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What goes wrong with one batch of copies.

    Attributes:
        late_s: it takes so much longer; the link is free meanwhile.
        failure: it raises this once it has copied `copied` of its copies.
        copied: see `failure`.
    """

    late_s: float = 0.0
    failure: Exception | None = None
    copied: int = 0


class SimulatedEvent:
    """A point in a stream's work, and who has used it since it was recorded."""

    __slots__ = (
        "clock",
        "failure",
        "fired",
        "fired_by",
        "name",
        "pending",
        "recorded",
        "reset",
        "thing",
        "threads",
        "time",
        "uses",
    )

    def __init__(self, host: Scheduler, name: str) -> None:
        self.name = name
        self.thing = host.thing()
        self.recorded: Access | None = None
        self.reset: Access | None = None
        self.fired = False
        self.fired_by: Access | None = None
        self.time = 0.0
        self.failure: BaseException | None = None
        self.clock: Clock = {}
        self.uses: list[Access] = []
        self.pending = 0  # streams that have been told to wait for it and have not come to that yet
        self.threads: list[Task] = []  # wait for it

    def record_by(self, who: Actor, what: str) -> None:
        """A host thread hands over the work that will fire it.

        Raises:
            OrderError: it was recorded before, or nothing orders the reset before this.
        """
        if self.recorded is not None:
            raise OrderError(
                "event", f"{self.name}: {what} by {who.name}, after {self.recorded}, without a reset"
            )
        if self.reset is not None and not who.after(self.reset):
            raise OrderError("event", f"{self.name}: nothing orders {what} by {who.name} after {self.reset}")
        self.recorded = Access(who, who.epoch, what)

    def use(self, who: Actor, what: str) -> None:
        """A host thread relies on it.

        Raises:
            OrderError: nothing orders that after the recording, so that another time it could be relied on in vain.
        """
        if self.recorded is None:
            raise OrderError("event", f"{self.name}: {what} by {who.name}, and nobody has recorded it")
        if not who.after(self.recorded):
            raise OrderError(
                "event", f"{self.name}: nothing orders {what} by {who.name} after {self.recorded}"
            )
        self.uses.append(Access(who, who.epoch, what))

    def ask(self, who: Actor, what: str) -> None:
        """A host thread asks what is known once it has fired.

        Raises:
            OrderError: it has not fired, or has so far by chance only.
        """
        self.use(who, what)
        if self.fired_by is None or not who.after(self.fired_by):
            raise OrderError("event", f"{self.name}: nothing orders {what} by {who.name} after its firing")

    def fire(self, host: Scheduler, by: Actor, failure: BaseException | None = None) -> None:
        self.time, self.failure = host.time, failure
        self.fired_by = Access(by, by.epoch, "firing")
        self.clock = by.release()
        self.fired = True
        host.touch(self.thing, "open")
        host.wake(self.threads)

    def reset_by(self, who: Actor) -> None:
        """Let it be recorded again.

        Raises:
            OrderError: it has not fired, it is still waited for, or it is so by chance only.
        """
        if self.fired_by is None or not who.after(self.fired_by):
            raise OrderError("event", f"{self.name}: nothing orders the reset by {who.name} after its firing")
        if self.pending or self.threads:
            raise OrderError("event", f"{self.name}: reset by {who.name} while it is waited for")
        for use in self.uses:
            if not who.after(use):
                raise OrderError("event", f"{self.name}: nothing orders the reset by {who.name} after {use}")
        self.recorded, self.reset = None, Access(who, who.epoch, "reset")
        self.fired, self.fired_by, self.failure = False, None, None
        self.uses.clear()


class Work(Protocol):
    """One piece of a stream's work."""

    knows: Clock
    """What its submitter knew."""

    def ready(self) -> bool: ...

    def begin(self, stream: SimulatedStream) -> bool:
        """Whether it ends at once; otherwise the stream's `end` is due."""

    def end(self, stream: SimulatedStream) -> None:
        """What follows once it has run; not called for work that ended at once."""


class SimulatedStream:
    """Work in order: a copy stream, or the compute stream of a device that computes by itself.

    On the clock it goes on by itself; otherwise it takes one `step` at a time, whenever it is chosen.
    """

    def __init__(
        self, host: Scheduler, name: str, link: SimulatedLink, carrier: Carrier, progress: Callable[[], None]
    ) -> None:
        self.name = name
        self.host = host
        self.link = link
        self.carrier = carrier
        self.actor = host.actor(name)
        self.thing = host.thing()  # what is given to it, and in which order
        self.through = host.thing()  # that it comes to an end
        self.closed = False
        self.follows = False  # whether it comes from one batch of copies to the next
        self.held_until: Timer | None = None  # what is under way stands still
        self._progress = progress  # called after something has ended
        self._given: deque[tuple[int, Work]] = deque()
        self._under_way: Work | None = None

    @property
    def idle(self) -> bool:
        return self._under_way is None and not self._given

    def give(self, work: Work) -> None:
        thing = self.host.thing()
        self.host.touch(self.thing, "change")
        self.host.touch(thing, "open")
        self._given.append((thing, work))

    def may_step(self) -> bool:
        if self._under_way is not None:
            return self.held_until is None
        return bool(self._given) and self._given[0][1].ready()

    def step(self) -> None:
        """One step: begin the next piece of work, or end the one under way."""
        self.host.touch(self.through, "open")
        if self._under_way is not None:
            self.end()
            return
        thing, work = self._given.popleft()
        self.host.touch(thing, "await")
        self.actor.follow(work.knows)
        if not work.begin(self):
            self._under_way = work
        elif not self.host.timed:
            self._progress()

    def run(self) -> bool:
        """On the clock: everything up to the next piece of work that takes time; False if there was nothing."""
        ran = False
        while self._under_way is None and self._given and self._given[0][1].ready():
            self.step()
            ran = True
        return ran

    def end(self) -> None:
        work, self._under_way = self._under_way, None
        assert work is not None
        work.end(self)
        self.follows = (
            isinstance(work, Copies) and bool(self._given) and isinstance(self._given[0][1], Copies)
        )
        self._progress()


class Record:
    def __init__(self, knows: Clock, event: SimulatedEvent) -> None:
        self.knows = knows
        self.event = event

    def ready(self) -> bool:
        return True

    def begin(self, stream: SimulatedStream) -> bool:
        self.event.fire(stream.host, stream.actor)
        return True

    def end(self, stream: SimulatedStream) -> None: ...


class Wait:
    def __init__(self, knows: Clock, event: SimulatedEvent) -> None:
        self.knows = knows
        self.event = event
        event.pending += 1

    def ready(self) -> bool:
        return self.event.fired

    def begin(self, stream: SimulatedStream) -> bool:
        self.event.pending -= 1
        stream.host.touch(self.event.thing, "await")
        stream.actor.follow(self.event.clock)
        # On the stream's own clock: whoever resets the event must know that the stream is past it.
        self.event.uses.append(Access(stream.actor, stream.actor.epoch, "a stream's wait"))
        return True

    def end(self, stream: SimulatedStream) -> None: ...


@dataclass(slots=True)
class Kernel:
    """Compute: what it reads and writes, and what it does to the bytes."""

    knows: Clock
    what: str
    seconds: float
    reads: Sequence[Place]
    writes: Sequence[Place]
    body: Callable[[], None] | None

    def ready(self) -> bool:
        return True

    def run(self, actor: Actor) -> None:
        """Account for it and do it."""
        access = Access(actor, actor.epoch, self.what)
        for block, low, high in self.reads:
            block.read(low, high, access)
        for block, low, high in self.writes:
            block.write(low, high, access)
        if self.body is not None:
            self.body()

    def begin(self, stream: SimulatedStream) -> bool:
        self.run(stream.actor)
        if self.seconds == 0:
            return True
        if stream.host.timed:
            stream.host.at(stream.host.time + self.seconds, stream.end)
        return False

    def end(self, stream: SimulatedStream) -> None: ...


class Copies:
    """A batch of copies with the events around it."""

    def __init__(
        self,
        knows: Clock,
        destination: Place,
        source: Place,
        copies: Sequence[CopyDescriptor],
        cancel: SimulatedFlag,
        began: SimulatedEvent,
        done: SimulatedEvent,
        disturbance: Disturbance | None,
    ) -> None:
        self.knows = knows
        self.destination = destination
        self.source = source
        self.given = copies
        self.copies = tuple(copies)
        self.cancel = cancel
        self.began = began
        self.done = done
        self.disturbance = disturbance
        self.failure: BaseException | None = None

    def ready(self) -> bool:
        return True

    def begin(self, stream: SimulatedStream) -> bool:
        self._check_unchanged()
        self.began.fire(stream.host, stream.actor)
        self._account(stream.actor)
        stream.host.touch(self.cancel.thing, "look")
        if self.cancel.value:
            self.failure = CopyDroppedError("the load was given up")
        if self.cancel.value or not self.copies:
            self._finish(stream)
            return True
        for copy in self.copies:
            self.destination.data[copy.destination : copy.destination + copy.nbytes] = POISON
        late_s = 0.0 if self.disturbance is None else self.disturbance.late_s
        host = stream.host
        if host.timed:
            fixed_s = stream.link.fixed_s(len(self.copies), follows=stream.follows)

            def arrived() -> None:
                if late_s > 0:
                    host.at(host.time + late_s, stream.end)
                else:
                    stream.end()

            stream.carrier.carry(fixed_s, total_bytes(self.copies), arrived)
        elif late_s > 0:

            def go_on() -> None:
                stream.held_until = None

            stream.held_until = host.at(host.time + late_s, go_on)
        return False

    def end(self, stream: SimulatedStream) -> None:
        self._check_unchanged()
        done = self.copies
        if self.disturbance is not None and self.disturbance.failure is not None:
            self.failure = self.disturbance.failure
            done = done[: self.disturbance.copied]
        for copy in done:
            source = self.source.data[copy.source : copy.source + copy.nbytes]
            self.destination.data[copy.destination : copy.destination + copy.nbytes] = source
        self._finish(stream)

    def _account(self, actor: Actor) -> None:
        """Also for copies that are dropped or fail: it is a matter of time whether they are."""
        for copy in self.copies:
            access = Access(actor, actor.epoch, f"copy of layer {copy.layer}", self.cancel)
            out_of, into = self.source.low + copy.source, self.destination.low + copy.destination
            self.source.block.read(out_of, out_of + copy.nbytes, access)
            self.destination.block.write(into, into + copy.nbytes, access)

    def _check_unchanged(self) -> None:
        # A tuple cannot be; anything else is read again when the device gets to it.
        if self.given is not self.copies and tuple(self.given) != self.copies:
            raise OrderError("descriptors", "a list of copies was changed before they were done")

    def _finish(self, stream: SimulatedStream) -> None:
        self.done.fire(stream.host, stream.actor, self.failure)
