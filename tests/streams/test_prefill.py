"""The engine-neutral prefill on the cpu backend with a toy model: every plan, every fault, and what it leaves."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.executor import (
    LayerExecutor,
    LayerLoad,
    LoadError,
    LoadRefusedError,
    PrefillCancelledError,
)
from kvlane.streams.prefill import Job, Prefiller, SequenceKv
from kvlane.streams.quarantine import BlockPool
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout, KvRegion
from kvlane.transfer.store import KvSafetyError

LAYOUT = KvLayout(layers=5, kv_heads=2, k_width=4, v_width=4, itemsize=1)
IDENTITY = KvIdentity("model", "r1", None, "uint8", LAYOUT.name, 0, 1, "rope", "numerics")
UNIT = 4
STORED = 32
TOKENS = 37


def kv_of(ids, layer):
    """The toy model's keys and values, uint8 [tokens, 8] each: they depend on every token up to their own."""
    rows, state = [], hashlib.sha256(bytes([layer]))
    for token in ids:
        state.update(int(token).to_bytes(4, "little"))
        rows.append(np.frombuffer(state.digest()[:16], np.uint8))
    both = np.stack(rows)
    return both[:, :8], both[:, 8:]


class Block:
    def __init__(self, backend, layout=LAYOUT, capacity=48):
        self.region = KvRegion(layout, capacity)
        self.memory = backend.device_bytes(self.region.nbytes)
        self.memory.fill_(0xEE)

    def rows(self, layer, start, end):
        data, region = self.memory.numpy(), self.region
        return (
            data[region.key_offset(layer, start) : region.key_offset(layer, end)].reshape(-1, 8),
            data[region.value_offset(layer, start) : region.value_offset(layer, end)].reshape(-1, 8),
        )


class Toy:
    """A prompt of the toy model. Its answer is a digest of all KV it read, so that one wrong byte shows."""

    def __init__(self, ids, on_layer=None):
        self.ids = ids
        self.on_layer = on_layer or (lambda start, layer: None)

    def extend(self, block, start, end, steps):
        self.answer(block, start, end, steps)

    def answer(self, block, start, end, steps):
        read = hashlib.sha256()
        for layer in range(LAYOUT.layers):
            steps.begin(layer)
            self.on_layer(start, layer)
            for rows, new in zip(block.rows(layer, start, end), kv_of(self.ids[:end], layer), strict=True):
                rows[:] = new[start:]
            steps.ready(layer)
            for rows in block.rows(layer, 0, end):
                read.update(rows.tobytes())
            steps.end(layer)
        return read.hexdigest()

    def carry(self, source, target, tokens):
        for layer in range(LAYOUT.layers):
            for its, mine in zip(source.rows(layer, 0, tokens), target.rows(layer, 0, tokens), strict=True):
                mine[:] = its


class DiskStore(HostStore):
    tier = "disk"


def ids_of(seed=0, tokens=TOKENS):
    return np.random.default_rng(seed).integers(0, 1000, tokens)


def fill(store, ids):
    layers = [
        tuple(np.ascontiguousarray(rows).ravel() for rows in kv_of(ids[:STORED], layer))
        for layer in range(LAYOUT.layers)
    ]
    store.put(IDENTITY, ids[:STORED], LAYOUT, layers)


