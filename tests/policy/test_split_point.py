"""The split point the planner finds in a few steps, against trying every load unit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvlane.policy import (
    Calibration,
    Device,
    LayerSpec,
    Link,
    Machine,
    ModelSpec,
    PassCost,
    Planner,
    PrefillCost,
    Request,
    Tier,
    load_machine,
    load_model,
)
from kvlane.policy.plan import Executor
from kvlane.policy.transfer_cost import TransferCost

# What two_ended adds to layered has tests of its own.
planners = st.from_type(Planner).filter(lambda planner: planner.executor != "two_ended")
# Hits of one tier, so that a plan's split is that tier's best.
requests = st.from_type(Request).map(
    lambda request: replace(request, hits={"host": request.hits.get("host", request.prompt_tokens)})
)


def transfer_of(planner: Planner, request: Request) -> TransferCost:
    tier = planner.machine.tier("host")
    link = planner.machine.links[tier.link]
    return TransferCost.of_tier(
        tier, link, planner.layers, planner.layer_bytes_per_token, request.load_unit_tokens
    )


def every_split(planner: Planner, request: Request) -> dict[int, float]:
    """TTFT by split point, over all of them: whole units strictly between resident and usable."""
    unit, prompt = request.load_unit_tokens, request.prompt_tokens
    usable = min(request.hit("host"), prompt - request.tail_tokens) // unit * unit
    transfer = transfer_of(planner, request)
    first = (request.resident_tokens // unit + 1) * unit
    return {
        end: planner.cost.load_s(transfer, request.resident_tokens, end, prompt, request.prefill_chunk_tokens)
        for end in range(first, usable, unit)
    }


def with_parts(
    planner: Planner,
    *,
    flat: bool = False,
    run_tokens: int | None = None,
    prefill: PrefillCost | None = None,
) -> Planner:
    """The same planner with other runs of the host tier, flat links, or another prefill cost."""
    machine = planner.machine
    host = replace(machine.tier("host"), run_tokens=run_tokens)
    if flat:
        links = {name: replace(link, rate_table=(), per_event_s=0.0) for name, link in machine.links.items()}
        machine = replace(machine, links=links)
    return Planner(
        planner.model,
        replace(machine, tiers={**machine.tiers, "host": host}),
        executor=planner.executor,
        calibration=Calibration(prefill or planner.prefill, 0.1, "drawn at random"),
        tie_margin=planner.tie_margin,
    )


def found_and_best_s(planner: Planner, request: Request) -> tuple[float, float]:
    tried = every_split(planner, request)
    found = planner.decide(request).estimates["split"]
    if not tried:
        assert found is None
        return 0.0, 0.0
    assert found is not None
    assert found.end in tried
    assert found.ttft_s == pytest.approx(tried[found.end], rel=1e-12)
    return found.ttft_s, min(tried.values())


@given(planner=planners, request=requests, paged=st.booleans())
@settings(max_examples=200)
def test_a_flat_link_and_one_pass_give_the_very_best_split(
    planner: Planner, request: Request, paged: bool
) -> None:
    request = replace(request, prefill_chunk_tokens=None)
    planner = with_parts(planner, flat=True, run_tokens=0 if paged else None)
    found, best = found_and_best_s(planner, request)
    assert found <= best * (1 + 1e-9)


@given(planner=planners, request=requests)
@settings(max_examples=200)
def test_without_a_memory_floor_chunks_change_nothing_about_that(planner: Planner, request: Request) -> None:
    bare = replace(planner.prefill, floor_s=0.0, floor_context_s=0.0)
    planner = with_parts(planner, flat=True, run_tokens=0, prefill=bare)
    found, best = found_and_best_s(planner, request)
    assert found <= best * (1 + 1e-9)


def chunked(executor: Executor, layers: int, cost: PassCost, link: Link, tier: Tier) -> Planner:
    layer = LayerSpec(heads=1, kv_heads=1, k_width=250, v_width=250, weights=1)
    return Planner(
        ModelSpec("chunked", (layer,) * layers, 250, 10, "bf16", "bf16"),
        Machine("chunked", Device("chunked"), {"link": link}, {"host": tier}, ()),
        executor=executor,
        calibration=Calibration(PrefillCost(layers, cost, cost), 0.1, "drawn at random"),
    )


@st.composite
def many_chunks(draw: st.DrawFn) -> tuple[Planner, Request]:
    """Passes whose own cost counts, and prompts of many chunks, most of them of whole load units."""
    layers = draw(st.sampled_from((1, 2, 4, 16, 32)))
    cost = PassCost(
        draw(st.sampled_from((0.0, 1e-3, 2e-2, 0.1, 0.5))),
        1e-3,
        draw(st.sampled_from((0.0, 1e-7, 1e-6, 1e-5, 1e-3))),
        draw(st.sampled_from((0.0, 1e-6, 1e-4))),
        draw(st.booleans()),
    )
    link = Link(
        "link",
        1e6 * layers * draw(st.sampled_from((0.01, 0.1, 0.3, 0.7, 1.0, 1.5, 3.0, 100.0))),
        per_copy_s=draw(st.sampled_from((0.0, 1e-4))),
        latency_s=draw(st.sampled_from((0.0, 5e-3))),
    )
    tier = Tier(
        "host",
        "link",
        run_tokens=draw(st.sampled_from((None, 0))),
        layout=draw(st.sampled_from(("layer_major", "layer_major", "chunk_major"))),
    )
    planner = chunked(draw(st.sampled_from(("bulk", "layered"))), layers, cost, link, tier)
    unit = draw(st.sampled_from((1, 4, 16)))
    prompt = draw(st.integers(3 * unit, 60 * unit))
    request = Request(
        prompt,
        {"host": prompt - draw(st.just(0) | st.integers(0, prompt))},
        resident_tokens=draw(st.just(0) | st.integers(0, prompt // 2)),
        load_unit_tokens=unit,
        prefill_chunk_tokens=draw(
            st.integers(1, 12).map(lambda units: units * unit) | st.integers(1, 12 * unit)
        ),
    )
    return planner, request


# Found by random search: the best split is at the end of a stretch beside the one where the waits cross, and
# chunks that are not whole load units make the ends of stretches uneven.
ODD_ENDS = (
    chunked(
        "layered",
        4,
        PassCost(1e-3, 1e-3, 1e-6, 1e-4, rectangle=True),
        Link("link", 2.8e6, per_copy_s=1e-4),
        Tier("host", "link", run_tokens=0),
    ),
    Request(41, {"host": 41}, resident_tokens=8, load_unit_tokens=1, prefill_chunk_tokens=6),
)
UNEVEN_CHUNKS = (
    chunked(
        "bulk",
        4,
        PassCost(0.5, 1e-3, 1e-7, 1e-6, rectangle=True),
        Link("link", 4e4),
        Tier("host", "link", layout="chunk_major"),
    ),
    Request(108, {"host": 38}, load_unit_tokens=4, prefill_chunk_tokens=6),
)


@given(both=many_chunks())
@example(both=ODD_ENDS)
@example(both=UNEVEN_CHUNKS)
@settings(max_examples=400, deadline=None)
def test_of_many_chunks_the_few_that_are_looked_at_hold_the_best_split(both: tuple[Planner, Request]) -> None:
    found, best = found_and_best_s(*both)
    assert found <= best * (1 + 1e-9)


@given(planner=planners, request=requests)
@settings(max_examples=300)
def test_any_link_store_and_engine_give_a_split_within_a_percent_of_the_best(
    planner: Planner, request: Request
) -> None:
    found, best = found_and_best_s(planner, request)
    assert found <= best * 1.01


def passes(overhead_s: float, token_s: float, pair_s: float, context_s: float = 0.0) -> PassCost:
    return PassCost(overhead_s, token_s, pair_s, context_s)


# Found by random search: the best split lies where TTFT bends for another reason than the first pass's own.
BENDS: dict[str, tuple[Executor, Link, Tier, int, PrefillCost, Request]] = {
    "loading a whole run costs no more copies than loading its first token": (
        "layered",
        Link("link", 28.6e9, per_copy_s=73e-6),
        Tier("host", "link", layout="chunk_major", run_tokens=100, runs_per_layer=2),
        256,
        PrefillCost(16, passes(17.6e-3, 12e-6, 0.0), passes(0.0, 3.4e-7, 1.4e-11)),
        Request(142, {"host": 142}, load_unit_tokens=1),
    ),
    "a copy smaller than the table's first row takes as long as that row": (
        "bulk",
        Link("link", 35e6, rate_table=((480e3, 35e6),)),
        Tier("host", "link", run_tokens=16),
        1024,
        PrefillCost(2, passes(0.0, 6.4e-4, 0.0), passes(1e-4, 3.9e-4, 0.0)),
        Request(177, {"host": 177}, load_unit_tokens=1),
    ),
    "a copy outgrows a row of the table": (
        "layered",
        Link("link", 496e6, rate_table=((167e3, 73e6), (830e3, 156e6), (2.7e6, 289e6), (259e6, 496e6))),
        Tier("host", "link", runs_per_layer=2),
        256,
        PrefillCost(32, passes(0.0, 3.7e-6, 0.0), passes(0.0, 1.87e-5, 0.0)),
        Request(8105, {"host": 6481}, prefill_chunk_tokens=2908),
    ),
    "the last chunk leaves the memory floor": (
        "layered",
        Link("link", 2.28e9, latency_s=3.1e-3),
        Tier("host", "link"),
        4096,
        PrefillCost(
            2,
            passes(0.0, 4.5e-4, 0.0),
            passes(0.0, 3.9e-6, 5.6e-10, 7.5e-9),
            floor_s=9.1e-3,
            floor_context_s=1.9e-9,
        ),
        Request(7071, {"host": 2160}, prefill_chunk_tokens=4434),
    ),
}


@pytest.mark.parametrize("why", BENDS)
def test_the_split_is_found_also_where_something_else_bends(why: str) -> None:
    executor, link, tier, layer_bytes, prefill, request = BENDS[why]
    layer = LayerSpec(heads=1, kv_heads=1, k_width=layer_bytes // 4, v_width=layer_bytes // 4, weights=1)
    planner = Planner(
        ModelSpec("small", (layer,) * prefill.layers, 64, 100, "bf16", "bf16"),
        Machine("small", Device("small"), {"link": link}, {"host": tier}, ()),
        executor=executor,
        calibration=Calibration(prefill, 0.1, "found by random search"),
    )
    found, best = found_and_best_s(planner, request)
    assert found <= best * 1.01


@pytest.mark.parametrize("executor", ["bulk", "layered"])
@pytest.mark.parametrize("chunk", [None, 128, 256, 512, 2048, 8192])
@pytest.mark.parametrize("gb_per_s", [0.5, 2.0, 5.0, 20.0, 50.0])
def test_on_a_built_in_machine_the_split_is_the_best_there_is(
    executor: Executor, chunk: int | None, gb_per_s: float
) -> None:
    # Chunks of a few hundred tokens are where a pass turns from memory-bound to compute-bound on an H100.
    machine = load_machine("h100-sxm")
    if gb_per_s != 50.0:
        machine = machine.with_link_rate(gb_per_s * 1e9)
    planner = Planner(load_model("llama-3.1-8b"), machine, executor=executor)
    request = Request(12370, {"host": 12368}, resident_tokens=100, prefill_chunk_tokens=chunk)
    found, best = found_and_best_s(planner, request)
    assert found <= best * (1 + 1e-9)


@given(planner=planners, request=requests, data=st.data())
@settings(max_examples=60)
def test_a_faster_link_never_makes_the_best_split_slower(
    planner: Planner, request: Request, data: st.DataObject
) -> None:
    request = replace(request, prefill_chunk_tokens=None)
    slow = with_parts(planner, flat=True)
    split = slow.decide(request).estimates["split"]
    assume(split is not None)
    assert split is not None
    factor = data.draw(st.floats(1, 100))
    link = slow.machine.links["to_host"]
    links = {**slow.machine.links, "to_host": replace(link, rate_bytes_per_s=link.rate_bytes_per_s * factor)}
    fast = Planner(
        slow.model,
        replace(slow.machine, links=links),
        executor=slow.executor,
        calibration=Calibration(slow.prefill, 0.1, "drawn at random"),
    )
    faster = fast.decide(request).estimates["split"]
    assert faster is not None
    assert faster.ttft_s <= split.ttft_s * (1 + 1e-9)
