"""A busy device: passes wait for it, copies do not (DESIGN, section 4, state)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlane.policy import InputError, Planner, Request, load_machine, load_model
from kvlane.policy.plan import Estimate, LoadSegment

planners = st.from_type(Planner)
requests = st.from_type(Request)
queues = st.just(0.0) | st.floats(-5, 3).map(lambda exponent: float(10.0**exponent))


@st.composite
def busy_requests(draw: st.DrawFn) -> Request:
    """Requests with seconds queued on the device and on the links."""
    request = draw(requests)
    return replace(
        request, device_busy_s=draw(queues), link_queue_s={tier: draw(queues) for tier in request.hits}
    )


def loading(request: Request, end: int, group: int) -> Estimate:
    segment = LoadSegment("host", request.resident_tokens, end, 0)
    return Estimate("split", 0.0, 0.0, load=(segment,), group_layers=group)


def found(planner: Planner, request: Request) -> list[Estimate]:
    return [estimate for estimate in planner.decide(request).estimates.values() if estimate is not None]


@given(planner=planners, request=busy_requests())
@settings(max_examples=100)
def test_every_estimate_is_what_happens_on_a_busy_device_and_a_busy_link(
    planner: Planner, request: Request, replay: Any
) -> None:
    for estimate in found(planner, request):
        assert math.isclose(estimate.ttft_s, replay.ttft_s(planner, request, estimate), rel_tol=1e-9)
        assert estimate.ttft_s >= request.device_busy_s + estimate.compute_s * (1 - 1e-9)


@given(planner=planners, request=busy_requests())
@settings(max_examples=150)
def test_only_what_the_link_is_behind_the_device_counts(
    planner: Planner, request: Request, replay: Any
) -> None:
    # TTFT(Q, W) = Q + TTFT(0, W - Q): an hour of queue on both is an hour for whoever waits, and no other choice.
    later = replace(
        request,
        device_busy_s=request.device_busy_s + 3600,
        link_queue_s={tier: queued + 3600 for tier, queued in request.link_queue_s.items()},
    )
    for estimate in found(planner, request):
        assert replay.ttft_s(planner, later, estimate) == pytest.approx(3600 + estimate.ttft_s)
    before, after = planner.decide(request), planner.decide(later)
    assert after.ttft_s == pytest.approx(3600 + before.ttft_s, abs=1e-6)


@given(planner=planners, request=busy_requests())
@settings(max_examples=100)
def test_the_split_is_a_near_tie_with_the_best_there_is(
    planner: Planner, request: Request, replay: Any
) -> None:
    request = replace(request, hits={"host": request.hits.get("host", request.prompt_tokens)})
    unit, prompt = request.load_unit_tokens, request.prompt_tokens
    usable = min(request.hit("host"), prompt - request.tail_tokens) // unit * unit
    ends = range((request.resident_tokens // unit + 1) * unit, usable, unit)
    split = planner.decide(request).estimates["split"]
    assert (split is None) == (not ends)
    assume(split is not None)
    assert split is not None
    groups = range(1, planner.layers + 1)
    best = min(
        replay.ttft_s(planner, request, loading(request, end, group)) for end in ends for group in groups
    )
    assert split.ttft_s <= best * 1.03  # near ties are within 3 %


def test_a_bulk_load_hides_behind_the_queue_as_far_as_it_fits() -> None:
    # On a link too slow to load anything, what arrives while others compute is free.
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm").with_link_rate(0.5e9))
    free = planner.decide(Request(12370, {"host": 12368}))
    assert free.path == "recompute"
    busy = planner.decide(Request(12370, {"host": 12368}, device_busy_s=1.0))
    assert busy.path == "split"
    transfer = planner.transfer("host", 16)
    assert transfer.total_s(busy.load_tokens) <= 1.0 < transfer.total_s(busy.load_tokens + 16)
    longer = planner.decide(Request(12370, {"host": 12368}, device_busy_s=10.0))
    assert longer.path == "load"
    assert longer.ttft_s == pytest.approx(10.0 + longer.estimates["load"].compute_s)  # type: ignore[union-attr]


@given(planner=planners, request=busy_requests())
@settings(max_examples=100)
def test_crossover_and_break_even_never_contradict_the_estimates(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    load, recompute = plan.estimates["load"], plan.estimates["recompute"]
    assume(load is not None)
    assert load is not None
    assert recompute is not None
    # They are about one tier: the one loaded from.
    tier = plan.basis.tier
    assume(len(plan.load) <= 1 and [segment.tier for segment in load.load] == [tier])
    assume(not math.isclose(load.ttft_s, recompute.ttft_s, rel_tol=1e-6))
    wins = load.ttft_s < recompute.ttft_s
    if plan.crossover_tokens is not None:
        assert (plan.crossover_tokens <= plan.usable_tokens) == wins
    else:
        assert ("recomputing is faster" in plan.crossover_note) == (not wins)
    if plan.break_even_bytes_per_s is None:
        assert not wins
    elif not planner.transfer(str(tier), 1).link.rate_table:
        rate = planner.transfer(str(tier), 1).link.rate_bytes_per_s
        assert (rate >= plan.break_even_bytes_per_s) == wins


@given(planner=planners, request=busy_requests())
@settings(max_examples=150)
def test_a_long_queue_makes_no_near_tie(planner: Planner, request: Request) -> None:
    # All candidates wait for the device: only what comes after it is weighed.
    plan = planner.decide(request)
    best = min(estimate.ttft_s for estimate in plan.estimates.values() if estimate is not None)
    lost = plan.ttft_s - best
    assert lost <= planner.tie_margin * (best - request.device_busy_s) + 1e-9 * best


def test_the_reason_says_what_the_queue_took() -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm").with_link_rate(1e6))
    assert "in the queue" not in planner.decide(Request(1000)).reason
    for hits in ({}, {"host": 900}):
        assert "500.0 ms of it in the queue" in planner.decide(Request(1000, hits, device_busy_s=0.5)).reason


@pytest.mark.parametrize("busy", [-1.0, math.nan, math.inf, 1e9, True, "1"])
def test_a_queue_that_cannot_be_is_refused_by_name(busy: object) -> None:
    with pytest.raises(InputError) as refused:
        Request(1000, device_busy_s=busy)  # type: ignore[arg-type]
    assert refused.value.field == "device_busy_s"
