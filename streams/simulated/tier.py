"""A tier of stored KV that can go wrong: the host store itself, and runs that raise, stall, come short or rot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from kvlane.streams.simulated.backend import SimulatedBackend
from kvlane.streams.simulated.device import Disturbance
from kvlane.streams.simulated.kv import PromptKv
from kvlane.streams.simulated.memory import POISON
from kvlane.transfer.host import HostStore
from kvlane.transfer.host_entry import Entry
from kvlane.transfer.host_run import HostRun
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import CopyDescriptor, Region
from kvlane.transfer.store import Hit, HostBytes
from kvlane.transfer.wrapped import WrappedRun

FaultKind: TypeAlias = Literal[
    "unpinnable", "raise", "stall", "short", "rot", "link", "torn", "late", "stuck"
]
"""What goes wrong with one layer of a load:

- `unpinnable`: the store does not pin the run a second time
- `raise`: it raises when asked for the layer's copies
- `stall`: it takes so long to say whether the layer's bytes are good
- `short`: its copies leave out a part of the layer
- `rot`: the stored bytes are no longer those that were put
- `link`: the copies of the layer fail on the device, none of them done
- `torn`: the same after the first of them
- `late`: they take so much longer
- `stuck`: the same, for longer than anybody waits
"""

FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
ON_THE_LINK: tuple[FaultKind, ...] = ("link", "torn", "late", "stuck")


class StoreBrokenError(RuntimeError):
    """The store, or the link, has failed as it was told to."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one layer; `seconds` is how long a `stall` or a copy's delay is."""

    kind: FaultKind
    layer: int
    seconds: float = 0.0


class LinkFaults:
    """Faults that strike copies on their way, each once. See `SimulatedBackend.disturb`."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], Fault] = {}

    def arm(self, tier: str, fault: Fault) -> None:
        """The next batch on the tier's stream that carries the layer is struck."""
        self._next[f"copy-{tier}", fault.layer] = fault

    def disarm(self, tier: str, fault: Fault) -> None:
        """It strikes no more, if it has not."""
        self._next.pop((f"copy-{tier}", fault.layer), None)

    def __call__(self, stream: str, copies: Sequence[CopyDescriptor]) -> Disturbance | None:
        if not self._next:
            return None
        struck = next((copy.layer for copy in copies if (stream, copy.layer) in self._next), None)
        if struck is None:
            return None
        fault = self._next.pop((stream, struck))
        if fault.kind in ("late", "stuck"):
            return Disturbance(late_s=fault.seconds)
        return Disturbance(failure=StoreBrokenError("link down"), copied=int(fault.kind == "torn"))


class FaultyRun(WrappedRun[HostRun]):
    """A run of the host store's, and the fault it has. See `StoredRun`."""

    def __init__(self, backend: SimulatedBackend, run: HostRun, fault: Fault | None) -> None:
        super().__init__(run)
        self._backend = backend
        self._fault = fault

    def _strikes(self, kind: FaultKind, layer: int) -> bool:
        return self._fault is not None and self._fault.kind == kind and self._fault.layer == layer

    def verify(self, layer: int) -> None:
        if self._fault is not None and self._strikes("stall", layer):
            self._backend.sleep(self._fault.seconds)
        super().verify(layer)

    def copies(self, layer: int, destination: Region) -> tuple[CopyDescriptor, ...]:
        if self._strikes("raise", layer):
            raise StoreBrokenError("no descriptors")
        copies = super().copies(layer, destination)
        return copies[:-1] if self._strikes("short", layer) else copies

    def retain(self) -> FaultyRun:
        if self._fault is not None and self._fault.kind == "unpinnable":
            raise StoreBrokenError("no pins left")
        return FaultyRun(self._backend, self._run.retain(), self._fault)


class _TellingStore(HostStore):
    """Says whose memory it has let go of."""

    def __init__(self, tier: str, unit_tokens: int, allocate: Callable[[int], HostBytes]) -> None:
        super().__init__(unit_tokens, checksums=True, allocate=allocate)
        self.tier = tier
        self._dropped: list[HostBytes] = []

    def take_dropped(self) -> list[HostBytes]:
        """What was let go of since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def _drop(self, entry: Entry) -> None:
        super()._drop(entry)
        self._dropped.append(entry.stored.memory)


class SimulatedTier:
    """A host store on the simulated device: what it lets go of is written over, and used again.

    Args:
        name: of the tier.
        identity: of all that it holds.
    """

    def __init__(self, backend: SimulatedBackend, name: str, unit_tokens: int, identity: KvIdentity) -> None:
        self.name = name
        self._identity = identity
        self._backend = backend
        self._free: dict[int, list[HostBytes]] = {}
        with backend.watched_locks():
            self._lock = threading.Lock()
            self.store = _TellingStore(name, unit_tokens, self._allocate)

    def put(self, kv: PromptKv, checkpoints: tuple[int, ...] = ()) -> int:
        """Store a prompt's whole units; returns how many tokens are stored."""
        tokens = kv.tokens // self.store.unit_tokens * self.store.unit_tokens
        return self.store.put(self._identity, kv.ids, kv.layout, kv.layers(tokens, checkpoints), checkpoints)

    def lookup(self, kv: PromptKv) -> Hit:
        return self.store.lookup(self._identity, kv.ids)

    def open(self, hit: Hit, start: int, end: int, load_end: int, fault: Fault | None = None) -> FaultyRun:
        """A run with a fault; `rot` is brought about here, and stays. See `HostStore.open`."""
        run = self.store.open(hit, start, end, load_end=load_end)
        if fault is not None and fault.kind == "rot":
            for copy in run.copies(fault.layer, run.region)[-1:]:
                run.memory[copy.source : copy.source + 1] += 1
        return FaultyRun(self._backend, run, fault)

    def evict(self) -> int:
        """Free what is not pinned, and write over it; returns how many prompts stay. Any thread."""
        kept = self.store.clear()
        self._write_over()
        return kept

    def _write_over(self) -> None:
        for memory in self.store.take_dropped():
            self._backend.overwrite(memory, POISON)
            with self._lock:
                self._free.setdefault(memory.size, []).append(memory)

    def _allocate(self, nbytes: int) -> HostBytes:
        self._write_over()
        with self._lock:
            free = self._free.get(nbytes)
            memory = free.pop() if free else None
        if memory is None:
            memory = self._backend.host_bytes(nbytes)
        self._backend.overwrite(memory, POISON)
        return memory
