"""What one decision costs, all candidates weighed and no reason asked for; and what is put off until it is asked for.

`pytest tests/policy/test_decide_speed.py --benchmark-columns=min,median,iqr` prints the figures; nothing here
asserts on a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlane.policy import Link, Planner, Request, Tier, load_machine, load_model
from kvlane.policy.lane import Lane
from kvlane.policy.plan import EXECUTORS, Executor

MODEL, H100 = load_model("llama-3.1-8b"), load_machine("h100-sxm")
ONE_HIT = {"host": 12_368}
# Four tiers at links of their own, for layers of two kinds: twelve ways to load from two at once, and searches in each.
RATES = {"host": 50e9, "cxl": 28e9, "ssd": 12e9, "net": 20e9}
FOUR_TIERS = replace(
    H100,
    links={name: Link(name, rate, per_copy_s=2e-6, latency_s=1e-5) for name, rate in RATES.items()},
    tiers={name: Tier(name, name, run_tokens=0) for name in RATES},
)
FOUR_HITS = Request(120_000, {"host": 72_000, "cxl": 96_000, "ssd": 119_998, "net": 108_000})
REQUESTS = {
    "one_hit": Request(12_370, ONE_HIT),
    "chunks": Request(12_370, ONE_HIT, prefill_chunk_tokens=2048),
    "two_hits": Request(12_370, {"host": 8192, "nvme": 12_368}),
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_decision(benchmark: Any, executor: Executor, kind: str) -> None:
    planner = Planner(MODEL, H100, executor=executor)
    plan = benchmark.pedantic(planner.decide, (REQUESTS[kind],), rounds=100, iterations=10, warmup_rounds=5)
    # A planner that is kept answers as a new one does, down to what is worked out when asked for.
    fresh = Planner(MODEL, H100, executor=executor).decide(REQUESTS[kind])
    assert plan == fresh
    assert plan.to_dict() == fresh.to_dict()
    assert all(estimate is not None for estimate in plan.estimates.values())


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-120b"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_decision_among_four_tiers_of_a_model_of_unlike_layers(
    benchmark: Any, executor: Executor, name: str
) -> None:
    model = load_model(name)
    planner = Planner(model, FOUR_TIERS, executor=executor)
    plan = benchmark.pedantic(planner.decide, (FOUR_HITS,), rounds=10, iterations=1, warmup_rounds=1)
    assert plan == Planner(model, FOUR_TIERS, executor=executor).decide(FOUR_HITS)
    assert len(plan.load) == 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ties_are_looked_for_when_asked_for_and_once(
    monkeypatch: pytest.MonkeyPatch, executor: Executor
) -> None:
    asked: list[str] = []
    for name in ("crossover", "break_even", "link_rate"):
        real = getattr(Lane, name)

        def counted(lane: Lane, name: str = name, real: Any = real) -> Any:
            asked.append(name)
            return real(lane)

        monkeypatch.setattr(Lane, name, counted)
    plan = Planner(MODEL, H100, executor=executor).decide(REQUESTS["one_hit"])
    assert (plan.path, plan.load_tokens > 0, asked) == (plan.path, True, [])
    first = plan.crossover_tokens, plan.break_even_bytes_per_s, plan.link_bytes_per_s
    assert (plan.crossover_tokens, plan.break_even_bytes_per_s, plan.link_bytes_per_s) == first
    assert plan.reason
    assert sorted(asked) == ["break_even", "crossover", "link_rate"]
