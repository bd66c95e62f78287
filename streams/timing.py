"""What a prefill reports: when every layer's copies and compute ran. All times in seconds after the submission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

PassKind: TypeAlias = Literal["forward", "front", "tail", "recompute"]


@dataclass(frozen=True, slots=True)
class CopyTiming:
    """What happened to one layer's copies from one tier.

    Attributes:
        layer: whose KV they carried.
        bytes: of this layer alone.
        copies: how many carried them.
        enqueue_s: they were handed to the device.
        start_s: the copy stream reached them.
        arrive_s: the last of them was done.
        group: the first of the layers whose copies share this start and this arrival.
    """

    layer: int
    bytes: int
    copies: int
    enqueue_s: float
    start_s: float
    arrive_s: float
    group: int


@dataclass(frozen=True, slots=True)
class PartTiming:
    """The copies of one stored run, tokens `[start, end)` from `tier`: one row per layer that it holds something for.

    `whole` says that all of it arrived; a part that did not lists what was copied before it was given up, and nothing
    while a copy is still under way.
    """

    tier: str
    start: int
    end: int
    whole: bool
    layers: tuple[CopyTiming, ...]

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.layers)


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """What happened to one layer in one pass.

    Attributes:
        layer: index in the model.
        bytes: loaded for it, from all tiers together; 0 without a load, and the four load fields are None then.
        copies: copies that carried them.
        enqueue_s: the first of its copies were handed to the device.
        start_s: a copy stream reached them.
        arrive_s: the last of them was done.
        reached_s: compute came to need the KV: before the forward in bulk, inside the layer when layered. None where it
            waited for nothing: in every other layer of a bulk load, and of a group.
        compute_begin_s: the layer's compute began.
        compute_end_s: the layer's compute ended, waiting included.
        exposed_s: how long compute stood still for this layer's KV (in bulk, layer 0 carries the whole wait).
    """

    layer: int
    bytes: int
    copies: int
    enqueue_s: float | None
    start_s: float | None
    arrive_s: float | None
    reached_s: float | None
    compute_begin_s: float
    compute_end_s: float
    exposed_s: float

    @property
    def compute_s(self) -> float:
        """The layer's own compute, its wait taken out where that lies inside it."""
        inside = self.reached_s is not None and self.reached_s >= self.compute_begin_s
        return self.compute_end_s - self.compute_begin_s - (self.exposed_s if inside else 0.0)

    @property
    def copy_s(self) -> float | None:
        """Time the layer's copies took on their stream, None without a load."""
        if self.start_s is None or self.arrive_s is None:
            return None
        return self.arrive_s - self.start_s


@dataclass(frozen=True, slots=True)
class PassTiming:
    """One forward pass over tokens `[start, end)`, one row per layer.

    `forward` is the only pass of a request whose load went well or that had none; `front` and `tail` are the two of a
    two-ended one; `recompute` took the place of a pass whose load failed.
    """

    kind: PassKind
    start: int
    end: int
    layers: tuple[LayerTiming, ...]
