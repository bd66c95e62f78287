"""From a prompt to its answer through lookup, decision, load and breaker, with a real model, planner and stores."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvlane.policy.breaker import CircuitBreaker
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Device, Link, Machine, Tier
from kvlane.policy.model import ModelSpec
from kvlane.policy.planner import Calibration, Planner
from kvlane.policy.prefill_cost import PassCost, PrefillCost
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.executor import PrefillCancelledError
from kvlane.streams.runner import PlanRunner
from kvlane.transfer.host import HostStore

TOKENS = 83
FAST, SLOW = 1e9, 1e4


class DiskStore(HostStore):
    tier = "disk"


def planner_for(model, executor="layered", host=FAST, disk=FAST):
    """1 ms a token to compute, and links of two rates."""
    spec = ModelSpec.from_config({**model.config.to_dict(), "torch_dtype": "float32"}, name="tiny")
    links = {"host": Link("host", host), "disk": Link("disk", disk)}
    machine = Machine(
        name="declared",
        device=Device("one CPU core"),
        links=links,
        tiers={name: Tier(name, name, runs_per_layer=2) for name in links},
        prefill=(),
    )
    cost = PassCost(1e-4, 1e-3, 0.0)
    calibration = Calibration(PrefillCost(4, cost, cost), 0.1, "declared")
    return Planner(spec, machine, executor=executor, kv_dtype="fp32", calibration=calibration)


class Rig:
    """A model whose first 40 prompt tokens are stored in host memory, and 80 on what stands for a disk."""

    def __init__(self, kit, backend, executor="layered", host=FAST, disk=FAST, model=None):
        self.kit = kit
        self.model, self.ids = model or kit.model(), kit.ids(TOKENS)
        self.engine = kit.engine(self.model, backend)
        self.full = self.engine.prefill(self.ids)
        self.stores = {
            "host": HostStore(kit.unit, checksums=True),
            "disk": DiskStore(kit.unit, checksums=True),
        }
        self.store()
        self.planner = planner_for(self.model, executor, host, disk)

    def store(self):
        self.engine.save(self.stores["host"], self.ids, 40)
        self.engine.save(self.stores["disk"], self.ids, 80)

    def break_tier(self, tier, how, layer=0):
        self.stores[tier] = self.kit.FaultyStore(self.stores[tier], how, layer)
        return self.stores[tier]

    def runner(self, **options):
        return PlanRunner(self.engine, self.planner, self.stores.values(), **options)

    def run(self, runner, resident=0, **options):
        """A request with everything that is not resident poisoned before."""
        self.engine.prefill(self.ids)
        self.engine.poison(resident)
        answer = runner.run(self.ids, resident, **options)
        self.check(answer)
        return answer

    def check(self, answer):
        assert answer.result.first_token == self.full.first_token
        np.testing.assert_allclose(answer.result.logits, self.full.logits, rtol=0, atol=1e-4)


def loaded(answer):
    return [(part.tier, part.start, part.end) for part in answer.result.parts if part.whole]


class TestPlan:
    @pytest.mark.parametrize(
        ("executor", "host", "disk", "resident", "expected"),
        [
            ("layered", FAST, FAST, 0, [("disk", 0, 80)]),
            ("bulk", FAST, 3e6, 0, [("host", 0, 40), ("disk", 40, 80)]),
            ("layered", FAST, 3e6, 5, [("host", 5, 40), ("disk", 40, 72)]),
            ("two_ended", SLOW, 4e5, 0, [("disk", 56, 80)]),
            ("layered", SLOW, SLOW, 0, []),
        ],
    )
    def test_is_run_as_decided(self, kit, executor, host, disk, resident, expected):
        with kit.SlowBackend() as backend:
            backend.delay_s = 0.0005
            rig = Rig(kit, backend, executor, host, disk)
            runner = rig.runner()
            answer = rig.run(runner, resident)
        assert loaded(answer) == [(s.tier, s.start, s.end) for s in answer.plan.load] == expected
        assert answer.result.computed_tokens == TOKENS - resident - answer.plan.load_tokens
        assert answer.result.loaded_bytes == answer.plan.load_bytes
        assert answer.result.mode == (None if not expected else "bulk" if executor == "bulk" else "layered")
        assert answer.failures == ()
        assert runner.failure_counts == {}

    def test_moves_of_a_window_what_it_says(self, kit):
        with kit.SlowBackend() as backend:
            backend.delay_s = 0.0005
            rig = Rig(kit, backend, model=kit.model("mistral", sliding_window=16))
            answer = rig.run(rig.runner())
        assert loaded(answer) == [("disk", 0, 80)]
        assert answer.result.loaded_bytes == answer.plan.load_bytes == 16 * rig.engine.layout.bytes_per_token

    def test_groups_layers_as_decided(self, kit, monkeypatch):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            decide = rig.planner.decide

            def grouped(request):
                plan = decide(request)
                plan.group_layers = 3
                return plan

            monkeypatch.setattr(rig.planner, "decide", grouped)
            answer = rig.run(rig.runner())
            assert [row.group for row in answer.result.parts[0].layers] == [0, 0, 0, 3]

    def test_lookup_and_decision_count_as_part_of_the_answers_time(self, kit, monkeypatch):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            answer = rig.run(rig.runner(), submitted_s=backend.now() - 5)
            assert answer.result.total_s > 5


class Shifted(HostStore):
    """Opens what nobody asked for."""

    tier = "disk"

    def __init__(self, unit, by):
        super().__init__(unit)
        self.by = by

    def open(self, hit, start, end, *, load_end=None, **options):
        run = super().open(hit, start + self.by[0], end + self.by[1], load_end=load_end, **options)
        if self.by == (0, 0):
            run.tier = "cellar"
        return run


class Empty(HostStore):
    tier = "disk"

    def open(self, hit, start, end, **options):
        return None


class TestFaults:
    @pytest.mark.parametrize("by", [(8, 0), (0, -8), (8, -8), (0, 0)])
    @pytest.mark.parametrize(("executor", "rate"), [("layered", FAST), ("bulk", 3e6)])
    def test_of_a_store_that_opens_another_run_cost_only_time(self, kit, by, executor, rate):
        with CpuBackend() as backend:
            rig = Rig(kit, backend, executor, disk=rate)
            rig.stores["disk"] = Shifted(kit.unit, by)
            rig.store()
            runner = rig.runner()
            answer = rig.run(runner)
            assert loaded(answer) == [("host", 0, 40)]
            (failure,) = answer.failures
            assert (failure.layer, failure.tier) == (None, "disk")
            assert failure.reason.startswith("open failed: it is of [")
            assert runner.breaker.counts("disk").failures == 1
            assert all(kit.freed(store) for store in rig.stores.values())

    @pytest.mark.parametrize("call", ["lookup", "open"])
    def test_that_say_nothing_of_themselves_are_named(self, kit, call, monkeypatch):
        def refuse(*given, **options):
            raise TimeoutError

        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            monkeypatch.setattr(rig.stores["disk"], call, refuse)
            (failure,) = rig.run(rig.runner()).failures
            assert failure.reason == f"{call} failed: TimeoutError"

    def test_of_a_store_that_opens_nothing_cost_only_time(self, kit):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            rig.stores["disk"] = Empty(kit.unit)
            rig.store()
            answer = rig.run(rig.runner())
            assert loaded(answer) == [("host", 0, 40)]
            assert {failure.tier for failure in answer.failures} == {"disk"}

    @pytest.mark.parametrize("how", ["pin", "rotten", "raising", "standing still", "short"])
    @pytest.mark.parametrize("layer", range(4))
    def test_of_a_load_are_counted_by_tier_and_layer(self, kit, how, layer):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            faulty = rig.break_tier("disk", how, layer)
            runner = rig.runner(deadline_s=0.5 if how == "standing still" else 60)
            answer = rig.run(runner)
            assert answer.result.fell_back
            (failure,) = answer.failures
            assert kit.load_faults[how] in failure.reason
            expected = 0 if how == "pin" else layer
            assert runner.failure_counts == {("disk", expected): 1}
            assert runner.breaker.counts("disk").failures == 1
            faulty.go.set()
            assert all(kit.freed(store) for store in rig.stores.values())

    @pytest.mark.parametrize("how", ["lookup", "open"])
    def test_before_there_is_a_load_leave_the_tier_out(self, kit, how):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            rig.break_tier("disk", how)
            runner = rig.runner()
            answer = rig.run(runner)
            assert loaded(answer) == [("host", 0, 40)]
            assert not answer.result.fell_back
            assert (answer.failures[0].tier, answer.failures[0].layer) == ("disk", None)
            assert runner.failure_counts == {("disk", None): 1}

    def test_a_hit_that_was_evicted_is_no_fault(self, kit):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            rig.break_tier("disk", "stale")
            rig.break_tier("host", "stale")
            runner = rig.runner()
            answer = rig.run(runner)
            assert (loaded(answer), answer.plan.path, answer.failures) == ([], "recompute", ())
            assert runner.failure_counts == {}
            assert all(kit.freed(store) for store in rig.stores.values())

    def test_a_tier_that_cannot_be_opened_leaves_no_pin_on_the_other(self, kit):
        with CpuBackend() as backend:
            rig = Rig(kit, backend, "bulk", disk=3e6)
            rig.break_tier("disk", "open")
            answer = rig.run(rig.runner())
            assert loaded(answer) == [("host", 0, 40)]
            assert all(kit.freed(store) for store in rig.stores.values())

    def test_of_one_tier_leave_the_other_its_success(self, kit):
        with CpuBackend() as backend:
            rig = Rig(kit, backend, "bulk", disk=3e6)
            faulty = rig.break_tier("disk", "standing still", 2)
            runner = rig.runner(deadline_s=0.5)
            runner.breaker.failed("host", backend.now())
            answer = rig.run(runner)
            assert answer.result.fell_back
            assert loaded(answer) == [("host", 0, 40)]
            # One more failure of host's would not be the second in a row.
            for _ in range(2):
                runner.breaker.failed("host", backend.now())
            assert runner.breaker.state("host") == "closed"
            faulty.go.set()

    def test_of_one_tier_say_nothing_of_another_that_was_cut_short(self, kit):
        with CpuBackend() as backend:
            rig = Rig(kit, backend, "bulk", disk=3e6)
            standing = rig.break_tier("host", "standing still", 3)
            rig.break_tier("disk", "raising", 0)
            runner = rig.runner(breaker=CircuitBreaker(failures=2))
            runner.breaker.failed("host", backend.now())
            assert rig.run(runner).failures[0].tier == "disk"
            # Not a success: one more failure is the second in a row.
            runner.breaker.failed("host", backend.now())
            assert runner.breaker.state("host") == "open"
            standing.go.set()

    def test_a_close_that_raises_is_counted_and_costs_nothing(self, kit):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            rig.break_tier("disk", "close")
            runner = rig.runner()
            answer = rig.run(runner)
            assert loaded(answer) == [("disk", 0, 80)]
            # On a busy machine it is not waited for.
            until = time.monotonic() + 20
            while not runner.failure_counts:
                assert time.monotonic() < until
                time.sleep(0.001)
            assert runner.failure_counts == {("disk", None): 1}


class TestBreaker:
    def test_leaves_a_failing_tier_alone_and_probes_it_later(self, kit, monkeypatch):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            faulty = rig.break_tier("disk", "raising", 1)
            runner = rig.runner(breaker=CircuitBreaker(failures=2, probe_after_s=200.0))
            assert rig.run(runner).result.fell_back
            assert rig.run(runner).result.fell_back
            assert runner.breaker.state("disk") == "open"
            for _ in range(3):
                answer = rig.run(runner)
                assert not answer.result.fell_back
                assert loaded(answer) == [("host", 0, 40)]
            # Its time has come, and it fails again: one request pays for that, and no other.
            later = backend.now() + 250
            monkeypatch.setattr(backend, "now", lambda: later)
            assert rig.run(runner).result.fell_back
            assert not rig.run(runner).result.fell_back
            assert runner.failure_counts == {("disk", 1): 3}
            # The next probe finds it mended.
            faulty.how = "nothing"
            monkeypatch.setattr(backend, "now", lambda: later + 500)
            assert loaded(rig.run(runner)) == [("disk", 0, 80)]
            assert runner.breaker.state("disk") == "closed"

    def test_is_not_asked_to_probe_a_tier_that_the_plan_does_not_use(self, kit, monkeypatch):
        with CpuBackend() as backend:
            rig = Rig(kit, backend, disk=SLOW)
            runner = rig.runner(breaker=CircuitBreaker(failures=1, probe_after_s=10.0))
            runner.breaker.failed("disk", backend.now() - 20)
            assert loaded(rig.run(runner)) == [("host", 0, 40)]
            assert runner.breaker.state("disk") == "open"

    def test_a_probe_that_is_out_keeps_the_tier_from_others(self, kit):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            runner = rig.runner(breaker=CircuitBreaker(failures=1, probe_after_s=10.0))
            runner.breaker.failed("disk", backend.now() - 20)
            assert runner.breaker.admit("disk", backend.now())
            assert loaded(rig.run(runner)) == [("host", 0, 40)]

    def test_a_tier_used_for_two_runs_is_probed_once(self, kit, monkeypatch):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            decide = rig.planner.decide

            def in_two(request):
                plan = decide(request)
                if plan.load:
                    (whole,) = plan.load
                    plan.load = (
                        type(whole)(whole.tier, 0, 16, 16 * 1024),
                        type(whole)(whole.tier, 16, whole.end, (whole.end - 16) * 1024),
                    )
                return plan

            monkeypatch.setattr(rig.planner, "decide", in_two)
            runner = rig.runner(breaker=CircuitBreaker(failures=1, probe_after_s=10.0))
            runner.breaker.failed("disk", backend.now() - 20)
            assert loaded(rig.run(runner)) == [("disk", 0, 16), ("disk", 16, 80)]
            assert runner.breaker.state("disk") == "closed"


def test_a_request_that_is_called_off_leaves_no_pin_and_tells_the_breaker_nothing(kit):
    with CpuBackend() as backend:
        rig = Rig(kit, backend)
        runner = rig.runner()
        cancel = backend.flag()
        cancel.set()
        rig.engine.poison()
        with pytest.raises(PrefillCancelledError):
            runner.run(rig.ids, cancel=cancel)
        assert runner.failure_counts == {}
        assert all(kit.freed(store) for store in rig.stores.values())


@pytest.mark.parametrize(
    ("stores", "field"),
    [
        ([], "stores"),
        ([HostStore(8), HostStore(8)], "stores"),
        ([HostStore(8), DiskStore(16)], "stores"),
    ],
)
def test_stores_that_do_not_go_together_are_refused(kit, stores, field):
    with CpuBackend() as backend, pytest.raises(InputError) as caught:
        PlanRunner(kit.engine(kit.model(), backend), planner_for(kit.model()), stores)
    assert caught.value.field == field
