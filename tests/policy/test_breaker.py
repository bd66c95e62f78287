"""A breaker against a model that remembers every report, and its few promises one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvlane.policy.breaker import BreakerCounts, CircuitBreaker
from kvlane.policy.errors import InputError

KEYS = st.sampled_from(("host", ("pod-1", "nvme"), 7))
MOST, WAIT, GROWTH, LONGEST = 3, 2.0, 3.0, 15.0


class Breakers(RuleBasedStateMachine):
    """The breaker beside the sequence of reports and admissions that each key has seen."""

    @initialize()
    def start(self) -> None:
        self.breaker = CircuitBreaker(MOST, WAIT, growth=GROWTH, longest_s=LONGEST)
        self.now = 100.0
        self.seen: dict[Any, dict[str, Any]] = {}

    def of(self, key: Any) -> dict[str, Any]:
        fresh = {"run": 0, "until": None, "wait": WAIT, "probe": False, "counts": BreakerCounts()}
        return self.seen.setdefault(key, fresh)

    @rule(seconds=st.sampled_from((0.0, 0.5, 1.99, 2.0, 6.0, 20.0)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS)
    def ask(self, key: Any) -> None:
        known = self.of(key)
        due = known["until"] is None or self.now >= known["until"]
        assert self.breaker.would_admit(key, self.now) is due
        assert self.breaker.admit(key, self.now) is due
        if known["until"] is None:
            return
        if not due:
            known["counts"].refused += 1
            return
        known["counts"].probes += 1
        known["counts"].probes_lost += known["probe"]
        known["probe"], known["until"] = True, self.now + known["wait"]
        # Exactly one: nobody else is let through until its outcome is in, or has been too long in coming.
        assert not self.breaker.would_admit(key, self.now)
        assert not self.breaker.would_admit(key, self.now + known["wait"] * 0.99)
        assert self.breaker.would_admit(key, self.now + known["wait"])

    @rule(key=KEYS)
    def fail(self, key: Any) -> None:
        known = self.of(key)
        self.breaker.failed(key, self.now)
        known["counts"].failures += 1
        if known["until"] is None:
            known["run"] += 1
            if known["run"] < MOST:
                return
            known["wait"] = WAIT
        elif known["probe"]:
            known["wait"] = min(known["wait"] * GROWTH, LONGEST)
        else:
            return
        known["probe"], known["until"] = False, self.now + known["wait"]
        known["counts"].opened += 1

    @rule(key=KEYS)
    def succeed(self, key: Any) -> None:
        known = self.of(key)
        self.breaker.succeeded(key)
        if known["until"] is None or known["probe"]:
            known["run"], known["until"], known["probe"] = 0, None, False

    @invariant()
    def every_key_is_in_its_own_state(self) -> None:
        for key, known in self.seen.items():
            state = "closed" if known["until"] is None else "half_open" if known["probe"] else "open"
            assert self.breaker.state(key) == state
            assert self.breaker.counts(key) == known["counts"]
            # Nothing shuts a key off for longer than the longest wait.
            assert self.breaker.would_admit(key, self.now + LONGEST)


TestBreakers = Breakers.TestCase
TestBreakers.settings = settings(max_examples=150, stateful_step_count=40)


def shut(breaker: CircuitBreaker, now: float = 0.0) -> CircuitBreaker:
    for _ in range(breaker.most_failures):
        assert breaker.admit("host", now)
        breaker.failed("host", now)
    return breaker


def test_it_shuts_off_after_so_many_failures_in_a_row_and_not_before() -> None:
    breaker = CircuitBreaker(3, 5.0)
    for outcome in ("fail", "fail", "succeed", "fail", "fail"):
        breaker.failed("host", 0.0) if outcome == "fail" else breaker.succeeded("host")
    assert breaker.admit("host", 0.0)
    breaker.failed("host", 0.0)
    assert not breaker.admit("host", 4.9)
    assert breaker.admit("disk", 4.9), "another key is another circuit"


def test_each_failed_probe_shuts_it_off_for_longer_up_to_the_longest() -> None:
    breaker = shut(CircuitBreaker(2, 5.0, growth=2.0, longest_s=15.0))
    now = 0.0
    for wait in (5.0, 10.0, 15.0, 15.0):
        assert not breaker.admit("host", now + wait - 0.1)
        assert breaker.admit("host", now + wait)
        now += wait
        breaker.failed("host", now)
    breaker.admit("host", now + 15.0)
    breaker.succeeded("host")
    shut(breaker, now + 15.0)
    assert breaker.admit("host", now + 20.0), "the next wait begins at the shortest again"


def test_a_probe_that_never_reports_does_not_block_for_ever() -> None:
    breaker = shut(CircuitBreaker(1, 5.0))
    assert breaker.admit("host", 5.0)
    assert not breaker.admit("host", 9.9)
    assert breaker.admit("host", 10.0)
    assert breaker.counts("host").probes_lost == 1
    breaker.succeeded("host")
    assert breaker.state("host") == "closed"


def test_uses_that_began_before_it_was_shut_off_do_not_open_or_lengthen_anything() -> None:
    breaker = shut(CircuitBreaker(2, 5.0))
    breaker.failed("host", 4.0)
    breaker.succeeded("host")
    assert breaker.state("host") == "open"
    assert breaker.admit("host", 5.0)


def test_a_key_that_never_failed_is_not_remembered() -> None:
    breaker = CircuitBreaker()
    for key in range(1000):
        assert breaker.admit(key, 0.0)
        breaker.succeeded(key)
    assert breaker.known() == ()
    breaker.failed(7, 0.0)
    assert breaker.known() == (7,)
    assert breaker.counts(0) == BreakerCounts()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("failures", {"failures": 0}),
        ("failures", {"failures": 1.5}),
        ("failures", {"failures": True}),
        ("probe_after_s", {"probe_after_s": 0.0}),
        ("probe_after_s", {"probe_after_s": float("nan")}),
        ("growth", {"growth": 0.9}),
        ("longest_s", {"probe_after_s": 5.0, "longest_s": 4.0}),
        ("longest_s", {"longest_s": float("inf")}),
    ],
)
def test_a_breaker_that_cannot_be_names_its_field(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        CircuitBreaker(**options)
    assert caught.value.field == field


def test_only_so_many_keys_are_remembered_and_those_that_failed_last() -> None:
    breaker = CircuitBreaker(failures=1, most=3)
    for key in ("a", "b", "c", "a", "d"):
        breaker.failed(key, 0.0)
    assert (len(breaker), set(breaker.known())) == (3, {"c", "a", "d"})
    assert breaker.would_admit("b", 0.0)
    assert not breaker.would_admit("a", 0.0)
