"""The scenarios' arithmetic, their predictions, and the order in which they are measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlane.bench.lab import AloneTimes, Answer
from kvlane.bench.measuring import Condition, Outcome
from kvlane.bench.reproduce import _lengths, _points, _scenarios
from kvlane.bench.scenarios import (
    Scenario,
    chat_turn,
    conditions,
    measure,
    near_break_even,
    published,
)
from kvlane.bench.shape import Shape, build_model, spec_of
from kvlane.policy.errors import InputError

TOKENS = st.integers(512, 20_000)


class TestArithmetic:
    def test_of_the_published_prompt(self):
        a, b, c = published(12_370), chat_turn(12_370), near_break_even(12_370)
        assert (a.tokens, a.stored_tokens, a.usable_tokens, a.suffix_tokens) == (12_370, 12_370, 12_368, 2)
        assert (b.tokens, b.stored_tokens, b.usable_tokens, b.suffix_tokens) == (12_370, 11_776, 11_776, 594)
        assert (c.tokens, c.stored_tokens, c.usable_tokens, c.suffix_tokens) == (4096, 4096, 4080, 16)

    @given(tokens=TOKENS)
    @example(512)
    @example(12_368)
    def test_what_is_usable_is_whole_units_before_the_last_token(self, tokens: int):
        for scenario in _scenarios(tokens):
            assert scenario.usable_tokens % 16 == 0
            assert 0 < scenario.usable_tokens <= min(scenario.stored_tokens, scenario.tokens - 1)
            assert scenario.usable_tokens + scenario.suffix_tokens == scenario.tokens
            # Nothing more could be loaded.
            assert min(scenario.stored_tokens, scenario.tokens - 1) - scenario.usable_tokens < 16

    @given(tokens=TOKENS)
    def test_the_three_keep_their_proportions(self, tokens: int):
        a, b, c = _scenarios(tokens)
        assert a.tokens == b.tokens == tokens
        assert a.suffix_tokens <= 16
        assert abs(b.usable_tokens - tokens * 11_776 / 12_370) <= 16
        assert b.suffix_tokens > 16
        assert abs(c.tokens - tokens * 4096 / 12_370) <= 0.5

    @given(tokens=TOKENS)
    def test_the_policy_counts_the_same_tokens(self, tokens: int, kit, spec):
        planner = kit.planner(spec, kit.cheap_link)
        for scenario in _scenarios(tokens):
            plan = scenario.plan(planner)
            assert (plan.prompt_tokens, plan.usable_tokens) == (scenario.tokens, scenario.usable_tokens)


class TestCalibrationPoints:
    """What is measured is predicted from other lengths and other prefixes, all of them within the prompt."""

    @given(tokens=TOKENS)
    @example(512)
    @example(12_370)
    def test_no_full_prefill_is_as_long_as_the_scenarios_own(self, tokens: int):
        for scenario in (published(tokens), near_break_even(tokens)):
            lengths = _lengths(scenario)
            assert scenario.tokens not in lengths
            assert all(length % 16 for length in lengths)
            assert all(1 <= length <= tokens for length in lengths)
            # As many as a fit from token 0 has coefficients, and far enough apart to tell these.
            assert len(set(lengths)) >= 3
            assert max(lengths) > 2 * min(lengths)

    @given(tokens=TOKENS)
    @example(512)
    @example(12_370)
    def test_no_prefix_is_the_scenarios_own(self, tokens: int):
        for scenario in _scenarios(tokens):
            points = _points(scenario)
            assert scenario.usable_tokens not in [point.resident for point in points]
            assert all(point.resident >= 1 and point.new >= 1 and point.repeats >= 1 for point in points)
            assert all(point.resident + point.new <= tokens for point in points)
            assert len({(point.resident, point.new) for point in points}) >= 4

    @given(tokens=TOKENS)
    def test_the_bare_suffix_is_measured_after_other_prefixes(self, tokens: int):
        a, _, c = _scenarios(tokens)
        for scenario in (a, c):
            assert [p for p in _points(scenario) if p.new == scenario.suffix_tokens]


@pytest.fixture(scope="module")
def spec():
    return spec_of(build_model(Shape(layers=3, hidden=32, ffn=48, vocab=160), 128, seed=1))


class TestPredictions:
    @pytest.mark.parametrize("link", ["cheap_link", "middling_link", "slow_link"])
    @pytest.mark.parametrize("scenario", _scenarios(12_370), ids=lambda scenario: scenario.key)
    def test_are_what_the_policies_say(self, kit, spec, scenario, link):
        rate = getattr(kit, link)
        layered = kit.planner(spec, rate)
        plan = scenario.plan(layered)
        bulk = scenario.plan(kit.planner(spec, rate, "bulk"))
        found = {condition.name: condition for condition in conditions(scenario, layered)}
        assert list(found) == list(scenario.conditions)

        estimates = {
            "recompute": ("recompute", None, plan.estimates["recompute"]),
            "bulk load": ("load", "bulk", bulk.estimates["load"]),
            "layered load": ("load", "layered", plan.estimates["load"]),
            "prefix split": ("split", "layered", plan.estimates["split"]),
        }
        for name, (path, executor, estimate) in estimates.items():
            if name in found:
                assert (found[name].path, found[name].executor) == (path, executor)
                assert found[name].load_tokens == estimate.load_tokens
                assert found[name].predicted_s == pytest.approx(estimate.ttft_s, rel=1e-12)
        choice = found["choice"]
        assert (choice.path, choice.load_tokens, choice.predicted_s) == (
            plan.path,
            plan.load_tokens,
            plan.ttft_s,
        )
        assert choice.executor == ("layered" if plan.load else None)

    def test_a_prompt_of_one_unit_has_no_split(self, kit, spec):
        scenario = Scenario("X", "short", 17, 17, ("recompute", "layered load", "prefix split", "choice"))
        names = [condition.name for condition in conditions(scenario, kit.planner(spec, kit.cheap_link))]
        assert names == ["recompute", "layered load", "choice"]


class TestOrder:
    NAMES = ("recompute", "bulk load", "layered load", "choice")

    def run(self, kit, small, reps):
        said: list[tuple[str, float]] = []
        outcomes = measure(
            Scenario("A", "a test", kit.tokens, kit.tokens, self.NAMES),
            small.lab,
            small.store,
            small.ids,
            small.planner(kit.cheap_link),
            reps,
            None,
            small.spec,
            lambda what, work: said.append((what, work)),
        )
        return outcomes, said

    def test_repetitions_are_interleaved_and_take_turns_at_the_start(self, kit, small):
        outcomes, said = self.run(kit, small, 6)
        names = list(self.NAMES)
        expected = [
            f"scenario A: {name}, {rep + 1} of 6"
            for rep in range(6)
            for name in names[rep % 4 :] + names[: rep % 4]
        ]
        assert [what for what, _ in said] == expected
        assert [outcome.condition.name for outcome in outcomes] == names
        assert all(len(outcome.answers) == len(outcome.measured_s) == 6 for outcome in outcomes)
        assert all(work > 0 for _, work in said)

    def test_what_loads_as_much_shares_one_measurement_of_its_parts_a_repetition(self, kit, small):
        (recompute, bulk, layered, choice), _ = self.run(kit, small, 2)
        assert recompute.alone == []
        assert recompute.median_efficiency is None
        for rep in range(2):
            assert bulk.alone[rep] is layered.alone[rep] is choice.alone[rep]
        assert bulk.alone[0] is not bulk.alone[1]

    def test_a_choice_to_recompute_has_no_overlap(self, kit, small):
        scenario = Scenario("A", "a test", kit.tokens, kit.tokens, ("recompute", "choice"))
        planner = small.planner(kit.slow_link)
        _, choice = measure(
            scenario, small.lab, small.store, small.ids, planner, 1, None, small.spec, lambda what, work: None
        )
        assert choice.condition.path == "recompute"
        assert (choice.alone, choice.median_efficiency, choice.answers[0].moved_bytes) == ([], None, 0)


class TestOutcome:
    def outcome(self, small, seconds, bounds=()):
        answers = [Answer(replace(small.reference.result, total_s=taken)) for taken in seconds]
        alone = [AloneTimes((0.0,), 0.0, (bound,), 0.0) for bound in bounds]
        return Outcome(Condition("x", "load", "layered", 16, 1.0), answers, alone)

    def test_median_is_of_the_measured_times(self, small):
        assert self.outcome(small, [3.0, 1.0, 2.0]).median_s == 2.0
        assert self.outcome(small, [4.0, 1.0, 2.0, 3.0]).median_s == 2.5

    def test_the_median_answer_is_one_that_was_given(self, small):
        assert self.outcome(small, [3.0, 1.0, 2.0]).median_answer.result.total_s == 2.0
        assert self.outcome(small, [4.0, 1.0, 2.0, 3.0]).median_answer.result.total_s == 2.0
        assert self.outcome(small, [5.0]).median_answer.result.total_s == 5.0

    def test_efficiency_is_the_tightest_bound_over_each_measured_time(self, small):
        # A bound measured while the machine was disturbed must not make up for a slow load.
        outcome = self.outcome(small, [4.0, 1.0, 2.0], [2.0, 0.9, 1.9])
        assert outcome.overlap_efficiencies == [0.225, 0.9, 0.45]
        assert outcome.median_efficiency == 0.45
        assert self.outcome(small, [4.0], [2.0]).median_efficiency == 0.5


class TestShape:
    def test_the_policy_and_the_engine_count_the_same_bytes(self, small):
        assert small.spec.kv_bytes_per_token("fp32") == small.lab.engine.layout.bytes_per_token
        assert len(small.spec.layers) == small.lab.engine.layout.layers

    @pytest.mark.parametrize(
        "shape", [Shape(layers=3, hidden=32, ffn=48, vocab=160), Shape(2, 64, 8, 8, 16, 32)], ids=str
    )
    def test_what_memory_it_will_take_is_known_before_it_is_built(self, shape):
        built = build_model(shape, 128, seed=1)
        assert shape.kv_bytes_per_token == spec_of(built).kv_bytes_per_token("fp32")
        weights = sum(weight.numel() * weight.element_size() for weight in built.parameters())
        # The norms' vectors are not counted.
        assert shape.weight_bytes <= weights <= 1.03 * shape.weight_bytes

    def test_the_same_seed_gives_the_same_model(self, kit):
        one, two, other = (build_model(kit.shape, 128, seed) for seed in (1, 1, 2))
        same, different = [], []
        for a, b, c in zip(one.parameters(), two.parameters(), other.parameters(), strict=True):
            same.append(bool((a == b).all()))
            different.append(bool((a != c).any()))
        assert all(same)
        assert any(different)
        assert not one.training

    @pytest.mark.parametrize("field", ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab"])
    @pytest.mark.parametrize("value", [0, -1])
    def test_a_size_below_one_is_refused(self, field, value):
        with pytest.raises(InputError) as caught:
            Shape(**{field: value})
        assert caught.value.field == field

    @pytest.mark.parametrize(
        ("field", "sizes"),
        [
            ("heads", {"hidden": 256, "heads": 3, "kv_heads": 1}),
            # Rotary positions turn pairs of elements.
            ("heads", {"hidden": 12, "heads": 4}),
            ("kv_heads", {"heads": 4, "kv_heads": 3}),
            ("kv_heads", {"heads": 4, "kv_heads": 8}),
        ],
    )
    def test_sizes_that_do_not_divide_are_refused(self, field, sizes):
        with pytest.raises(InputError) as caught:
            Shape(**sizes)
        assert caught.value.field == field
