"""The commonest decision in few steps: one stored prefix, all copies before one pass over equal layers.

What `Planner.decide` finds, and what its plan says when asked, is worked out for that case without the objects that
make room for all others: the same costs are added in the same order, so that both are equal to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvlane.policy.basis import parameter
from kvlane.policy.crossover import Crossover, in_words
from kvlane.policy.lane import AT_NO_RATE, FASTER_ABOVE
from kvlane.policy.onset import Onset
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
        self.prefill, self.transfer = planner.prefill, transfer
        self.band, self.compute_band, self.tie_margin = band, compute_band, planner.tie_margin
        self.prefill_from = prefill_from
        # To copy one, in the mean of a load unit.
        self.token_s = transfer.per_token_s + transfer.layers * transfer.layer_s(unit) / unit
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
        needed = self._break_even(gain, whole_s - load.compute_s, asked)
        others = [each for each in (load, recompute, split) if each is not None and each is not chosen]
        return Told(
            chosen,
            load,
            recompute,
            split,
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
                "bulk",
                self.tie_margin,
                self.tier,
                link.rate_bytes_per_s,
                needed,
            ),
        )

    def _split_points(self, usable: int, asked: _Asked) -> tuple[int, ...]:
        """The ends of the proper splits of which one is the fastest: the first and the last that load no less than the
        device's queue hides anyway. There are none where no load unit ends strictly inside what is usable."""
        unit = self.unit
        low, high = asked.resident // unit + 1, usable // unit - 1
        if low > high:
            return ()
        if asked.busy_s and low < high:
            low = self._last_hidden(low, high, asked)
        return (low * unit, high * unit) if low < high else (high * unit,)

    def _last_hidden(self, low: int, high: int, asked: _Asked) -> int:
        """The last of these load units, if there is one, up to which all is copied before the device is free."""
        unit, resident, lead_s, busy_s = self.unit, asked.resident, asked.lead_s, asked.busy_s
        if self._copied_s(high * unit - resident, lead_s) <= busy_s:
            return high
        about = (resident + int((busy_s - lead_s) / self.token_s)) // unit
        last = min(max(about, low), high - 1)
        while last > low and self._copied_s(last * unit - resident, lead_s) >= busy_s:
            last -= 1
        while last < high - 1 and self._copied_s((last + 1) * unit - resident, lead_s) < busy_s:
            last += 1
        return last

    def _break_even(self, gain: int, saved_s: float, asked: _Asked) -> float | None:
        """What `Lane.break_even` finds for a load of so many tokens that saves so much compute."""
        transfer, per_copy_s, busy_s = self.transfer, self.transfer.link.per_copy_s, asked.busy_s
        fixed_s = asked.lead_s + gain * transfer.per_token_s
        if per_copy_s:
            fixed_s += transfer.copies(gain) * (transfer.layers if transfer.by_layer else 1) * per_copy_s
        left_s = busy_s + saved_s - fixed_s
        if left_s <= 0 or (saved_s <= 0 and busy_s):
            return None
        return transfer.bytes(gain) / left_s

    def _copied_s(self, tokens: int, lead_s: float) -> float:
        """What `TransferCost.total_s` says of a link in whose queue something waits."""
        transfer = self.transfer
        return lead_s + tokens * transfer.per_token_s + transfer.layers * transfer.layer_s(tokens)

    def _estimate(self, path: Path, end: int, asked: _Asked) -> Estimate:
        prompt, resident, busy_s, lead_s = asked
        tokens = end - resident
        copied_s = self._copied_s(tokens, lead_s)
        rest_s = self.prefill.pass_s(end, prompt - end) + self.prefill.head_s
        segment = LoadSegment(self.tier, resident, end, round(self.transfer.bytes(tokens)))
        ttft_s = rest_s + (copied_s if copied_s > busy_s else busy_s)
        return Estimate(path, ttft_s, rest_s, copied_s, (segment,), 0.0, 1, self.band)
