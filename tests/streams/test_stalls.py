"""Stores that do not come back from a call, under the runner, with a real model: no request is held up."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from kvlane.policy.breaker import CircuitBreaker
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Device, Link, Machine, Tier
from kvlane.policy.model import ModelSpec
from kvlane.policy.planner import Calibration, Planner
from kvlane.policy.prefill_cost import PassCost, PrefillCost
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.runner import PlanRunner, _Attempt
from kvlane.streams.visit import Visit
from kvlane.transfer.host import HostStore
from kvlane.transfer.store import KvSafetyError

TOKENS = 83
REQUESTS = 250
SEED = 20_262
TIERS = ("host", "disk")
BOTH, DISK = 3e6, 1e9
"""Rates of the disk, in bytes/s, at which a bulk plan loads from both tiers, and at which any loads from the disk."""


class DiskStore(HostStore):
    tier = "disk"


def planner_for(model, executor, disk):
    """1 ms a token to compute."""
    spec = ModelSpec.from_config({**model.config.to_dict(), "torch_dtype": "float32"}, name="tiny")
    links = {"host": Link("host", 1e9), "disk": Link("disk", disk)}
    tiers = {name: Tier(name, name, runs_per_layer=2) for name in links}
    machine = Machine("declared", Device("one CPU core"), links, tiers, ())
    cost = PassCost(1e-4, 1e-3, 0.0)
    calibration = Calibration(PrefillCost(4, cost, cost), 0.1, "declared")
    return Planner(spec, machine, executor=executor, kv_dtype="fp32", calibration=calibration)


class Rig:
    """A model whose first 40 prompt tokens are stored in host memory, and 80 on what stands for a disk."""

    def __init__(self, kit, backend):
        self.kit, self.backend = kit, backend
        self.model, self.ids = kit.model(), kit.ids(TOKENS)
        self.engine = kit.engine(self.model, backend)
        self.full = self.engine.prefill(self.ids)
        kinds = {"host": HostStore, "disk": DiskStore}
        self.stores = {tier: kit.FaultyStore(kinds[tier](kit.unit, checksums=True), None) for tier in TIERS}
        self.store()

    def store(self):
        self.engine.save(self.stores["host"], self.ids, 40)
        self.engine.save(self.stores["disk"], self.ids, 80)

    def runner(self, executor="layered", disk=DISK, **options):
        return PlanRunner(
            self.engine, planner_for(self.model, executor, disk), self.stores.values(), **options
        )

    def run(self, runner):
        """A request with everything poisoned before; its answer is the no-cache one."""
        self.engine.poison()
        answer = runner.run(self.ids)
        assert answer.result.first_token == self.full.first_token
        np.testing.assert_allclose(answer.result.logits, self.full.logits, rtol=0, atol=1e-4)
        return answer

    def check_nothing_left(self):
        """Once nothing stands still any more."""
        until = time.monotonic() + 20
        while asking() or self.engine.pool.quarantined:
            assert time.monotonic() < until
            time.sleep(0.002)
        assert all(self.kit.freed(store) for store in self.stores.values())


def asking():
    """The threads on which stores are asked."""
    return [t.name for t in threading.enumerate() if t.name.startswith("kvlane-store-")]


def loaded(answer):
    return [(part.tier, part.start, part.end) for part in answer.result.parts if part.whole]


def failures(answer, tier="disk"):
    return [failure for failure in answer.failures if failure.tier == tier]


@contextmanager
def released(flags):
    """Let what stands still go at the end, also when a check has failed: it would be found by every later test."""
    try:
        yield flags
    finally:
        for flag in flags:
            flag.set()


class TestOneStall:
    @pytest.fixture(params=["lookup", "open", "pin", "close"])
    def call(self, request):
        return request.param

    def noticed(self, rig, runner, call, go, bulk=False):
        """A runner's first answer of a disk that stands still, and the failure by which somebody has noticed."""
        answer = rig.run(runner)
        assert not go.is_set()
        found = failures(answer)
        if call == "close":
            # Nobody waits for it: only who asks next finds out.
            assert loaded(answer)[-1] == ("disk", 40 if bulk else 0, 80)
            assert found == []
            found = failures(rig.run(runner))
        return found

    def test_costs_one_request_a_wait_and_the_next_ones_nothing(self, kit, call):
        with CpuBackend() as backend, released([]) as flags:
            rig = Rig(kit, backend)
            faulty, runner = rig.stores["disk"], rig.runner(breaker=CircuitBreaker(10))
            flags.append(faulty.arm(f"{call} standing still"))
            (failure,) = self.noticed(rig, runner, call, flags[0])
            assert failure.layer is None
            assert "no answer within" in failure.reason
            assert runner.failure_counts == {("disk", None): 1}
            assert runner.breaker.counts("disk").failures == 1
            # Whoever comes next does not even ask, and no thread joins the one that stands still.
            asked = faulty.asked
            for _ in range(3):
                answer = rig.run(runner)
                assert loaded(answer) == [("host", 0, 40)]
                (failure,) = failures(answer)
                assert (failure.layer, failure.reason[:30]) == (None, "lookup failed: not asked: its ")
                stands = "open" if call == "pin" else call  # a run is pinned as soon as it is open
                assert f"its {stands} has been under way for" in failure.reason
            assert faulty.asked == asked
            assert runner.failure_counts == {("disk", None): 4}
            assert [name for name in asking() if "disk" in name] == ["kvlane-store-disk"]
            # Once it comes back, what it brings is let go of, and it is asked again.
            flags[0].set()
            rig.check_nothing_left()
            faulty.arm(None)
            rig.engine.prefill(rig.ids)
            rig.store()
            answer = rig.run(runner)
            assert (loaded(answer), answer.failures) == ([("disk", 0, 80)], ())
            rig.check_nothing_left()

    def test_again_and_again_shuts_the_tier_off_until_it_answers(self, kit, call, monkeypatch):
        with CpuBackend() as backend, released([]) as flags:
            rig = Rig(kit, backend)
            faulty = rig.stores["disk"]
            runner = rig.runner(breaker=CircuitBreaker(3, probe_after_s=200.0), store_deadline_s=0.5)
            flags.append(faulty.arm(f"{call} standing still"))
            self.noticed(rig, runner, call, flags[0])
            for _ in range(2):
                assert runner.breaker.state("disk") == "closed"
                assert failures(rig.run(runner))
            assert runner.breaker.state("disk") == "open"
            counts = runner.failure_counts
            assert failures(rig.run(runner)) == []
            assert runner.failure_counts == counts
            # Its probe finds that it stands still yet.
            later = backend.now() + 250
            monkeypatch.setattr(backend, "now", lambda: later)
            assert "not asked" in failures(rig.run(runner))[0].reason
            assert failures(rig.run(runner)) == []
            flags[0].set()
            rig.check_nothing_left()
            faulty.arm(None)
            rig.engine.prefill(rig.ids)
            rig.store()
            monkeypatch.setattr(backend, "now", lambda: later + 500)
            assert loaded(rig.run(runner)) == [("disk", 0, 80)]
            assert runner.breaker.state("disk") == "closed"

    def test_of_one_of_two_tiers_leaves_the_other_unpinned(self, kit, call):
        with CpuBackend() as backend, released([]) as flags:
            rig = Rig(kit, backend)
            runner = rig.runner("bulk", BOTH)
            assert loaded(rig.run(runner)) == [("host", 0, 40), ("disk", 40, 80)]
            flags.append(rig.stores["disk"].arm(f"{call} standing still"))
            assert len(self.noticed(rig, runner, call, flags[0], bulk=True)) == 1
            assert kit.freed(rig.stores["host"])
            flags[0].set()
            rig.check_nothing_left()


