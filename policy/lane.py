"""What can be done with one tier's stored prefix, and how long each would take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from kvlane.policy.crossover import crossover
from kvlane.policy.model import usable_tokens
from kvlane.policy.onset import Onset
from kvlane.policy.path_cost import Part, PathCost
from kvlane.policy.plan import Estimate, LoadSegment, Path, Request
from kvlane.policy.search import closed_in, lowest_maximum
from kvlane.policy.split_points import SplitPoints, only_ends_count
from kvlane.policy.transfer_cost import Computes, TransferCost
from kvlane.policy.waits import Ends, Waits

# Words on the break-even rate.
FASTER_ABOVE = "above this link rate loading everything is faster"
AT_NO_RATE = "loading saves less time than its fixed cost, at any rate"


def estimated(cost: PathCost, request: Request, path: Path, parts: Sequence[Part], band: float) -> Estimate:
    """Computing what lies before `parts` while they load, beside each other, and then the rest of the prompt."""
    resident, prompt, chunk = request.resident_tokens, request.prompt_tokens, request.prefill_chunk_tokens
    begin, end = parts[0].start, parts[-1].end
    wait, arrived, group = cost.arrival(parts, cost.computes(end, prompt, chunk))
    front = cost.prefill.prefill_s(resident, begin - resident, chunk) if begin > resident else 0.0
    rest = cost.recompute_s(end, prompt, chunk)
    return Estimate(
        path=path,
        ttft_s=rest + max(request.device_busy_s + front, wait),
        compute_s=front + rest,
        front_s=front,
        transfer_s=arrived,
        load=tuple(
            [
                LoadSegment(
                    part.tier, part.start, part.end, round(part.transfer.bytes(part.end - part.start))
                )
                for part in parts
            ]
        ),
        group_layers=group,
        band=band,
    )


class Lane:
    """One request's choices on one tier: how much to load, and what would change the answer.

    `onset` finds the tier's crossovers, None where only a search does.
    """

    def __init__(
        self,
        cost: PathCost,
        transfer: TransferCost,
        tier: str,
        request: Request,
        band: float,
        onset: Onset | None = None,
    ) -> None:
        self.cost = cost
        self.transfer = transfer
        self.tier = tier
        self.band = band
        self.request = request
        self.unit = request.load_unit_tokens
        self.onset = onset
        self.start = start = request.resident_tokens
        self.chunk = request.prefill_chunk_tokens
        self.busy_s = request.device_busy_s
        stored = request.hit(tier)
        self.usable = usable = usable_tokens(stored, request.prompt_tokens, self.unit, request.tail_tokens)
        self.gain = usable - start if usable > start else 0
        # To compute everything after what is resident, and what follows the usable prefix; None where not known yet.
        self.recompute_s: float | None = None
        self.rest_s: float | None = None
        self._ends: Ends | None = None

    def no_gain(self) -> str:
        stored = self.request.hit(self.tier)
        if self.usable == 0:
            return f"{self.tier}: {stored} stored tokens hold no whole load unit of {self.unit} before the last token"
        return f"{self.tier}: {self.usable} usable tokens, {self.start} resident already"

    def link_rate(self) -> float:
        """Bytes per second the link achieves for loading everything usable, fixed costs apart."""
        link = self.transfer.link
        if not link.rate_table:
            return link.rate_bytes_per_s
        return link.rate_at(self.transfer.copy_bytes(max(1, self.gain)))

    def cuts(self, low: int, high: int) -> Sequence[int]:
        """Where in the usable prefix a load may begin or end, strictly between two token counts, ascending."""
        return range((low // self.unit + 1) * self.unit, min(high, self.usable + 1), self.unit)

    def waits(self) -> Waits:
        """How long loads over this tier's link are waited for."""
        return Waits(self.cost, self.transfer)

    def eventless(self) -> Waits:
        """The same if events cost nothing: never longer."""
        transfer = self.transfer
        if transfer.event_s:
            transfer = replace(transfer, link=replace(transfer.link, per_event_s=0.0))
        return Waits(self.cost, transfer)

    @property
    def ends(self) -> Ends:
        """What follows loads of the request."""
        if self._ends is None:
            self._ends = Ends(self.cost, self.request)
        return self._ends

    def share(self, ends: Ends) -> None:
        """Take what follows loads from there, which lanes of the same request may share."""
        self._ends = ends

    def part(self, begin: int, end: int, load_end: int) -> Part:
        """Tokens `[begin, end)` from here, of a load that ends at `load_end`."""
        return Part(self.tier, self.transfer.before(load_end - end), begin, end)

    def ttft(self, end: int, beyond: float = math.inf) -> float:  # noqa: ARG002 - plain layers are priced in few steps
        """TTFT when `[start, end)` is loaded and nothing before it computed; any number above `beyond` where it is."""
        cost, prompt, busy_s = self.cost, self.request.prompt_tokens, self.busy_s
        if cost.executor != "bulk":
            return cost.load_s(self.transfer, self.start, end, prompt, self.chunk, busy_s=busy_s)
        wait_s = self.transfer.total_s(end - self.start)
        return cost.recompute_s(end, prompt, self.chunk) + (wait_s if wait_s > busy_s else busy_s)

    def estimate(self, begin: int, end: int) -> Estimate:
        """Loading `[begin, end)`: a load when that is everything usable, else a split."""
        path: Path = "load" if end == self.usable and begin == self.start else "split"
        cost, transfer = self.cost, self.transfer
        bulk = cost.executor == "bulk"
        if not bulk and transfer.event_s:
            return estimated(cost, self.request, path, (self.part(begin, end, end),), self.band)
        # The same written out for one run of tokens whose layers have events of their own.
        prompt, chunk, tokens = self.request.prompt_tokens, self.chunk, end - begin
        wait = arrived = transfer.total_s(tokens)
        if bulk:
            rest = cost.recompute_s(end, prompt, chunk)
        else:
            computes, rest = cost.after(end, prompt, chunk)
            wait = transfer.wait_s(tokens, computes)
        front = cost.prefill.prefill_s(self.start, begin - self.start, chunk) if begin > self.start else 0.0
        ready = self.busy_s + front
        return Estimate(
            path,
            rest + (wait if wait > ready else ready),
            front + rest,
            arrived,
            (LoadSegment(self.tier, begin, end, round(transfer.bytes(tokens))),),
            front,
            1,
            self.band,
        )

    def load(self) -> Estimate:
        """Loading everything usable."""
        found = self.estimate(self.start, self.usable)
        self.rest_s = found.compute_s
        return found

    def two_ended(self) -> Estimate | None:
        """The fastest way to compute the front of the usable prefix while the rest of it loads, None where no load
        may begin inside it.

        The front takes longer the longer it is, and the load is waited for less: the best is where they meet.
        """
        points = self.cuts(self.start, self.usable)
        if not points:
            return None
        prefill, chunk = self.cost.prefill, self.chunk

        def front(begin: int) -> float:
            return self.busy_s + prefill.prefill_s(self.start, begin - self.start, chunk)

        return self.estimate(lowest_maximum(front, self.waited(self.usable), points)[0], self.usable)

    def waited(self, end: int) -> Callable[[int], float]:
        """How long a load that ends there is waited for, by where it begins."""
        cost, computes = self.cost, self.cost.computes(end, self.request.prompt_tokens, self.chunk)
        return lambda begin: cost.alone_s(self.transfer, end - begin, computes)

    def best_split(self) -> Estimate | None:
        """The fastest proper split, None where no load unit ends strictly inside the usable run."""
        low, high = self.start // self.unit + 1, self.usable // self.unit - 1
        if low > high:
            return None
        if not self.busy_s and only_ends_count(self.cost, self.transfer, self.request):
            last = self.estimate(self.start, high * self.unit)
            first = low * self.unit
            sooner = low < high and self.ttft(first) <= last.ttft_s
            return self.estimate(self.start, first) if sooner else last
        points = SplitPoints(self.cost, self.transfer, self.request, low, high).find()
        if self.cost.executor != "bulk" and self.transfer.event_s:
            # Each number of layers to an event has bends of its own.
            best = closed_in(self.ttft, self.cuts(self.start, self.usable), points)
        else:
            best = min(points, key=self.ttft)
        return self.estimate(self.start, best)

    def crossover(self) -> tuple[int | None, str]:
        """The prefix length in tokens, suffix held fixed, from which on loading all of it is not slower."""
        return crossover(self, self.onset)

    def break_even(self) -> tuple[float | None, str]:
        """The flat link rate at which loading everything usable ties with recomputing, this executor's fixed
        costs included: the largest that any awaited layer's arrival asks for."""
        cost, transfer = self.cost, self.transfer
        prompt, chunk = self.request.prompt_tokens, self.chunk
        moved = transfer.bytes(self.gain)
        if moved == 0:
            return None, "these layers keep nothing that a load would have to move"
        whole_s, rest_s = self.recompute_s, self.rest_s
        saved = cost.recompute_s(self.start, prompt, chunk) if whole_s is None else whole_s
        saved -= cost.recompute_s(self.usable, prompt, chunk) if rest_s is None else rest_s
        computes = cost.computes(self.usable, prompt, chunk)
        if type(transfer) is TransferCost and isinstance(computes, float) and not transfer.event_s:
            awaited_s = computes if cost.executor != "bulk" and transfer.by_layer else None
            rates = [
                plain_break_even(
                    transfer, self.gain, transfer.lead_s(self.gain), saved, self.busy_s, awaited_s
                )
            ]
        else:
            rates = self._rates(moved, saved, computes)
        found = [rate for rate in rates if rate is not None]
        if not found:
            return None, AT_NO_RATE
        return min(found), FASTER_ABOVE

    def _rates(self, moved: float, saved: float, computes: Computes) -> list[float | None]:
        """The rates at which loading everything usable ties, for each number of layers that may share an event."""
        # With all copies done while the device was busy, what is saved is left.
        hidden = [(0.0, saved)] if self.busy_s else []
        transfer = self.transfer
        if self.cost.executor == "bulk":
            left = self.busy_s + saved - transfer.fixed_s(self.gain)
            return [_rate([*hidden, (moved, left)])]
        most = self.cost.prefill.layers if transfer.event_s else 1
        return [_rate([*hidden, *self._budgets(saved, computes, group)]) for group in range(1, most + 1)]

    def _budgets(self, saved: float, computes: Computes, group: int) -> list[tuple[float, float]]:
        """The bytes that are there when each group of layers has arrived, and the seconds they may take.

        What is computed before a group is needed may run while it arrives.
        """
        transfer, layers = self.transfer, self.cost.prefill.layers
        each = [computes] * layers if isinstance(computes, float) else computes
        before = list(accumulate(each, initial=0.0))
        moved, fixed = transfer.bytes_until(self.gain), transfer.fixed_until(self.gain)
        moving = transfer.moving(self.gain)
        budgets = []
        for number, first in enumerate(range(0, len(moving), group)):
            last = moving[min(first + group, len(moving)) - 1]
            spent = fixed[last] + (number + 1) * transfer.event_s
            budgets.append((moved[last], self.busy_s + saved + before[moving[first]] - spent))
        return budgets


