"""A plan in time: what its copies and computes must add up to, whatever the model, the machine and the request."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import Estimate, Planner, Request, load_machine, load_model
from kvlane.policy.assignment import Place, assign
from kvlane.policy.booking import Booking, Load, LoadKey
from kvlane.policy.ledger import Ledger
from kvlane.policy.machine import Machine
from kvlane.policy.plan import EXECUTORS, Executor
from kvlane.policy.timeline import Timeline, timeline

# Plain layers, windows, states, latents with an indexer, and layers that keep nothing.
MODELS = (
    "llama-3.2-1b",
    "gpt-oss-20b",
    "gemma-3-27b",
    "gemma-4-26b-a4b",
    "deepseek-v3.2",
    "llama-4-scout",
    "qwen3-next-80b-a3b",
    "nemotron-3-nano-30b-a3b",
)
H100 = load_machine("h100-sxm")


def close(one: float, other: float, ttft_s: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9 * ttft_s)


def check(planner: Planner, request: Request, estimate: Estimate, found: Timeline) -> None:
    """All that must hold of any timeline."""
    ttft_s, layers = estimate.ttft_s, planner.layers
    assert (found.ttft_s, found.device_busy_s) == (ttft_s, request.device_busy_s)
    assert close(found.computes[-1].end_s, ttft_s, ttft_s)

    for one, other in pairwise(found.computes):
        assert one.end_s <= other.start_s
    for compute in found.computes:
        assert request.device_busy_s <= compute.start_s <= compute.end_s
    fronts = [compute for compute in found.computes if compute.part == "front"]
    assert bool(fronts) == (bool(estimate.load) and estimate.start > request.resident_tokens)
    assert close(sum(each.end_s - each.start_s for each in fronts), estimate.front_s, ttft_s)
    for part in ("front", "tail"):
        # The first pass comes layer by layer, whatever follows it as one.
        own = [compute for compute in found.computes if compute.part == part]
        if own:
            assert [(each.first_layer, each.layers) for each in own[:layers]] == [
                (layer, 1) for layer in range(layers)
            ]
            assert [(each.first_layer, each.layers) for each in own[layers:]] in ([], [(0, layers)])
    work_s = sum(each.end_s - each.start_s for each in found.computes)
    assert close(work_s, estimate.compute_s, ttft_s)

    tail = {each.first_layer: each for each in found.computes if each.part == "tail" and each.layers == 1}
    for copy in found.copies:
        assert 0 <= copy.start_s <= copy.end_s
        assert 0 <= copy.first_layer < copy.first_layer + copy.layers <= layers
        assert all(
            tail[layer].start_s >= copy.end_s
            for layer in range(copy.first_layer, copy.first_layer + copy.layers)
        )
    assert list(found.copies) == sorted(found.copies, key=lambda copy: copy.start_s)
    for link in {copy.link for copy in found.copies}:
        for first, then in pairwise([copy for copy in found.copies if copy.link == link]):
            assert then.start_s >= first.end_s * (1 - 1e-12)
    if found.copies:
        assert max(copy.end_s for copy in found.copies) <= estimate.transfer_s * (1 + 1e-9)
    if not estimate.load:
        assert found.copies == ()

    for span in found.exposed:
        assert span.start_s < span.end_s
        # A wait ends with the arrival of what was waited for.
        assert any(copy.end_s == span.end_s for copy in found.copies)
        assert all(each.end_s <= span.start_s or each.start_s >= span.end_s for each in found.computes)
    exposed_s = sum(span.end_s - span.start_s for span in found.exposed)
    assert close(found.device_busy_s + exposed_s, estimate.exposed_s, ttft_s)


def check_all(planner: Planner, request: Request) -> None:
    for estimate in planner.decide(request).estimates.values():
        if estimate is not None:
            found = timeline(planner, request, estimate)
            check(planner, request, estimate, found)
            queues = [request.link_queue_s.get(each.tier, 0.0) for each in estimate.load]
            assert found.link_queue_s >= max(queues[:1], default=0.0)
            if found.copies:
                assert min(copy.start_s for copy in found.copies) <= found.link_queue_s


@given(planner=st.from_type(Planner), request=st.from_type(Request))
@settings(max_examples=400)
def test_copies_and_computes_add_up_to_what_was_decided(planner: Planner, request: Request) -> None:
    check_all(planner, request)


@st.composite
def unlike(draw: st.DrawFn) -> tuple[Planner, Request]:
    """Real models on machines whose links cost events, of either layout, with one or several tiers on a link."""
    tiers = {}
    links = {}
    for name in ("host", "remote"):
        link = H100.links[H100.tiers[name].link]
        links[link.name] = replace(
            link,
            rate_bytes_per_s=10.0 ** draw(st.floats(8, 11)),
            per_event_s=draw(st.sampled_from((0.0, 1e-5, 1e-3))),
            ceiling_bytes_per_s=None,
            first_use_s=draw(st.sampled_from((0.0, 0.01))),
        )
        tiers[name] = replace(
            H100.tiers[name],
            layout=draw(st.sampled_from(("layer_major", "chunk_major"))),
            link=draw(st.sampled_from((link.name, H100.tiers["host"].link))),
        )
    machine = Machine(H100.name, H100.device, links, tiers, H100.prefill)
    planner = Planner(
        load_model(draw(st.sampled_from(MODELS))), machine, executor=draw(st.sampled_from(EXECUTORS)), tp=2
    )
    prompt = draw(st.integers(100, 30_000))
    named = draw(st.sampled_from((("host",), ("remote",), ("host", "remote"))))
    hits = {name: draw(st.integers(prompt // 2, prompt)) for name in named}
    unit = draw(st.sampled_from((16, 256)))
    return planner, Request(
        prompt_tokens=prompt,
        hits=hits,
        resident_tokens=draw(st.just(0) | st.integers(0, prompt // 2)),
        load_unit_tokens=unit,
        prefill_chunk_tokens=draw(st.none() | st.integers(512, 8192)),
        state_checkpoints=[at * unit for at in draw(st.sets(st.integers(1, prompt // unit + 1), max_size=6))],
        link_queue_s={name: draw(st.sampled_from((0.0, 0.003, 0.5))) for name in hits},
        cold=draw(st.sampled_from(((), ("host",)))),
        device_busy_s=draw(st.sampled_from((0.0, 0.01, 0.4))),
    )


@given(drawn=unlike())
@settings(max_examples=150, deadline=None)
def test_they_do_so_where_layers_differ(drawn: tuple[Planner, Request]) -> None:
    check_all(*drawn)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
@pytest.mark.parametrize("event_s", [0.0, 2e-3])
@pytest.mark.parametrize("one_link", [False, True])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_tiers_bring_one_load(executor: Executor, one_link: bool, event_s: float, model: str) -> None:
    shapes = set()
    for rate in (3e9, 8e9, 2e10, 4e10):
        links = {
            name: replace(link, per_event_s=event_s, rate_bytes_per_s=rate, ceiling_bytes_per_s=None)
            for name, link in H100.links.items()
        }
        host, remote = H100.tiers["host"], H100.tiers["remote"]
        # Over one link two tiers are worth it only where one of them is dearer.
        other = replace(
            host,
            name="remote",
            link=host.link if one_link else remote.link,
            per_token_s=2e-6 if one_link else 0.0,
        )
        machine = replace(H100, links=links, tiers={"host": host, "remote": other})
        planner = Planner(load_model(model), machine, executor=executor)
        request = Request(prompt_tokens=20_000, hits={"host": 12_000, "remote": 19_200}, device_busy_s=0.02)
        for estimate in planner.decide(request).estimates.values():
            if estimate is None:
                continue
            found = timeline(planner, request, estimate)
            check(planner, request, estimate, found)
            shapes.add((len({copy.tier for copy in found.copies}), bool(estimate.front_s)))
            if estimate.load and model == "llama-3.1-8b":  # a front has nothing for the layers of a window
                groups = 1 if executor == "bulk" else -(-planner.layers // estimate.group_layers)
                assert len(found.copies) == groups * len(estimate.load)
    assert 2 in {tiers for tiers, _ in shapes}
    assert any(front for _, front in shapes) == (executor == "two_ended")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_load_that_is_joined_is_waited_for_as_a_whole(executor: Executor) -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"), executor=executor)
    ledger, place = Ledger(), Place("i")
    request = Request(prompt_tokens=20_000, hits={"host": 19_984}, device_busy_s=0.01)
    load = Load(place.link("pcie5-x16"), 0.05, 1e9, LoadKey("i", "host", "p"), 0, 19_984, 19_984)
    ledger.reserve("r", Booking(instance="i", ttft_s=1.0, device_s=0.001, loads=(load,)), 0.0)
    found = assign(ledger, planner, request, place, 0.0, prefix_id="p")
    assert found.joins
    chosen = found.plan.estimates[found.plan.path]
    assert chosen is not None
    told = timeline(planner, request, chosen, own=(), joined=[("host", 0.05)])
    check(planner, request, chosen, told)
    assert [(copy.start_s, copy.end_s, copy.layers) for copy in told.copies] == [(0.0, 0.05, 32)]
    assert [(span.start_s, span.end_s) for span in told.exposed] == [(0.01, 0.05)]


def test_a_bulk_load_is_one_copy_that_is_waited_for() -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"))
    request = Request(prompt_tokens=12_370, hits={"host": 12_368}, link_queue_s={"host": 0.02})
    load = planner.decide(request).estimates["load"]
    assert load is not None
    told = timeline(planner, request, load)
    assert told.link_queue_s == 0.02
    (copy,) = told.copies
    assert (copy.tier, copy.link, copy.first_layer, copy.layers) == ("host", "pcie5-x16", 0, 32)
    assert copy.start_s == 0.02
    assert copy.end_s == pytest.approx(load.transfer_s)
    (span,) = told.exposed
    assert (span.start_s, span.end_s) == (0.0, copy.end_s)


def test_later_passes_come_as_one() -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"))
    request = Request(prompt_tokens=20_000, prefill_chunk_tokens=2048)
    recompute = planner.decide(request).estimates["recompute"]
    assert recompute is not None
    told = timeline(planner, request, recompute)
    assert (told.copies, told.exposed) == ((), ())
    assert len(told.computes) == 33
    assert (told.computes[-1].first_layer, told.computes[-1].layers) == (0, 32)
