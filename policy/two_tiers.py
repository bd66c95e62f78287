"""Loading from two tiers at once: one brings the front of the load, the other what follows, over their own links."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter

from kvlane.policy.lane import Lane, estimated
from kvlane.policy.path_cost import Part
from kvlane.policy.plan import Estimate, Path
from kvlane.policy.search import balanced, closed_in, first_to_hold, lowest_maximum
from kvlane.policy.waits import SURELY, Ends, Then, Waits

# Where to cut a load that begins and ends there, and how long it is waited for then.
Cut = Callable[[int, int, Then], tuple[int, float] | None]

# Split points tried before the best of them is closed in on: each takes a search for the boundary of its own.
_GRID = 12

# Boundaries tried at most for one load whose layers share events.
_ROUNDS = 3


class TwoTiers:
    """One request's choices on two tiers.

    `first` brings tokens from where the load begins, `last` those after a boundary. A layer is there when both have
    brought their tokens of it. Over one link the second run follows the first. `ends` is what follows loads of this
    request.

    Each way is None also where it is sure to be later than `beyond`, in seconds.
    """

    def __init__(self, first: Lane, last: Lane, ends: Ends) -> None:
        self.first, self.last, self.ends = first, last, ends
        self.cost, self.request = last.cost, last.request
        self.start, self.usable = last.start, last.usable
        self.more = first.usable > last.usable
        self.events = self.cost.executor != "bulk" and bool(first.transfer.event_s or last.transfer.event_s)
        self.one_link = first.transfer.link.name == last.transfer.link.name
        self._waits, self._eventless = (first.waits(), last.waits()), (first.eventless(), last.eventless())
        # How much of a load is the first tier's share: where the next boundary is looked for.
        self._share = 0.5

    def load(self, beyond: float = math.inf) -> Estimate | None:
        """Loading everything usable, None where `first` has more of it or no boundary lies inside it."""
        if self.more or not self.first.cuts(self.start, self.usable):
            return None
        return self._estimate("load", self.start, self.usable, beyond)

    def best_split(self, beyond: float = math.inf) -> Estimate | None:
        """The fastest prefix split found that loads from both."""
        boundaries = self.first.cuts(self.start, self.usable)
        ends = self.last.cuts(boundaries[0], self.usable + self.more) if boundaries else ()
        if not ends:
            return None
        return self._estimate("split", self.start, closed_in(self._ttft, ends, grid=_GRID), beyond)

    def _ttft(self, end: int, beyond: float) -> float:
        then, busy_s = self.ends.at(end), self.request.device_busy_s
        wait_s = busy_s
        if then.rest_s + busy_s <= beyond:
            # Sure to be above `beyond`, where there is no boundary that would have it below.
            found = self._boundary(self.start, end, then, (beyond - then.rest_s) * SURELY)
            wait_s = math.inf if found is None else max(busy_s, found[1])
        return then.rest_s + wait_s

    def two_ended(self, beyond: float = math.inf) -> Estimate | None:
        """The fastest way to compute the front while both bring the rest."""
        boundaries = self.first.cuts(self.start, self.usable)
        begins = self.first.cuts(self.start, boundaries[-1]) if boundaries else ()
        if not begins:
            return None
        request, prefill, then = self.request, self.cost.prefill, self.ends.at(self.usable)

        def front(begin: int) -> float:
            ahead = prefill.prefill_s(self.start, begin - self.start, request.prefill_chunk_tokens)
            return request.device_busy_s + ahead

        def waited(cut: Cut) -> Callable[[int], float]:
            def wait(begin: int) -> float:
                found = cut(begin, self.usable, then)
                assert found is not None
                return found[1]

            return wait

        least = waited(self._balance if self.events else self._boundary)
        middle = begins[len(begins) // 2]
        found = balanced(front, least, begins, middle, (beyond - then.rest_s) * SURELY)
        if found is None:
            return None
        begin, least_s = found
        if self.events:
            begin, _ = lowest_maximum(front, waited(self._boundary), begins)
        elif front(begin) < least_s:

            def no_later(point: int) -> bool:
                cut = self._boundary(point, self.usable, then, least_s)
                return cut is not None and cut[1] <= least_s

            # Where one tier alone is waited for, however much the other brings: the device computes what it must.
            begin = first_to_hold(no_later, begins, begin)
        return self._estimate("split", begin, self.usable, beyond)

    def _estimate(self, path: Path, begin: int, end: int, beyond: float) -> Estimate | None:
        then = self.ends.at(end)
        beyond = (beyond - then.rest_s) * SURELY
        found = self._boundary(begin, end, then, beyond)
        if found is None or found[1] > beyond:
            return None
        band = max(self.first.band, self.last.band)
        return estimated(self.cost, self.request, path, self._cut(begin, found[0], end), band)

    def _boundary(
        self, begin: int, end: int, then: Then, beyond: float = math.inf
    ) -> tuple[int, float] | None:
        """Where `[begin, end)` is best cut in two, and how long the two runs are waited for then; None where that is
        sure to be longer than `beyond`."""
        if self.one_link:
            # One after the other nothing is balanced: each token costs what it costs from its tier.
            points = self.first.cuts(begin, end)
            ends = [(point, self._wait(begin, point, end, then)[0]) for point in (points[-1], points[0])]
            return min(ends, key=itemgetter(1))
        least = self._balance(begin, end, then, beyond)
        if least is None or not self.events:
            return least
        # The layers that share an event are the same on both links: their number follows from the boundary, and the
        # boundary from their number.
        best, group = (begin, math.inf), 1
        for _ in range(_ROUNDS):
            first, last = self._waited(self._waits, begin, end, then, group)
            boundary, _ = lowest_maximum(first, last, self.first.cuts(begin, end))
            wait, best_group = self._wait(begin, boundary, end, then)
            best = min(best, (boundary, wait), key=itemgetter(1))
            if best_group == group:
                break
            group = best_group
        return best

    def _balance(
        self, begin: int, end: int, then: Then, beyond: float = math.inf
    ) -> tuple[int, float] | None:
        """Where neither run is waited for longer than the other, if events cost nothing."""
        first, last = self._waited(self._eventless, begin, end, then)
        guess = begin + round(self._share * (end - begin))
        found = balanced(first, last, self.first.cuts(begin, end), guess, beyond)
        if found is not None:
            self._share = (found[0] - begin) / (end - begin)
        return found

    @staticmethod
    def _waited(
        waits: tuple[Waits, Waits], begin: int, end: int, then: Then, group_layers: int = 1
    ) -> tuple[Callable[[int], float], Callable[[int], float]]:
        """How long each run is waited for, by the boundary."""
        first_s, last_s = waits[0].seconds, waits[1].seconds

        def first(point: int) -> float:
            return first_s(point - begin, end - point, then, group_layers)

        def last(point: int) -> float:
            return last_s(end - point, 0, then, group_layers)

        return first, last

    def _wait(self, begin: int, boundary: int, end: int, then: Then) -> tuple[float, int]:
        wait, _, group = self.cost.arrival(self._cut(begin, boundary, end), then.computes)
        return wait, group

    def _cut(self, begin: int, boundary: int, end: int) -> tuple[Part, Part]:
        last = self.last.part(boundary, end, end)
        return self.first.part(begin, boundary, end), last._replace(follows=self.one_link)