class Drawn:
    """Requests, and what goes wrong with them, drawn from a seed."""

    def __init__(self, kit, rig):
        self.kit, self.rig = kit, rig
        self.chosen = random.Random(SEED)
        self.hows = (*kit.stalls, *kit.stalls, *kit.load_faults, "lookup", "open", "close", "stale", None)
        plans = (("layered", DISK), ("bulk", BOTH), ("two_ended", 4e5))
        # Breakers that let the tiers come back soon: all is tried often.
        self.runners = [
            rig.runner(
                executor,
                disk,
                breaker=CircuitBreaker(3, 0.02, longest_s=0.05),
                deadline_s=0.4,
                store_deadline_s=0.1,
            )
            for executor, disk in plans
        ]
        self.seen: Counter[str | None] = Counter()
        self.requests = 0

    def request(self, flags):
        chosen, tier = self.chosen, self.chosen.choice(TIERS)
        how = chosen.choice(self.hows)
        go = self.rig.stores[tier].arm(how, chosen.randrange(self.kit.layers))
        flags.append(go)
        answer = self.rig.run(chosen.choice(self.runners))
        assert not go.is_set()
        self.requests += 1
        self.seen[how] += 1
        self.seen["loaded"] += bool(loaded(answer))
        for failure in answer.failures:
            for what in ("lookup failed", "open failed", "not pinned", "not asked", "no answer"):
                self.seen[what] += what in failure.reason
        # Some come back soon, and some only after others have stood still.
        while flags and chosen.random() < 0.4:
            flags.pop(0).set()

    @property
    def lacking(self):
        """What has hardly been seen yet: what a stall leads to depends on what else the machine is busy with."""
        ends = ("loaded", "lookup failed", "open failed", "not pinned", "not asked", "no answer")
        return [what for what in (*self.hows, *ends) if self.seen[what] < 3]


