"""What holds for every plan, whatever the machine, the model and the request: random ones, many of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlane.policy import Calibration, Estimate, Plan, Planner, Request
from kvlane.policy.plan import Parameter, Path
from kvlane.policy.units import show_seconds

planners = st.from_type(Planner)
requests = st.from_type(Request)
STEADIEST_FIRST: tuple[Path, ...] = ("recompute", "load", "split")


def usable(request: Request, tier: str) -> int:
    ranks = request.hits[tier]
    stored = min(ranks) if isinstance(ranks, tuple) else ranks
    unit = request.load_unit_tokens
    return max(0, min(stored, request.prompt_tokens - request.tail_tokens)) // unit * unit


def best_of(path: Path, plans: list[Plan]) -> float:
    found = (plan.estimates[path] for plan in plans)
    return min((estimate.ttft_s for estimate in found if estimate is not None), default=math.inf)


def existing(plan: Plan) -> list[Estimate]:
    return [estimate for estimate in plan.estimates.values() if estimate is not None]


@given(planner=planners, request=requests)
@settings(max_examples=250)
def test_every_estimate_is_what_happens_layer_by_layer(
    replay: Any, planner: Planner, request: Request
) -> None:
    for estimate in existing(planner.decide(request)):
        happens = replay.ttft_s(planner, request, estimate)
        assert math.isclose(estimate.ttft_s, happens, rel_tol=1e-9, abs_tol=1e-15)
        arrivals = replay.arrivals(planner, request, estimate)
        assert math.isclose(estimate.transfer_s, max(arrivals), rel_tol=1e-9, abs_tol=1e-15)
        front = replay.front_s(planner, request, estimate)
        after = max(estimate.end, request.resident_tokens)
        rest = replay.passes_s(planner, request, after, request.prompt_tokens) + planner.prefill.head_s
        assert math.isclose(estimate.front_s, front, rel_tol=1e-9, abs_tol=1e-15)
        assert math.isclose(estimate.compute_s, front + rest, rel_tol=1e-9)
        assert estimate.exposed_s <= estimate.transfer_s * (1 + 1e-9) + 1e-12 * estimate.ttft_s


@given(planner=planners, request=requests)
@settings(max_examples=250)
def test_the_plan_is_never_slower_than_the_better_pure_path_by_more_than_the_tie_margin(
    planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    pure = min(
        estimate.ttft_s for path in ("load", "recompute") if (estimate := plan.estimates[path]) is not None
    )
    assert plan.ttft_s <= pure * (1 + planner.tie_margin)
    assert plan.ttft_s <= min(estimate.ttft_s for estimate in existing(plan)) * (1 + planner.tie_margin)


@given(planner=planners, request=requests)
@settings(max_examples=150)
def test_a_near_tie_goes_to_the_steadier_path(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    chosen = plan.estimates[plan.path]
    assert chosen is not None
    assert (chosen.ttft_s, chosen.load, chosen.group_layers) == (plan.ttft_s, plan.load, plan.group_layers)
    best = min(estimate.ttft_s for estimate in existing(plan))
    # Where the chosen path's fastest form gave way to a simpler one, only that form was within the margin.
    least = (
        best * (1 + planner.tie_margin) if len(request.hits) < 2 and planner.executor != "two_ended" else best
    )
    for steadier in STEADIEST_FIRST[: STEADIEST_FIRST.index(plan.path)]:
        passed_over = plan.estimates[steadier]
        assert passed_over is None or passed_over.ttft_s >= least


@given(planner=planners, request=requests, band=st.floats(0, 3))
def test_the_error_band_of_an_estimate_changes_no_choice(
    planner: Planner, request: Request, band: float
) -> None:
    # Candidates share their parameters, so their errors move together.
    surer = planner.decide(request)
    other = Planner(
        planner.model,
        planner.machine,
        executor=planner.executor,
        calibration=Calibration(planner.prefill, band, "less sure"),
        tie_margin=planner.tie_margin,
    ).decide(request)
    assert (other.path, other.load, other.ttft_s) == (surer.path, surer.load, surer.ttft_s)
    for estimate in existing(other):
        assert 0 <= estimate.low_s <= estimate.ttft_s <= estimate.high_s
        assert estimate.high_s >= estimate.ttft_s * (1 + band)


@given(planner=planners, request=requests)
@settings(max_examples=250)
def test_what_is_loaded_lies_between_resident_and_usable_in_whole_units(
    planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    resident, unit = request.resident_tokens, request.load_unit_tokens
    assert (plan.load == ()) == (plan.path == "recompute")
    assert plan.recompute_tokens >= (request.tail_tokens if plan.load else 1)
    assert plan.load_tokens + plan.recompute_tokens + resident == request.prompt_tokens
    for path, estimate in plan.estimates.items():
        if estimate is None or not estimate.load:
            continue
        at = estimate.start
        assert at == resident or (planner.executor == "two_ended" and at > resident and at % unit == 0)
        for segment in estimate.load:
            # Run after run without a hole, each from a tier that has it.
            assert segment.start == at < segment.end <= usable(request, segment.tier)
            assert segment.end % unit == 0
            assert segment.bytes == segment.tokens * plan.kv_bytes_per_token
            at = segment.end
        assert len({segment.tier for segment in estimate.load}) == len(estimate.load) <= 2
        whole = max(usable(request, segment.tier) for segment in estimate.load)
        assert (path == "load") == (estimate.start == resident and estimate.end == whole)
        assert estimate.start == resident or estimate.end == whole
        assert estimate.load_bytes == estimate.load_tokens * plan.kv_bytes_per_token
        assert 1 <= estimate.group_layers <= planner.layers
    assert plan.load_bytes == plan.load_tokens * plan.kv_bytes_per_token


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_a_path_exists_exactly_where_there_is_something_to_load(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    unit, resident = request.load_unit_tokens, request.resident_tokens
    loadable = [tier for tier in request.hits if usable(request, tier) > resident]
    divisible = [tier for tier in loadable if (usable(request, tier) - 1) // unit * unit > resident]
    assert plan.estimates["recompute"] is not None
    assert (plan.estimates["load"] is not None) == bool(loadable)
    assert (plan.estimates["split"] is not None) == bool(divisible)
    missing = {path for path, estimate in plan.estimates.items() if estimate is None}
    assert set(plan.unavailable) == missing
    assert all(plan.unavailable.values())


@given(planner=planners, request=requests)
@settings(max_examples=150)
def test_of_several_tiers_the_one_that_serves_each_path_best_is_taken_or_two_that_serve_it_better(
    planner: Planner, request: Request
) -> None:
    assume(len(request.hits) > 1)
    both = planner.decide(request)
    alone = [planner.decide(replace(request, hits={tier: hit})) for tier, hit in request.hits.items()]
    # The same planner that computes no front: its splits are prefix splits, which are steadier than two-ended ones.
    steadier = planner
    if planner.executor == "two_ended":
        steadier = Planner(
            planner.model,
            planner.machine,
            executor="layered",
            calibration=Calibration(planner.prefill, 0.1, "as the planner's"),
            tie_margin=planner.tie_margin,
        )
    prefix_alone = [steadier.decide(replace(request, hits={tier: hit})) for tier, hit in request.hits.items()]
    assert both.ttft_s <= min(plan.ttft_s for plan in alone) * (1 + planner.tie_margin)
    for path in ("load", "split"):
        best = best_of(path, alone)
        estimate = both.estimates[path]
        if estimate is None:
            assert best == math.inf
        elif len(estimate.load) > 1:
            # Worth the second link, of plans as steady; one tier that serves as well by a less steady way gives way.
            assert estimate.ttft_s < (
                best_of(path, prefix_alone) if estimate.start == request.resident_tokens else best
            )
            assert estimate.ttft_s <= best * (1 + (planner.tie_margin if path == both.path else 0))
        elif path == both.path:
            assert best <= estimate.ttft_s <= best * (1 + planner.tie_margin)
        else:
            assert estimate.ttft_s == best


@given(planner=planners, request=requests)
def test_the_rank_that_holds_least_counts(planner: Planner, request: Request) -> None:
    fewest = {tier: min(hit) if isinstance(hit, tuple) else hit for tier, hit in request.hits.items()}
    assert planner.decide(request) == planner.decide(replace(request, hits=fewest))


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers_in(entry)]
    if isinstance(value, (list, tuple)):
        return [number for entry in value for number in numbers_in(entry)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_a_plan_is_json_without_infinities_in_the_words_of_its_attributes(
    planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    said = plan.to_dict()
    assert all(math.isfinite(number) for number in numbers_in(said))
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    for name, value in said.items():
        if isinstance(value, (int, float, str)) or value is None:
            assert getattr(plan, name) == value
    for path, estimate in plan.estimates.items():
        if estimate is None:
            assert said["estimates"][path] is None
        else:
            for name, value in said["estimates"][path].items():
                assert getattr(estimate, name) == value or name == "load"
            assert said["estimates"][path]["load"] == [
                msgspec.structs.asdict(segment) for segment in estimate.load
            ]
    for value, note in (
        (plan.crossover_tokens, plan.crossover_note),
        (plan.break_even_bytes_per_s, plan.break_even_note),
    ):
        assert note, f"{value!r} stands without a word"


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_the_reason_is_one_sentence_with_the_inequality_and_both_of_its_numbers(
    planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    assert "\n" not in plan.reason
    assert show_seconds(plan.ttft_s) in plan.reason
    others = [estimate for estimate in existing(plan) if estimate.path != plan.path]
    if not others:
        assert plan.unavailable["load"] in plan.reason
        return
    best = min(others, key=lambda estimate: estimate.ttft_s)
    first_claim = plan.reason.split(best.path)[0]
    assert first_claim.startswith(plan.path)
    assert show_seconds(best.ttft_s) in plan.reason
    if "within" in first_claim:
        assert best.ttft_s < plan.ttft_s <= best.ttft_s * (1 + plan.tie_margin)
        assert f"{plan.tie_margin:.0%}" in first_claim
    else:
        assert " < " in first_claim
        assert plan.ttft_s <= best.ttft_s


@given(planner=planners, request=requests)
def test_what_a_plan_echoes_is_what_was_asked(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    assert (plan.executor, plan.tp, plan.tie_margin) == (planner.executor, planner.tp, planner.tie_margin)
    assert (plan.prompt_tokens, plan.resident_tokens) == (request.prompt_tokens, request.resident_tokens)
    assert plan.kv_bytes_per_token == planner.model.kv_bytes_per_token()
    assert plan.parameters_from["prefill"] == Parameter("calibration", "drawn at random")
    # Random machines are calibrated and their links explicit, so nothing is assumed.
    assert plan.calibrated
