"""Columns of requests are decided as the planner decides each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import (
    Calibration,
    Device,
    InputError,
    LayerSpec,
    Link,
    Machine,
    ModelSpec,
    PassCost,
    Plan,
    Planner,
    PrefillCost,
    Request,
    Tier,
    load_machine,
    load_model,
)
from kvlane.policy.batch import PATHS, Decisions, decide_batch

# Two TTFTs that are no further apart are the same to whoever adds in another order.
ROUNDING = 1e-9


@st.composite
def smooth_planners(draw: st.DrawFn) -> Planner:
    """Planners whose columns are priced by array operations: flat links, whole or paged runs, no floor."""
    planner = draw(st.from_type(Planner))
    machine = planner.machine
    prefill: PrefillCost = replace(planner.prefill, floor_s=0.0, floor_context_s=0.0)
    if draw(st.booleans()):
        prefill = replace(prefill, fresh=prefill.extend)
    return Planner(
        planner.model,
        replace(
            machine,
            links={name: replace(link, rate_table=()) for name, link in machine.links.items()},
            tiers={
                name: replace(tier, run_tokens=draw(st.sampled_from((None, 0))))
                for name, tier in machine.tiers.items()
            },
        ),
        executor=planner.executor,
        calibration=Calibration(prefill, 0.1, "drawn at random"),
        tie_margin=planner.tie_margin,
    )


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[Request], dict[str, Any]]:
    """Requests that share what a column shares, and that."""
    unit = draw(st.sampled_from((1, 16, 100)))
    prompts = st.integers(1, 200 * unit)
    shared: dict[str, Any] = {
        "load_unit_tokens": unit,
        "prefill_chunk_tokens": draw(st.none() | st.integers(7 * unit, 250 * unit)),
        "tail_tokens": draw(st.sampled_from((1, 4))),
    }
    tiers = draw(st.sampled_from((("host",), ("disk", "host"), ())))
    requests = []
    for prompt in draw(st.lists(prompts, min_size=1, max_size=12)):
        resident = draw(st.just(0) | st.integers(0, (prompt - 1) // 4) | st.integers(0, prompt - 1))
        hits = {tier: draw(st.just(prompt) | st.integers(0, prompt)) for tier in tiers}
        requests.append(Request(prompt, hits, resident, **shared))
    return requests, shared


def decided(planner: Planner, requests: list[Request], shared: dict[str, Any]) -> Decisions:
    return decide_batch(
        planner,
        [request.prompt_tokens for request in requests],
        {tier: [request.hit(tier) for request in requests] for tier in requests[0].hits},
        [request.resident_tokens for request in requests],
        **shared,
    )


def near(left: float, right: float) -> bool:
    return abs(left - right) <= ROUNDING * max(left, right)


def assert_same(plan: Plan, batch: Decisions, row: int) -> None:
    """The same path and load tokens, unless what tells them apart is within rounding."""
    path = PATHS[batch.path[row]]
    assert batch.load_tokens[row] + batch.recompute_tokens[row] + plan.resident_tokens == plan.prompt_tokens
    assert (batch.tier[row] == -1) == (batch.load_tokens[row] == 0) == (path == "recompute")
    ours = plan.estimates[path]
    assert ours is not None
    if path == plan.path:
        assert near(batch.ttft_s[row], plan.ttft_s)
        if batch.load_tokens[row] != plan.load_tokens:
            assert path == "split"  # two split points that take as long
        elif plan.load and batch.tiers[batch.tier[row]] != plan.load[0].tier:
            assert len(batch.tiers) > 1  # two tiers that take as long
        return
    best = min(estimate.ttft_s for estimate in plan.estimates.values() if estimate is not None)
    within = best * (1 + plan.tie_margin)
    chosen = min((path, plan.path), key=PATHS.index)  # the steadier of the two was or was not a near-tie
    steadier = plan.estimates[chosen]
    assert steadier is not None
    assert near(steadier.ttft_s, within), f"{path} instead of {plan.path}"


@given(planner=smooth_planners(), drawn=columns())
@settings(max_examples=300)
def test_array_operations_decide_as_the_planner_does(
    planner: Planner, drawn: tuple[list[Request], dict[str, Any]]
) -> None:
    requests, shared = drawn
    batch = decided(planner, requests, shared)
    for row, request in enumerate(requests):
        assert_same(planner.decide(request), batch, row)


@given(planner=st.from_type(Planner), drawn=columns())
@settings(max_examples=60)
def test_so_does_whatever_has_no_closed_form(
    planner: Planner, drawn: tuple[list[Request], dict[str, Any]]
) -> None:
    requests, shared = drawn
    batch = decided(planner, requests, shared)
    for row, request in enumerate(requests):
        assert_same(planner.decide(request), batch, row)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-32b", "deepseek-v3", "gpt-oss-20b"])
@pytest.mark.parametrize("executor", ["bulk", "layered"])
@pytest.mark.parametrize("chunk", [None, 2048, 8192])
@pytest.mark.parametrize("rate", [None, 0.4e9, 6e9])
def test_served_models_and_links(model: str, executor: Any, chunk: int | None, rate: float | None) -> None:
    machine: Machine = load_machine("h100-sxm")
    if rate is not None:
        machine = machine.with_link_rate(rate)
    planner = Planner(load_model(model), machine, executor=executor)
    numbers = np.random.default_rng(7)
    requests = []
    for prompt in numbers.integers(1, 40_000, 12).tolist():
        hit = int(numbers.integers(0, prompt + 1))
        requests.append(
            Request(prompt, {"host": hit}, int(numbers.integers(0, prompt)) // 3, prefill_chunk_tokens=chunk)
        )
    batch = decided(planner, requests, {"prefill_chunk_tokens": chunk})
    for row, request in enumerate(requests):
        assert_same(planner.decide(request), batch, row)


# The best split is the last of those that leave equally many chunks; one before a rectangle's cheaper chunks; one where
# a pass more costs little beside a slow link.
@pytest.mark.parametrize(
    ("executor", "layers", "cost", "rate", "row", "unit", "chunk"),
    [
        ("layered", 32, PassCost(1e-5, 1.6e-5, 8.7e-8, 0, True), 1.09e7, (33_055, 29_173, 0), 64, 4_638),
        ("bulk", 8, PassCost(0.0513, 0, 1.69e-9, 8.2e-9, True), 1.65e8, (12_532, 12_267, 0), 100, 6_259),
        ("bulk", 1, PassCost(1.4e-3, 0, 0), 2.09e8, (2_396, 1_249, 636), 16, 860),
    ],
)
def test_splits_that_leave_several_chunks(
    executor: Any,
    layers: int,
    cost: PassCost,
    rate: float,
    row: tuple[int, int, int],
    unit: int,
    chunk: int,
) -> None:
    model = ModelSpec("m", (LayerSpec(8, 2, 64, 64, 1_000_000),) * layers, 512, 1000, "bf16", "bf16")
    machine = Machine("x", Device("d"), {"l": Link("l", rate)}, {"host": Tier("host", "l")}, ())
    calibration = Calibration(PrefillCost(layers, cost, cost), 0.1, "made up")
    planner = Planner(model, machine, executor=executor, calibration=calibration, tie_margin=0.0)
    prompt, hit, resident = row
    request = Request(prompt, {"host": hit}, resident, load_unit_tokens=unit, prefill_chunk_tokens=chunk)
    plan = planner.decide(request)
    assert plan.path == "split"
    shared: dict[str, Any] = {"load_unit_tokens": unit, "prefill_chunk_tokens": chunk}
    assert_same(plan, decided(planner, [request], shared), 0)


def test_a_block_s_end_changes_nothing() -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"), executor="layered")
    prompt = np.arange(2, 20_002, 2)
    whole = decide_batch(planner, prompt, {"host": prompt // 2}, prompt // 8)
    for first in (0, 1, 4_095, 9_000):
        part = slice(first, first + 700)
        again = decide_batch(planner, prompt[part], {"host": prompt[part] // 2}, prompt[part] // 8)
        for column in ("path", "load_tokens", "recompute_tokens", "ttft_s", "tier"):
            assert np.array_equal(getattr(whole, column)[part], getattr(again, column))


def test_no_rows_are_no_decisions() -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"))
    batch = decide_batch(planner, np.zeros(0, np.int64), {"host": np.zeros(0, np.int64)})
    assert len(batch.path) == 0


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt_tokens[1]", {"prompt_tokens": [100, 0, 100]}),
        ("prompt_tokens[2]", {"prompt_tokens": [100, 100, 1 << 25]}),
        ("prompt_tokens[0]", {"prompt_tokens": [1.5, 100, 100]}),
        ("prompt_tokens[2]", {"prompt_tokens": [100, 100, None]}),
        ("prompt_tokens[1]", {"prompt_tokens": [100, True, 100.0]}),
        ("prompt_tokens[1]", {"prompt_tokens": [100, 10**30, 100]}),
        ("prompt_tokens", {"prompt_tokens": [[100, 100, 100]]}),
        ("prompt_tokens", {"prompt_tokens": [[100], [100, 100], 100]}),
        ("prompt_tokens", {"prompt_tokens": 100}),
        ("resident_tokens[1]", {"resident_tokens": [0, 100, 0]}),
        ("resident_tokens[2]", {"resident_tokens": [0, 0, -1]}),
        ("resident_tokens", {"resident_tokens": [0, 0]}),
        ("hits.host[0]", {"hits": {"host": [101, 0, 0]}}),
        ("hits.host[2]", {"hits": {"host": [0, 0, -1]}}),
        ("hits.host", {"hits": {"host": [0, 0, 0, 0]}}),
        ("hit", {"hits": {"attic": [0, 0, 0]}}),
        ("load_unit_tokens", {"load_unit_tokens": 0}),
        ("prefill_chunk_tokens", {"prefill_chunk_tokens": -5}),
        ("tail_tokens", {"tail_tokens": 0}),
    ],
)
def test_a_bad_value_is_named_by_column_and_row(field: str, change: dict[str, Any]) -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"))
    with pytest.raises(InputError) as refused:
        decide_batch(planner, **{"prompt_tokens": [100, 100, 100], **change})
    assert refused.value.field == field


@pytest.mark.benchmark(group="decide")
@pytest.mark.parametrize("executor", ["bulk", "layered"])
@pytest.mark.parametrize("chunk", [None, 8192])
def test_speed_of_a_column(benchmark: Any, executor: Any, chunk: int | None) -> None:
    # Goal: 150 ns a row without chunks. See benchmark.extra_info for nanoseconds a row.
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"), executor=executor)
    numbers = np.random.default_rng(1)
    prompt = numbers.integers(100, 40_000, 50_000)
    hit = (prompt * numbers.random(50_000)).astype(np.int64)
    batch = benchmark(decide_batch, planner, prompt, {"host": hit}, hit // 4, prefill_chunk_tokens=chunk)
    if benchmark.enabled:
        benchmark.extra_info["ns_per_row"] = round(benchmark.stats["median"] / 50_000 * 1e9, 1)
    assert len(np.unique(batch.path)) > 1
