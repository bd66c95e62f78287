"""Crossovers kept between requests are those that a search would find, for whatever prompt asks next."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import Calibration, Link, PassCost, Planner, PrefillCost, Request, load_machine, load_model
from kvlane.policy.crossover import Kept, crossover, holds_for_all, in_words, search
from kvlane.policy.lane import Lane

LLAMA, H100 = load_model("llama-3.1-8b"), load_machine("h100-sxm")
times = st.floats(-7, -3).map(lambda exponent: float(10.0**exponent))


@st.composite
def plain_planners(draw: st.DrawFn) -> Planner:
    """Those whose crossovers may be kept, and some beside them, with links around the rate at which paths tie."""
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
        executor=draw(st.sampled_from(("bulk", "bulk", "layered"))),
        calibration=Calibration(PrefillCost(32, fresh, cost), 0.1, "drawn at random"),
    )


def lane(planner: Planner, prompt: int, stored: int, resident: int = 0, busy_s: float = 0.0) -> Lane:
    request = Request(prompt, {"host": stored}, resident_tokens=resident, device_busy_s=busy_s)
    return planner._lane("host", request)


prompts = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 100_000)), min_size=2, max_size=6)


@given(
    planner=plain_planners(),
    lengths=prompts,
    resident=st.just(0) | st.integers(0, 3000),
    busy_s=st.sampled_from((0.0, 0.0, 0.01, 3.0)),
)
@settings(max_examples=300, deadline=None)
def test_what_holds_for_all_is_found_by_every_search(
    planner: Planner, lengths: list[tuple[int, int]], resident: int, busy_s: float
) -> None:
    lanes = [
        lane(planner, resident + 32 + stored + suffix, resident + 16 + stored, resident, busy_s)
        for suffix, stored in lengths
    ]
    first = search(lanes[0])
    if first is not None and holds_for_all(lanes[0], first):
        assert [search(other) for other in lanes] == [first] * len(lanes)


@given(
    planner=plain_planners() | st.from_type(Planner),
    lengths=prompts,
    resident=st.sampled_from((0, 0, 16, 100)),
    busy_s=st.sampled_from((0.0, 0.0, 0.01)),
    chunk=st.sampled_from((None, None, 512, 30_000, 200_000)),
)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_what_a_search_finds(
    planner: Planner, lengths: list[tuple[int, int]], resident: int, busy_s: float, chunk: int | None
) -> None:
    kept = Kept()
    for suffix, stored in [*lengths, *lengths]:
        request = Request(
            resident + 16 + stored + suffix,
            {"host": resident + 16 + stored},
            resident_tokens=resident,
            device_busy_s=busy_s,
            prefill_chunk_tokens=chunk,
        )
        found = planner._lane("host", request)
        assert crossover(found, kept) == in_words(
            search(found), resident, request.prompt_tokens - found.usable
        )


def test_of_a_usual_machine_it_is_kept_from_the_second_request_on() -> None:
    planner, kept = Planner(LLAMA, H100), Kept()
    for prompt in (1000, 2000, 3000):
        assert kept.known(0, 0.0, 0.0) == (None if prompt < 3000 else 7)
        assert kept.tokens(lane(planner, prompt, prompt)) == 7


def test_one_of_several_crossovers_is_not_kept() -> None:
    # A run of a copy costs more than its tokens: just after each run's end loading is slower for a while.
    link = replace(H100.links["pcie5-x16"], per_copy_s=1.2e-5)
    planner = Planner(LLAMA, replace(H100, links={**H100.links, "pcie5-x16": link}))
    kept = Kept()
    found = {kept.tokens(lane(planner, prompt, prompt)) for prompt in range(20, 3000, 16)}
    assert len(found) > 1
    assert kept.known(0, 0.0, 0.0) is None


def test_queues_told_anew_each_time_are_not_kept_for_ever() -> None:
    planner, kept = Planner(LLAMA, H100), Kept()
    for number in range(2000):
        kept.tokens(lane(planner, 1000, 900, busy_s=number * 1e-4))
    assert len(kept) < 1000
