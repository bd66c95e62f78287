"""The commonest decision in few steps: one stored prefix, nothing queued, all copies before one pass over equal layers.

What `Planner.decide` finds, and what its plan says when asked, is worked out for that case without the objects that
make room for all others: the same costs are added in the same order, so that both are equal to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvlane.policy.basis import parameter
from kvlane.policy.crossover import Crossover, Kept, in_words
from kvlane.policy.lane import AT_NO_RATE, FASTER_ABOVE
from kvlane.policy.plan import MEASURED, Estimate, LoadSegment, Parameter, Path
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.reason import weighed
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
    crossover: Crossover
    break_even: tuple[float | None, str]
    calibrated: bool
    parameters: dict[str, Parameter]
    reason: str


class PlainTier:
    """Decides requests with one hit, in one tier, in load units of one size."""

    def __init__(
        self,
        planner: Planner,
        tier: str,
        unit: int,
        transfer: TransferCost,
        band: float,
        kept: Kept,
        prefill_from: Parameter,
        compute_band: float,
    ) -> None:
        self.tier, self.unit, self.kept = tier, unit, kept
        self.prefill, self.transfer = planner.prefill, transfer
        self.band, self.compute_band, self.tie_margin = band, compute_band, planner.tie_margin
        self.prefill_from = prefill_from
        self.link_name = "link." + transfer.link.name
        self.calibrated = MEASURED.issuperset((prefill_from.source, transfer.link.source))

    @staticmethod
    def fits(planner: Planner, transfer: TransferCost, unit: int) -> bool:
        """Whether what is said here holds for such a planner and such transfers."""
        return (
            planner.executor == "bulk"
            and type(planner.prefill) is PrefillCost
            and not planner.prefill.floored
            and type(transfer) is TransferCost
            and transfer.even(unit)
            and transfer.layer_bytes_per_token > 0
        )

    def decide(self, prompt: int, resident: int, stored: int, chunk: int | None = None) -> Told | None:
        """The plan for one request; None where it is to be refused, has nothing to load, takes several passes, or its
        crossover is not known yet: then `Planner.decide` is asked, which finds it."""
        unit = self.unit
        usable = (stored if stored < prompt else prompt - 1) // unit * unit
        gain = usable - resident
        tokens = self.kept.known(resident, 0.0, 0.0)
        if gain <= 0 or stored > prompt or tokens is None:
            return None
        if chunk is not None and (prompt - resident > chunk or tokens > usable):
            return None
        whole_s = self.prefill.pass_s(resident, prompt - resident) + self.prefill.head_s
        recompute = Estimate("recompute", whole_s, whole_s, band=self.compute_band)
        load = self._loaded("load", resident, usable, prompt)
        chosen = recompute if recompute.ttft_s <= load.ttft_s else load
        split: Estimate | None = None
        first, last = (resident // unit + 1) * unit, usable - unit
        if first <= last:
            split = self._loaded("split", resident, last, prompt)
            if first < last:
                other = self._loaded("split", resident, first, prompt)
                split = other if other.ttft_s <= split.ttft_s else split
            if split.ttft_s < chosen.ttft_s:
                chosen = split
        # A near-tie goes to the steadier path.
        near = chosen.ttft_s * (1 + self.tie_margin)
        if recompute.ttft_s < near:
            chosen = recompute
        elif load.ttft_s < near:
            chosen = load
        left = whole_s - load.compute_s - self.transfer.fixed_s(gain)
        needed = self.transfer.bytes(gain) / left if left > 0 else None
        link = self.transfer.link
        others = [each for each in (load, recompute, split) if each is not None and each is not chosen]
        return Told(
            chosen,
            load,
            recompute,
            split,
            in_words(tokens, resident, prompt - usable),
            (needed, AT_NO_RATE if needed is None else FASTER_ABOVE),
            self.calibrated,
            {"prefill": self.prefill_from, self.link_name: parameter(link, self.transfer, gain)},
            weighed(
                chosen,
                others,
                prompt,
                resident,
                "bulk",
                self.tie_margin,
                self.tier,
                link.rate_bytes_per_s,
                needed,
            ),
        )

    def _loaded(self, path: Path, begin: int, end: int, prompt: int) -> Estimate:
        copied_s = self.transfer.total_s(end - begin)
        rest_s = self.prefill.pass_s(end, prompt - end) + self.prefill.head_s
        size = round(self.transfer.bytes(end - begin))
        segment = LoadSegment(self.tier, begin, end, size)
        return Estimate(path, rest_s + copied_s, rest_s, copied_s, (segment,), 0.0, 1, self.band)
