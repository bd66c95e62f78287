"""The commonest decision in few steps: one stored prefix, and one pass over equal layers.

What `Planner.decide` finds, and what its plan says when asked, is worked out for that case without the objects that
make room for all others: the same costs are added in the same order, so that both are equal to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvlane.policy.basis import parameter
from kvlane.policy.crossover import Crossover, in_words
from kvlane.policy.lane import AT_NO_RATE, FASTER_ABOVE, plain_break_even
from kvlane.policy.onset import Onset
from kvlane.policy.pipeline import uniform_wait
from kvlane.policy.plan import MEASURED, Estimate, Executor, LoadSegment, Parameter, Path
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.reason import weighed
from kvlane.policy.search import crossing
from kvlane.policy.transfer_cost import TransferCost

if TYPE_CHECKING:
    from kvlane.policy.planner import Planner

NO_SPLIT = "the usable prefix is a single load unit"


class Told(NamedTuple):
    """A plan's choice and what it says of it; `split` is None where there is no such path."""

    chosen: Estimate
    load: Estimate
    recompute: Estimate
    split: Estimate | None
    executor: Executor
    busy_s: float
    crossover: Crossover
    break_even: tuple[float | None, str]
    calibrated: bool
    parameters: dict[str, Parameter]
    reason: str


class _Asked(NamedTuple):
    """What one request says, and the seconds before the first of its copies."""

    prompt: int
    resident: int
    busy_s: float
    lead_s: float