def test_every_answer_is_the_no_cache_one_and_nothing_is_left(kit):
    with CpuBackend() as backend, released([]) as flags:
        rig = Rig(kit, backend)
        drawn = Drawn(kit, rig)
        while drawn.requests < REQUESTS or drawn.lacking:
            drawn.request(flags)
            assert drawn.requests < 10 * REQUESTS, drawn.lacking
            assert len(asking()) <= len(TIERS) * len(drawn.runners)
        for flag in flags:
            flag.set()
        for store in rig.stores.values():
            store.arm(None)
        rig.check_nothing_left()
        rig.engine.prefill(rig.ids)
        rig.store()
        # The tiers come back, once it is their time to be probed.
        for runner in drawn.runners:
            until = time.monotonic() + 20
            tiers: list[str] = []
            while not tiers or any(runner.breaker.state(tier) != "closed" for tier in tiers):
                assert time.monotonic() < until
                tiers = [tier for tier, *_ in loaded(rig.run(runner))]
        rig.check_nothing_left()


class TestControls:
    """Each check above must see what it is there for."""

    @pytest.mark.parametrize("call", ["lookup", "open", "pin", "close"])
    def test_a_store_asked_on_the_requests_thread_holds_it_up(self, kit, call, monkeypatch):
        monkeypatch.setattr(Visit, "ask", lambda self, what, call, put_away=None: call())
        monkeypatch.setattr(Visit, "wait", lambda self, answer: answer)
        monkeypatch.setattr(Visit, "close", lambda self, closing, wait_s: closing())
        with CpuBackend() as backend, released([]) as flags:
            rig = Rig(kit, backend)
            runner = rig.runner(deadline_s=1.0)
            flags.append(rig.stores["disk"].arm(f"{call} standing still"))
            threading.Timer(2.0, flags[0].set).start()
            rig.run(runner)
            assert flags[0].is_set()

    def test_a_run_that_came_too_late_and_is_not_closed_stays_pinned(self, kit, monkeypatch):
        with CpuBackend() as backend, released([]) as flags:
            rig = Rig(kit, backend)
            runner = rig.runner(store_deadline_s=0.2)
            flags.append(rig.stores["disk"].arm("open standing still"))
            left, came = [], threading.Event()
            put_away = Visit.put_away

            def leave_open(self, run):
                if run.tier != "disk":
                    put_away(self, run)
                    return
                left.append(run)
                came.set()

            monkeypatch.setattr(Visit, "put_away", leave_open)
            rig.run(runner)
            flags[0].set()
            assert came.wait(20)
            assert not kit.freed(rig.stores["disk"], timeout_s=0.2)
            for run in left:
                run.close()
            assert kit.freed(rig.stores["disk"])


