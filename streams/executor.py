"""Starts loads: runs of stored KV on their way to the device, beside the pass that computes the rest.

Copies are enqueued off the compute thread, one thread and one stream per tier, with one pair of events per run and
group of layers. The pass tells `LayerPass` where it is, and `ready` returns once that layer's KV has arrived. All
scheduling is here and in its neighbours (`load`, `part`, `layer_pass`, `ring`), and none of it in a backend.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend, Stream
from kvlane.streams.faults import LoadError, LoadFailure, LoadRefusedError, PrefillCancelledError
from kvlane.streams.layer_pass import LayerPass
from kvlane.streams.load import LayerLoad, Mode
from kvlane.streams.ring import EventRing
from kvlane.streams.timing import CopyTiming, LayerTiming, PartTiming, PassTiming
from kvlane.transfer.layout import Region
from kvlane.transfer.store import KvSafetyError, StoredRun

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFAULT_DEADLINE_S",
    "MAX_DEADLINE_S",
    "CopyTiming",
    "LayerExecutor",
    "LayerLoad",
    "LayerPass",
    "LayerTiming",
    "LoadError",
    "LoadFailure",
    "LoadRefusedError",
    "Mode",
    "PartTiming",
    "PassTiming",
    "PrefillCancelledError",
    "check_deadline",
]

DEFAULT_DEADLINE_S = 60.0
MAX_DEADLINE_S = 1e6
"""Eleven days, below what every clock and lock can wait: a load without a deadline could hold its memory for ever."""


def check_deadline(deadline_s: float, field: str = "deadline_s") -> None:
    """Raises InputError for a time that is not positive, or longer than can be waited."""
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise InputError(field, f"is {deadline_s}", f"a positive time of at most {MAX_DEADLINE_S:.0f} s")


@dataclass(slots=True, eq=False)
class _Lane:
    """A tier's copy stream, and the loads that use it."""

    stream: Stream
    submitting: int = 0  # submissions that are about to use it; changes under the executor's lock only
    # A dict, for its order: that of a set of objects would differ from run to run.
    loads: dict[LayerLoad, None] = field(default_factory=dict)

    @property
    def stuck(self) -> bool:
        """Whether a load that was given up still has a copy under way: what comes behind it would wait for that."""
        return any(load.lingers for load in tuple(self.loads))

    @property
    def idle(self) -> bool:
        """Whether nobody gives it anything any more."""
        return not self.submitting and all(load.settled for load in tuple(self.loads))

    def add(self, load: LayerLoad) -> None:
        """Note a load, and forget those that have settled: they hold on to what they copied from."""
        self.loads[load] = None
        for other in tuple(self.loads):
            if other.settled:
                self.loads.pop(other, None)