class PlainTier:
    """Decides requests with one hit, in one tier, in load units of one size."""

    def __init__(
        self,
        planner: Planner,
        tier: str,
        unit: int,
        transfer: TransferCost,
        band: float,
        onset: Onset,
        prefill_from: Parameter,
        compute_band: float,
    ) -> None:
        self.tier, self.unit, self.onset = tier, unit, onset
        self.executor = planner.executor
        # Whether a pass waits for each layer by itself.
        self.by_layer = planner.executor != "bulk" and transfer.by_layer
        self.prefill, self.transfer = planner.prefill, transfer
        self.band, self.compute_band, self.tie_margin = band, compute_band, planner.tie_margin
        self.prefill_from = prefill_from
        self.link_name = "link." + transfer.link.name
        self.calibrated = MEASURED.issuperset((prefill_from.source, transfer.link.source))

    @staticmethod
    def fits(planner: Planner, transfer: TransferCost, unit: int) -> bool:
        """Whether what is said here holds for such a planner and such transfers."""
        return (
            planner.executor != "two_ended"
            and type(planner.prefill) is PrefillCost
            and not planner.prefill.floored
            and type(transfer) is TransferCost
            and transfer.even(unit)
            and transfer.layer_bytes_per_token > 0
        )

    def decide(
        self,
        prompt: int,
        resident: int,
        stored: int,
        chunk: int | None = None,
        busy_s: float = 0.0,
        queued_s: float = 0.0,
    ) -> Told | None:
        """The plan for one request behind those queues; None where it is to be refused, has nothing to load, takes
        several passes, or its crossover takes a search: then `Planner.decide` is asked."""
        unit, transfer, link = self.unit, self.transfer, self.transfer.link
        usable = (stored if stored < prompt else prompt - 1) // unit * unit
        gain = usable - resident
        if gain <= 0 or stored > prompt or (chunk is not None and prompt - resident > chunk):
            return None
        tokens = self.onset.tokens(resident, busy_s, queued_s)
        if tokens is None or (chunk is not None and tokens > usable):
            return None
        whole_s = self.prefill.pass_s(resident, prompt - resident) + self.prefill.head_s
        recompute = Estimate("recompute", busy_s + whole_s, whole_s, band=self.compute_band)
        asked = _Asked(prompt, resident, busy_s, queued_s + link.latency_s)
        load = self._estimate("load", usable, asked)
        split: Estimate | None = None
        for end in self._split_points(usable, asked):
            other = self._estimate("split", end, asked)
            split = other if split is None or other.ttft_s < split.ttft_s else split
        chosen = recompute if recompute.ttft_s <= load.ttft_s else load
        if split is not None and split.ttft_s < chosen.ttft_s:
            chosen = split
        # A near-tie of what comes after the device's queue goes to the steadier path.
        near = busy_s + (chosen.ttft_s - busy_s) * (1 + self.tie_margin)
        if recompute.ttft_s < near:
            chosen = recompute
        elif load.ttft_s < near:
            chosen = load
        awaited_s = self.prefill.pass_s(usable, prompt - usable) / transfer.layers if self.by_layer else None
        begun_s = asked.lead_s + gain * transfer.per_token_s
        needed = plain_break_even(transfer, gain, begun_s, whole_s - load.compute_s, busy_s, awaited_s)
        others = [each for each in (load, recompute, split) if each is not None and each is not chosen]
        return Told(
            chosen,
            load,
            recompute,
            split,
            self.executor,
            busy_s,
            in_words(tokens, resident, prompt - usable),
            (needed, AT_NO_RATE if needed is None else FASTER_ABOVE),
            self.calibrated,
            {"prefill": self.prefill_from, self.link_name: parameter(link, transfer, gain)},
            weighed(
                chosen,
                others,
                prompt,
                resident,
                self.executor,
                self.tie_margin,
                self.tier,
                link.rate_bytes_per_s,
                needed,
            ),
        )

    def _split_points(self, usable: int, asked: _Asked) -> tuple[int, ...]:
        """The ends of the proper splits of which one is the fastest, as `SplitPoints` finds them: the last that the
        device's queue hides, or else the first, the very last, and where copying a layer takes as long as computing it.
        There are none where no load unit ends strictly inside what is usable."""
        unit, prefill, transfer = self.unit, self.prefill, self.transfer
        low, high = asked.resident // unit + 1, usable // unit - 1
        if low >= high:
            return () if low > high else (high * unit,)
        if not asked.busy_s and not self.by_layer:
            return low * unit, high * unit

        def beyond_queue(units: int) -> float:
            return self._times(units * unit, asked)[1] - asked.busy_s

        def copy_beyond_compute(units: int) -> float:
            end = units * unit
            pass_s = prefill.pass_s(end, asked.prompt - end)
            return transfer.layer_s(end - asked.resident) - pass_s / transfer.layers

        if asked.busy_s:
            hidden = (high,) if beyond_queue(high) <= 0 else crossing(beyond_queue, range(low, high + 1))
            low = hidden[0] if hidden else low
        points = {low, high}
        if self.by_layer:
            points.update(crossing(copy_beyond_compute, range(low, high + 1)))
        return tuple([units * unit for units in sorted(points)])

    def _times(self, end: int, asked: _Asked) -> tuple[float, float, float]:
        """Seconds until everything up to `end` is there, that the pass after it waits, and that it takes."""
        prompt, resident, _, lead_s = asked
        transfer, tokens = self.transfer, end - resident
        layers, layer_s = transfer.layers, transfer.layer_s(tokens)
        begun_s = lead_s + tokens * transfer.per_token_s
        copied_s = begun_s + layers * layer_s
        pass_s = self.prefill.pass_s(end, prompt - end)
        if not self.by_layer:
            return copied_s, copied_s, pass_s
        return copied_s, uniform_wait(begun_s, layer_s, pass_s / layers, layers), pass_s

    def _estimate(self, path: Path, end: int, asked: _Asked) -> Estimate:
        copied_s, wait_s, pass_s = self._times(end, asked)
        resident, busy_s = asked.resident, asked.busy_s
        rest_s = pass_s + self.prefill.head_s
        segment = LoadSegment(self.tier, resident, end, round(self.transfer.bytes(end - resident)))
        ttft_s = rest_s + (wait_s if wait_s > busy_s else busy_s)
        return Estimate(path, ttft_s, rest_s, copied_s, (segment,), 0.0, 1, self.band)
