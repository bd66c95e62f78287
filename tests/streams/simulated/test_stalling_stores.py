"""Stores that stall, on a clock that says exactly what they cost: in the runner, and in the thread that asks them."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvlane.policy.breaker import CircuitBreaker
from kvlane.streams.faults import StoreSilentError
from kvlane.streams.prefill import Job
from kvlane.streams.runner import PlanRunner
from kvlane.streams.simulated.backend import SimulatedBackend
from kvlane.streams.simulated.choosers import Seeded
from kvlane.streams.simulated.device import Disturbance
from kvlane.streams.simulated.engine import SimulatedBlock, SimulatedEngine
from kvlane.streams.simulated.explore import bounded, reduced
from kvlane.streams.simulated.kv import PromptKv
from kvlane.streams.simulated.tier import SimulatedTier
from kvlane.streams.store_thread import StoreThread
from kvlane.streams.visit import CLOSE_WAIT_S, Visit
from kvlane.transfer.identity import KvIdentity, encode_token_ids
from kvlane.transfer.layout import KvRegion
from kvlane.transfer.wrapped import WrappedRun

TOKENS, UNIT = 16, 4
TIERS = ("host", "disk")
CALLS = ("lookup", "open", "pin", "close")
FOR_EVER = 1000.0
DEADLINE_S, STORE_DEADLINE_S = 0.05, 0.02


class StallingStore:
    """Stands still in the calls that `stalls` names, for so many seconds; it notes who is inside."""

    def __init__(self, backend, store):
        self.backend, self.store = backend, store
        self.tier, self.unit_tokens = store.tier, store.unit_tokens
        self.stalls = {}
        self.asked: Counter[str] = Counter()
        self.inside = self.most_inside = 0

    @contextmanager
    def call(self, what):
        self.asked[what] += 1
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            self.backend.sleep(self.stalls.get(what, 0.0))
            yield
        finally:
            self.inside -= 1

    def lookup(self, *given):
        with self.call("lookup"):
            return self.store.lookup(*given)

    def open(self, *given, **options):
        with self.call("open"):
            return StallingRun(self.store.open(*given, **options), self)


class StallingRun(WrappedRun):
    def __init__(self, run, store):
        super().__init__(run)
        self.store = store

    def retain(self):
        with self.store.call("pin"):
            return StallingRun(self._run.retain(), self.store)

    def close(self):
        with self.store.call("close"):
            super().close()


@dataclass(frozen=True)
class Segment:
    tier: str
    start: int
    end: int


class Loads:
    """A planner that loads all there is: from the disk if it can, or, where it is told to, from both tiers."""

    def __init__(self, cut=False):
        self.cut = cut

    def decide(self, request):
        hits = {tier: min(hit, TOKENS - UNIT) for tier, hit in request.hits.items() if hit}
        load = []
        if hits:
            best = "disk" if "disk" in hits else "host"
            load = [Segment(best, 0, hits[best])]
            if self.cut and len(hits) == len(TIERS):
                load = [Segment("host", 0, UNIT), Segment("disk", UNIT, hits[best])]
        return SimpleNamespace(load=load, executor="layered", group_layers=1)


class Engine:
    """The simulated one, as the runner takes it."""

    def __init__(self, sim, backend):
        region = KvRegion(sim.layout, TOKENS)
        self.backend = backend
        self.identity = KvIdentity("simulated", "r0", None, "bytes", sim.layout.name, 0, 1, "none", "none")
        self.own = SimulatedEngine(
            backend,
            sim.layout,
            lambda: SimulatedBlock(backend.device_bytes(region.nbytes), region),
            lambda layer, start, end: sim.layer_s * (end - start) / TOKENS,
        )
        self.sequence = self.own.sequence()
        self.kv = PromptKv(encode_token_ids(range(TOKENS)), sim.layout)

    def prefill(self, token_ids, resident=0, load=(), *, submitted_s, **options):
        job = Job(tokens=TOKENS, resident=resident, parts=tuple(load), submitted_s=submitted_s, **options)
        # It raises if the answer is not the no-cache one.
        return self.own.prefill(self.sequence, self.kv, job)


class Rig:
    def __init__(self, sim, backend, *, cut=False, **options):
        self.backend = backend
        self.engine = Engine(sim, backend)
        self.tiers = [SimulatedTier(backend, name, UNIT, self.engine.identity) for name in TIERS]
        for tier in self.tiers:
            tier.put(self.engine.kv)
        self.stores: dict[str, Any] = {t.name: StallingStore(backend, t.store) for t in self.tiers}
        planner: Any = Loads(cut)
        given = {"deadline_s": DEADLINE_S, "store_deadline_s": STORE_DEADLINE_S, **options}
        with backend.watched_locks():
            self.runner = PlanRunner(self.engine, planner, self.stores.values(), **given)

    def run(self):
        """A request, and how long it took until it came back."""
        began = self.backend.now()
        answer = self.runner.run(range(TOKENS))
        return answer, self.backend.now() - began

    def stall(self, *calls, tier="disk", seconds=FOR_EVER):
        self.stores[tier].stalls = dict.fromkeys(calls, seconds)

    def check_nothing_left(self):
        self.backend.join()
        assert all(tier.evict() == 0 for tier in self.tiers)
        assert self.engine.own.pool.quarantined == 0
        self.engine.own.executor.close()
        assert self.backend.open_streams == 0


def loaded(answer):
    return [part.tier for part in answer.result.parts if part.whole]


def latest_s(sim):
    """A request's deadline, a recompute, the layer that was computed meanwhile, and the waits for two closes."""
    return DEADLINE_S + (sim.layout.layers + 1) * sim.layer_s + 2 * CLOSE_WAIT_S + 1e-9


