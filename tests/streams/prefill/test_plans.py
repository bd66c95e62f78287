"""The engine-neutral prefill on the cpu backend: every plan, and what is reported of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.prefill import Job
from kvlane.transfer.store import KvSafetyError


@pytest.mark.parametrize("group_layers", [1, 2, 5, 9])
@pytest.mark.parametrize("mode", ["bulk", "layered"])
def test_every_plan_gives_the_answer_of_a_recompute(toy, kit, plan, mode, group_layers):
    resident, segments = plan
    start, end = segments[0][1], segments[-1][2]
    with kit.SlowBackend() as backend:
        backend.delay_s = 0.0005
        rig = toy.Rig(backend)
        outcome = rig.run(resident, *segments, mode=mode, group_layers=group_layers)
        rig.check(outcome)
        rig.check_nothing_left(kit)
    assert not outcome.fell_back
    assert outcome.loaded_tokens == end - start
    assert outcome.computed_tokens == toy.TOKENS - resident - (end - start)
    assert outcome.loaded_bytes == (end - start) * toy.LAYOUT.bytes_per_token
    assert outcome.loaded_bytes == sum(store.bytes_moved for store in rig.stores.values())
    assert [(p.tier, p.start, p.end, p.whole) for p in outcome.parts] == [(*s, True) for s in segments]
    passes = [("forward", end, toy.TOKENS)]
    if start > resident:
        passes = [("front", resident, start), ("tail", end, toy.TOKENS)]
    assert [(p.kind, p.start, p.end) for p in outcome.passes] == passes


class TestReport:
    def test_of_both_passes_and_both_tiers_is_in_order(self, toy, kit):
        with kit.SlowBackend() as backend:
            outcome = toy.Rig(backend).run(3, ("disk", 8, 16), ("host", 16, 32))
        front, tail = (each.layers for each in outcome.passes)
        assert all(row.enqueue_s is row.reached_s is None and row.exposed_s == 0 for row in front)
        for one, two in pairwise((*front, *tail)):
            assert one.compute_begin_s <= one.compute_end_s <= two.compute_begin_s
        for row, disk, host in zip(tail, *(part.layers for part in outcome.parts), strict=True):
            assert row.layer == disk.layer == disk.group == host.layer
            assert row.bytes == disk.bytes + host.bytes == 24 * toy.LAYOUT.layer_bytes_per_token
            assert row.copies == disk.copies + host.copies == 4
            assert row.start_s == min(disk.start_s, host.start_s)
            assert row.arrive_s == max(disk.arrive_s, host.arrive_s)
            assert row.compute_end_s >= row.reached_s + row.exposed_s >= row.arrive_s
        assert 0 < outcome.head_s < outcome.total_s
        assert tail[-1].compute_end_s + outcome.head_s == pytest.approx(outcome.total_s)

    def test_layers_of_a_group_share_their_times_and_only_the_first_waits(self, toy, kit):
        with kit.SlowBackend() as backend:
            outcome = toy.Rig(backend).run(0, ("host", 0, 32), group_layers=2)
        (part,) = outcome.parts
        assert [row.group for row in part.layers] == [0, 0, 2, 2, 4]
        for one, two in pairwise(part.layers):
            shared = (one.start_s, one.arrive_s) == (two.start_s, two.arrive_s)
            assert shared == (one.group == two.group)
            assert one.bytes == two.bytes
        waited = [row.layer for row in outcome.passes[0].layers if row.reached_s is not None]
        assert waited == [0, 2, 4]

    def test_the_front_pass_runs_beside_the_load(self, toy, kit):
        # The load stands still until the front pass is through, which could not be if that waited for it.
        with kit.StuckBackend(layer=0) as backend:
            went = []

            def go(start, layer):
                went.append((start, layer))
                if (start, layer) == (0, 4):
                    backend.go.set()

            rig = toy.Rig(backend)
            rig.check(rig.run(0, ("host", 12, 32), forward=toy.Toy(rig.ids, go)))
        assert went[5] == (32, 0)


@pytest.mark.parametrize("segments", [[("host", 5, 32)], []])
def test_a_pass_that_leaves_a_layer_out_is_no_answer_and_holds_nothing_new(toy, segments):
    with CpuBackend() as backend:
        rig = toy.Rig(backend)
        forward = toy.Toy(rig.ids)
        answer = forward.answer

        def short(block, start, end, steps):
            steps.end = lambda layer: None
            return answer(block, start, end, steps)

        forward.answer = short
        with pytest.raises(KvSafetyError, match="every layer"):
            rig.run(5, *segments, forward=forward)
        assert rig.sequence.tokens == 5


class TestJob:
    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("resident", {"resident": 37}),
            ("resident", {"resident": -1}),
            ("load", {"resident": 9}),
            ("load", {"tokens": 32}),
            ("deadline_s", {"deadline_s": 0}),
            ("on_failure", {"on_failure": "ignore"}),
        ],
    )
    def test_that_does_not_add_up_is_refused(self, toy, field, change):
        with CpuBackend() as backend:
            rig = toy.Rig(backend)
            (run,) = rig.open(("host", 8, 32))
            with run, pytest.raises(InputError) as caught:
                Job(**{"tokens": toy.TOKENS, "resident": 0, "parts": (run,), "submitted_s": 0.0, **change})
            assert caught.value.field == field

    def test_with_runs_that_do_not_follow_one_another_is_refused(self, toy):
        with CpuBackend() as backend:
            rig = toy.Rig(backend)
            for segments in ((("host", 0, 8), ("disk", 12, 32)), (("host", 8, 16), ("disk", 0, 8))):
                with pytest.raises(InputError, match="no gap"):
                    rig.run(0, *segments)

    def test_that_goes_on_from_more_than_is_held_is_refused(self, toy):
        with CpuBackend() as backend:
            rig = toy.Rig(backend)
            with pytest.raises(InputError, match="resident"):
                rig.prefiller.run(toy.Toy(rig.ids), rig.sequence, rig.job(4, ()))


@settings(max_examples=60)
@given(data=st.data())
def test_any_plan_gives_the_answer_of_a_recompute(toy, data):
    cuts = st.integers(0, toy.STORED // toy.UNIT).map(lambda unit: unit * toy.UNIT)
    start, middle, end = sorted(data.draw(st.lists(cuts, min_size=3, max_size=3)))
    resident = data.draw(st.integers(0, start))
    segments = [s for s in (("host", start, middle), ("disk", middle, end)) if s[1] < s[2]]
    with CpuBackend() as backend:
        rig = toy.Rig(backend)
        outcome = rig.run(
            resident if segments else min(resident, toy.TOKENS - 1),
            *segments,
            mode=data.draw(st.sampled_from(["bulk", "layered"])),
            group_layers=data.draw(st.integers(1, 6)),
        )
        rig.check(outcome)
        assert outcome.loaded_tokens == sum(e - s for _, s, e in segments)
