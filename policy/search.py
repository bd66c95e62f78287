"""Finding the best point on an ordered set of them, in few steps."""

from __future__ import annotations

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


def closed_in(
    cost: Callable[[int], float], points: Sequence[int], also: Iterable[int] = (), grid: int = GRID
) -> int:
    """The cheapest point found by an even grid, and then by halving steps around the best one so far.

    The neighbours of `also` are tried beside the grid. A dip narrower than the grid may be missed.
    """
    last = len(points) - 1
    step = max(1, last // grid)
    tried = {*range(0, last + 1, step), last}
    for value in also:
        at = bisect_left(points, value)
        tried.update(near for near in (at - 1, at) if 0 <= near <= last)
    known: dict[int, float] = {at: cost(points[at]) for at in sorted(tried)}
    best = min(known, key=lambda at: known[at])
    while step > 1:
        step = (step + 1) // 2
        for at in (best - step, best + step):
            if 0 <= at <= last and at not in known:
                known[at] = cost(points[at])
        best = min(known, key=lambda at: known[at])
    return points[best]
