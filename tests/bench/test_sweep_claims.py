"""Every claim of a sweep holds on numbers that meet it, fails just short of it, and is left open on a busy machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlane.bench.host import machine
from kvlane.bench.lab import AloneTimes
from kvlane.bench.sweep_claims import error_of, judge, quartiles, within_reach
from kvlane.bench.sweep_report import render
from kvlane.bench.sweep_results import to_dict

# Seconds that meet every claim; each is predicted exactly, and loads come as near their bound as they must.
SECONDS = {
    "recompute": 2.0,
    "bulk load": 1.5,
    "layered load": 1.2,
    "prefix split": 1.1,
    "two-ended": 1.0,
    "choice": 1.0,
}
EFFICIENCY = 0.95


@pytest.fixture
def made(swept):
    """The tiny sweep with other numbers in its first link: the above, but for what is given."""

    def outcome(old, seconds, predicted, efficiency):
        series = seconds if isinstance(seconds, list) else [seconds] * 3
        usual = sorted(series)[len(series) // 2]
        answer = old.answers[0]
        return replace(
            old,
            condition=replace(old.condition, predicted_s=usual * predicted),
            answers=[replace(answer, result=replace(answer.result, total_s=each)) for each in series],
            alone=[AloneTimes((0.0,), 0.0, (usual * efficiency,), 0.0)] if old.alone else [],
        )

    def make(measured=None, predicted=None, efficiency=None, memcpy=0.85, core_share=0.97, layer=4 << 20):
        outcomes = []
        for old in swept.sweep.rungs[0].outcomes:
            name = old.condition.name
            seconds = (measured or {}).get(name, SECONDS[name])
            near = (efficiency or {}).get(name, EFFICIENCY)
            outcomes.append(outcome(old, seconds, (predicted or {}).get(name, 1.0), near))
        rung = replace(swept.sweep.rungs[0], outcomes=outcomes, core_share=core_share)
        each = swept.sweep.overlapped[0]
        each = replace(
            each,
            layer_bytes=layer,
            core_share=core_share,
            outcome=outcome(each.outcome, 0.1, 1.0, memcpy),
        )
        return replace(swept.sweep, rungs=[rung], overlapped=[each])

    return make


def failed(sweep):
    return [claim.text for claim in judge(sweep) if claim.held is False]


def test_numbers_that_meet_every_claim_hold(made):
    claims = judge(made())
    assert [claim.held for claim in claims] == [True] * 4
    assert len({claim.text for claim in claims}) == 4


@pytest.mark.parametrize(
    ("choice", "best", "held"),
    [
        ([1.049] * 7, [1.0] * 7, True),
        ([1.051] * 7, [1.0] * 7, False),
        ([0.9] * 7, [1.0] * 7, True),
        # Slower by more, but the middle halves meet: from 1.1 on, and up to 1.1.
        ([1.0, 1.1, 1.1, 1.2, 1.3, 1.3, 1.4], [0.9, 0.9, 0.9, 1.0, 1.1, 1.1, 1.2], True),
        # One quick choice and one slow best path do not make them meet.
        ([0.9, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.3], False),
    ],
)
def test_the_choice_is_near_the_best_or_overlaps_it(made, choice, best, held):
    sweep = made({"choice": choice, "two-ended": best})
    assert within_reach(sweep.rungs[0]) is held
    assert [text.startswith("ratio 0.5: the policy's choice") for text in failed(sweep)] == (
        [] if held else [True]
    )


@pytest.mark.parametrize("best", ["recompute", "bulk load", "layered load", "prefix split", "two-ended"])
def test_any_path_may_be_the_best_one(made, best):
    sweep = made({best: 0.5})
    assert sweep.rungs[0].best.condition.name == best
    assert sweep.rungs[0].regret == pytest.approx(1.0)
    assert len(failed(sweep)) == 1


def test_the_choice_itself_is_not_what_it_is_held_against(made):
    rung = made({"choice": 0.5}).rungs[0]
    assert rung.best.condition.name == "two-ended"
    assert rung.regret == pytest.approx(-0.5)


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_each_prediction_may_be_off_by_a_tenth(made, name, sign):
    assert failed(made(predicted={name: 1 + sign * 0.099})) == []
    (text,) = failed(made(predicted={name: 1 + sign * 0.101}))
    assert text.startswith("ratio 0.5: each prediction")
    (claim,) = [c for c in judge(made(predicted={name: 1 + sign * 0.101})) if c.held is False]
    assert name in claim.numbers
    assert f"{sign * 0.101:+.1%}" in claim.numbers


@pytest.mark.parametrize("name", ["layered load", "prefix split", "two-ended"])
@pytest.mark.parametrize(("efficiency", "held"), [(0.931, True), (0.929, False)])
def test_each_path_that_loads_by_layer_must_come_near_its_bound(made, name, efficiency, held):
    texts = failed(made(efficiency={name: efficiency}))
    assert [text.startswith("ratio 0.5: each path that loads by layer") for text in texts] == (
        [] if held else [True]
    )


def test_in_bulk_nothing_has_to_overlap(made):
    assert failed(made(efficiency={"bulk load": 0.4})) == []


@pytest.mark.parametrize(("efficiency", "held"), [(0.801, True), (0.799, False)])
def test_over_plain_memory_four_fifths_of_the_bound_are_enough(made, efficiency, held):
    texts = failed(made(memcpy=efficiency))
    assert [text.startswith("memcpy: ") for text in texts] == ([] if held else [True])


def test_layers_too_small_to_say_something_of_memory_are_not_judged(made):
    assert len(judge(made(layer=(4 << 20) - 1, memcpy=0.1))) == 3


def test_on_a_busy_machine_nothing_is_judged_and_the_numbers_stay(made):
    wrong = {"choice": 3.0}
    judged, busy = judge(made(wrong, core_share=0.9)), judge(made(wrong, core_share=0.89))
    assert [claim.held for claim in judged].count(False) == 1
    assert [claim.held for claim in busy] == [None] * 4
    assert [(c.text, c.numbers) for c in busy] == [(c.text, c.numbers) for c in judged]


def test_quartiles_of_few(made):
    (rung,) = made({"choice": [1.0, 2.0, 3.0, 4.0, 5.0]}).rungs
    assert quartiles(rung.choice) == (2.0, 4.0)
    (rung,) = made({"choice": [1.5]}).rungs
    assert quartiles(rung.choice) == (1.5, 1.5)


def test_an_error_is_predicted_over_measured(made):
    (rung,) = made(predicted={"recompute": 1.25}).rungs
    assert error_of(rung.outcomes[0]) == pytest.approx(0.25)


def test_the_text_and_the_results_say_each_claim(made):
    sweep = made({"choice": 3.0})
    claims = judge(sweep)
    assert to_dict(sweep, machine())["claims"] == [
        {"text": c.text, "held": c.held, "numbers": c.numbers} for c in claims
    ]
    head, *lines = render(sweep, machine()).split("\n\n")[-1].splitlines()
    assert head == "claims"
    for line, claim in zip(lines, claims, strict=True):
        assert line.strip().startswith("held " if claim.held else "DID NOT HOLD ")
        assert line.endswith(f"{claim.text}: {claim.numbers}")
