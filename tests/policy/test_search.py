"""Searches that are told what is enough, or where to begin, find what those find that are told nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.search import balanced, closed_in, first_to_hold, lowest_maximum

# Small whole numbers, so that there are ties and flat stretches; now and then a jump.
steps = st.lists(st.integers(0, 3) | st.sampled_from((0, 0, 1, 50)), min_size=1, max_size=60)


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    rising, falling = draw(steps), draw(steps)
    count = min(len(rising), len(falling))
    ups = list(accumulate(rising[:count]))
    downs = list(accumulate(falling[:count]))[::-1]
    return ups, downs


@given(sides=sides(), stride=st.integers(1, 20), guess=st.integers(-10, 1300), beyond=st.integers(-1, 120))
def test_a_balance_is_found_from_any_guess_and_left_where_it_is_above_what_is_enough(
    sides: tuple[list[int], list[int]], stride: int, guess: int, beyond: int
) -> None:
    ups, downs = sides
    points = range(stride, stride * (len(ups) + 1), stride)

    def rising(point: int) -> float:
        return ups[point // stride - 1]

    def falling(point: int) -> float:
        return downs[point // stride - 1]

    least = min(max(pair) for pair in zip(ups, downs, strict=True))
    found = balanced(rising, falling, points, guess)
    assert found is not None
    at, larger = found
    assert larger == max(rising(at), falling(at)) == least == lowest_maximum(rising, falling, points)[1]
    bounded = balanced(rising, falling, points, guess, beyond)
    assert bounded == found if least <= beyond else bounded is None or bounded[1] == least


def test_a_balance_next_to_the_guess_takes_few_steps_and_one_far_off_not_many() -> None:
    def asked(guess: int) -> int:
        points: list[int] = []

        def rising(point: int) -> float:
            points.append(point)
            return 3e-6 * point

        balanced(rising, lambda point: 5e-6 * (8000 - point), range(1, 8000), guess)
        return len(points)

    assert asked(5000) <= 3
    assert max(map(asked, range(0, 8001, 500))) <= 8


@given(
    costs=st.lists(st.integers(0, 40), min_size=1, max_size=300),
    grid=st.sampled_from((4, 12, 48)),
    also=st.lists(st.integers(0, 300), max_size=3),
    more=st.integers(1, 5),
)
def test_what_a_point_costs_beyond_the_best_makes_no_difference(
    costs: list[int], grid: int, also: list[int], more: int
) -> None:
    def told(at: int, beyond: float) -> float:
        return costs[at] if costs[at] <= beyond else beyond + more

    def exact(at: int, _: float) -> float:
        return costs[at]

    points = range(len(costs))
    best = closed_in(exact, points, also, grid)
    assert closed_in(told, points, also, grid) == best
    assert costs[best] == min(costs[at] for at in _tried(exact, points, also, grid))


def _tried(cost: Callable[[int, float], float], points: range, also: list[int], grid: int) -> set[int]:
    tried: set[int] = set()

    def noted(at: int, beyond: float) -> float:
        tried.add(at)
        return cost(at, beyond)

    closed_in(noted, points, also, grid)
    return tried


def test_of_points_that_cost_the_same_the_first_is_taken_from_whichever_end_they_are_tried() -> None:
    for costs in ([5, 1, 9, 1, 4], [4, 1, 9, 1, 5], [1, 1, 1]):

        def cost(at: int, _: float, costs: list[int] = costs) -> float:
            return costs[at]

        assert closed_in(cost, range(len(costs))) == costs.index(1)


def test_a_cost_is_told_the_best_so_far() -> None:
    beyonds: list[float] = []

    def cost(at: int, beyond: float) -> float:
        beyonds.append(beyond)
        return float(abs(at - 30))

    assert closed_in(cost, range(100)) == 30
    assert beyonds[0] == math.inf
    assert beyonds[1:] == sorted(beyonds[1:], reverse=True)


@given(first=st.integers(0, 40), known=st.integers(0, 40), points=st.just(range(0, 120, 3)))
def test_the_first_that_holds_is_found_and_one_question_tells_that_there_is_none_before(
    first: int, known: int, points: range
) -> None:
    asked: list[int] = []

    def holds(point: int) -> bool:
        asked.append(point)
        return point >= first

    known = max(points[min(known, len(points) - 1)], -(-first // 3) * 3)
    if known in points:
        assert first_to_hold(holds, points, known) == -(-first // 3) * 3
        assert len(asked) <= (1 if known - 3 < first else 8)
