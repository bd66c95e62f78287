"""The engine-neutral prefill on the cpu backend: every kind of fault, the quarantine, cancellation, and controls."""

from __future__ import annotations

import pytest

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.executor import (
    LayerLoad,
    LoadError,
    LoadRefusedError,
    PrefillCancelledError,
)
from kvlane.transfer.store import KvSafetyError


class TestFaults:
    @pytest.mark.parametrize("mode", ["bulk", "layered"])
    @pytest.mark.parametrize("group_layers", [1, 3])
    @pytest.mark.parametrize("layer", range(5))
    @pytest.mark.parametrize("how", ["pin", "rotten", "raising", "standing still", "short"])
    def test_of_the_store_cost_a_recompute(self, toy, kit, how, layer, group_layers, mode):
        with CpuBackend() as backend:
            rig = toy.Rig(backend)
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
            assert outcome.computed_tokens == toy.TOKENS - 5
            faulty.go.set()
            rig.check_nothing_left(kit)
            rig.stores["host"] = faulty.store
            assert not rig.run(5, ("host", 8, 32)).fell_back

    @pytest.mark.parametrize("layer", range(5))
    def test_of_a_copy_cost_a_recompute(self, toy, kit, layer):
        with kit.FailingBackend(layer) as backend:
            rig = toy.Rig(backend)
            outcome = rig.run(5, ("host", 5, 32))
            rig.check(outcome)
            assert (outcome.failures[0].layer, outcome.failures[0].reason) == (
                layer,
                "copy failed: link down",
            )
            rig.check_nothing_left(kit)

    def test_a_tier_that_did_its_part_keeps_it(self, toy, kit):
        with CpuBackend() as backend:
            rig = toy.Rig(backend)
            rig.stores["disk"] = kit.FaultyStore(rig.stores["disk"], "standing still", 2)

            def held(start, layer):
                toy.wait_for(lambda: rig.stores["host"].bytes_moved == 16 * toy.LAYOUT.bytes_per_token)

            outcome = rig.run(
                0, ("host", 0, 16), ("disk", 16, 32), forward=toy.Toy(rig.ids, held), deadline_s=0.1
            )
            rig.check(outcome)
            assert outcome.failures[0].tier == "disk"
            assert outcome.failures[0].layer <= 2  # a busy machine may be late before it
            assert (outcome.loaded_tokens, outcome.computed_tokens) == (16, toy.TOKENS - 16)
            assert outcome.loaded_bytes == 16 * toy.LAYOUT.bytes_per_token
            assert [(p.tier, p.whole) for p in outcome.parts] == [("host", True), ("disk", False)]
            rig.stores["disk"].go.set()
            rig.check_nothing_left(kit)

    def test_is_raised_where_that_is_asked_for(self, toy, kit):
        with kit.FailingBackend(2) as backend:
            rig = toy.Rig(backend)
            with pytest.raises(LoadError, match="link down"):
                rig.run(5, ("host", 5, 32), on_failure="raise")
            assert rig.sequence.tokens == 5
            rig.check_nothing_left(kit)


class TestQuarantine:
    def test_a_late_copy_lands_in_a_block_that_is_not_in_use(self, toy, kit):
        with kit.StuckBackend(layer=1) as backend:
            rig = toy.Rig(backend)
            before = rig.sequence.block
            outcome = toy.stuck(rig)
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

    def test_without_it_the_late_copy_lands_in_the_block(self, toy, kit, monkeypatch):
        """Control: the check above sees what the quarantine is against."""
        with kit.StuckBackend(layer=1) as backend:
            rig = toy.Rig(backend)
            monkeypatch.setattr(LayerLoad, "settled", property(lambda load: True))
            rig.check(toy.stuck(rig))
            (rows, _) = rig.sequence.block.rows(1, 5, 32)
            rows[:] = 0xAB  # another prompt's, say
            backend.go.set()
            assert kit.freed(rig.stores["host"])
            assert not (rows == 0xAB).all()

    def test_resident_tokens_that_are_not_carried_over_are_missed(self, toy, kit, monkeypatch):
        """Control."""
        with kit.StuckBackend(layer=1) as backend:
            rig = toy.Rig(backend)
            monkeypatch.setattr(toy.Toy, "carry", lambda *args: None)
            assert toy.stuck(rig).answer != rig.expected

    def test_at_its_bound_loads_are_refused_and_computed_until_a_copy_ends(self, toy, kit):
        with kit.StuckBackend(layer=1) as backend:
            rig = toy.Rig(backend)
            for _ in range(2):
                assert toy.stuck(rig).failures
            assert rig.pool.quarantined == 2
            refused = toy.stuck(rig)
            rig.check(refused)
            assert refused.fell_back
            assert not refused.failures
            assert "quarantine" in refused.refused
            assert [(p.kind, p.start) for p in refused.passes] == [("recompute", 5)]
            with pytest.raises(LoadRefusedError):
                toy.stuck(rig, on_failure="raise")
            assert len(rig.made) == 3
            backend.go.set()
            rig.check_nothing_left(kit)
            outcome = rig.run(5, ("host", 5, 32))
            assert not outcome.fell_back
            assert len(rig.made) == 3

    def test_a_load_does_not_queue_behind_a_stuck_one_of_its_tier(self, toy, kit):
        with kit.StuckBackend(layer=1) as backend:
            rig = toy.Rig(backend)
            assert toy.stuck(rig).failures
            backend.layer = None  # only that copy
            outcome = rig.run(5, ("host", 5, 32))
            rig.check(outcome)
            assert not outcome.fell_back
            assert rig.pool.quarantined == 1
            backend.go.set()
            rig.check_nothing_left(kit)

    def test_without_memory_for_another_block_the_sequence_holds_nothing_until_there_is(
        self, toy, kit, monkeypatch
    ):
        with kit.StuckBackend(layer=1) as backend:
            rig = toy.Rig(backend)

            def no_memory():
                raise MemoryError("no block")

            with monkeypatch.context() as patch:
                patch.setattr(rig.pool, "_make", no_memory)
                for _ in range(2):
                    with pytest.raises(MemoryError):
                        toy.stuck(rig)
                    assert rig.sequence.tokens == 0
                    with pytest.raises(MemoryError):
                        rig.recompute(rig.sequence)
            before = rig.sequence.block
            assert rig.recompute(rig.sequence) == rig.expected
            assert rig.sequence.block is not before
            backend.go.set()
            rig.check_nothing_left(kit)

    def test_a_part_that_does_not_start_leaves_the_block_to_the_copies_of_the_one_before(self, toy, kit):
        with kit.StuckBackend(layer=1) as backend:
            start = backend.start

            def starting(task, name):
                if name == "enqueue-disk":
                    assert backend.reached.wait(10)
                    raise RuntimeError("no thread")
                start(task, name)

            backend.start = starting
            rig = toy.Rig(backend)
            before = rig.sequence.block
            outcome = rig.run(3, ("host", 3, 16), ("disk", 16, 32))
            rig.check(outcome)
            assert (outcome.failures[0].tier, outcome.failures[0].reason) == (
                "disk",
                "not started: no thread",
            )
            assert rig.sequence.block is not before
            assert rig.pool.quarantined == 1
            backend.go.set()
            rig.check_nothing_left(kit)
            rig.check(outcome)

    def test_takes_at_least_one_block(self, toy):
        with CpuBackend() as backend, pytest.raises(InputError, match="most"):
            toy.Rig(backend, most=0)


