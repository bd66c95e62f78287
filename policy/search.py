"""Finding the best point on an ordered set of them, in few steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

# Points tried first, evenly spaced; the best of them is then closed in on.
GRID = 48


def crossing(signed: Callable[[int], float], points: Sequence[int]) -> tuple[int, ...]:
    """The two neighbours among `points` between which a monotone function changes sign, none if it does not."""
    left, right = 0, len(points) - 1
    if right < 0:
        return ()
    at_left, at_right = signed(points[left]), signed(points[right])
    if at_left * at_right > 0:
        return ()
    one, other, slow = (left, at_left), (right, at_right), 0
    while right - left > 1:
        width = right - left
        rise = one[1] - other[1]
        if slow < 2 and rise:
            # Where a straight line through the last two would cross; near one, few steps are enough.
            middle = one[0] + int((other[0] - one[0]) * one[1] / rise)
            middle = min(max(middle, left + 1), right - 1)
        else:
            middle = left + width // 2
        one, other = other, (middle, signed(points[middle]))
        if at_left * other[1] > 0:
            left = middle
        else:
            right = middle
        slow = slow + 1 if 2 * (right - left) > width else 0
    return points[left], points[right]


def lowest_maximum(
    rising: Callable[[int], float], falling: Callable[[int], float], points: Sequence[int]
) -> tuple[int, float]:
    """The point at which the larger of a rising and a falling function is least, and how large it is there."""
    larger: dict[int, float] = {}

    def gap(point: int) -> float:
        one, other = rising(point), falling(point)
        larger[point] = one if one > other else other
        return one - other

    crossing(gap, points)
    best = min(larger, key=lambda point: larger[point])
    return best, larger[best]


# Of a search for a balance, so many steps follow straight lines alone; then every other one halves what is left.
_STRAIGHT = 4


def balanced(
    rising: Callable[[int], float],
    falling: Callable[[int], float],
    points: Sequence[int],
    guess: int,
    beyond: float = math.inf,
) -> tuple[int, float] | None:
    """What `lowest_maximum` finds, looked for from `guess` on; None where it is sure to be above `beyond`.

    Of points on one side of any other, `rising` or `falling` says the least that the larger of the two may be.
    """
    left, right = -1, len(points)
    at = min(max(bisect_left(points, guess), 0), right - 1)
    best, least = points[at], math.inf
    earlier, at_earlier, steps = at, 0.0, 0
    while True:
        one, other = rising(points[at]), falling(points[at])
        gap = one - other
        larger, smaller = (one, other) if gap > 0 else (other, one)
        if smaller > beyond:
            return None
        if larger < least:
            best, least = points[at], larger
        if gap < 0:
            left = at
        else:
            right = at
        if right - left <= 1 or not gap:
            return best, least
        steps += 1
        if steps > _STRAIGHT and steps % 2:
            new = (left + right) // 2
        else:
            # As if both were lines: through the last two points, or from the ends to this one.
            if steps > 1 and gap != at_earlier:
                per_point = (gap - at_earlier) / (at - earlier)
            else:
                per_point = one / (at + 1) + other / (len(points) - at)
            to = -gap / per_point if per_point > 0 else 0.0
            if steps > 1 and gap * at_earlier > 0:
                to *= 2  # twice on the same side: rather a step too far
            new = min(max(at + math.floor(to), left + 1), right - 1)
        earlier, at_earlier, at = at, gap, new


def first_to_hold(holds: Callable[[int], bool], points: Sequence[int], known: int) -> int:
    """The first of the points from which on something holds, which does at `known`, and mostly not before it."""
    right = bisect_left(points, known)
    if not right or not holds(points[right - 1]):
        return known
    if holds(points[0]):
        return points[0]
    return points[bisect_left(points, True, 1, right - 1, key=holds)]


def closed_in(
    cost: Callable[[int, float], float], points: Sequence[int], also: Iterable[int] = (), grid: int = GRID
) -> int:
    """The cheapest point found by an even grid, and then by halving steps around the best one so far.

    `cost` is told the cost of the best point so far: what costs more may be given as any number above that. The
    neighbours of `also` are tried beside the grid. A dip narrower than the grid may be missed.
    """
    last = len(points) - 1
    step = max(1, last // grid)
    tried = {*range(0, last + 1, step), last}
    for value in also:
        at = bisect_left(points, value)
        tried.update(near for near in (at - 1, at) if 0 <= near <= last)
    known: dict[int, float] = {}
    best, least = 0, math.inf
    # From the cheaper end on, so that as soon as possible it is known what costs more than the best.
    ordered = sorted(tried)
    for at in (0, last):
        known[at] = cost(points[at], least)
        if known[at] < least:
            best, least = at, known[at]
    for at in ordered if best == 0 else reversed(ordered):
        if at not in known:
            known[at] = cost(points[at], least)
            if known[at] < least or (known[at] == least and at < best):
                best, least = at, known[at]
    while step > 1:
        step = (step + 1) // 2
        middle = best
        for at in (middle - step, middle + step):
            if 0 <= at <= last and at not in known:
                known[at] = cost(points[at], least)
                if known[at] < least:
                    best, least = at, known[at]
    return points[best]
