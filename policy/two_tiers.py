"""Loading from two tiers at once: one brings the front of the load, the other what follows, over their own links."""

from __future__ import annotations

from kvlane.policy.lane import Lane, estimated
from kvlane.policy.path_cost import Part
from kvlane.policy.plan import Estimate, Path
from kvlane.policy.search import closed_in, lowest_maximum
from kvlane.policy.transfer_cost import Computes

# Split points tried before the best of them is closed in on: each takes a search for the boundary of its own.
_GRID = 12


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
        """Where `[begin, end)` is cut in two so that neither run is waited for longer than the other, and how long
        the two are waited for then."""
        cost, points = self.cost, self.first.cuts(begin, end)

        def first(point: int) -> float:
            return cost.alone_s(self.first.transfer.before(end - point), point - begin, computes)

        def last(point: int) -> float:
            return cost.alone_s(self.last.transfer, end - point, computes)

        def both(point: int) -> float:
            return cost.arrival(self._cut(begin, point, end), computes)[0]

        if self.one_link:
            # One after the other nothing is balanced: each token costs what it costs from its tier.
            waits = {point: both(point) for point in (points[-1], points[0])}
            boundary = min(waits, key=lambda point: waits[point])
            return boundary, waits[boundary]
        boundary, wait = lowest_maximum(first, last, points)
        if cost.executor != "bulk" and (self.first.transfer.event_s or self.last.transfer.event_s):
            # The layers that share an event are the same on both links, and best for neither alone.
            boundary = closed_in(both, points, (boundary,), _GRID)
            wait = both(boundary)
        return boundary, wait

    def _cut(self, begin: int, boundary: int, end: int) -> tuple[Part, Part]:
        last = self.last.part(boundary, end, end)
        return self.first.part(begin, boundary, end), last._replace(follows=self.one_link)
