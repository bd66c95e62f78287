"""Crossovers told in closed form are those that a search would find, for whatever prompt asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import Calibration, Link, PassCost, Planner, PrefillCost, Request, load_machine, load_model
from kvlane.policy.crossover import in_words, search
from kvlane.policy.lane import Lane
from kvlane.policy.plan import EXECUTORS, Executor

LLAMA, H100 = load_model("llama-3.1-8b"), load_machine("h100-sxm")
times = st.floats(-7, -3).map(lambda exponent: float(10.0**exponent))


@st.composite
def plain_planners(draw: st.DrawFn) -> Planner:
    """Those whose crossovers may be told at once, and some others, with links around the rate at which paths tie."""
    cost = PassCost(
        overhead_s=draw(st.just(0.0) | times),
        token_s=draw(times),
        pair_s=draw(st.just(0.0) | times.map(lambda seconds: seconds * 1e-4)),
        context_s=draw(st.just(0.0) | times.map(lambda seconds: seconds * 1e-2)),
        rectangle=draw(st.sampled_from((False, False, False, True))),
    )
    fresh = draw(st.sampled_from((cost, cost, cost, replace(cost, overhead_s=2e-3))))
    token_bytes = LLAMA.kv_bytes_per_token()
    rate = token_bytes / cost.token_s * draw(st.floats(0.3, 30))
    link = Link(
        "pcie5-x16",
        rate,
        per_copy_s=draw(st.just(0.0) | times.map(lambda seconds: seconds * 0.1)),
        latency_s=draw(st.just(0.0) | times.map(lambda seconds: seconds * 30)),
    )
    tier = replace(
        H100.tiers["host"],
        run_tokens=draw(st.sampled_from((None, 0, 5, 16))),
        layout=draw(st.sampled_from(("layer_major", "chunk_major"))),
    )
    machine = replace(H100, links={**H100.links, link.name: link}, tiers={**H100.tiers, "host": tier})
    return Planner(
        LLAMA,
        machine,
        executor=draw(st.sampled_from(("bulk", "layered", "two_ended"))),
        calibration=Calibration(PrefillCost(32, fresh, cost), 0.1, "drawn at random"),
    )


def lane(
    planner: Planner,
    prompt: int,
    stored: int,
    resident: int = 0,
    busy_s: float = 0.0,
    queued_s: float = 0.0,
    chunk: int | None = None,
) -> Lane:
    request = Request(
        prompt,
        {"host": stored},
        resident_tokens=resident,
        prefill_chunk_tokens=chunk,
        device_busy_s=busy_s,
        link_queue_s={"host": queued_s},
    )
    return planner._lane("host", request)


prompts = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 100_000)), min_size=2, max_size=6)
queues = st.sampled_from((0.0, 0.0, 0.01, 3.0)) | st.floats(-5, 2).map(lambda exponent: float(10.0**exponent))


@given(
    planner=plain_planners(),
    lengths=prompts,
    resident=st.just(0) | st.integers(0, 3000),
    busy_s=queues,
    queued_s=queues,
)
@settings(max_examples=400, deadline=None)
def test_an_onset_is_found_by_every_search(
    planner: Planner, lengths: list[tuple[int, int]], resident: int, busy_s: float, queued_s: float
) -> None:
    lanes = [
        lane(planner, resident + 32 + stored + suffix, resident + 16 + stored, resident, busy_s, queued_s)
        for suffix, stored in lengths
    ]
    onset = lanes[0].onset
    told = None if onset is None else onset.tokens(resident, busy_s, queued_s)
    if told is not None:
        assert [search(other) for other in lanes] == [told] * len(lanes)


@given(
    planner=plain_planners() | st.from_type(Planner),
    lengths=prompts,
    resident=st.sampled_from((0, 0, 16, 100)),
    busy_s=queues,
    queued_s=queues,
    chunk=st.sampled_from((None, None, 512, 30_000, 200_000)),
)
@settings(max_examples=300, deadline=None)
def test_a_crossover_is_what_a_search_finds(
    planner: Planner,
    lengths: list[tuple[int, int]],
    resident: int,
    busy_s: float,
    queued_s: float,
    chunk: int | None,
) -> None:
    for suffix, stored in lengths:
        hit = resident + 16 + stored
        found = lane(planner, hit + suffix, hit, resident, busy_s, queued_s, chunk)
        assert found.crossover() == in_words(search(found), resident, hit + suffix - found.usable)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("tier", "busy_s", "queued_s"),
    [("host", 0.0, 0.0), ("host", 0.02, 0.0), ("host", 0.0, 0.02), ("host", 0.02, 0.03), ("nvme", 0.0, 3.0)],
)
def test_of_a_usual_machine_it_takes_no_search(
    executor: Executor, tier: str, busy_s: float, queued_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(LLAMA, H100, executor=executor)
    request = Request(3000, {tier: 2900}, device_busy_s=busy_s, link_queue_s={tier: queued_s})
    found = planner._lane(tier, request)
    searched = search(found)
    assert searched is not None
    monkeypatch.setattr("kvlane.policy.crossover.search", None)
    assert found.crossover() == in_words(searched, 0, 3000 - found.usable)


def test_one_of_several_crossovers_is_not_told_at_once() -> None:
    # A run of a copy costs more than its tokens: just after each run's end loading is slower for a while.
    link = replace(H100.links["pcie5-x16"], per_copy_s=1.2e-5)
    planner = Planner(LLAMA, replace(H100, links={**H100.links, "pcie5-x16": link}))
    lanes = [lane(planner, prompt, prompt) for prompt in range(20, 3000, 16)]
    assert len({search(each) for each in lanes}) > 1
    onset = lanes[0].onset
    assert onset is not None
    assert onset.tokens(0, 0.0, 0.0) is None


def test_what_the_queue_hides_may_pay_for_a_short_prefix_only() -> None:
    # Copies are slower than compute; a short one is done while the device is busy anyway.
    slow = replace(H100.links["pcie5-x16"], rate_bytes_per_s=1e9)
    planner = Planner(LLAMA, replace(H100, links={**H100.links, "pcie5-x16": slow}))
    lanes = [lane(planner, prompt, prompt, busy_s=0.02) for prompt in (40, 400, 300_000)]
    assert len({search(each) for each in lanes}) > 1
    onset = lanes[0].onset
    assert onset is not None
    assert onset.tokens(0, 0.02, 0.0) is None


def test_onsets_of_many_resident_prefixes_are_not_kept_for_ever() -> None:
    onset = lane(Planner(LLAMA, H100), 1000, 900).onset
    assert onset is not None
    assert {onset.tokens(start, 0.0, 0.0) for start in range(2000)} >= {7}
    assert len(onset._idle) < 1000
