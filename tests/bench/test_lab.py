"""What the lab measures: answers by every path, and copies and compute each without the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlane.bench.lab import AloneTimes, Lab, timeline_rows
from kvlane.bench.shape import random_prompt
from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.device_kv import DeviceKv
from kvlane.streams.engines.transformers import TransformersEngine
from kvlane.streams.executor import LayerExecutor
from kvlane.transfer.host import HostStore


def rows_are_nan(small, start, end=None):
    """For keys and values of every layer: whether all of their rows from one token to another are NaN."""
    kv = small.lab.engine.kv
    layers = range(small.lab.engine.layout.layers)
    return [
        bool(torch.isnan(rows(at)[:, :, start:end]).all()) for at in layers for rows in (kv.keys, kv.values)
    ]


def same_answer(small, answer):
    expected = small.reference.result
    assert answer.result.first_token == expected.first_token
    np.testing.assert_allclose(answer.result.logits, expected.logits, rtol=0, atol=1e-4)


class TestAnswers:
    def test_recompute_uses_no_store(self, kit, small):
        answer = small.lab.recompute(small.ids)
        same_answer(small, answer)
        assert (answer.moved_bytes, answer.plan, answer.result.mode) == (0, None, None)
        assert answer.result.computed_tokens == kit.tokens
        assert small.store.bytes_moved == 0

    @pytest.mark.parametrize("executor", ["bulk", "layered"])
    @pytest.mark.parametrize("end", [16, 64, 128])
    def test_load_moves_exactly_its_tokens(self, kit, small, executor, end):
        answer = small.lab.load(small.store, small.ids, end, executor)
        same_answer(small, answer)
        assert answer.result.mode == executor
        assert answer.moved_bytes == answer.result.loaded_bytes == end * small.bytes_per_token
        assert (answer.result.loaded_tokens, answer.result.computed_tokens) == (end, kit.tokens - end)
        assert small.store.bytes_moved == answer.moved_bytes

    @pytest.mark.parametrize("start", [16, 64, 112])
    def test_what_lies_before_a_load_is_computed_meanwhile(self, kit, small, start):
        answer = small.lab.load(small.store, small.ids, kit.usable, "layered", start)
        same_answer(small, answer)
        assert answer.loaded == (start, kit.usable)
        assert answer.moved_bytes == (kit.usable - start) * small.bytes_per_token
        assert answer.result.computed_tokens == kit.tokens - kit.usable + start
        assert [(each.kind, each.start, each.end) for each in answer.result.passes] == [
            ("front", 0, start),
            ("tail", kit.usable, kit.tokens),
        ]

    def test_an_answer_says_which_tokens_were_loaded(self, small):
        assert small.lab.recompute(small.ids).loaded == (0, 0)
        assert small.lab.load(small.store, small.ids, 64, "bulk").loaded == (0, 64)

    @pytest.mark.parametrize(
        ("link", "path"), [("cheap_link", "load"), ("middling_link", "split"), ("slow_link", "recompute")]
    )
    def test_choose_does_what_the_policy_says(self, kit, small, link, path):
        answer = small.lab.choose(small.store, small.ids, small.planner(getattr(kit, link)))
        same_answer(small, answer)
        plan = answer.plan
        assert plan.path == path
        assert answer.result.loaded_tokens == plan.load_tokens
        assert answer.moved_bytes == plan.load_bytes == plan.load_tokens * small.bytes_per_token
        assert answer.result.computed_tokens == plan.recompute_tokens
        assert (plan.load_tokens == kit.usable) == (path == "load")
        assert (plan.load_tokens == 0) == (path == "recompute")

    @pytest.mark.parametrize("executor", ["bulk", "layered"])
    def test_choose_loads_as_the_policy_was_told_to(self, kit, small, executor):
        answer = small.lab.choose(small.store, small.ids, small.planner(kit.cheap_link, executor))
        assert answer.result.mode == executor

    def test_choose_recomputes_what_is_not_stored(self, kit, small):
        other = random_prompt(kit.shape, kit.tokens, seed=3)
        answer = small.lab.choose(small.store, other, small.planner(kit.cheap_link))
        assert (answer.plan.path, answer.moved_bytes) == ("recompute", 0)
        assert answer.result.first_token == small.lab.recompute(other).result.first_token

    def test_a_load_may_take_as_long_as_recomputing_a_large_model(self, model, kit, small, monkeypatch):
        """Near the break-even rate a load takes as long as the prefill, which knows no deadline."""
        for call in (TransformersEngine.prefill, LayerExecutor.submit):
            # As if the model were so large that its loads take several times the executor's own default.
            monkeypatch.setitem(call.__kwdefaults__, "deadline_s", 0.01)
        with Lab(model, kit.tokens, "seed-1", link_bytes_per_s=1e6) as slow:
            same_answer(small, slow.load(small.store, small.ids, kit.usable, "layered"))
            same_answer(small, slow.choose(small.store, small.ids, small.planner(kit.middling_link)))
            assert slow.sample_transfer(small.store, small.ids, kit.usable).seconds > 0.01


class TestPoison:
    """The KV of the answer before must not be what makes the next one right."""

    def test_a_shorter_load_leaves_nan_after_it(self, kit, small):
        small.lab.recompute(small.ids)
        assert not any(rows_are_nan(small, 100, kit.tokens))
        small.lab.load(small.store, small.ids[:100], 64, "layered")
        assert all(rows_are_nan(small, 100))
        small.lab.recompute(small.ids)
        small.lab.choose(small.store, small.ids[:100], small.planner(kit.cheap_link))
        assert all(rows_are_nan(small, 100))

    def test_copies_alone_leave_nan_after_them(self, kit, small):
        small.lab.recompute(small.ids)
        small.lab.sample_transfer(small.store, small.ids, 48)
        assert all(rows_are_nan(small, 48))
        assert not any(rows_are_nan(small, 0, 48))

    @pytest.mark.parametrize("path", ["bulk", "layered", "choose"])
    def test_copies_that_move_nothing_leave_no_answer(self, kit, small, path, monkeypatch):
        small.lab.recompute(small.ids)
        monkeypatch.setattr(CpuBackend, "_copy_piece", lambda *rest: None)
        if path == "choose":
            answer = small.lab.choose(small.store, small.ids, small.planner(kit.cheap_link))
        else:
            answer = small.lab.load(small.store, small.ids, kit.usable, path)
        assert np.isnan(answer.result.logits).all()


class TestTimedPart:
    """What belongs to a time to first token and what does not, on a clock that jumps while each thing is done."""

    POISON, LOOKUP, OPEN, DECIDE = 1e7, 1e6, 2e5, 3e4
    REST = 1e4  # what everything else takes is lost in it, however busy the machine

    @pytest.fixture
    def jumps(self, small, monkeypatch):
        """Makes each step take so many seconds on the lab's clock."""
        passed = 0.0
        now = small.lab.backend.now
        monkeypatch.setattr(small.lab.backend, "now", lambda: now() + passed)

        def takes(owner, name, seconds):
            step = getattr(owner, name)

            def slow(*arguments, **options):
                nonlocal passed
                passed += seconds
                return step(*arguments, **options)

            monkeypatch.setattr(owner, name, slow)

        takes(DeviceKv, "poison", self.POISON)
        takes(HostStore, "lookup", self.LOOKUP)
        takes(HostStore, "open", self.OPEN)
        return takes

    def planner(self, small, jumps, rate):
        planner = small.planner(rate)
        jumps(type(planner), "decide", self.DECIDE)
        return planner

    def check(self, seconds, expected):
        assert expected <= seconds < expected + self.REST

    def test_recompute_is_timed_without_the_poisoning(self, small, jumps):
        self.check(small.lab.recompute(small.ids).result.total_s, 0)

    @pytest.mark.parametrize("executor", ["bulk", "layered"])
    def test_load_is_timed_from_its_lookup_on(self, kit, small, jumps, executor):
        answer = small.lab.load(small.store, small.ids, kit.usable, executor)
        self.check(answer.result.total_s, self.LOOKUP + self.OPEN)

    @pytest.mark.parametrize("link", ["cheap_link", "middling_link", "slow_link"])
    def test_choose_is_timed_with_lookup_and_decision(self, kit, small, jumps, link):
        answer = small.lab.choose(small.store, small.ids, self.planner(small, jumps, getattr(kit, link)))
        opened = self.OPEN if answer.plan.load else 0.0
        self.check(answer.result.total_s, self.LOOKUP + self.DECIDE + opened)

    def test_copies_alone_are_timed_without_lookup_and_poisoning(self, kit, small, jumps):
        self.check(small.lab.sample_transfer(small.store, small.ids, kit.usable).seconds, 0)
        alone = small.lab.alone(small.store, small.ids, kit.usable)
        self.check(alone.arrivals[-1], 0)
        self.check(alone.bound_s, 0)

    def test_a_lookup_is_timed_whole(self, small, jumps):
        self.check(small.lab.lookup_s(small.store, small.ids), self.LOOKUP)


