"""Finding the best point on an ordered set of them, in few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Points tried first, evenly spaced; the best of them is then closed in on.
GRID = 48


def crossing(signed: Callable[[int], float], points: Sequence[int]) -> tuple[int, ...]:
    """The two neighbours among `points` between which a monotone function changes sign, none if it does not."""
    left, right = 0, len(points) - 1
    if right < 0:
        return ()
    at_left = signed(points[left])
    if at_left * signed(points[right]) > 0:
        return ()
    while right - left > 1:
        middle = (left + right) // 2
        if at_left * signed(points[middle]) > 0:
            left = middle
        else:
            right = middle
    return points[left], points[right]


def lowest_maximum(
    rising: Callable[[int], float], falling: Callable[[int], float], points: Sequence[int]
) -> int:
    """The point at which the larger of a rising and a falling function is least."""
    near = crossing(lambda point: rising(point) - falling(point), points)
    return min(near or (points[0], points[-1]), key=lambda point: max(rising(point), falling(point)))


def closed_in(
    cost: Callable[[int], float], points: Sequence[int], also: Sequence[int] = (), grid: int = GRID
) -> int:
    """The cheapest point found by an even grid, and then by halving steps around the best one so far.

    `also` are indices of points to try beside the grid. A dip narrower than the grid may be missed.
    """
    last = len(points) - 1
    step = max(1, last // grid)
    tried: set[int] = {*range(0, last + 1, step), last, *(at for at in also if 0 <= at <= last)}
    known: dict[int, float] = {at: cost(points[at]) for at in sorted(tried)}
    best = min(known, key=lambda at: known[at])
    while step > 1:
        step = (step + 1) // 2
        for at in (best - step, best + step):
            if 0 <= at <= last and at not in known:
                known[at] = cost(points[at])
        best = min(known, key=lambda at: known[at])
    return points[best]