class Rig:
    """A device, a prompt stored in two tiers, and one sequence."""

    def __init__(self, backend, ring_sets=3, most=2):
        self.backend = backend
        self.executor = LayerExecutor(backend, ring_sets=ring_sets)
        self.made = []
        self.pool = BlockPool(self.make, most)
        self.prefiller = Prefiller(backend, self.executor, self.pool, LAYOUT.layers)
        self.ids = ids_of()
        self.stores: dict[str, Any] = {
            kind.tier: kind(UNIT, checksums=True) for kind in (HostStore, DiskStore)
        }
        self.sequence = SequenceKv(self.pool.take())
        self.expected = self.recompute(SequenceKv(Block(backend)))

    def make(self):
        self.made.append(Block(self.backend))
        return self.made[-1]

    def recompute(self, sequence):
        return self.prefiller.run(Toy(self.ids), sequence, self.job(0, ())).answer

    def job(self, resident, parts, **options):
        return Job(TOKENS, resident, tuple(parts), self.backend.now(), **options)

    def open(self, *segments):
        """Runs of (tier, start, end), stored anew where a test has cleared the store."""
        runs = []
        for tier, start, end in segments:
            store = self.stores[tier]
            fill(store, self.ids)
            runs.append(store.open(store.lookup(IDENTITY, self.ids), start, end))
        return runs

    def run(self, resident, *segments, forward=None, **options):
        """A prefill with the rest of the block overwritten before."""
        if resident:
            prompt = replace(self.job(0, ()), tokens=resident)
            self.prefiller.run(Toy(self.ids[:resident]), self.sequence, prompt)
        for layer in range(LAYOUT.layers):
            for rows in self.sequence.block.rows(layer, resident, 48):
                rows[:] = 0xEE
        runs = self.open(*segments)
        try:
            return self.prefiller.run(
                forward or Toy(self.ids), self.sequence, self.job(resident, runs, **options)
            )
        finally:
            for run in runs:
                run.close()

    def check(self, outcome):
        assert outcome.answer == self.expected
        assert self.sequence.tokens == TOKENS
        for layer in range(LAYOUT.layers):
            for rows, expected in zip(
                self.sequence.block.rows(layer, 0, TOKENS), kv_of(self.ids, layer), strict=True
            ):
                np.testing.assert_array_equal(rows, expected)

    def check_nothing_left(self, kit):
        assert all(kit.freed(store) for store in self.stores.values())
        wait_for(lambda: self.executor.ring.free == 3 and self.pool.quarantined == 0)
        for _ in range(self.pool.most):
            self.pool.admit()  # no place was lost
        for _ in range(self.pool.most):
            self.pool.dismiss()


