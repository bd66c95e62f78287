"""Calibrating round by round: nothing that is measured later is among the points, and one disturbance passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlane.bench.rounds import KEPT, Rounds, calibration_points, longest_point
from kvlane.policy.calibration import PrefillSample

UNIT = 16
TOKENS = st.integers(256, 20_000)


class TestPoints:
    @given(tokens=TOKENS)
    @example(2560)
    @example(256)
    def test_no_length_and_no_prefix_is_a_whole_number_of_units(self, tokens: int):
        # Loads begin and end at whole units, and so does the front of a two-ended load.
        for resident, new in calibration_points(tokens, UNIT):
            assert (resident or new) % UNIT
            assert (resident, new) != (0, tokens)

    @given(tokens=TOKENS)
    def test_the_bare_suffix_is_measured_after_other_prefixes(self, tokens: int):
        usable = (tokens - 1) // UNIT * UNIT
        bare = [resident for resident, new in calibration_points(tokens, UNIT) if new == tokens - usable]
        assert len(bare) >= 2
        assert usable not in bare

    @given(tokens=TOKENS)
    def test_lengths_span_those_that_are_measured(self, tokens: int):
        points = calibration_points(tokens, UNIT)
        fresh = sorted(new for resident, new in points if not resident)
        assert fresh[0] < tokens / 4
        assert fresh[-1] > tokens
        assert len(set(fresh)) >= 4
        after = [resident for resident, _ in points if resident]
        assert min(after) < tokens / 6
        assert max(after) > tokens

    @given(tokens=TOKENS)
    def test_all_of_them_fit(self, tokens: int):
        longest = longest_point(tokens, UNIT)
        assert longest % UNIT == 0
        assert all(resident + new <= longest for resident, new in calibration_points(tokens, UNIT))
        assert longest > tokens


class Machine:
    """A lab and a tuner on a machine whose passes take what the test says."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.held: list[int] = []
        self.store = SimpleNamespace(unit_tokens=UNIT)
        self.ids = range(10**6)
        self.lab = self
        self.said: list[str] = []

    def hold(self, store, ids, end):
        self.held.append(end)

    def sample_prefill(self, ids, resident, new):
        work = new * (resident + new) if resident else new * (new + 1) / 2
        return PrefillSample(
            resident, new, self.factor * (0.01 + 1e-4 * new + 1e-8 * work)
        ), self.factor * 1e-3

    def tick(self, what, work):
        self.said.append(what)


class TestRounds:
    TOKENS = 2560

    @pytest.fixture
    def machine(self):
        return Machine()

    @pytest.fixture
    def rounds(self, machine):
        return Rounds(machine, self.TOKENS)

    def coefficients(self, rounds):
        return [(each.fit.cost.token_s, each.fit.cost.pair_s) for each in (rounds.fresh(), rounds.extend())]

    def test_every_point_is_measured_after_its_own_prefix(self, machine, rounds):
        rounds.measure()
        points = calibration_points(self.TOKENS, UNIT)
        assert machine.held == [resident for resident, _ in points if resident]
        assert len(machine.said) == len(points)

    def test_the_fits_are_the_machines_law(self, rounds):
        rounds.measure()
        for token_s, pair_s in self.coefficients(rounds):
            assert token_s == pytest.approx(1e-4, rel=1e-3)
            assert pair_s == pytest.approx(1e-8, rel=1e-3)
        assert rounds.extend().fit.cost.rectangle
        assert not rounds.fresh().fit.cost.rectangle
        assert rounds.fresh().head_s == pytest.approx(1e-3)

    def test_one_disturbed_round_passes(self, machine, rounds):
        for factor in (1.0, 5.0, 1.0):
            machine.factor = factor
            rounds.measure()
        for token_s, _ in self.coefficients(rounds):
            assert token_s == pytest.approx(1e-4, rel=1e-3)

    def test_a_machine_that_stays_slower_is_followed(self, machine, rounds):
        for factor in (1.0,) * KEPT + (2.0,) * (KEPT // 2 + 1):
            machine.factor = factor
            rounds.measure()
        for token_s, _ in self.coefficients(rounds):
            assert token_s == pytest.approx(2e-4, rel=1e-3)
