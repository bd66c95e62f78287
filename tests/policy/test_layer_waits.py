"""Waits for loads of unlike layers in few steps: the same as layer by layer, whatever the layers and their pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy import Link, Planner, Request, load_machine, load_model
from kvlane.policy.layer_transfer import LayerBytes, LayerwiseTransfer
from kvlane.policy.layer_waits import LayerWaits, awaited
from kvlane.policy.model_layer import LayerSpec
from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import EXECUTORS, Executor
from kvlane.policy.prefill_cost import PassCost, PrefillCost
from kvlane.policy.waits import Then, Waits

FULL = LayerSpec(8, 2, 64, 64, 1_000_000)
KINDS = (FULL, replace(FULL, weights=3_000_000), replace(FULL, kind="sliding_attention", window=64))
BYTES = st.builds(
    LayerBytes,
    per_token=st.sampled_from((0.0, 100.0, 4096.0)),
    window=st.none() | st.sampled_from((16, 100)),
    runs=st.sampled_from((1, 2)),
)
STATEFUL = BYTES.map(lambda layer: replace(layer, static=5e4, static_runs=2))


@st.composite
def patterns(draw: st.DrawFn, kinds: int) -> tuple[int, ...]:
    """Which kind each layer is: a period again and again, and what is left of it, or anything."""
    period = draw(st.lists(st.integers(0, kinds - 1), min_size=1, max_size=8))
    if draw(st.booleans()):
        period *= draw(st.integers(1, 10))
    return tuple(period + draw(st.lists(st.integers(0, kinds - 1), max_size=3)))


@st.composite
def transfers(draw: st.DrawFn) -> LayerwiseTransfer:
    kinds = draw(st.lists(BYTES | STATEFUL, min_size=1, max_size=4, unique=True))
    order = draw(patterns(len(kinds)))
    rate = 10.0 ** draw(st.floats(6, 10))
    table = draw(st.booleans())
    link = Link(
        "link",
        rate,
        per_copy_s=0.0 if table else draw(st.sampled_from((0.0, 1e-5))),
        latency_s=draw(st.sampled_from((0.0, 1e-3))),
        rate_table=((4096, rate / 10), (1 << 20, rate)) if table else (),
        per_event_s=draw(st.sampled_from((0.0, 0.0, 1e-4))),
    )
    return LayerwiseTransfer(
        link=link,
        layers=len(order),
        layer_bytes_per_token=1.0,
        run_tokens=draw(st.sampled_from((None, 16))),
        runs_per_layer=draw(st.sampled_from((1, 2))),
        layout=draw(st.sampled_from(("layer_major", "chunk_major"))),
        per_token_s=draw(st.sampled_from((0.0, 1e-6))),
        queued_s=draw(st.sampled_from((0.0, 5e-3))),
        counted=draw(st.none() | st.just((500, 37))),
        kinds=tuple(kinds),
        order=order,
    )


def prefill_of(computed: Sequence[int]) -> PrefillCost:
    cost = PassCost(overhead_s=1e-3, token_s=1e-5, pair_s=1e-9)
    unlike = () if set(computed) == {0} else tuple(KINDS[kind] for kind in computed)
    return PrefillCost(len(computed), cost, cost, unlike=unlike)


@given(
    transfer=transfers(),
    data=st.data(),
    executor=st.sampled_from(EXECUTORS),
    tokens=st.integers(1, 500),
    after=st.just(0) | st.integers(0, 150),
    suffix=st.integers(1, 300),
    chunk=st.none() | st.sampled_from((40, 1000)),
)
def test_a_wait_is_that_of_every_layer_and_without_events_never_longer(
    transfer: LayerwiseTransfer,
    data: Any,
    executor: Executor,
    tokens: int,
    after: int,
    suffix: int,
    chunk: int | None,
) -> None:
    layers = st.lists(st.integers(0, 2), min_size=transfer.layers, max_size=transfer.layers)
    computed = data.draw(st.just(transfer.order).filter(lambda order: max(order) < 3) | layers.map(tuple))
    cost = PathCost(prefill_of(computed), executor)
    end = tokens + after
    then = Then(cost, Request(end + suffix, prefill_chunk_tokens=chunk), end)
    few = LayerWaits(cost, transfer).seconds(tokens, after, then)
    each = Waits(cost, transfer).seconds(tokens, after, then)
    if executor == "bulk" or not transfer.event_s:
        assert few == pytest.approx(each, rel=1e-9, abs=1e-15)
    else:
        assert few <= each * (1 + 1e-9)
    assert then.rest_s == cost.after(end, end + suffix, chunk)[1]
    assert then.computes == cost.after(end, end + suffix, chunk)[0]


@given(data=st.data(), copied=patterns(3), moving=st.sets(st.integers(0, 2)))
def test_of_the_layers_left_out_none_is_waited_for_longest(
    data: Any, copied: tuple[int, ...], moving: set[int]
) -> None:
    computed = data.draw(patterns(3))
    computed = (computed * len(copied))[: len(copied)]
    seconds = st.lists(st.floats(0, 10), min_size=3, max_size=3)
    copies_s, computes_s = data.draw(seconds), data.draw(seconds)
    found = awaited(copied, computed, tuple(sorted(moving)))
    done = due = 0.0
    late = []
    for kind, compute in zip(copied, computed, strict=True):
        if kind in moving:
            done += copies_s[kind]
            late.append(done - due)
        due += computes_s[compute]
    if found is None:
        assert not late
        return
    kinds = sorted(set(computed))
    due_s = [
        sum(count * computes_s[kind] for count, kind in zip(counts, kinds, strict=True))
        for counts in found.before
    ]
    each = [copies_s[kind] for kind in sorted(moving)]
    assert found.latest_s(each, due_s) == pytest.approx(max(late), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_of_a_pattern_that_repeats_few_layers_count(name: str) -> None:
    planner = Planner(load_model(name), load_machine("h100-sxm"), executor="layered")
    transfer = planner.transfer("host", 16)
    assert isinstance(transfer, LayerwiseTransfer)
    found = awaited(transfer.order, planner.prefill.order, (0, 1))
    assert found is not None
    assert len(found.copied) <= 8 < planner.layers
