"""Plans of several parts where layers differ: what each part moves, and where a recurrent state lets them meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import (
    Calibration,
    Device,
    Estimate,
    LayerSpec,
    Link,
    Machine,
    ModelSpec,
    PassCost,
    Planner,
    PrefillCost,
    Request,
    Tier,
    pipeline,
)
from kvlane.policy.layer_transfer import LayerBytes
from kvlane.policy.model_layer import State
from kvlane.policy.plan import EXECUTORS, Executor

STATE = State(
    heads=8,
    head_elements=256,
    element_bytes=4,
    groups=2,
    head_channels=16,
    group_channels=32,
    kernel=4,
    flop_per_token=1e5,
)
FULL = LayerSpec(8, 2, 64, 64, 1_000_000)
WINDOWED = LayerSpec(8, 4, 64, 64, 1_000_000, "sliding_attention", 100)
RECURRENT = LayerSpec(0, 0, 0, 0, 800_000, "linear_attention", state=STATE)


def planner_of(
    layers: tuple[LayerSpec, ...],
    executor: Executor,
    host: Link,
    disk: Link,
    token_s: float = 1e-4,
    tie_margin: float = 0.0,
) -> Planner:
    model = ModelSpec("mixed", layers, 512, 1000, "bf16", "bf16")
    tiers = {"host": Tier("host", host.name, run_tokens=0), "disk": Tier("disk", disk.name)}
    machine = Machine("two", Device("two"), {link.name: link for link in (host, disk)}, tiers, ())
    cost = PassCost(overhead_s=1e-3, token_s=token_s, pair_s=1e-9)
    return Planner(
        model,
        machine,
        executor=executor,
        calibration=Calibration(PrefillCost(len(layers), cost, cost), 0.1, "measured"),
        tie_margin=tie_margin,
    )


@st.composite
def planners(draw: st.DrawFn) -> Planner:
    host, disk = (
        Link(
            name,
            10.0 ** draw(st.floats(5, 9)),
            per_copy_s=draw(st.sampled_from((0.0, 1e-5))),
            latency_s=draw(st.sampled_from((0.0, 1e-3))),
            per_event_s=draw(st.sampled_from((0.0, 0.0, 2e-4))),
        )
        for name in ("one", "other")
    )
    layers = draw(st.lists(st.sampled_from((FULL, WINDOWED, RECURRENT)), min_size=1, max_size=8))
    executor = draw(st.sampled_from(EXECUTORS))
    return planner_of(tuple(layers), executor, host, disk, tie_margin=draw(st.sampled_from((0.0, 0.03))))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt = draw(st.integers(20, 600))
    return Request(
        prompt,
        {tier: draw(st.integers(0, prompt)) for tier in ("host", "disk")},
        resident_tokens=draw(st.just(0) | st.integers(0, prompt - 1)),
        prefill_chunk_tokens=draw(st.none() | st.integers(20, prompt)),
        state_checkpoints={
            tier: [16 * at for at in draw(st.lists(st.integers(1, 36), max_size=5))]
            for tier in ("host", "disk")
        },
    )


def what_happens_s(planner: Planner, request: Request, estimate: Estimate) -> float:
    prefill, prompt = planner.prefill, request.prompt_tokens
    chunk = request.prefill_chunk_tokens
    arrivals = [0.0] * planner.layers
    for segment in estimate.load:
        transfer = planner.transfer(segment.tier, request.load_unit_tokens).before(estimate.end - segment.end)
        if planner.executor == "bulk":
            each = [transfer.total_s(segment.tokens)] * planner.layers
        else:
            each = transfer.arrivals(segment.tokens, estimate.group_layers)
        arrivals = [max(pair) for pair in zip(arrivals, each, strict=True)]
    at = max(estimate.end, request.resident_tokens)
    first = min(chunk or prompt, prompt - at)
    front = estimate.start - request.resident_tokens if estimate.load else 0
    begun = prefill.prefill_s(request.resident_tokens, front, chunk)
    done = pipeline.recurrence(arrivals, prefill.layers_s(at, first), begun)[-1]
    return done + prefill.prefill_s(at + first, prompt - at - first, chunk) + prefill.head_s


@given(planner=planners(), request=requests())
@settings(max_examples=200, deadline=None)
def test_every_estimate_is_what_happens_and_none_is_passed_over(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    for estimate in plan.estimates.values():
        if estimate is not None:
            assert estimate.ttft_s == pytest.approx(what_happens_s(planner, request, estimate), rel=1e-9)
    for tier in request.hits:
        checkpoints = {tier: request.checkpoints(tier)}
        alone = planner.decide(
            replace(request, hits={tier: request.hits[tier]}, state_checkpoints=checkpoints)
        )
        assert plan.ttft_s <= alone.ttft_s * (1 + planner.tie_margin)


@given(planner=planners(), request=requests())
@settings(max_examples=200, deadline=None)
def test_a_state_moves_once_and_runs_meet_only_where_one_was_stored(
    planner: Planner, request: Request
) -> None:
    for estimate in planner.decide(request).estimates.values():
        if estimate is None or not estimate.load:
            continue
        # However it is cut, a load moves what it moves in one piece.
        whole = planner.transfer("host", request.load_unit_tokens).bytes(estimate.load_tokens)
        assert estimate.load_bytes == pytest.approx(whole, abs=2)
        if not planner.model.recurrent:
            continue
        for segment in estimate.load:
            assert segment.end in request.checkpoints(segment.tier)
        assert estimate.start == request.resident_tokens


def test_a_window_that_lies_in_the_last_run_leaves_the_first_nothing_to_move() -> None:
    layer = LayerBytes(per_token=10.0, window=100, static=7.0, static_runs=2)
    assert [layer.before(after).bytes(80) for after in (0, 30, 100, 500)] == [800, 700, 0, 0]
    assert layer.bytes(80) == 807


def test_two_tiers_meet_at_a_checkpoint_and_the_last_brings_the_state() -> None:
    planner = planner_of((FULL, RECURRENT, FULL), "bulk", Link("one", 1e6), Link("other", 1e6), token_s=1e-2)
    request = Request(
        401,
        {"host": 400, "disk": 400},
        state_checkpoints={"host": [64, 160, 384], "disk": [96, 240, 400]},
    )
    plan = planner.decide(request)
    per_token, state = planner.model.kv_bytes_per_token(), planner.model.state_bytes()
    assert [(part.tier, part.start, part.end) for part in plan.load] == [("host", 0, 160), ("disk", 160, 400)]
    assert [part.bytes for part in plan.load] == [160 * per_token, round(240 * per_token + state)]
    # Without a checkpoint inside, one tier brings all of it.
    bare = planner.decide(replace(request, state_checkpoints={"host": [400], "disk": [400]}))
    assert len(bare.load) == 1


def test_no_front_of_a_recurrent_model_is_computed_beside_a_load() -> None:
    """Its states would be written where the load brings others; on the same model without states one is."""
    request = Request(401, {"host": 400}, state_checkpoints={"host": [48, 208, 400]})
    starts = []
    for layers in ((FULL, RECURRENT), (FULL, FULL)):
        planner = planner_of(layers, "two_ended", Link("one", 1e6), Link("other", 1e6), token_s=5e-4)
        split = planner.decide(request).estimates["split"]
        assert split is not None
        starts.append(split.start)
    assert starts[0] == 0 < starts[1]