class LayerExecutor:
    """Starts loads on copy streams of a backend, one per tier, made on demand. Methods may be called from any thread.

    Args:
        ring_sets: most loads in flight, those that failed and have not settled included.

    Raises:
        InputError: fewer than one set.
    """

    def __init__(self, backend: Backend, *, ring_sets: int = 3) -> None:
        self._backend = backend
        self.ring = EventRing(backend, ring_sets)
        self._lanes: dict[str, _Lane] = {}
        self._left: list[_Lane] = []  # stuck; other loads may still be on their way there
        self._lock = threading.Lock()  # never held while the backend is called: it may decide who runs next
        self._closed = False

    def close(self) -> None:
        """Give the streams back; returns at once. Copies they were given still run, and their loads settle.

        A load whose layers are not all enqueued yet fails at the first that is not.
        """
        with self._lock:
            self._closed = True
            lanes, self._lanes, self._left = [*self._lanes.values(), *self._left], {}, []
        for lane in lanes:
            self._backend.release(lane.stream)

    def submit(
        self,
        parts: Sequence[StoredRun],
        destination: torch.Tensor,
        region: Region,
        *,
        mode: Mode,
        group_layers: int = 1,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> LayerLoad:
        """Start copying every layer of some runs into the same tokens of a device region; returns at once.

        Args:
            parts: runs that follow one another, each on the stream of its tier; they are retained, so the caller's
                handles may be closed at any time. That is done on this thread, and a store that stalls in it holds this
                one up, unless it is asked elsewhere (`streams.visit`); `verify`, `copies` and all that comes after them
                are called on threads of the load's own.
            destination: device memory, uint8 [region.nbytes]. Nothing else may touch the runs' tokens in it until
                the load has settled.
            region: how `destination` is arranged.
            mode: `layered`, or `bulk`, which differs only in what the pass waits for.
            group_layers: layers that share one pair of events.
            deadline_s: from now; a layer that has not arrived by then is given up.

        Raises:
            InputError: a mode that does not exist, a group of no layers, a deadline that is not positive or above
                `MAX_DEADLINE_S`, runs that do not fit or do not follow one another.
            LoadRefusedError: `ring_sets` loads have not ended.
            LoadError: a store would not pin its run, or no thread could be started.
            KvSafetyError: the executor or its backend is closed.
        """
        if mode not in ("bulk", "layered"):
            raise InputError("mode", f"is {mode!r}", "bulk or layered")
        if group_layers < 1:
            raise InputError("group_layers", f"is {group_layers}", "at least 1")
        check_deadline(deadline_s)
        _check_parts(parts, region)
        if self._closed:
            raise KvSafetyError("the executor is closed")
        self._release_left()
        lanes: list[_Lane] = []
        try:
            lanes.extend(self._lane(part.tier) for part in parts)
            load = LayerLoad(
                self._backend,
                self.ring,
                [(part, lane.stream) for part, lane in zip(parts, lanes, strict=True)],
                destination,
                region,
                group_layers,
                mode=mode,
                deadline_s=deadline_s,
                over=self._release_left,
            )
            for lane in lanes:
                lane.add(load)
            return load
        finally:
            with self._lock:
                for lane in lanes:
                    lane.submitting -= 1

    def _release_left(self) -> None:
        """Give back the streams of lanes that were stuck, once their last load has settled."""
        if not self._left:
            return
        with self._lock:
            left = list(self._left)
        idle = [lane for lane in left if lane.idle]
        with self._lock:
            idle = [lane for lane in idle if lane in self._left and not lane.submitting]
            self._left = [lane for lane in self._left if lane not in idle]
        for lane in idle:
            self._backend.release(lane.stream)

    def _lane(self, tier: str) -> _Lane:
        """The tier's lane; a new one in place of one that is stuck."""
        with self._lock:
            found = self._lanes.get(tier)
            if found is not None:
                found.submitting += 1
        if found is not None and not found.stuck:
            return found
        fresh = _Lane(self._backend.stream(f"copy-{tier}"))
        with self._lock:
            if found is not None:
                found.submitting -= 1
            # Another thread may have been here, too, or closed everything.
            current = self._lanes.get(tier)
            spare = self._closed or current is not found
            if not spare:
                self._lanes[tier] = current = fresh
                if found is not None:
                    self._left.append(found)
            if current is not None:
                current.submitting += 1
        if spare:
            self._backend.release(fresh.stream)
        if current is None:
            raise KvSafetyError("the executor is closed")
        return current


def _check_parts(parts: Sequence[StoredRun], region: Region) -> None:
    if not parts:
        raise InputError("parts", "holds no run", "at least one")
    for part in parts:
        part.check(region)
    if any(shape.window is not None or shape.state_bytes for shape in region.layout.shapes):
        for part in parts:
            # Two parts would write one state, or leave out what a window still reaches.
            if part.load_end != parts[-1].end:
                raise InputError("parts", f"hold one of a load to {part.load_end}", f"one to {parts[-1].end}")
    for one, two in pairwise(parts):
        if one.end != two.start:
            raise InputError("parts", f"hold a run from {two.start} after one to {one.end}", "no gap")
