"""One stored run on its way to the device: the thread that enqueues its copies, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvlane.streams.backend import Backend, Event, Flag, Stream
from kvlane.streams.faults import LoadError
from kvlane.streams.ring import EventSet
from kvlane.streams.timing import CopyTiming
from kvlane.transfer.layout import CopyDescriptor, Region, total_bytes
from kvlane.transfer.store import KvSafetyError, StoredRun

if TYPE_CHECKING:
    import torch

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Layers that share a pair of events, in order; layers that a run brings nothing for are in none."""


class PartLoad:
    """The copies of one run, on the stream of its tier.

    The source stays pinned until the last copy that was enqueued is done, however the load ends.

    Attributes:
        groups: the layers that it brings something for.
        held: the groups that compute knows to have arrived; of the compute thread only.

    Args:
        group_layers: layers that share one pair of events.
        failed: called with a layer, a reason and its cause when the run's copies cannot be enqueued.
        ended: called once nothing of this part touches source, destination or events any more.
        over: called by its thread at the very end, once it has settled.
    """

    def __init__(
        self,
        backend: Backend,
        stream: Stream,
        source: StoredRun,
        destination: torch.Tensor,
        region: Region,
        group_layers: int,
        events: EventSet,
        fence: Event,
        cancel: Flag,
        failed: Callable[[PartLoad, int, str, BaseException | None], object],
        ended: Callable[[], None],
        over: Callable[[], None],
    ) -> None:
        self.tier, self.start, self.end = source.tier, source.start, source.end
        self.groups = groups = _groups(source, region, group_layers)
        self.held: set[int] = set()
        self.began = [events.take() for _ in groups]
        self.done = [events.take() for _ in groups]
        self.decided = [backend.flag() for _ in groups]  # enqueued, or never to be
        self._group_of = {layer: at for at, layers in enumerate(groups) for layer in layers}
        self._backend = backend
        self._stream = stream
        self._destination = destination
        self._region = region
        self._events = events
        self._fence = fence
        self._cancel = cancel
        self._failed = failed
        self._ended = ended
        self._over = over
        self._layer = 0  # the one at hand
        self._issued = 0
        self._enqueued_at: list[float] = []
        self._moves: list[list[tuple[int, int]]] = []  # bytes and copies of each layer of each group
        self._arrivals: list[tuple[float, float]] = []  # start and end of each group that arrived
        self._settled = backend.flag()
        self._source = _pinned(source, self.first_layer)

    @property
    def settled(self) -> bool:
        """Whether no copy of this part is under way any more, and its source is free."""
        return self._settled.is_set()

    @property
    def whole(self) -> bool:
        """Whether all of it arrived; False while it is under way."""
        return self.settled and len(self._arrivals) == len(self.groups)

    @property
    def first_layer(self) -> int:
        """The first layer it brings anything for, 0 where there is none."""
        return self.groups[0][0] if self.groups else 0

    def group_of(self, layer: int) -> int | None:
        """The group of a layer, None for one that it brings nothing for."""
        return self._group_of.get(layer)

    def wait_settled(self, timeout_s: float | None) -> bool:
        return self._settled.wait(timeout_s)

    def run(self) -> None:
        """The enqueuing thread: give the copies to the stream, then stay to free the source."""
        try:
            self._enqueue()
        except Exception as error:  # noqa: BLE001  it reaches the compute thread as the LoadError that `hold` raises
            self._failed(self, self._layer, f"enqueue failed: {error}", error)
        # Those that were not enqueued will never be: wake whoever waits for them.
        if self._issued < len(self.groups):
            self._failed(self, self._layer, "given up", None)
        # The stream runs in order, and a group that was not issued gave it nothing: the last one issued ends last.
        if self._issued:
            self._backend.synchronize(self.done[self._issued - 1])
        try:
            self._count()
        finally:
            self.drop()
            self._over()

    def drop(self) -> None:
        """Unpin the source of a part that has nothing under way; `run` does it at its end."""
        try:
            self._source.close()
        finally:
            # Whoever still holds this part must not keep an evicted prompt's memory.
            del self._source
            self._ended()
            # Last: whoever sees that it has settled may start the next load.
            self._settled.set()

    def timings(self, submitted_s: float) -> tuple[CopyTiming, ...]:
        """A row for every layer that arrived; none while a copy is under way."""
        if not self.settled:
            return ()
        rows = []
        for at, (layers, (start, arrive)) in enumerate(zip(self.groups, self._arrivals, strict=False)):
            enqueue = self._enqueued_at[at] - submitted_s
            for layer, (nbytes, copies) in zip(layers, self._moves[at], strict=True):
                rows.append(
                    CopyTiming(
                        layer, nbytes, copies, enqueue, start - submitted_s, arrive - submitted_s, layers[0]
                    )
                )
        return tuple(rows)

    def _enqueue(self) -> None:
        for layers in self.groups:
            copies: list[CopyDescriptor] = []
            moves: list[tuple[int, int]] = []
            for self._layer in layers:
                if self._cancel.is_set():
                    return
                found = self._copies_of(self._layer)
                copies += found
                moves.append((total_bytes(found), len(found)))
            self._issue(copies, moves)

    def _copies_of(self, layer: int) -> Sequence[CopyDescriptor]:
        self._source.verify(layer)
        copies = self._source.copies(layer, self._region)
        carried, expected = total_bytes(copies), self._source.layer_nbytes(layer)
        if carried != expected:
            raise ValueError(f"{carried} bytes of {expected}")
        return copies

    def _issue(self, copies: list[CopyDescriptor], moves: list[tuple[int, int]]) -> None:
        group = self._issued
        if group == 0:
            # The copies may overwrite what earlier compute still reads: they wait for it.
            self._backend.wait(self._stream, self._fence)
        self._enqueued_at.append(self._backend.now())
        self._moves.append(moves)
        self._backend.copy(
            self._stream,
            self._destination,
            self._source.memory,
            copies,
            self._cancel,
            began=self.began[group],
            done=self.done[group],
        )
        self._events.note_recorded(self.began[group], self.done[group])
        self._issued += 1
        self.decided[group].set()

    def _count(self) -> None:
        for group in range(self._issued):
            began, done = self.began[group], self.done[group]
            if self._backend.failure(done) is not None:
                continue
            if len(self._arrivals) == group:
                # Read now: the events are another load's later.
                self._arrivals.append((self._backend.time_of(began), self._backend.time_of(done)))
            self._source.count_moved(sum(nbytes for nbytes, _ in self._moves[group]))


def _groups(source: StoredRun, region: Region, group_layers: int) -> Groups:
    """The layers that the run brings something for: not those that see none of its tokens, or have no KV at all."""
    last = source.end == source.load_end
    moved = []
    for layer, shape in enumerate(region.layout.shapes):
        first, end = shape.moved(source.start, source.end, source.load_end)
        if first < end or (shape.state_bytes and last):
            moved.append(layer)
    return tuple(tuple(moved[at : at + group_layers]) for at in range(0, len(moved), group_layers))


def _pinned(source: StoredRun, first_layer: int) -> StoredRun:
    try:
        return source.retain()
    except KvSafetyError:
        raise  # it was closed: the caller's mistake
    except Exception as error:
        raise LoadError(first_layer, f"not pinned: {error}", source.tier) from error