class TestCosts:
    """What a stall costs whom; here a store answers in no time at all, or it stalls."""

    @pytest.fixture
    def usual_s(self, sim, host_threads):
        """What a request takes by each tier, with nothing wrong."""
        took = {}
        for tier in TIERS:
            with SimulatedBackend({"*": sim.link}, threads=host_threads) as backend:
                rig = Rig(sim, backend)
                for other in TIERS:
                    if other != tier:
                        rig.stores[other].store.clear()
                answer, took[tier] = rig.run()
                assert loaded(answer) == [tier]
                rig.check_nothing_left()
        return took

    @pytest.mark.parametrize("call", CALLS)
    def test_the_first_request_waits_once_and_the_next_not_at_all(self, sim, host_threads, usual_s, call):
        with SimulatedBackend({"*": sim.link}, threads=host_threads) as backend:
            rig = Rig(sim, backend)
            rig.stall(call)
            answer, took = rig.run()
            if call == "close":
                # Of the load's handle and of the runner's, the first is waited for a little.
                assert (loaded(answer), answer.failures) == (["disk"], ())
                assert took <= usual_s["disk"] + CLOSE_WAIT_S + 1e-9
                backend.sleep(STORE_DEADLINE_S)
            else:
                (failure,) = answer.failures
                assert (failure.tier, failure.layer) == ("disk", None)
                assert loaded(answer) == ["host"]
                assert f"no answer within {STORE_DEADLINE_S:g} s" in failure.reason
                assert STORE_DEADLINE_S <= took <= latest_s(sim)
            asked = rig.stores["disk"].asked.copy()
            for _ in range(2):
                answer, took = rig.run()
                assert loaded(answer) == ["host"]
                assert took == pytest.approx(usual_s["host"], rel=1e-9)
                stands = "open" if call == "pin" else call  # a run is pinned as soon as it is open
                assert f"not asked: its {stands} has been under way for" in answer.failures[0].reason
            assert rig.stores["disk"].asked == asked
            assert rig.stores["disk"].most_inside == 1
            rig.check_nothing_left()

    def test_two_tiers_that_stall_at_once_are_waited_for_at_once(self, sim, host_threads):
        with SimulatedBackend({"*": sim.link}, threads=host_threads) as backend:
            rig = Rig(sim, backend)
            for tier in TIERS:
                rig.stall("lookup", tier=tier)
            answer, took = rig.run()
            assert loaded(answer) == []
            assert {failure.tier for failure in answer.failures} == {*TIERS}
            assert took == pytest.approx(STORE_DEADLINE_S + sim.layout.layers * sim.layer_s)
            rig.check_nothing_left()

    def test_all_waiting_for_one_store_counts_together(self, sim, host_threads):
        with SimulatedBackend({"*": sim.link}, threads=host_threads) as backend:
            rig = Rig(sim, backend)
            rig.stall("lookup", "open", seconds=0.6 * STORE_DEADLINE_S)
            answer, took = rig.run()
            assert loaded(answer) == ["host"]
            assert "open failed" in answer.failures[0].reason
            assert took < 1.1 * STORE_DEADLINE_S + sim.layout.layers * sim.layer_s
            rig.check_nothing_left()

    def test_nothing_is_loaded_once_the_deadline_has_passed(self, sim, host_threads):
        with SimulatedBackend({"*": sim.link}, threads=host_threads) as backend:
            rig = Rig(sim, backend, store_deadline_s=10 * DEADLINE_S)
            rig.stall("lookup")
            answer, took = rig.run()
            assert loaded(answer) == []
            # The other tier has answered, and is not told off for what this one has cost.
            assert [failure.tier for failure in answer.failures] == ["disk"]
            assert took == pytest.approx(DEADLINE_S + sim.layout.layers * sim.layer_s)
            rig.check_nothing_left()

    def test_a_load_has_what_is_left_of_the_deadline(self, sim, host_threads):
        """Stores that take their time, and a link that stands still."""
        stuck = Disturbance(late_s=FOR_EVER)
        with SimulatedBackend(
            {"*": sim.link}, threads=host_threads, disturb=lambda stream, copies: stuck
        ) as backend:
            rig = Rig(sim, backend)
            for tier in TIERS:
                rig.stall("lookup", tier=tier, seconds=0.9 * STORE_DEADLINE_S)
            answer, took = rig.run()
            assert [failure.tier for failure in answer.failures] == ["disk"]
            # Nobody closes anything that would have to be waited for.
            assert DEADLINE_S < took <= latest_s(sim) - 2 * CLOSE_WAIT_S
            rig.check_nothing_left()


