"""A queue of seconds against the schedule that whoever is ready first is served first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.fifo import Fifo, Turn

seconds = st.integers(0, 40).map(lambda quarter: quarter / 4)


def left_by(turns: list[tuple[float, float]], now: float) -> list[float]:
    """What is left at `now` of each turn `(ready, seconds)`, one after the other in the order they are ready."""
    left, at = [size for _, size in turns], 0.0
    for place in sorted(range(len(turns)), key=lambda place: turns[place][0]):
        ready, size = turns[place]
        begins = max(at, ready)
        left[place] = size - min(size, max(0.0, now - begins))
        at = begins + size
    return left


@given(
    bookings=st.lists(st.tuples(seconds, seconds, st.floats(0.25, 10.0)), max_size=12),
    asked=st.lists(seconds, max_size=6),
)
def test_turns_are_served_as_they_are_ready(
    bookings: list[tuple[float, float, float]], asked: list[float]
) -> None:
    queue, now, turns, plan = Fifo(0.0), 0.0, [], []
    for wait, ready_in, size in bookings:
        now += wait
        turns.append(Turn(size, size, now + ready_in))
        plan.append((now + ready_in, size))
        queue.add(turns[-1], now)
        assert queue.waiting_s(now) == pytest.approx(sum(left_by(plan, now)))
    for wait in asked:
        now += wait
        expected = left_by(plan, now)
        assert queue.waiting_s(now) == pytest.approx(sum(expected), abs=1e-9)
        assert [turn.left_s for turn in turns] == pytest.approx(expected, abs=1e-9)
        assert queue.turns(now) == sum(1 for left in expected if left > 1e-9)
        ready = [turn.ready_s for turn in queue]
        assert ready == sorted(ready)


@given(
    bookings=st.lists(st.tuples(seconds, st.floats(0.25, 10.0)), min_size=1, max_size=8),
    wait=seconds,
    seen=seconds,
)
def test_what_is_seen_leaves_those_that_come_last(
    bookings: list[tuple[float, float]], wait: float, seen: float
) -> None:
    queue = Fifo(0.0)
    turns = [Turn(size, size, ready) for ready, size in bookings]
    for turn in turns:
        queue.add(turn, 0.0)
    order = sorted(turns, key=lambda turn: turn.ready_s)
    queue.waiting_s(wait)
    left = [turn.left_s for turn in order]
    queue.replace(seen, wait)
    assert queue.waiting_s(wait) == pytest.approx(seen)
    for place, turn in enumerate(order):
        behind = sum(left[place + 1 :])
        assert turn.left_s == pytest.approx(min(left[place], max(0.0, seen - behind)))
    for turn in turns:
        queue.remove(turn, wait)
        queue.remove(turn, wait)
    assert queue.turns(wait) == 0
    assert queue.waiting_s(wait) == pytest.approx(max(0.0, seen - sum(left)))


def test_one_that_got_ready_while_another_was_served_goes_before_one_booked_later() -> None:
    queue = Fifo(0.0)
    served, ready, late = Turn(4.0, 4.0), Turn(1.0, 1.0, ready_s=1.0), Turn(1.0, 1.0, ready_s=3.0)
    queue.add(served, 0.0)
    queue.add(ready, 0.0)
    queue.add(late, 3.0)
    assert list(queue) == [served, ready, late]
    queue.waiting_s(4.5)
    assert (ready.left_s, late.left_s) == (0.5, 1.0)


def test_bytes_and_arrival_follow_the_seconds() -> None:
    queue = Fifo(10.0)
    first, second = Turn(2.0, 2.0, nbytes=8.0), Turn(4.0, 4.0, nbytes=4.0)
    queue.add(first, 10.0)
    queue.add(second, 10.0)
    queue.add(Turn(0.0, 0.0), 10.0)
    assert (queue.until_done_s(first, 11.0), queue.until_done_s(second, 11.0)) == (1.0, 5.0)
    assert queue.waiting_bytes(11.0) == 8.0
    assert queue.until_done_s(first, 12.0) == 0.0
    assert queue.turns(12.0) == 1