class TestCancellation:
    def test_at_any_layer_leaves_nothing_behind(self, toy, kit, plan):
        resident, segments = plan
        with kit.SlowBackend() as backend:
            backend.delay_s = 0.0005
            rig = toy.Rig(backend)
            starts = [segments[-1][2]] + ([resident] if segments[0][1] > resident else [])
            for at in [(start, layer) for start in starts for layer in range(toy.LAYOUT.layers)]:
                cancel = backend.flag()

                def call_off(start, layer, at=at, cancel=cancel):
                    if (start, layer) == at:
                        cancel.set()

                with pytest.raises(PrefillCancelledError):
                    rig.run(resident, *segments, forward=toy.Toy(rig.ids, call_off), cancel=cancel)
                front = segments[0][1] if at[0] != resident and len(starts) == 2 else resident
                assert front <= rig.sequence.tokens < toy.TOKENS
                # What it says it holds is good.
                again = rig.prefiller.run(toy.Toy(rig.ids), rig.sequence, rig.job(rig.sequence.tokens, ()))
                rig.check(again)
                rig.check_nothing_left(kit)
            assert len(rig.made) <= 3

    def test_beside_a_stuck_copy_does_not_wait_for_it(self, toy, kit):
        with kit.StuckBackend(layer=3) as backend:
            rig = toy.Rig(backend)
            cancel = backend.flag()

            def call_off(start, layer):
                if layer == 2:
                    backend.reached.wait(10)
                    cancel.set()

            with pytest.raises(PrefillCancelledError):
                rig.run(5, ("host", 5, 32), forward=toy.Toy(rig.ids, call_off), cancel=cancel)
            assert (rig.sequence.tokens, rig.pool.quarantined) == (5, 1)
            backend.go.set()
            rig.check_nothing_left(kit)

    def test_of_a_plain_recompute(self, toy, kit):
        with CpuBackend() as backend:
            rig = toy.Rig(backend)
            cancel = backend.flag()
            cancel.set()
            with pytest.raises(PrefillCancelledError):
                rig.run(5, cancel=cancel)
            assert rig.sequence.tokens == 5


class TestControls:
    @pytest.mark.parametrize("mode", ["bulk", "layered"])
    def test_a_wait_left_out_is_noticed(self, toy, kit, mode, monkeypatch):
        with kit.SlowBackend() as backend:
            rig = toy.Rig(backend)
            monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)
            assert rig.run(0, ("host", 0, 32), mode=mode).answer != rig.expected

    # The load whose events were taken from it fails on its own thread.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_ring_that_is_used_again_too_early_is_noticed(self, toy, kit, monkeypatch):
        with kit.StuckBackend(layer=1) as backend:
            rig = toy.Rig(backend, ring_sets=1)
            monkeypatch.setattr(LayerLoad, "_let_go", lambda self: rig.executor.ring.let_go(self._events, 2))
            assert toy.stuck(rig).failures
            with pytest.raises(KvSafetyError, match="not fired"):
                rig.run(5, ("host", 5, 32))
            backend.go.set()

    def test_one_set_is_enough_for_loads_one_after_another_and_too_few_for_a_stuck_one(self, toy, kit):
        with kit.StuckBackend(layer=1) as backend:
            backend.go.set()
            rig = toy.Rig(backend, ring_sets=1)
            for _ in range(5):
                assert not rig.run(5, ("host", 5, 32)).fell_back
            backend.go.clear()
            assert toy.stuck(rig).failures
            outcome = toy.stuck(rig)
            rig.check(outcome)
            assert "event set" in outcome.refused
            backend.go.set()
