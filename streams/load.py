"""One load in flight: what the compute thread waits for, and what it learns when something fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvlane.streams.backend import Backend, Stream
from kvlane.streams.faults import LoadError
from kvlane.streams.part import PartLoad
from kvlane.streams.ring import EventRing
from kvlane.streams.timing import PartTiming
from kvlane.transfer.layout import Region
from kvlane.transfer.store import KvSafetyError, StoredRun

if TYPE_CHECKING:
    import torch

Mode: TypeAlias = Literal["bulk", "layered"]


class LayerLoad:
    """Runs that follow one another in a prompt, each from its tier, on their way into one destination.

    One thread computes and calls `hold`, `hold_all`, `finish` and `close`. The destination may be used for something
    else only once the load has settled.

    The compute thread waits on the host, each time with the deadline, and gives the compute stream no wait of its own:
    behind a copy that stands still the stream would stand still, too, and so would whatever is to replace the load.
    """

    def __init__(
        self,
        backend: Backend,
        ring: EventRing,
        lanes: Sequence[tuple[StoredRun, Stream]],
        destination: torch.Tensor,
        region: Region,
        group_layers: int,
        *,
        mode: Mode,
        deadline_s: float,
        over: Callable[[], None],
    ) -> None:
        self.mode = mode
        self.parts: list[PartLoad] = []
        self._backend = backend
        self._ring = ring
        self._deadline = backend.now() + deadline_s
        # Appended to and never taken from, so that the first of two threads that fail at once is the one that counts.
        self._errors: list[LoadError] = []
        self._cancel = backend.flag()
        self._closed = False
        # Every part, and the thread that computes.
        self._events = ring.take(len(lanes) + 1)
        try:
            fence = backend.event()
            backend.record(backend.compute, fence)
            for source, stream in lanes:
                self.parts.append(
                    PartLoad(
                        backend,
                        stream,
                        source,
                        destination,
                        region,
                        group_layers,
                        self._events,
                        fence,
                        self._cancel,
                        failed=self._fail,
                        ended=self._let_go,
                        over=over,
                    )
                )
        except BaseException:
            ring.let_go(self._events, len(lanes) - len(self.parts))
            self._abandon(0)
            raise
        self._start()

    def awaits(self, layer: int) -> bool:
        """Whether `hold` has yet to make sure of a layer: not of one that the load brings nothing for."""
        for part in self.parts:
            group = part.group_of(layer)
            if group is not None and group not in part.held:
                return True
        return False

    def check(self) -> None:
        """That the load may still come to a good end: compute that went on over layers which did arrive, and met the
        missing one only when it got there, would have to begin again from later on.

        Raises:
            LoadError: it has failed, or has not arrived before its deadline.
        """
        if self._errors:
            raise self._errors[0]
        if not self._left():
            self._await_all(but_held=True)

    def hold(self, layer: int) -> None:
        """Return once a layer's KV is there: what is given to the compute stream from now on may read it.

        Raises:
            LoadError: it is not, and will not be.
        """
        for part in self.parts:
            group = part.group_of(layer)
            if group is not None:
                self._await(part, group)

    def hold_all(self) -> None:
        """Return once every layer's KV is there.

        Raises:
            LoadError: one is not, and will not be.
        """
        for part in self.parts:
            for layers in part.groups:
                self.hold(layers[0])

    def finish(self) -> None:
        """Make sure that every layer arrived whole, and let the load go.

        Raises:
            LoadError: one did not; what compute made of it must not be used.
        """
        self._await_all()
        for part in self.parts:
            # All of it is there: only the accounts are left. Who cannot wait for them finds the part unsettled.
            part.wait_settled(self._left())
        self.close()

    def close(self) -> None:
        """Compute needs it no more: what has not arrived is given up. Also after `finish`, and more than once."""
        if not self._closed:
            self._closed = True
            self.give_up()
            self._let_go()

    def give_up(self) -> None:
        """Let copies that have not begun be dropped. The pins go once those that have begun are done. Any thread."""
        self._cancel.set()

    def settle(self, timeout_s: float | None) -> bool:
        """Wait until no copy is under way any more; False when the timeout passed first."""
        until = None if timeout_s is None else self._backend.now() + timeout_s
        return all(
            part.wait_settled(None if until is None else max(0.0, until - self._backend.now()))
            for part in self.parts
        )

    @property
    def settled(self) -> bool:
        return all(part.settled for part in self.parts)

    @property
    def lingers(self) -> bool:
        """Whether nobody wants it any more, and a copy or a call of the store's is still under way."""
        return self._cancel.is_set() and not self.settled

    def timings(self, submitted_s: float) -> tuple[PartTiming, ...]:
        """When everything that arrived did, part by part."""
        return tuple(
            PartTiming(part.tier, part.start, part.end, part.whole, part.timings(submitted_s))
            for part in self.parts
        )

    def _start(self) -> None:
        for at, part in enumerate(self.parts):
            try:
                self._backend.start(part.run, f"enqueue-{part.tier}")
            except BaseException as error:
                layer, reason = part.first_layer, f"not started: {error}"
                if at and isinstance(error, Exception):
                    # The parts before copy already: who has the load keeps what they write to until they have ended.
                    self._fail(part, layer, reason, error)
                    for other in self.parts[at:]:
                        other.drop()
                    return
                self._abandon(at)
                if isinstance(error, KvSafetyError) or not isinstance(error, Exception):
                    raise
                raise LoadError(layer, reason, part.tier) from error

    def _abandon(self, started: int) -> None:
        """Take back what was not started."""
        self.close()
        for part in self.parts[started:]:
            part.drop()

    def _let_go(self) -> None:
        self._ring.let_go(self._events)

    def _await_all(self, *, but_held: bool = False) -> None:
        for part in self.parts:
            for group in range(len(part.groups)):
                if not (but_held and group in part.held):
                    self._await(part, group)

    def _await(self, part: PartLoad, group: int) -> None:
        layer = part.groups[group][0]
        # Always before waiting for the event: where nobody has recorded it yet, a device would not wait.
        if not self._errors and not part.decided[group].wait(self._left()):
            raise self._fail(part, layer, "not enqueued before the deadline")
        if self._errors:
            raise self._errors[0]
        try:
            self._backend.synchronize(part.done[group], self._left())
        except TimeoutError as error:
            raise self._fail(part, layer, "not arrived before the deadline", error) from error
        failure = self._backend.failure(part.done[group])
        if failure is not None:
            raise self._fail(part, layer, f"copy failed: {failure}", failure) from failure
        part.held.add(group)

    def _fail(self, part: PartLoad, layer: int, reason: str, cause: BaseException | None = None) -> LoadError:
        if not self._errors:
            given_up = self._cancel.is_set()
            error = LoadError(layer, "given up" if given_up else reason, part.tier, given_up=given_up)
            error.__cause__ = cause
            self._errors.append(error)
        # After the error: whoever then finds itself given up knows why.
        self._cancel.set()
        for other in self.parts:
            for flag in other.decided:
                flag.set()
        return self._errors[0]

    def _left(self) -> float:
        return max(0.0, self._deadline - self._backend.now())
