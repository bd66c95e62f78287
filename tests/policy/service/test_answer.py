"""An answer told in few steps is the answer that a plan gives, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import Calibration, Link, PassCost, Planner, PrefillCost, Request, load_machine, load_model
from kvlane.policy.assignment import Place, assign
from kvlane.policy.ledger import Ledger
from kvlane.policy.plan import EXECUTORS, Executor
from kvlane.policy.service.answer import gist_of, gist_of_plain
from kvlane.policy.service.types import Hit

LLAMA, H100 = load_model("llama-3.1-8b"), load_machine("h100-sxm")
times = st.floats(-7, -3).map(lambda exponent: float(10.0**exponent))


@st.composite
def planners(draw: st.DrawFn) -> Planner:
    """Plain ones, with links around the rate at which paths tie, so that each path is chosen now and then."""
    cost = PassCost(draw(times), draw(times), draw(times) * 1e-4, draw(times) * 1e-2)
    rate = LLAMA.kv_bytes_per_token() / cost.token_s * draw(st.floats(0.8, 30))
    link = Link("pcie5-x16", rate, per_copy_s=draw(st.just(0.0) | times.map(lambda s: s * 0.1)))
    tier = replace(H100.tiers["host"], layout=draw(st.sampled_from(("layer_major", "chunk_major"))))
    return Planner(
        LLAMA,
        replace(H100, links={**H100.links, link.name: link}, tiers={**H100.tiers, "host": tier}),
        calibration=draw(
            st.none()
            | st.just(Calibration(PrefillCost(32, cost, cost, head_s=1e-3), 0.1, 'drawn "at random"'))
            | st.just(Calibration(PrefillCost(32, replace(cost, token_s=2e-5), cost), 0.1, "two costs"))
        ),
        tie_margin=draw(st.sampled_from((0.0, 0.03, 0.2))),
        executor=draw(st.sampled_from(("bulk", "layered"))),
    )


PROMPTS = st.integers(1, 400) | st.integers(1, 30_000)
# Queues around what copies and passes take, and far beyond.
QUEUES = st.just(0.0) | st.floats(-5, 1).map(lambda exponent: float(10.0**exponent)) | st.just(1e6)
ASKED = st.tuples(PROMPTS, st.floats(0, 1), QUEUES, QUEUES)


@given(
    planner=planners(),
    unit=st.sampled_from((1, 16, 64)),
    resident=st.sampled_from((0, 0, 1, 16, 100)),
    asked=st.lists(ASKED, min_size=1, max_size=8),
    exactly=st.sampled_from((False, False, True)),
    chunk=st.sampled_from((None, None, 512, 10_000)),
)
@settings(max_examples=300, deadline=None)
def test_what_is_told_at_once_is_what_a_plan_says(
    planner: Planner,
    unit: int,
    resident: int,
    asked: list[tuple[int, float, float, float]],
    exactly: bool,
    chunk: int | None,
) -> None:
    plain = planner.plain("host", unit)
    assert plain is not None
    transfer = planner.transfer("host", unit)
    for new, share, busy_s, queued_s in asked:
        prompt = resident + new
        stored = int(prompt * share)
        if exactly:
            # So long that a load up to there is awaited just until the device is free.
            end = resident + new // 2 // unit * unit
            computes = planner.cost.computes(end, prompt, chunk)
            waited_s = planner.cost.alone_s(transfer.behind(queued_s), end - resident, computes)
            busy_s = min(1e6, waited_s)
        request = Request(
            prompt,
            {"host": stored},
            resident_tokens=resident,
            load_unit_tokens=unit,
            prefill_chunk_tokens=chunk,
            link_queue_s={"host": queued_s},
            device_busy_s=busy_s,
        )
        told = plain.decide(prompt, resident, stored, chunk, busy_s, queued_s)
        if told is not None:
            listed = [Hit("host", stored)]
            found = gist_of(assign(Ledger(), planner, request, Place("one"), 0.0), listed, None)
            assert gist_of_plain(told, prompt, resident, unit, listed) == found


@pytest.mark.parametrize(
    ("busy_s", "queued_s"), [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01), (0.02, 0.015), (9.0, 0.0)]
)
@pytest.mark.parametrize("executor", ["bulk", "layered"])
@pytest.mark.parametrize("stored", [1, 16, 17, 8000, 11_999, 12_000])
def test_of_a_usual_machine_it_is_told(
    stored: int, executor: Executor, busy_s: float, queued_s: float
) -> None:
    planner = Planner(LLAMA, H100, executor=executor)
    plain = planner.plain("host", 16)
    assert plain is not None
    told = plain.decide(12_000, 0, stored, None, busy_s, queued_s)
    request = Request(12_000, {"host": stored}, link_queue_s={"host": queued_s}, device_busy_s=busy_s)
    plan = planner.decide(request)
    assert (told is None) == (stored < 16)
    if told is not None:
        assert (told.chosen, told.load, told.split) == (
            plan.estimates[plan.path],
            plan.estimates["load"],
            plan.estimates["split"],
        )
        assert (told.reason, told.crossover) == (plan.reason, (plan.crossover_tokens, plan.crossover_note))


def test_what_is_to_be_refused_or_has_nothing_to_load_is_left_to_the_planner() -> None:
    planner = Planner(LLAMA, H100)
    plain = planner.plain("host", 16)
    assert plain is not None
    assert plain.decide(1000, 0, 900) is not None
    for prompt, resident, stored in (
        (1000, 0, 1001),
        (1000, 0, 0),
        (1000, 900, 900),
        (1000, 1000, 1000),
        (16, 0, 16),
    ):
        assert plain.decide(prompt, resident, stored) is None


def test_only_plain_planners_have_one() -> None:
    for executor in EXECUTORS:
        found = Planner(LLAMA, H100, executor=executor).plain("host", 16)
        assert (found is None) == (executor == "two_ended")
    assert Planner(load_model("gpt-oss-20b"), H100).plain("host", 16) is None
    table = replace(H100.links["pcie5-x16"], per_copy_s=0.0, rate_table=((1e4, 1e9), (1e6, 5e10)))
    machine = replace(H100, links={**H100.links, "pcie5-x16": table})
    assert Planner(LLAMA, machine).plain("host", 16) is None
    floored = PrefillCost(32, PassCost(0.01, 2e-5, 1e-9), PassCost(0.01, 2e-5, 1e-9), floor_s=0.1)
    assert Planner(LLAMA, H100, calibration=Calibration(floored, 0.1, "floored")).plain("host", 16) is None
    # With runs of 16 tokens to a copy, units of 24 do not all cost the same.
    odd = replace(H100, tiers={**H100.tiers, "host": replace(H100.tiers["host"], run_tokens=16)})
    assert Planner(LLAMA, odd).plain("host", 24) is None
