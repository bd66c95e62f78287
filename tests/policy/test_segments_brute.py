"""Plans of several parts against every plan there is, on cases small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from kvlane.policy import (
    Calibration,
    Device,
    Estimate,
    LayerSpec,
    Link,
    LoadSegment,
    Machine,
    ModelSpec,
    PassCost,
    Planner,
    PrefillCost,
    Request,
    Tier,
)
from kvlane.policy.plan import EXECUTORS, Executor

PER_TOKEN = PassCost(overhead_s=0.0, token_s=1e-3, pair_s=0.0)
SIMPLE = ModelSpec("simple", (LayerSpec(1, 1, 250, 250, 1),) * 4, 250, 10, "bf16", "bf16")


def usable(request: Request, tier: str) -> int:
    unit = request.load_unit_tokens
    return max(0, min(request.hit(tier), request.prompt_tokens - request.tail_tokens)) // unit * unit


def every_load(planner: Planner, request: Request) -> Iterator[tuple[tuple[str, int, int], ...]]:
    """All there is to do: runs from one tier or two, ending anywhere, or beginning anywhere and ending at the end."""
    unit, resident = request.load_unit_tokens, request.resident_tokens
    ends = {tier: usable(request, tier) for tier in request.hits}

    def units(low: int, high: int) -> range:
        return range((low // unit + 1) * unit, high + 1, unit)

    for last, furthest in ends.items():
        begins = [resident]
        if planner.executor == "two_ended":
            begins += units(resident, furthest - 1)
        for end in units(resident, furthest):
            for begin in begins if end == furthest else [resident]:
                yield ((last, begin, end),)
                for first in ends:
                    if first != last:
                        for boundary in units(begin, min(end - 1, ends[first])):
                            yield (first, begin, boundary), (last, boundary, end)


def best_of_all_s(replay: Any, planner: Planner, request: Request) -> float:
    """The least TTFT over every load, in groups of every size."""
    recompute = planner.cost.recompute_s(
        request.resident_tokens, request.prompt_tokens, request.prefill_chunk_tokens
    )
    groups = range(1, planner.layers + 1) if planner.executor != "bulk" else (1,)
    times = [
        replay.ttft_s(
            planner,
            request,
            Estimate(
                "load",
                0.0,
                0.0,
                load=tuple(LoadSegment(tier, start, end, 0) for tier, start, end in load),
                group_layers=group,
            ),
        )
        for load in every_load(planner, request)
        for group in groups
    ]
    return min([recompute, *times])


few_layers = st.from_type(Planner).filter(lambda planner: planner.layers <= 3)


@st.composite
def balanced_planners(draw: st.DrawFn) -> Planner:
    """Machines on which loading a token takes about as long as computing it, so that every form has its cases."""
    layers = draw(st.integers(1, 4))
    cost = PassCost(draw(st.sampled_from((0.0, 1e-3))), 1e-3, draw(st.sampled_from((0.0, 1e-8))))
    prefill = PrefillCost(layers, cost, cost, floor_s=draw(st.sampled_from((0.0, 0.01))))
    model = replace(SIMPLE, layers=SIMPLE.layers[:layers])
    links = {
        name: Link(
            name,
            1e6 * layers * draw(st.sampled_from((0.3, 1.0, 3.0))),
            per_copy_s=draw(st.sampled_from((0.0, 1e-3))),
            latency_s=draw(st.sampled_from((0.0, 5e-3))),
            per_event_s=draw(st.sampled_from((0.0, 0.0, 2e-3))),
        )
        for name in ("one", "other")
    }
    tiers = {
        name: Tier(
            name,
            draw(st.sampled_from(("one", link))),
            layout=draw(st.sampled_from(("layer_major", "layer_major", "chunk_major"))),
            run_tokens=draw(st.sampled_from((None, 0))),
        )
        for name, link in (("host", "one"), ("disk", "other"))
    }
    return Planner(
        model,
        Machine("balanced", Device("balanced"), links, tiers, ()),
        executor=draw(st.sampled_from(EXECUTORS)),
        calibration=Calibration(prefill, 0.1, "drawn at random"),
        tie_margin=draw(st.sampled_from((0.0, 0.03))),
    )


@st.composite
def small_requests(draw: st.DrawFn) -> Request:
    unit = draw(st.sampled_from((1, 16, 16, 784)))
    prompt = draw(st.integers(unit + 1, 9 * unit) | st.integers(5 * unit, 9 * unit))
    stored = st.integers(0, prompt) | st.integers(prompt * 2 // 3, prompt)
    tiers = draw(st.sampled_from((("host",), ("host", "disk"), ("disk", "host"))))
    return Request(
        prompt,
        {tier: draw(stored) for tier in tiers},
        resident_tokens=draw(st.just(0) | st.integers(0, prompt - 1)),
        load_unit_tokens=unit,
        prefill_chunk_tokens=draw(st.none() | st.integers(max(1, prompt // 4), prompt)),
    )


def priced_events(executor: Executor, host: Link, disk: Link) -> Planner:
    """Four layers, tiers over a link each."""
    tiers = {
        "host": Tier("host", "one"),
        "disk": Tier("disk", "other", run_tokens=0),
    }
    return Planner(
        SIMPLE,
        Machine("events", Device("events"), {"one": host, "other": disk}, tiers, ()),
        executor=executor,
        calibration=Calibration(PrefillCost(4, PER_TOKEN, PER_TOKEN), 0.1, "drawn at random"),
        tie_margin=0.0,
    )


@given(planner=few_layers | balanced_planners(), request=small_requests())
# Found by random search: one bends where another number of layers shares an event, the other is best cut for
# another number of them than the one it is cut for first.
@example(
    planner=priced_events("layered", Link("one", 4e6, 1e-3, 5e-3, per_event_s=2e-3), Link("other", 4e6)),
    request=Request(46, {"host": 41}, load_unit_tokens=1, prefill_chunk_tokens=32),
)
@example(
    planner=priced_events(
        "layered",
        Link("one", 4e6, per_event_s=2e-3),
        Link("other", 4e6, latency_s=5e-3),
    ),
    request=Request(13, {"host": 10, "disk": 8}, load_unit_tokens=1),
)
@settings(max_examples=500, deadline=None)
def test_no_plan_of_any_form_beats_the_chosen_one_by_more_than_the_tie_margin(
    replay: Any, planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    best = best_of_all_s(replay, planner, request)
    assert plan.ttft_s >= best * (1 - 1e-9)
    assert plan.ttft_s <= best * (1 + max(planner.tie_margin, 0.01)) * (1 + 1e-9)
    event(f"{planner.executor}: {plan.path} of {len(plan.load)}")


def test_over_one_link_whole_chunks_come_first_and_layers_are_computed_under_what_follows(
    replay: Any,
) -> None:
    """Whichever tier is named first."""
    tiers = {
        "host": Tier("host", "one", layout="chunk_major"),
        "disk": Tier("disk", "one", run_tokens=0),
    }
    planner = Planner(
        SIMPLE,
        Machine("one link", Device("one link"), {"one": Link("one", 1.2e6, 1e-3)}, tiers, ()),
        executor="layered",
        calibration=Calibration(PrefillCost(4, PER_TOKEN, PER_TOKEN, floor_s=0.01), 0.1, "drawn at random"),
        tie_margin=0.0,
    )
    for hits in ({"disk": 2, "host": 2}, {"host": 2, "disk": 2}):
        request = Request(3, hits, load_unit_tokens=1, prefill_chunk_tokens=1)
        plan = planner.decide(request)
        assert [part.tier for part in plan.load] == ["host", "disk"]
        assert plan.ttft_s <= best_of_all_s(replay, planner, request) * (1 + 1e-9)
