"""One answer as what each stream did when: copies by tier, compute by pass, and where compute stood still.

The trace, the picture and the text are drawn from this, whatever the mode the answer was given in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvlane.streams.engines.transformers import PrefillResult
from kvlane.streams.timing import LayerTiming, PartTiming, PassTiming


class Wait(NamedTuple):
    """Compute stood still for a layer's KV: from when to when, in seconds after the submission."""

    layer: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One answer: what was loaded, what computed, and `total_s` from the submission to the first token's id.

    `head_s` is the last of it, from the end of the last layer on. All rows are in seconds after the submission.
    """

    title: str
    parts: tuple[PartTiming, ...]
    passes: tuple[PassTiming, ...]
    head_s: float
    total_s: float

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.passes[0].layers)

    @property
    def bytes(self) -> int:
        """Loaded, from all tiers."""
        return sum(part.bytes for part in self.parts)

    @property
    def waits(self) -> list[Wait]:
        """All of them, in order."""
        rows = [row for each in self.passes for row in each.layers]
        return [wait for row in rows if (wait := wait_of(row)) is not None]

    @property
    def exposed_s(self) -> float:
        """How long compute stood still for KV, all layers together."""
        return sum(wait.end_s - wait.begin_s for wait in self.waits)


def timeline_of(title: str, result: PrefillResult) -> Timeline:
    """The timeline of an answer as the engine reports it."""
    return Timeline(title, result.parts, result.passes, result.head_s, result.total_s)


def waits_inside(row: LayerTiming) -> bool:
    """Whether a layer came to need its KV after it had begun: in bulk the wait lies before the forward."""
    return row.reached_s is not None and row.reached_s >= row.compute_begin_s


def resumed_s(row: LayerTiming) -> float:
    """When a layer had its KV; when it began, where it waited for nothing."""
    return row.compute_begin_s if row.reached_s is None else row.reached_s + row.exposed_s


def wait_of(row: LayerTiming) -> Wait | None:
    """When compute stood still for a layer's KV, None where it did not."""
    if row.reached_s is None or row.exposed_s <= 0:
        return None
    return Wait(row.layer, row.reached_s, resumed_s(row))


def busy(row: LayerTiming) -> list[tuple[float, float]]:
    """From when to when a layer computed: in two pieces where it stood still in between."""
    if row.reached_s is None or not waits_inside(row):
        return [(row.compute_begin_s, row.compute_end_s)]
    return [(row.compute_begin_s, row.reached_s), (resumed_s(row), row.compute_end_s)]
