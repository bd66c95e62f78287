"""Several tiers and unlike layers: what is left out of a decision early would not have been chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given, settings
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
    PrefillEfficiency,
    Request,
    Tier,
    load_machine,
    load_model,
)
from kvlane.policy.layer_waits import LayerWaits
from kvlane.policy.model_layer import Experts, State
from kvlane.policy.plan import EXECUTORS
from kvlane.policy.two_tiers import TwoTiers

FULL = LayerSpec(8, 2, 64, 64, 1_000_000)
KINDS = (
    FULL,
    replace(FULL, weights=2_000_000, k_width=96),
    replace(FULL, experts=Experts(count=16, active=2, weights=100_000)),
    replace(FULL, stores_kv=False),
    LayerSpec(8, 4, 64, 64, 1_000_000, "sliding_attention", 128),
    LayerSpec(8, 4, 64, 64, 1_000_000, "chunked_attention", 512),
)
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
RECURRENT = LayerSpec(0, 0, 0, 0, 800_000, "linear_attention", state=STATE)
NAMES = ("host", "cxl", "ssd", "net")


@st.composite
def links(draw: st.DrawFn, name: str) -> Link:
    rate = 10.0 ** draw(st.floats(7, 9.5))
    table = draw(st.sampled_from((False, False, True)))
    return Link(
        name,
        rate,
        per_copy_s=0.0 if table else draw(st.sampled_from((0.0, 3e-6, 1e-4))),
        latency_s=draw(st.sampled_from((0.0, 1e-3))),
        rate_table=((4096, rate / 10), (1 << 20, rate)) if table else (),
        per_event_s=draw(st.sampled_from((0.0, 0.0, 0.0, 1e-4))),
    )


@st.composite
def planners(draw: st.DrawFn) -> Planner:
    kinds = draw(st.sampled_from((KINDS[:1], KINDS, KINDS, (*KINDS[:2], RECURRENT))))
    period = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    layers = tuple(period * draw(st.integers(1, 4)))
    model = ModelSpec("mixed", layers, 512, 1000, "bf16", "bf16")
    names = NAMES[: draw(st.integers(2, 4))]
    over = {name: draw(st.sampled_from((name, name, name, "host"))) for name in names}
    tiers = {
        name: Tier(
            name,
            over[name],
            layout=draw(st.sampled_from(("layer_major", "layer_major", "chunk_major"))),
            run_tokens=draw(st.sampled_from((None, 0, 16))),
        )
        for name in names
    }
    machine = Machine(
        name="random",
        device=Device(
            "random",
            memory_bytes_per_s=10.0 ** draw(st.floats(9, 12.5)),
            peak_flops={"bf16": 10.0 ** draw(st.floats(10, 13))},
        ),
        links={name: draw(links(name)) for name in sorted(set(over.values()))},
        tiers=tiers,
        prefill=(PrefillEfficiency("vllm", "bf16", 0.5, 0.4, 1e-4, "profile", "drawn at random"),),
    )
    cost = PassCost(1e-3, 10.0 ** draw(st.floats(-6, -4)), draw(st.sampled_from((0.0, 1e-9))))
    measured = Calibration(PrefillCost(len(layers), cost, cost), 0.1, "measured")
    return Planner(
        model,
        machine,
        executor=draw(st.sampled_from(EXECUTORS)),
        calibration=draw(st.none() | st.just(measured)),
        tie_margin=draw(st.sampled_from((0.0, 0.03))),
    )


@st.composite
def requests(draw: st.DrawFn, planner: Planner) -> Request:
    unit = draw(st.sampled_from((1, 16, 64)))
    prompt = draw(st.integers(2, 80 * unit) | st.integers(40 * unit, 80 * unit))
    stored = st.integers(0, prompt) | st.integers(prompt // 2, prompt)
    tiers = list(planner.machine.tiers)
    queued = st.sampled_from((0.0, 0.0, 1e-3, 0.05))
    return Request(
        prompt,
        {tier: draw(stored) for tier in tiers},
        resident_tokens=draw(st.just(0) | st.integers(0, prompt - 1)),
        load_unit_tokens=unit,
        prefill_chunk_tokens=draw(st.none() | st.integers(max(1, prompt // 20), prompt)),
        state_checkpoints=tuple(draw(st.lists(st.integers(1, 80).map(lambda at: at * unit), max_size=8))),
        link_queue_s={tier: draw(queued) for tier in tiers},
        device_busy_s=draw(queued),
    )


def left_out_nothing(patch: pytest.MonkeyPatch) -> None:
    """Every way of every two tiers is weighed to the end."""
    for name in ("load", "best_split", "two_ended"):
        real = getattr(TwoTiers, name)

        def unbounded(pair: TwoTiers, beyond: float = math.inf, real: Any = real) -> Estimate | None:
            found: Estimate | None = real(pair)
            return found

        patch.setattr(TwoTiers, name, unbounded)
    real_boundary = TwoTiers._boundary

    def boundary(pair: TwoTiers, begin: int, end: int, then: Any, beyond: float = 0.0) -> Any:
        return real_boundary(pair, begin, end, then)

    patch.setattr(TwoTiers, "_boundary", boundary)


@given(data=st.data(), planner=planners())
@settings(max_examples=250)
def test_what_is_left_out_makes_neither_the_plan_nor_an_estimate_later(data: Any, planner: Planner) -> None:
    request = data.draw(requests(planner))
    plan = planner.decide(request)
    with pytest.MonkeyPatch.context() as patch:
        left_out_nothing(patch)
        whole = planner.decide(request)
    assert plan.path == whole.path
    assert plan.estimates.keys() == whole.estimates.keys()
    for path, estimate in plan.estimates.items():
        best = whole.estimates[path]
        assert (estimate is None) == (best is None)
        if estimate is not None and best is not None:
            # Of two boundaries that are waited for equally long either may be found.
            assert estimate.ttft_s == pytest.approx(best.ttft_s, rel=1e-12)
    event(f"{planner.executor}: {plan.path} of {len(plan.load)}")


def four_tiers() -> Machine:
    """An H100 with host memory, CXL memory, a disk and the network, each at a link of its own."""
    rates = {"host": 50e9, "cxl": 28e9, "ssd": 12e9, "net": 20e9}
    machine = load_machine("h100-sxm")
    own = {name: Link(name, rate, per_copy_s=2e-6, latency_s=1e-5) for name, rate in rates.items()}
    return replace(machine, links=own, tiers={name: Tier(name, name, run_tokens=0) for name in rates})


HITS = {"host": 72_000, "cxl": 96_000, "ssd": 119_998, "net": 108_000}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-120b"])
def test_a_decision_among_four_tiers_asks_for_a_fraction_of_the_waits(
    monkeypatch: pytest.MonkeyPatch, name: str, executor: Any
) -> None:
    asked = [0]
    real = LayerWaits.seconds

    def counted(waits: LayerWaits, *args: Any) -> float:
        asked[0] += 1
        return real(waits, *args)

    monkeypatch.setattr(LayerWaits, "seconds", counted)
    planner = Planner(load_model(name), four_tiers(), executor=executor)
    request = Request(120_000, HITS)
    planner.decide(request)
    few, asked[0] = asked[0], 0
    left_out_nothing(monkeypatch)
    planner.decide(request)
    # Of twelve ways to order two of four tiers, each with some thirty ends and a boundary to look for at each.
    assert few < asked[0] * 0.9
    assert few < 1000


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "gemma-3-27b"])
def test_where_one_tier_alone_is_waited_for_the_device_computes_no_more_than_it_must(name: str) -> None:
    planner = Planner(load_model(name), load_machine("h100-sxm"), executor="two_ended")
    request = Request(42_828, {"cxl": 42_828, "remote": 10_730})
    split = planner.decide(request).estimates["split"]
    assert split is not None
    assert [part.tier for part in split.load] == ["remote", "cxl"]
    # Had it begun anywhere else before the shorter hit ends, the other tier would have been waited for as long.
    assert (split.load[0].start, split.load[0].end) == (16, 10_720)
    assert split.ttft_s > split.compute_s