def plain_break_even(
    transfer: TransferCost,
    tokens: int,
    lead_s: float,
    saved_s: float,
    busy_s: float,
    compute_s: float | None,
) -> float | None:
    """The rate at which loading that many tokens ties, copies beginning after `lead_s`, where it spares `saved_s` of
    compute and the device is busy for `busy_s` before; None where it does at none.

    Layers that are awaited one by one take `compute_s` each: what the first and the last ask for no other exceeds. It
    is None where all are awaited together.
    """
    layers, copies, per_copy_s = transfer.layers, transfer.copies(tokens), transfer.link.per_copy_s
    spare_s = busy_s + saved_s
    # With all copies done while the device was busy, what is saved is left.
    budgets = [(0.0, saved_s)] if busy_s else []
    if compute_s is None:
        copies *= layers if transfer.by_layer else 1
        budgets.append((transfer.bytes(tokens), spare_s - (lead_s + copies * per_copy_s)))
    else:
        moved = tokens * transfer.layer_bytes_per_token
        last_s = spare_s + (layers - 1) * compute_s
        budgets.append((moved, spare_s - (lead_s + copies * per_copy_s)))
        budgets.append((moved * layers, last_s - (lead_s + layers * copies * per_copy_s)))
    return _rate(budgets)


def _rate(budgets: Sequence[tuple[float, float]]) -> float | None:
    """The rate at which bytes take no more than their seconds, None where there are no seconds."""
    rate = 0.0
    for size, seconds in budgets:
        if seconds <= 0:
            return None
        rate = max(rate, size / seconds)
    return rate