@pytest.mark.parametrize(
    "error", [InputError("token_ids", "are odd"), KvSafetyError("closed"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("call", ["lookup", "open"])
def test_what_a_store_raises_as_the_callers_mistake_is_raised_to_the_caller(kit, call, error, monkeypatch):
    def refuse(*given, **options):
        raise error

    with CpuBackend() as backend:
        rig = Rig(kit, backend)
        runner = rig.runner()
        monkeypatch.setattr(rig.stores["disk"], call, refuse, raising=False)
        rig.engine.poison()
        with pytest.raises(type(error)) as caught:
            runner.run(rig.ids)
        assert caught.value is error
        assert runner.failure_counts == {}
        rig.check_nothing_left()


class Odd:
    """A run of which one call raises, once it is done."""

    def __init__(self, run, call, error):
        self._run, self._call, self._error = run, call, error

    def __getattr__(self, name):
        return getattr(self._run, name)

    def retain(self):
        if self._call == "pin":
            raise self._error
        return Odd(self._run.retain(), self._call, self._error)

    def close(self):
        self._run.close()
        if self._call == "close":
            raise self._error


@pytest.mark.parametrize("error", [OSError(), SystemExit(), KeyboardInterrupt()])
class TestRunsThatRaiseAnything:
    def hand_out(self, store, monkeypatch, call, error):
        opening = store.open
        monkeypatch.setattr(
            store, "open", lambda *given, **options: Odd(opening(*given, **options), call, error)
        )

    def test_in_a_close_are_counted_and_asked_again(self, kit, error, monkeypatch):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            runner = rig.runner()
            with monkeypatch.context() as patch:
                self.hand_out(rig.stores["disk"], patch, "close", error)
                assert loaded(rig.run(runner)) == [("disk", 0, 80)]
                rig.check_nothing_left()
            assert runner.failure_counts == {("disk", None): 2}  # the runner's pin and the load's
            rig.engine.prefill(rig.ids)
            rig.store()
            answer = rig.run(runner)
            assert (loaded(answer), answer.failures) == ([("disk", 0, 80)], ())

    def test_in_a_close_that_comes_too_late_do_not_end_the_stores_thread(self, kit, error, monkeypatch):
        with CpuBackend() as backend, released([]) as flags:
            rig = Rig(kit, backend)
            runner = rig.runner(breaker=CircuitBreaker(10))
            flags.append(rig.stores["disk"].arm("open standing still"))
            with monkeypatch.context() as patch:
                self.hand_out(rig.stores["disk"], patch, "close", error)
                (failure,) = failures(rig.run(runner))
                assert "no answer" in failure.reason
                flags[0].set()
                rig.check_nothing_left()
            assert runner.failure_counts == {("disk", None): 3}  # it opened too late, and two pins
            rig.stores["disk"].arm(None)
            rig.engine.prefill(rig.ids)
            rig.store()
            assert loaded(rig.run(runner)) == [("disk", 0, 80)]

    def test_in_a_pin_leave_none(self, kit, error, monkeypatch):
        with CpuBackend() as backend:
            rig = Rig(kit, backend)
            runner = rig.runner()
            self.hand_out(rig.stores["disk"], monkeypatch, "pin", error)
            if isinstance(error, Exception):
                (failure,) = rig.run(runner).failures
                assert failure.reason.startswith("not pinned")
            else:
                with pytest.raises(type(error)):
                    rig.run(runner)
            rig.check_nothing_left()


def test_who_is_called_away_from_a_close_has_closed_all(kit, monkeypatch):
    close = Visit.close
    interrupted: list[str] = []

    def interrupt_once(self, closing, wait_s):
        close(self, closing, wait_s)
        if wait_s and not interrupted:
            interrupted.append("by hand")
            raise KeyboardInterrupt

    with CpuBackend() as backend:
        rig = Rig(kit, backend)
        runner = rig.runner("bulk", BOTH)
        monkeypatch.setattr(Visit, "close", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            rig.run(runner)
        rig.check_nothing_left()


@pytest.mark.parametrize("how", [None, "lookup", "open", "stale"])
def test_a_request_leaves_nothing_to_the_garbage_collector(kit, how, monkeypatch):
    """A prompt's ids are megabytes where it is long."""
    made = []

    class Noted(_Attempt):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(weakref.ref(self))

    monkeypatch.setattr("kvlane.streams.runner._Attempt", Noted)
    with CpuBackend() as backend:
        rig = Rig(kit, backend)
        runner = rig.runner()
        rig.stores["disk"].arm(how)
        gc.collect()
        gc.disable()
        try:
            rig.run(runner)
            assert [attempt() for attempt in made] == [None]
        finally:
            gc.enable()
        rig.check_nothing_left()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_waited_for_is_refused(kit, seconds):
    with CpuBackend() as backend:
        rig = Rig(kit, backend)
        with pytest.raises(InputError) as caught:
            rig.runner(store_deadline_s=seconds)
        assert caught.value.field == "store_deadline_s"
