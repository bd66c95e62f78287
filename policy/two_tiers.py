"""Loading from two tiers at once: one brings the front of the load, the other what follows, over their own links."""

from __future__ import annotations

import math
from operator import itemgetter

from kvlane.policy.lane import Lane, estimated
from kvlane.policy.path_cost import Part
from kvlane.policy.plan import Estimate, Path
from kvlane.policy.search import closed_in, lowest_maximum
from kvlane.policy.transfer_cost import Computes

# Split points tried before the best of them is closed in on: each takes a search for the boundary of its own.
_GRID = 12

# Boundaries tried at most for one load whose layers share events.
_ROUNDS = 3


class TwoTiers:
    """One request's choices on two tiers.

    `first` brings tokens from where the load begins, `last` those after a boundary. A layer is there when both have
    brought their tokens of it. Over one link the second run follows the first.
    """

    def __init__(self, first: Lane, last: Lane) -> None:
        self.first, self.last = first, last
        self.cost, self.request = last.cost, last.request
        self.start, self.usable = last.start, last.usable
        self.more = first.usable > last.usable
        self.events = self.cost.executor != "bulk" and bool(first.transfer.event_s or last.transfer.event_s)
        self.one_link = first.transfer.link.name == last.transfer.link.name

    def load(self) -> Estimate | None:
        """Loading everything usable, None where `first` has more of it or no boundary lies inside it."""
        if self.more or not self.first.cuts(self.start, self.usable):
            return None
        return self._estimate("load", self.start, self.usable)

    def best_split(self) -> Estimate | None:
        """The fastest prefix split found that loads from both."""
        boundaries = self.first.cuts(self.start, self.usable)
        ends = self.last.cuts(boundaries[0], self.usable + self.more) if boundaries else ()
        if not ends:
            return None
        return self._estimate("split", self.start, closed_in(self._ttft, ends, grid=_GRID))

    def _ttft(self, end: int) -> float:
        prompt, chunk = self.request.prompt_tokens, self.request.prefill_chunk_tokens
        _, wait = self._boundary(self.start, end, self.cost.computes(end, prompt, chunk))
        return self.cost.recompute_s(end, prompt, chunk) + max(self.request.device_busy_s, wait)

    def two_ended(self) -> Estimate | None:
        """The fastest way to compute the front while both bring the rest."""
        boundaries = self.first.cuts(self.start, self.usable)
        begins = self.first.cuts(self.start, boundaries[-1]) if boundaries else ()
        if not begins:
            return None
        request, cost = self.request, self.cost
        computes = cost.computes(self.usable, request.prompt_tokens, request.prefill_chunk_tokens)

        def front(begin: int) -> float:
            ahead = cost.prefill.prefill_s(self.start, begin - self.start, request.prefill_chunk_tokens)
            return request.device_busy_s + ahead

        def wait(begin: int) -> float:
            return self._boundary(begin, self.usable, computes)[1]

        return self._estimate("split", lowest_maximum(front, wait, begins)[0], self.usable)

    def _estimate(self, path: Path, begin: int, end: int) -> Estimate:
        request = self.request
        computes = self.cost.computes(end, request.prompt_tokens, request.prefill_chunk_tokens)
        boundary, _ = self._boundary(begin, end, computes)
        band = max(self.first.band, self.last.band)
        return estimated(self.cost, request, path, self._cut(begin, boundary, end), band)

    def _boundary(self, begin: int, end: int, computes: Computes) -> tuple[int, float]:
        """Where `[begin, end)` is best cut in two, and how long the two runs are waited for then."""
        if self.one_link:
            # One after the other nothing is balanced: each token costs what it costs from its tier.
            points = self.first.cuts(begin, end)
            ends = [(point, self._wait(begin, point, end, computes)[0]) for point in (points[-1], points[0])]
            return min(ends, key=itemgetter(1))
        boundary, wait = self._balance(begin, end, computes, 1)
        if not self.events:
            return boundary, wait
        # The layers that share an event are the same on both links: their number follows from the boundary, and the
        # boundary from their number.
        best, group = (boundary, math.inf), 1
        for _ in range(_ROUNDS):
            wait, best_group = self._wait(begin, boundary, end, computes)
            best = min(best, (boundary, wait), key=itemgetter(1))
            if best_group == group:
                break
            group = best_group
            boundary, _ = self._balance(begin, end, computes, group)
        return best

    def _balance(self, begin: int, end: int, computes: Computes, group_layers: int) -> tuple[int, float]:
        """Where neither run is waited for longer than the other."""
        cost = self.cost

        def first(point: int) -> float:
            run = self.first.transfer.before(end - point)
            return cost.alone_s(run, point - begin, computes, group_layers)

        def last(point: int) -> float:
            return cost.alone_s(self.last.transfer, end - point, computes, group_layers)

        return lowest_maximum(first, last, self.first.cuts(begin, end))

    def _wait(self, begin: int, boundary: int, end: int, computes: Computes) -> tuple[float, int]:
        wait, _, group = self.cost.arrival(self._cut(begin, boundary, end), computes)
        return wait, group

    def _cut(self, begin: int, boundary: int, end: int) -> tuple[Part, Part]:
        last = self.last.part(boundary, end, end)
        return self.first.part(begin, boundary, end), last._replace(follows=self.one_link)
