"""When the last layer is done: what happens step by step, in closed form, and in O(1) for equal layers."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import pipeline

seconds = st.floats(0, 10) | st.floats(1e-9, 1e-3)
layers_of = st.integers(1, 100).flatmap(
    lambda count: st.tuples(
        st.lists(seconds, min_size=count, max_size=count), st.lists(seconds, min_size=count, max_size=count)
    )
)
Layers = tuple[list[float], list[float]]


def stepped(lead: float, gap: float, count: int) -> list[float]:
    return [lead + (layer + 1) * gap for layer in range(count)]


def uniform(lead: float, gap: float, compute: float, count: int) -> float:
    """When the last of equal layers is done."""
    return count * compute + pipeline.uniform_wait(lead, gap, compute, count)


@given(layers=layers_of)
def test_the_closed_form_is_what_happens(layers: Layers) -> None:
    arrivals, computes = layers
    assert pipeline.closed_form(arrivals, computes) == pytest.approx(
        pipeline.recurrence(arrivals, computes)[-1], rel=1e-9
    )


@given(layers=layers_of, begin=seconds)
def test_a_pass_that_begins_later_waits_for_whatever_is_later(layers: Layers, begin: float) -> None:
    arrivals, computes = layers
    done = pipeline.recurrence(arrivals, computes, begin)[-1]
    assert pipeline.closed_form(arrivals, computes, begin) == pytest.approx(done, rel=1e-9)
    wait = pipeline.longest_wait(arrivals, computes)
    assert done == pytest.approx(sum(computes) + max(begin, wait), rel=1e-9)


@given(lead=seconds, gap=seconds, compute=seconds, count=st.integers(1, 100))
def test_the_uniform_form_is_what_happens_to_equal_layers(
    lead: float, gap: float, compute: float, count: int
) -> None:
    finishes = pipeline.recurrence(stepped(lead, gap, count), [compute] * count)
    assert uniform(lead, gap, compute, count) == pytest.approx(finishes[-1], rel=1e-9)


@given(
    lead=seconds,
    gap=seconds,
    compute=seconds,
    count=st.integers(1, 100),
    group=st.integers(1, 100),
    event=st.just(0.0) | seconds,
)
@settings(max_examples=400)
def test_the_grouped_form_is_what_happens_when_layers_share_events(
    lead: float, gap: float, compute: float, count: int, group: int, event: float
) -> None:
    # Each event is a copy of its own on the link, after the layers it speaks for; nobody computes before it fires.
    at, arrivals = lead, []
    for first in range(0, count, group):
        layers = min(group, count - first)
        at += layers * gap + event
        arrivals += [at] * layers
    done = pipeline.recurrence(arrivals, [compute] * count)[-1]
    waited = pipeline.uniform_wait(lead, gap, compute, count, group, event)
    assert count * compute + waited == pytest.approx(done, rel=1e-9)
    assert pipeline.grouped(stepped(lead, gap, count), group, event) == pytest.approx(arrivals)


@given(layers=layers_of, group=st.integers(1, 100))
def test_groups_without_a_price_never_help(layers: Layers, group: int) -> None:
    arrivals, computes = sorted(layers[0]), layers[1]
    alone = pipeline.closed_form(arrivals, computes)
    together = pipeline.closed_form(pipeline.grouped(arrivals, group), computes)
    assert pipeline.grouped(arrivals, 1) == arrivals
    assert alone <= together * (1 + 1e-9)
    assert together <= (arrivals[-1] + sum(computes)) * (1 + 1e-9)


@given(layers=layers_of, event=st.just(0.0) | seconds, data=st.data())
def test_the_waits_of_every_size_of_a_group_are_found_together(
    layers: Layers, event: float, data: st.DataObject
) -> None:
    arrivals, computes = sorted(layers[0]), layers[1]
    # Some layers are not awaited: they only compute.
    awaited = data.draw(st.lists(st.booleans(), min_size=len(arrivals), max_size=len(arrivals)))
    moving = [layer for layer, awaits in enumerate(awaited) if awaits]
    before = list(accumulate(computes, initial=0.0))
    waits = pipeline.group_waits(
        [arrivals[layer] for layer in moving], [before[layer] for layer in moving], event
    )
    assert len(waits) == len(moving)
    for group, wait in enumerate(waits, 1):
        each = [0.0] * len(arrivals)
        for layer, at in zip(
            moving, pipeline.grouped([arrivals[layer] for layer in moving], group, event), strict=True
        ):
            each[layer] = at
        assert max(0.0, wait) == pytest.approx(pipeline.longest_wait(each, computes), rel=1e-9, abs=1e-12)


@given(layers=layers_of, data=st.data())
def test_of_two_sources_the_one_waited_for_longer_counts(layers: Layers, data: st.DataObject) -> None:
    first, computes = layers
    second = data.draw(st.lists(seconds, min_size=len(first), max_size=len(first)))
    both = pipeline.longest_wait([max(pair) for pair in zip(first, second, strict=True)], computes)
    assert both == max(pipeline.longest_wait(source, computes) for source in (first, second))


@given(layers=layers_of)
def test_every_layer_waits_for_its_own_kv_and_for_the_layer_before_it(layers: Layers) -> None:
    arrivals, computes = layers
    finishes = pipeline.recurrence(arrivals, computes)
    before = 0.0
    for arrival, compute, finish in zip(arrivals, computes, finishes, strict=True):
        assert finish - compute >= before - 1e-9
        assert finish - compute >= arrival - 1e-9
        before = finish


@given(layers=layers_of)
def test_nothing_beats_compute_alone_or_the_last_arrival_and_nothing_is_worse_than_bulk(
    layers: Layers,
) -> None:
    arrivals, computes = layers
    done = pipeline.closed_form(arrivals, computes)
    assert done >= sum(computes) * (1 - 1e-9)
    assert done >= (max(arrivals) if max(arrivals) == arrivals[-1] else 0.0)
    assert done <= (max(arrivals) + sum(computes)) * (1 + 1e-9)


@given(layers=layers_of)
def test_bulk_is_every_layer_arriving_with_the_last_one(layers: Layers) -> None:
    arrivals, computes = layers
    last = max(arrivals)
    bulk = pipeline.closed_form([last] * len(computes), computes)
    assert bulk == pytest.approx(last + sum(computes), rel=1e-9)
    assert bulk == pytest.approx(uniform(last, 0.0, sum(computes) / len(computes), len(computes)))


@given(layers=layers_of, late=seconds, data=st.data())
def test_a_layer_that_is_late_or_slow_never_helps_and_delays_by_no_more_than_that(
    layers: Layers, late: float, data: st.DataObject
) -> None:
    arrivals, computes = layers
    done = pipeline.closed_form(arrivals, computes)
    layer = data.draw(st.integers(0, len(arrivals) - 1))
    for changed in (arrivals, computes):
        kept = changed[layer]
        changed[layer] = kept + late
        delayed = pipeline.closed_form(arrivals, computes)
        changed[layer] = kept
        assert done * (1 - 1e-9) <= delayed <= (done + late) * (1 + 1e-9)


@given(layers=layers_of)
def test_layers_that_are_all_there_take_their_compute(layers: Layers) -> None:
    _, computes = layers
    finishes = pipeline.recurrence([0.0] * len(computes), computes)
    assert finishes == pytest.approx(list(accumulate(computes)), rel=1e-9)


def test_the_first_layers_copy_is_always_exposed() -> None:
    # However slow compute is, the pass cannot start before the first layer's KV is there.
    assert uniform(lead=0.0, gap=1.0, compute=100.0, count=10) == 1001.0
    assert uniform(lead=0.0, gap=1.0, compute=0.001, count=10) == pytest.approx(10.001)


def test_as_many_arrivals_as_computes_are_needed() -> None:
    for form in (pipeline.recurrence, pipeline.closed_form):
        with pytest.raises(ValueError):
            form([1.0, 2.0], [1.0])


def test_the_published_serial_and_overlapped_times(shared: Path) -> None:
    known = json.loads((shared / "known_answers.json").read_text())["serial_or_overlapped"]
    rows = zip(
        known["device_only_ms"], known["copy_ms"], known["serial_ms"], known["lower_bound_ms"], strict=True
    )
    for compute, copy, serial, bound in rows:
        # One layer overlaps nothing; ever more layers approach the larger of the two.
        assert uniform(0.0, copy, compute, 1) == pytest.approx(serial)
        many = 10_000
        assert uniform(0.0, copy / many, compute / many, many) == pytest.approx(bound, rel=1e-3)
        some = uniform(0.0, copy / 32, compute / 32, 32)
        assert bound < some < serial