class TestHold:
    def test_loads_what_another_prompt_displaced(self, kit, small):
        lab = small.lab
        lab.recompute(random_prompt(kit.shape, kit.tokens, seed=3))
        assert not lab.engine.holds(small.ids, 64)
        lab.hold(small.store, small.ids, 64)
        assert lab.engine.holds(small.ids, 64)
        assert small.store.bytes_moved == 64 * small.bytes_per_token
        same_answer(small, type(small.reference)(lab.engine.prefill(small.ids, resident=64)))

    def test_loads_nothing_that_is_there(self, kit, small):
        small.lab.recompute(small.ids)
        small.lab.hold(small.store, small.ids, kit.usable)
        assert small.store.bytes_moved == 0

    @pytest.mark.parametrize("end", [1, 50, 79])
    def test_a_prefix_that_ends_inside_a_unit_is_held_whole(self, kit, small, end):
        small.lab.engine.poison()
        small.lab.hold(small.store, small.ids, end)
        assert small.lab.engine.holds(small.ids, end)
        same_answer(small, type(small.reference)(small.lab.engine.prefill(small.ids, resident=end)))


class TestAlone:
    def test_measures_every_layer(self, kit, small):
        alone = small.lab.alone(small.store, small.ids, kit.usable)
        assert len(alone.arrivals) == len(alone.computes) == kit.shape.layers
        assert list(alone.arrivals) == sorted(alone.arrivals)
        assert min(*alone.arrivals, *alone.computes, alone.lead_s, alone.head_s) > 0

    def test_computes_with_everything_resident_and_copies_without_computing(self, kit, small):
        small.lab.engine.poison()
        before = small.store.bytes_moved
        small.lab.alone(small.store, small.ids, 64)
        # Once to hold the prefix, once to time the copies; and these leave nothing computed behind.
        assert small.store.bytes_moved - before == 2 * 64 * small.bytes_per_token
        assert small.lab.engine.held_tokens == 0
        assert all(rows_are_nan(small, 64))

    def test_what_is_computed_before_the_load_is_measured_alone_too(self, kit, small):
        small.lab.recompute(small.ids)
        whole = small.lab.alone(small.store, small.ids, kit.usable)
        small.lab.recompute(small.ids)
        moved = small.store.bytes_moved
        part = small.lab.alone(small.store, small.ids, kit.usable, 64)
        # Held already: all that is copied is what is timed.
        assert small.store.bytes_moved - moved == (kit.usable - 64) * small.bytes_per_token
        assert whole.front_s == 0
        assert part.front_s > 0
        assert all(rows_are_nan(small, 0, 64))

    @given(front=st.floats(0, 10), arrivals=st.lists(st.floats(0, 10), min_size=3, max_size=3).map(sorted))
    def test_a_front_runs_while_the_copies_do(self, front, arrivals):
        alone = AloneTimes(tuple(arrivals), 0.5, (1.0, 2.0, 4.0), 0.25, front)
        chains = [front + 0.5 + 7.0, arrivals[0] + 7.0, arrivals[1] + 6.0, arrivals[2] + 4.0]
        assert alone.bound_s == pytest.approx(max(chains) + 0.25)

    def test_bound_of_copies_that_hide_is_the_compute(self):
        alone = AloneTimes(arrivals=(0.1, 0.2, 0.3), lead_s=0.5, computes=(1.0, 2.0, 4.0), head_s=0.25)
        assert alone.bound_s == 0.5 + 7.0 + 0.25

    def test_bound_of_late_copies_waits_for_each_layer(self):
        alone = AloneTimes(arrivals=(1.0, 2.0, 6.0), lead_s=0.5, computes=(1.0, 1.0, 1.0), head_s=0.25)
        # Layers end at 2, 3 and, waiting for its copy, 7.
        assert alone.bound_s == 7.25

    @given(
        arrivals=st.lists(st.floats(0, 10), min_size=1, max_size=8).map(sorted),
        computes=st.lists(st.floats(0, 10), min_size=8, max_size=8),
        lead=st.floats(0, 10),
        head=st.floats(0, 10),
    )
    def test_bound_is_the_longest_chain_of_one_arrival_and_all_compute_after_it(
        self, arrivals, computes, lead, head
    ):
        computes = computes[: len(arrivals)]
        chains = [lead + sum(computes)]
        chains += [arrival + sum(computes[layer:]) for layer, arrival in enumerate(arrivals)]
        bound = AloneTimes(tuple(arrivals), lead, tuple(computes), head).bound_s
        assert bound == pytest.approx(max(chains) + head)

    def test_of_several_measurements_the_fastest_of_each_layer_bounds(self):
        times = [
            AloneTimes((1.0, 2.0, 9.0), 0.5, (1.0, 4.0, 1.0), 0.3, 0.7),
            AloneTimes((1.5, 1.8, 3.0), 0.4, (2.0, 1.0, 1.0), 0.2, 0.8),
        ]
        least = AloneTimes((1.0, 1.8, 3.0), 0.4, (1.0, 1.0, 1.0), 0.2, 0.7)
        assert AloneTimes.fastest(times) == AloneTimes.fastest(times[::-1]) == least
        assert AloneTimes.fastest(times[:1]) == times[0]
        assert least.bound_s <= min(each.bound_s for each in times)


