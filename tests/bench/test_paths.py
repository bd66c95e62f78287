"""Every path at its best: predicted as the policy predicts it, and none of its kind is faster."""

from __future__ import annotations

import pytest

from kvlane.bench.paths import decide, path_conditions
from kvlane.policy.path_cost import PathCost

PATHS = ["recompute", "bulk load", "layered load", "prefix split", "two-ended"]


class TestConditions:
    TOKENS = 1000

    @pytest.fixture(params=["cheap_link", "middling_link", "slow_link"])
    def rate(self, request, kit):
        return getattr(kit, request.param)

    @pytest.fixture
    def planner(self, small, rate):
        return small.planner(rate, "two_ended")

    def found(self, planner):
        return {condition.name: condition for condition in path_conditions(planner, self.TOKENS, self.TOKENS)}

    def test_every_path_is_there_and_the_choice_among_them(self, planner):
        assert list(self.found(planner)) == [*PATHS, "choice"]

    def test_predictions_are_the_policies(self, small, rate, planner):
        found = self.found(planner)
        for name, executor, path in (
            ("recompute", "layered", "recompute"),
            ("bulk load", "bulk", "load"),
            ("layered load", "layered", "load"),
            ("prefix split", "layered", "split"),
        ):
            estimates = decide(small.planner(rate, executor), self.TOKENS, self.TOKENS).estimates
            (estimate,) = [each for each in estimates.values() if each is not None and each.path == path]
            assert found[name].predicted_s == pytest.approx(estimate.ttft_s, rel=1e-9)
            assert found[name].load_tokens == estimate.load_tokens
        choice, plan = found["choice"], decide(planner, self.TOKENS, self.TOKENS)
        assert choice.predicted_s == plan.ttft_s
        assert choice.load_tokens == plan.load_tokens
        assert (choice.executor is None) == (plan.path == "recompute")

    def test_the_choice_is_the_best_of_them_or_nearly(self, planner):
        found = self.found(planner)
        best = min(found[name].predicted_s for name in PATHS)
        assert best * (1 - 1e-9) <= found["choice"].predicted_s <= best * (1 + planner.tie_margin)

    def test_a_two_ended_load_begins_inside_and_ends_with_what_is_usable(self, planner):
        condition = self.found(planner)["two-ended"]
        assert 0 < condition.start < condition.end == 992
        assert condition.start % 16 == 0
        assert condition.executor == "layered"

    def test_loads_that_end_elsewhere_are_slower(self, planner):
        found, transfer = self.found(planner), planner.transfer("host", 16)
        cost = PathCost(planner.prefill, "layered")
        for at in range(16, 992, 16):
            split = cost.load_s(transfer, 0, at, self.TOKENS)
            two_ended = cost.load_s(transfer, at, 992, self.TOKENS, resident=0)
            assert split >= found["prefix split"].predicted_s
            assert two_ended >= found["two-ended"].predicted_s

    def test_a_prompt_of_one_unit_has_no_part_to_load(self, small, kit):
        names = [each.name for each in path_conditions(small.planner(kit.cheap_link, "two_ended"), 17, 17)]
        assert names == ["recompute", "bulk load", "layered load", "choice"]

    def test_only_what_is_stored_is_loaded(self, small, kit):
        every = path_conditions(small.planner(kit.cheap_link, "two_ended"), self.TOKENS, 640)
        assert {each.end for each in every if each.name in ("bulk load", "layered load", "two-ended")} == {
            640
        }
