"""Where load and recompute tie: the link rate at which they do, and the prefix length from which on loading wins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlane.policy import Calibration, Plan, Planner, Request, decide, load_machine, load_model
from kvlane.policy.transfer_cost import TransferCost

planners = st.from_type(Planner)


def gains(request: Request) -> bool:
    unit = request.load_unit_tokens
    last = request.prompt_tokens - request.tail_tokens
    return min(request.hit("host"), last) // unit * unit > request.resident_tokens


# Something to load, from one tier, so that a plan's load, crossover and break-even rate are all about that tier.
requests = (
    st.from_type(Request)
    .map(lambda request: replace(request, hits={"host": request.hits.get("host", request.prompt_tokens)}))
    .filter(gains)
)


def load_and_recompute_s(plan: Plan) -> tuple[float, float]:
    load, recompute = plan.estimates["load"], plan.estimates["recompute"]
    assert load is not None
    assert recompute is not None
    return load.ttft_s, recompute.ttft_s


def at_flat_rate(planner: Planner, bytes_per_s: float) -> Planner:
    """The same machine with another asymptotic rate of the host's link, its fixed costs kept."""
    link = replace(planner.machine.links["to_host"], rate_bytes_per_s=bytes_per_s, rate_table=())
    return Planner(
        planner.model,
        replace(planner.machine, links={**planner.machine.links, "to_host": link}),
        executor=planner.executor,
        calibration=Calibration(planner.prefill, 0.1, "drawn at random"),
        tie_margin=planner.tie_margin,
    )


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_at_the_break_even_rate_load_and_recompute_tie(planner: Planner, request: Request) -> None:
    rate = planner.decide(request).break_even_bytes_per_s
    assume(rate is not None)
    assert rate is not None
    load, recompute = load_and_recompute_s(at_flat_rate(planner, rate).decide(request))
    assert load == pytest.approx(recompute, rel=1e-6)
    faster, recompute = load_and_recompute_s(at_flat_rate(planner, rate * 4).decide(request))
    assert faster <= recompute * (1 + 1e-9)
    slower, recompute = load_and_recompute_s(at_flat_rate(planner, rate / 4).decide(request))
    assert slower >= recompute * (1 - 1e-9)
    # It is a property of request and executor, not of the rate that happens to be in force.
    moved = at_flat_rate(planner, rate * 4).decide(request).break_even_bytes_per_s
    if not planner.machine.links["to_host"].rate_table:
        assert moved == pytest.approx(rate)


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_without_a_break_even_rate_no_link_however_fast_makes_loading_pay(
    planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    assume(plan.break_even_bytes_per_s is None)
    load, recompute = load_and_recompute_s(at_flat_rate(planner, 1e30).decide(request))
    assert load >= recompute * (1 - 1e-9)


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_at_the_crossover_loading_starts_to_be_no_slower(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    crossover = plan.crossover_tokens
    assume(crossover is not None)
    assert crossover is not None
    tier = planner.machine.tier("host")
    transfer = TransferCost.of_tier(
        tier,
        planner.machine.links[tier.link],
        planner.layers,
        planner.layer_bytes_per_token,
        request.load_unit_tokens,
    )
    start, chunk = request.resident_tokens, request.prefill_chunk_tokens
    suffix = request.prompt_tokens - plan.usable_tokens

    def pays(prefix: int) -> bool:
        prompt = prefix + suffix
        load = planner.cost.load_s(transfer, start, prefix, prompt, chunk)
        return load <= planner.cost.recompute_s(start, prompt, chunk)

    assert crossover > start
    assert pays(crossover)
    assert not pays(crossover - 1) or crossover - 1 == start


@given(planner=planners, request=requests)
@settings(max_examples=250)
def test_the_crossover_never_contradicts_the_estimates_beside_it(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    load, recompute = load_and_recompute_s(plan)
    assume(not math.isclose(load, recompute, rel_tol=1e-9))
    if plan.crossover_tokens is not None:
        assert (plan.crossover_tokens <= plan.usable_tokens) == (load < recompute)
    else:
        # Loading always pays, or never does: the note says which, and must be right about this very request.
        assert ("recomputing is faster" in plan.crossover_note) == (recompute < load)


def test_a_chunk_boundary_after_the_prefix_does_not_hide_the_crossover() -> None:
    # With a suffix of exactly one prefill chunk, the first prefix token costs recompute a whole pass over the
    # weights, so loading that one token pays on a link that is far too slow for the prefix there is.
    plan = decide(
        load_model("llama-3.1-8b"),
        load_machine("h100-sxm").with_link_rate(1e9),
        Request(12370, {"host": 10320}, prefill_chunk_tokens=2050),
    )
    assert plan.path == "recompute"
    assert "any length" not in plan.crossover_note
    assert plan.crossover_tokens is None or plan.crossover_tokens > 10320


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_the_reported_link_rate_is_what_loading_everything_achieves(
    planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    load = plan.estimates["load"]
    assert load is not None
    assert plan.link_bytes_per_s is not None
    tier = planner.machine.tier("host")
    link = planner.machine.links[tier.link]
    transfer = TransferCost.of_tier(
        tier, link, planner.layers, planner.layer_bytes_per_token, request.load_unit_tokens
    )
    events = 0.0
    if planner.executor != "bulk" and transfer.by_layer:
        events = -(-planner.layers // load.group_layers) * transfer.link.per_event_s
    moving = load.transfer_s - transfer.fixed_s(load.load_tokens) - events
    assume(moving > 1e-6 * load.transfer_s)
    assert plan.link_bytes_per_s == pytest.approx(load.load_bytes / moving, rel=1e-4)


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_the_reason_puts_the_link_on_the_side_of_break_even_that_the_estimates_show(
    planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    assume(plan.break_even_bytes_per_s is not None)
    load, recompute = load_and_recompute_s(plan)
    assume(not math.isclose(load, recompute, rel_tol=1e-6))
    assert (" is above the break-even rate" in plan.reason) == (load < recompute)
    assert (" is below the break-even rate" in plan.reason) == (recompute < load)


def test_a_layered_executor_breaks_even_at_a_lower_rate_for_a_chat_turn() -> None:
    # 594 tokens of compute hide most of the copy, which a bulk executor waits for.
    model, machine = load_model("llama-3.1-8b"), load_machine("h100-sxm")
    request = Request(12370, {"host": 11776})
    rates = {
        executor: Planner(model, machine, executor=executor).decide(request).break_even_bytes_per_s
        for executor in ("bulk", "layered")
    }
    assert rates["bulk"] is not None
    assert rates["layered"] is not None
    assert rates["layered"] < rates["bulk"]


@given(planner=planners, request=requests)
@settings(max_examples=120)
def test_of_equal_layers_only_the_first_and_the_last_need_be_asked(
    planner: Planner, request: Request
) -> None:
    lane = planner._lane("host", request)
    cost, prompt, chunk = lane.cost, request.prompt_tokens, request.prefill_chunk_tokens
    assume(not lane.transfer.event_s)
    computes = cost.computes(lane.usable, prompt, chunk)
    saved = cost.recompute_s(lane.start, prompt, chunk) - cost.recompute_s(lane.usable, prompt, chunk)
    (of_all,) = lane._rates(lane.transfer.bytes(lane.gain), saved, computes)
    assert lane.break_even()[0] == (None if of_all is None else pytest.approx(of_all, rel=1e-9))