class TestBreaker:
    def test_opens_after_so_many_and_probes_until_the_store_answers_again(self, sim, host_threads):
        with SimulatedBackend({"*": sim.link}, threads=host_threads) as backend:
            breaker = CircuitBreaker(failures=3, probe_after_s=1.0)
            rig = Rig(sim, backend, breaker=breaker)
            rig.stall("lookup", seconds=10.0)
            for _ in range(3):
                assert breaker.state("disk") == "closed"
                rig.run()
            assert breaker.state("disk") == "open"
            counted = dict(rig.runner.failure_counts)
            assert counted == {("disk", None): 3}
            # Shut off: it is not even looked at.
            assert rig.run()[0].failures == ()
            assert rig.runner.failure_counts == counted
            # A probe finds that it still hangs, at once, and it is shut off for longer.
            backend.sleep(1.5)
            assert "not asked" in rig.run()[0].failures[0].reason
            assert rig.run()[0].failures == ()
            assert breaker.counts("disk").probes == 1
            # It comes back, and so does the tier.
            rig.stall()
            backend.sleep(20.0)
            answer, _ = rig.run()
            assert (loaded(answer), answer.failures) == (["disk"], ())
            assert breaker.state("disk") == "closed"
            rig.check_nothing_left()

    def test_a_store_that_only_ever_takes_too_long_is_shut_off_again_by_each_probe(self, sim, host_threads):
        with SimulatedBackend({"*": sim.link}, threads=host_threads) as backend:
            rig = Rig(sim, backend, breaker=CircuitBreaker(failures=2, probe_after_s=1.0, growth=1.0))
            rig.stall("lookup", seconds=1.5 * STORE_DEADLINE_S)
            waited = 0
            for _ in range(100):
                answer, took = rig.run()
                waited += bool(answer.failures)
                assert took <= latest_s(sim)
                backend.sleep(0.1)
            # Two, and one for each second or so.
            assert waited <= 2 + 10
            rig.check_nothing_left()


SEEDS = range(120)