class TestSamples:
    @pytest.mark.parametrize("end", [16, 64, 128])
    def test_a_transfer_counts_its_bytes_and_two_copies_a_layer(self, kit, small, end):
        sample = small.lab.sample_transfer(small.store, small.ids, end)
        assert sample.copies == 2 * kit.shape.layers
        assert sample.bytes == end * small.bytes_per_token
        assert sample.seconds > 0

    def test_the_first_transfer_of_a_series_is_not_used(self, small, monkeypatch):
        seconds = iter([50.0, 3.0, 1.0, 2.0])
        monkeypatch.setattr(
            small.lab, "_copies_alone", lambda *rest: ((0.5, next(seconds)), (6, 16 * small.bytes_per_token))
        )
        assert small.lab.sample_transfer(small.store, small.ids, 16).seconds == 2.0
        assert next(seconds, None) is None

    @pytest.mark.parametrize(("resident", "new"), [(0, 33), (64, 1), (50, 20)])
    def test_a_prefill_is_sampled_without_its_head(self, small, resident, new, monkeypatch):
        small.lab.hold(small.store, small.ids, max(1, resident))
        results = []
        prefill = small.lab.engine.prefill

        def noted(*arguments, **options):
            results.append(prefill(*arguments, **options))
            return results[-1]

        monkeypatch.setattr(small.lab.engine, "prefill", noted)
        sample, head_s = small.lab.sample_prefill(small.ids, resident, new, repeats=3)
        assert (sample.resident_tokens, sample.new_tokens) == (resident, new)
        assert [result.computed_tokens for result in results] == [new] * 3
        assert sample.seconds == sorted(result.total_s - result.head_s for result in results)[1]
        assert head_s == sorted(result.head_s for result in results)[1]

    def test_a_prefix_that_is_not_held_cannot_be_sampled(self, small):
        small.lab.engine.poison()
        with pytest.raises(InputError, match="not on the device"):
            small.lab.sample_prefill(small.ids, 64, 16)


def test_timeline_rows_are_the_layers_as_plain_values(kit, small):
    result = small.lab.load(small.store, small.ids, kit.usable, "layered").result
    rows = timeline_rows(result)
    for row, layer in zip(rows, result.layers, strict=True):
        assert row.pop("pass") == "forward"
        assert row == {name: getattr(layer, name) for name in row}
        assert {"layer", "start_s", "arrive_s", "compute_begin_s", "compute_end_s", "exposed_s"} <= set(row)


def test_timeline_rows_are_those_of_both_passes(kit, small):
    rows = timeline_rows(small.lab.load(small.store, small.ids, kit.usable, "layered", 64).result)
    layers = list(range(kit.shape.layers))
    assert [(row["pass"], row["layer"]) for row in rows] == [
        (kind, layer) for kind in ("front", "tail") for layer in layers
    ]
    assert {row["bytes"] for row in rows if row["pass"] == "front"} == {0}