def wait_for(condition, timeout_s=10.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


PLANS = {
    "whole hit": (0, [("host", 0, 32)]),
    "prefix split": (0, [("host", 0, 20)]),
    "after a resident prefix": (7, [("host", 7, 24)]),
    "two-ended": (0, [("host", 12, 32)]),
    "two-ended after a resident prefix": (5, [("host", 16, 28)]),
    "two tiers": (3, [("host", 3, 16), ("disk", 16, 32)]),
    "two-ended from two tiers": (3, [("disk", 8, 16), ("host", 16, 32)]),
    "two runs of a tier": (0, [("host", 0, 8), ("host", 8, 32)]),
}


@pytest.mark.parametrize("group_layers", [1, 2, 5, 9])
@pytest.mark.parametrize("mode", ["bulk", "layered"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_answer_of_a_recompute(kit, plan, mode, group_layers):
    resident, segments = PLANS[plan]
    start, end = segments[0][1], segments[-1][2]
    with kit.SlowBackend() as backend:
        backend.delay_s = 0.0005
        rig = Rig(backend)
        outcome = rig.run(resident, *segments, mode=mode, group_layers=group_layers)
        rig.check(outcome)
        rig.check_nothing_left(kit)
    assert not outcome.fell_back
    assert outcome.loaded_tokens == end - start
    assert outcome.computed_tokens == TOKENS - resident - (end - start)
    assert outcome.loaded_bytes == (end - start) * LAYOUT.bytes_per_token
    assert outcome.loaded_bytes == sum(store.bytes_moved for store in rig.stores.values())
    assert [(p.tier, p.start, p.end, p.whole) for p in outcome.parts] == [(*s, True) for s in segments]
    passes = [("forward", end, TOKENS)]
    if start > resident:
        passes = [("front", resident, start), ("tail", end, TOKENS)]
    assert [(p.kind, p.start, p.end) for p in outcome.passes] == passes


class TestReport:
    def test_of_both_passes_and_both_tiers_is_in_order(self, kit):
        with kit.SlowBackend() as backend:
            outcome = Rig(backend).run(3, ("disk", 8, 16), ("host", 16, 32))
        front, tail = (each.layers for each in outcome.passes)
        assert all(row.enqueue_s is row.reached_s is None and row.exposed_s == 0 for row in front)
        for one, two in pairwise((*front, *tail)):
            assert one.compute_begin_s <= one.compute_end_s <= two.compute_begin_s
        for row, disk, host in zip(tail, *(part.layers for part in outcome.parts), strict=True):
            assert row.layer == disk.layer == disk.group == host.layer
            assert row.bytes == disk.bytes + host.bytes == 24 * LAYOUT.layer_bytes_per_token
            assert row.copies == disk.copies + host.copies == 4
            assert row.start_s == min(disk.start_s, host.start_s)
            assert row.arrive_s == max(disk.arrive_s, host.arrive_s)
            assert row.compute_end_s >= row.reached_s + row.exposed_s >= row.arrive_s
        assert 0 < outcome.head_s < outcome.total_s
        assert tail[-1].compute_end_s + outcome.head_s == pytest.approx(outcome.total_s)

    def test_layers_of_a_group_share_their_times_and_only_the_first_waits(self, kit):
        with kit.SlowBackend() as backend:
            outcome = Rig(backend).run(0, ("host", 0, 32), group_layers=2)
        (part,) = outcome.parts
        assert [row.group for row in part.layers] == [0, 0, 2, 2, 4]
        for one, two in pairwise(part.layers):
            shared = (one.start_s, one.arrive_s) == (two.start_s, two.arrive_s)
            assert shared == (one.group == two.group)
            assert one.bytes == two.bytes
        waited = [row.layer for row in outcome.passes[0].layers if row.reached_s is not None]
        assert waited == [0, 2, 4]

    def test_the_front_pass_runs_beside_the_load(self, kit):
        # The load stands still until the front pass is through, which could not be if that waited for it.
        with kit.StuckBackend(layer=0) as backend:
            went = []

            def go(start, layer):
                went.append((start, layer))
                if (start, layer) == (0, 4):
                    backend.go.set()

            rig = Rig(backend)
            rig.check(rig.run(0, ("host", 12, 32), forward=Toy(rig.ids, go)))
        assert went[5] == (32, 0)


class TestFaults:
    @pytest.mark.parametrize("mode", ["bulk", "layered"])
    @pytest.mark.parametrize("group_layers", [1, 3])
    @pytest.mark.parametrize("layer", range(LAYOUT.layers))
    @pytest.mark.parametrize("how", ["pin", "rotten", "raising", "standing still", "short"])
    def test_of_the_store_cost_a_recompute(self, kit, how, layer, group_layers, mode):
        with CpuBackend() as backend:
            rig = Rig(backend)
            rig.stores["host"] = faulty = kit.FaultyStore(rig.stores["host"], how, layer)
            deadline_s = 0.02 if how == "standing still" else 10
            outcome = rig.run(5, ("host", 8, 32), mode=mode, group_layers=group_layers, deadline_s=deadline_s)
            rig.check(outcome)
            assert outcome.fell_back
            (failure,) = outcome.failures
            assert failure.tier == "host"
            assert kit.load_faults[how] in failure.reason
            if how == "pin":
                assert outcome.passes[0].start == 5
            else:
                # That it stands still is known of a group only, and a busy machine may be late before it.
                assert failure.layer == layer or (how == "standing still" and failure.layer < layer)
                # The front had been computed.
                assert [(p.kind, p.start) for p in outcome.passes] == [("front", 5), ("recompute", 8)]
            assert outcome.loaded_tokens == outcome.loaded_bytes == 0
            assert outcome.computed_tokens == TOKENS - 5
            faulty.go.set()
            rig.check_nothing_left(kit)
            rig.stores["host"] = faulty.store
            assert not rig.run(5, ("host", 8, 32)).fell_back

    @pytest.mark.parametrize("layer", range(LAYOUT.layers))
    def test_of_a_copy_cost_a_recompute(self, kit, layer):
        with kit.FailingBackend(layer) as backend:
            rig = Rig(backend)
            outcome = rig.run(5, ("host", 5, 32))
            rig.check(outcome)
            assert (outcome.failures[0].layer, outcome.failures[0].reason) == (
                layer,
                "copy failed: link down",
            )
            rig.check_nothing_left(kit)

    def test_a_tier_that_did_its_part_keeps_it(self, kit):
        with CpuBackend() as backend:
            rig = Rig(backend)
            rig.stores["disk"] = kit.FaultyStore(rig.stores["disk"], "standing still", 2)

            def held(start, layer):
                wait_for(lambda: rig.stores["host"].bytes_moved == 16 * LAYOUT.bytes_per_token)

            outcome = rig.run(
                0, ("host", 0, 16), ("disk", 16, 32), forward=Toy(rig.ids, held), deadline_s=0.1
            )
            rig.check(outcome)
            assert outcome.failures[0].tier == "disk"
            assert outcome.failures[0].layer <= 2  # a busy machine may be late before it
            assert (outcome.loaded_tokens, outcome.computed_tokens) == (16, TOKENS - 16)
            assert outcome.loaded_bytes == 16 * LAYOUT.bytes_per_token
            assert [(p.tier, p.whole) for p in outcome.parts] == [("host", True), ("disk", False)]
            rig.stores["disk"].go.set()
            rig.check_nothing_left(kit)

    def test_is_raised_where_that_is_asked_for(self, kit):
        with kit.FailingBackend(2) as backend:
            rig = Rig(backend)
            with pytest.raises(LoadError, match="link down"):
                rig.run(5, ("host", 5, 32), on_failure="raise")
            assert rig.sequence.tokens == 5
            rig.check_nothing_left(kit)


def stuck(rig, **options):
    """A load that is looked at only once a copy stands still, however busy the machine."""

    def when_reached(start, layer):
        if start == 32:
            rig.backend.reached.wait(10)

    rig.backend.reached.clear()
    return rig.run(5, ("host", 5, 32), forward=Toy(rig.ids, when_reached), deadline_s=0.02, **options)


class TestQuarantine:
    def test_a_late_copy_lands_in_a_block_that_is_not_in_use(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            rig = Rig(backend)
            before = rig.sequence.block
            outcome = stuck(rig)
            rig.check(outcome)
            assert rig.sequence.block is not before
            assert rig.pool.quarantined == 1
            assert rig.pool.quarantined_bytes == before.region.nbytes
            assert not kit.freed(rig.stores["host"], 0.01)
            backend.go.set()
            rig.check_nothing_left(kit)
            rig.check(outcome)
            # And the block is used again.
            assert rig.pool.take() is before
            assert len(rig.made) == 2

    def test_without_it_the_late_copy_lands_in_the_block(self, kit, monkeypatch):
        """Control: the check above sees what the quarantine is against."""
        with kit.StuckBackend(layer=1) as backend:
            rig = Rig(backend)
            monkeypatch.setattr(LayerLoad, "settled", property(lambda load: True))
            rig.check(stuck(rig))
            (rows, _) = rig.sequence.block.rows(1, 5, 32)
            rows[:] = 0xAB  # another prompt's, say
            backend.go.set()
            assert kit.freed(rig.stores["host"])
            assert not (rows == 0xAB).all()

    def test_resident_tokens_that_are_not_carried_over_are_missed(self, kit, monkeypatch):
        """Control."""
        with kit.StuckBackend(layer=1) as backend:
            rig = Rig(backend)
            monkeypatch.setattr(Toy, "carry", lambda *args: None)
            assert stuck(rig).answer != rig.expected

    def test_at_its_bound_loads_are_refused_and_computed_until_a_copy_ends(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            rig = Rig(backend)
            for _ in range(2):
                assert stuck(rig).failures
            assert rig.pool.quarantined == 2
            refused = stuck(rig)
            rig.check(refused)
            assert refused.fell_back
            assert not refused.failures
            assert "quarantine" in refused.refused
            assert [(p.kind, p.start) for p in refused.passes] == [("recompute", 5)]
            with pytest.raises(LoadRefusedError):
                stuck(rig, on_failure="raise")
            assert len(rig.made) == 3
            backend.go.set()
            rig.check_nothing_left(kit)
            outcome = rig.run(5, ("host", 5, 32))
            assert not outcome.fell_back
            assert len(rig.made) == 3

    def test_a_load_does_not_queue_behind_a_stuck_one_of_its_tier(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            rig = Rig(backend)
            assert stuck(rig).failures
            backend.layer = None  # only that copy
            outcome = rig.run(5, ("host", 5, 32))
            rig.check(outcome)
            assert not outcome.fell_back
            assert rig.pool.quarantined == 1
            backend.go.set()
            rig.check_nothing_left(kit)

    def test_without_memory_for_another_block_the_sequence_holds_nothing_until_there_is(
        self, kit, monkeypatch
    ):
        with kit.StuckBackend(layer=1) as backend:
            rig = Rig(backend)

            def no_memory():
                raise MemoryError("no block")

            with monkeypatch.context() as patch:
                patch.setattr(rig.pool, "_make", no_memory)
                for _ in range(2):
                    with pytest.raises(MemoryError):
                        stuck(rig)
                    assert rig.sequence.tokens == 0
                    with pytest.raises(MemoryError):
                        rig.recompute(rig.sequence)
            before = rig.sequence.block
            assert rig.recompute(rig.sequence) == rig.expected
            assert rig.sequence.block is not before
            backend.go.set()
            rig.check_nothing_left(kit)

    def test_takes_at_least_one_block(self):
        with CpuBackend() as backend, pytest.raises(InputError, match="most"):
            Rig(backend, most=0)


class TestCancellation:
    @pytest.mark.parametrize("plan", PLANS)
    def test_at_any_layer_leaves_nothing_behind(self, kit, plan):
        resident, segments = PLANS[plan]
        with kit.SlowBackend() as backend:
            backend.delay_s = 0.0005
            rig = Rig(backend)
            starts = [segments[-1][2]] + ([resident] if segments[0][1] > resident else [])
            for at in [(start, layer) for start in starts for layer in range(LAYOUT.layers)]:
                cancel = backend.flag()

                def call_off(start, layer, at=at, cancel=cancel):
                    if (start, layer) == at:
                        cancel.set()

                with pytest.raises(PrefillCancelledError):
                    rig.run(resident, *segments, forward=Toy(rig.ids, call_off), cancel=cancel)
                front = segments[0][1] if at[0] != resident and len(starts) == 2 else resident
                assert front <= rig.sequence.tokens < TOKENS
                # What it says it holds is good.
                again = rig.prefiller.run(Toy(rig.ids), rig.sequence, rig.job(rig.sequence.tokens, ()))
                rig.check(again)
                rig.check_nothing_left(kit)
            assert len(rig.made) <= 3

    def test_beside_a_stuck_copy_does_not_wait_for_it(self, kit):
        with kit.StuckBackend(layer=3) as backend:
            rig = Rig(backend)
            cancel = backend.flag()

            def call_off(start, layer):
                if layer == 2:
                    backend.reached.wait(10)
                    cancel.set()

            with pytest.raises(PrefillCancelledError):
                rig.run(5, ("host", 5, 32), forward=Toy(rig.ids, call_off), cancel=cancel)
            assert (rig.sequence.tokens, rig.pool.quarantined) == (5, 1)
            backend.go.set()
            rig.check_nothing_left(kit)

    def test_of_a_plain_recompute(self, kit):
        with CpuBackend() as backend:
            rig = Rig(backend)
            cancel = backend.flag()
            cancel.set()
            with pytest.raises(PrefillCancelledError):
                rig.run(5, cancel=cancel)
            assert rig.sequence.tokens == 5


class TestControls:
    @pytest.mark.parametrize("mode", ["bulk", "layered"])
    def test_a_wait_left_out_is_noticed(self, kit, mode, monkeypatch):
        with kit.SlowBackend() as backend:
            rig = Rig(backend)
            monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)
            assert rig.run(0, ("host", 0, 32), mode=mode).answer != rig.expected

    # The load whose events were taken from it fails on its own thread.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_ring_that_is_used_again_too_early_is_noticed(self, kit, monkeypatch):
        with kit.StuckBackend(layer=1) as backend:
            rig = Rig(backend, ring_sets=1)
            monkeypatch.setattr(LayerLoad, "_let_go", lambda self: rig.executor.ring.let_go(self._events, 2))
            assert stuck(rig).failures
            with pytest.raises(KvSafetyError, match="not fired"):
                rig.run(5, ("host", 5, 32))
            backend.go.set()

    def test_one_set_is_enough_for_loads_one_after_another_and_too_few_for_a_stuck_one(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            backend.go.set()
            rig = Rig(backend, ring_sets=1)
            for _ in range(5):
                assert not rig.run(5, ("host", 5, 32)).fell_back
            backend.go.clear()
            assert stuck(rig).failures
            outcome = stuck(rig)
            rig.check(outcome)
            assert "event set" in outcome.refused
            backend.go.set()


class TestJob:
    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("resident", {"resident": TOKENS}),
            ("resident", {"resident": -1}),
            ("load", {"resident": 9}),
            ("load", {"tokens": 32}),
            ("deadline_s", {"deadline_s": 0}),
            ("on_failure", {"on_failure": "ignore"}),
        ],
    )
    def test_that_does_not_add_up_is_refused(self, field, change):
        with CpuBackend() as backend:
            rig = Rig(backend)
            (run,) = rig.open(("host", 8, 32))
            with run, pytest.raises(InputError) as caught:
                Job(**{"tokens": TOKENS, "resident": 0, "parts": (run,), "submitted_s": 0.0, **change})
            assert caught.value.field == field

    def test_with_runs_that_do_not_follow_one_another_is_refused(self):
        with CpuBackend() as backend:
            rig = Rig(backend)
            for segments in ((("host", 0, 8), ("disk", 12, 32)), (("host", 8, 16), ("disk", 0, 8))):
                with pytest.raises(InputError, match="no gap"):
                    rig.run(0, *segments)

    def test_that_goes_on_from_more_than_is_held_is_refused(self):
        with CpuBackend() as backend:
            rig = Rig(backend)
            with pytest.raises(InputError, match="resident"):
                rig.prefiller.run(Toy(rig.ids), rig.sequence, rig.job(4, ()))


@settings(max_examples=60)
@given(data=st.data())
def test_any_plan_gives_the_answer_of_a_recompute(data):
    cuts = st.integers(0, STORED // UNIT).map(lambda unit: unit * UNIT)
    start, middle, end = sorted(data.draw(st.lists(cuts, min_size=3, max_size=3)))
    resident = data.draw(st.integers(0, start))
    segments = [s for s in (("host", start, middle), ("disk", middle, end)) if s[1] < s[2]]
    with CpuBackend() as backend:
        rig = Rig(backend)
        outcome = rig.run(
            resident if segments else min(resident, TOKENS - 1),
            *segments,
            mode=data.draw(st.sampled_from(["bulk", "layered"])),
            group_layers=data.draw(st.integers(1, 6)),
        )
        rig.check(outcome)
        assert outcome.loaded_tokens == sum(e - s for _, s, e in segments)