class TestAtRandom:
    @staticmethod
    def one(sim, threads, seed):
        drawn = Random(seed)
        seen: Counter[str] = Counter()
        chooser = Seeded(seed, switch=drawn.choice((0.0, 0.1, 0.5)))
        compute: Any = drawn.choice(("thread", "stream"))
        with SimulatedBackend({"*": sim.link}, compute=compute, chooser=chooser, threads=threads) as backend:
            rig = Rig(sim, backend, cut=drawn.random() < 0.5, breaker=CircuitBreaker(1000))
            for _ in range(drawn.randint(2, 8)):
                for tier in TIERS:
                    calls = [call for call in CALLS if drawn.random() < 0.2]
                    rig.stall(*calls, tier=tier, seconds=DEADLINE_S * 10 ** drawn.uniform(-3, 2))
                answer, took = rig.run()
                if compute == "thread":
                    assert took <= latest_s(sim), seed
                seen["loaded"] += bool(loaded(answer))
                for failure in answer.failures:
                    seen[failure.reason.split(":")[0]] += 1
                    seen["not asked"] += "not asked" in failure.reason
                backend.sleep(drawn.choice((0.0, DEADLINE_S, 20 * DEADLINE_S)))
            assert all(store.most_inside <= 1 for store in rig.stores.values()), seed
            rig.check_nothing_left()
        return seen

    def all(self, sim, threads):
        return sum((self.one(sim, threads, seed) for seed in SEEDS), Counter())

    def test_every_answer_is_right_in_time_and_nothing_is_left(self, sim, host_threads):
        seen: Counter[str] = Counter()
        for seed in SEEDS:
            seen += self.one(sim, host_threads, seed)
        assert min(seen[what] for what in ("loaded", "lookup failed", "open failed", "not asked")) > 20

    # Controls: each check above must see what it is there for.

    def test_a_store_asked_on_the_callers_thread_is_too_late(self, sim, host_threads, monkeypatch):
        def at_once(self, what, call, put_away=None):
            return call()

        monkeypatch.setattr(Visit, "ask", at_once)
        monkeypatch.setattr(Visit, "wait", lambda self, value: value)
        with pytest.raises(AssertionError):
            self.all(sim, host_threads)

    def test_a_run_opened_too_late_and_not_closed_stays_pinned(self, sim, host_threads, monkeypatch):
        ask = Visit.ask

        def left_open(self, what, call, put_away=None):
            return ask(self, what, call)

        monkeypatch.setattr(Visit, "ask", left_open)
        with pytest.raises(AssertionError):
            self.all(sim, host_threads)


class TestEveryOrder:
    """Of an answer that comes just as it is given up: it is taken or put away, and never both, or neither."""

    @staticmethod
    def program(backend, seen):
        with backend.watched_locks():
            thread = StoreThread(backend, "store", 1.0)
        back = backend.flag()
        away: list[str] = []
        backend.start(back.set, "back")
        taken, begun = None, []

        def call():
            begun.append(True)
            back.wait()
            return "run"

        with suppress(StoreSilentError):
            taken = thread.wait(thread.ask("open", call, away.append), 1.0)
        again = "silent"
        try:
            again = thread.wait(thread.ask("lookup", lambda: "hit"), 1.0)
        except StoreSilentError as error:
            again = str(error).split(":")[0]
        backend.join()
        assert not thread._worker
        assert len(away) + (taken is not None) == len(begun)
        seen.add((taken, *away, again.split(" within")[0]))

    @staticmethod
    def crowd(backend, seen):
        """Two who ask, one of them closing something besides, and a thread that may be given up before it comes."""
        with backend.watched_locks():
            thread = StoreThread(backend, "store", 1.0)
        inside: list[str] = []
        done: list[str] = []

        def call(name):
            inside.append(name)
            assert len(inside) == 1
            backend.flag().wait(0.5)
            inside.remove(name)
            done.append(name)

        def ask(name):
            with suppress(StoreSilentError):
                thread.wait(thread.ask("lookup", lambda: call(name)), 1.0)
                seen.add(name)

        backend.start(lambda: ask("one"), "one")
        thread.post("close", lambda: call("close"), 0.0)
        ask("two")
        backend.join()
        assert "close" in done
        assert not thread._worker
        seen.add(tuple(done))

    @pytest.mark.parametrize("switch", [0.05, 0.3])
    def test_closes_what_it_was_given_and_is_asked_by_one_thread_at_a_time(self, host_threads, switch):
        seen: set[object] = set()
        for seed in range(1500):
            chooser = Seeded(seed, switch=switch)
            with SimulatedBackend(chooser=chooser, timed=False, jumps=True, threads=host_threads) as backend:
                self.crowd(backend, seen)
        assert {"one", "two", ("close",), ("close", "one", "two")} <= seen

    @pytest.mark.parametrize("how", ["bounded", "reduced"])
    def test_has_one_end(self, host_threads, how):
        seen: set[tuple[str | None, ...]] = set()

        def run(chooser):
            with SimulatedBackend(chooser=chooser, timed=False, jumps=True, threads=host_threads) as backend:
                self.program(backend, seen)

        if how == "bounded":
            bounded(run, 1, 200_000)
        else:
            reduced(run, 200_000)
        assert {("run", "hit"), (None, "run", "hit"), (None, "run", "not asked")} <= seen
