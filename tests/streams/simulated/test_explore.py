"""Every order of small runs: of made-up programs whose orders can be counted, and of real loads."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from kvlane.policy.errors import InputError
from kvlane.streams.load import LayerLoad
from kvlane.streams.simulated.backend import SimulatedBackend
from kvlane.streams.simulated.explore import Reduced, bounded, reduced
from kvlane.streams.simulated.order import OrderError
from kvlane.streams.simulated.schedules import ScheduleRun
from kvlane.streams.simulated.tier import Fault
from kvlane.transfer.layout import KvLayout

UNBOUNDED = 100


def three_under_a_lock(backend, seen):
    """Three threads each write their name under one lock."""
    with backend.watched_locks():
        import threading

        lock = threading.Lock()

    def write(name):
        with lock:
            seen.append(name)

    for name in "abc":
        backend.start(lambda name=name: write(name), name)
    backend.join()


def three_apart(backend, seen):
    """The same, each under a lock of its own: nobody can tell in which order."""
    with backend.watched_locks():
        import threading

        locks = {name: threading.Lock() for name in "abc"}
    done = set()

    def write(name):
        with locks[name]:
            done.add(name)

    for name in "abc":
        backend.start(lambda name=name: write(name), name)
    backend.join()
    seen.extend(sorted(done))


def a_flag_looked_at(backend, seen):
    """One thread sets two flags; another looks at the second and then at the first."""
    one, two = backend.flag(), backend.flag()

    def set_both():
        one.set()
        two.set()

    backend.start(set_both, "sets")
    seen.append((two.is_set(), one.is_set()))
    backend.join()


def a_wait_that_may_time_out(backend, seen):
    flag = backend.flag()
    backend.start(flag.set, "sets")
    seen.append(flag.wait(1.0))
    backend.join()


PROGRAMS = {
    three_under_a_lock: {str([*order]) for order in permutations("abc")},
    three_apart: {str([*"abc"])},
    a_flag_looked_at: {str([pair]) for pair in ((False, False), (False, True), (True, True))},
    a_wait_that_may_time_out: {"[True]", "[False]"},
}


class TestPrograms:
    @staticmethod
    def outcomes(program, explore, threads):
        seen = set()

        def run(chooser):
            one: list[object] = []
            with SimulatedBackend(chooser=chooser, timed=False, jumps=True, threads=threads) as backend:
                program(backend, one)
            seen.add(str(one))

        return explore(run), seen

    @pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
    def test_every_outcome_there_can_be_is_found(self, program, host_threads):
        runs, seen = self.outcomes(program, lambda run: bounded(run, UNBOUNDED, 50_000), host_threads)
        assert seen == PROGRAMS[program]
        (whole, _), found = self.outcomes(program, lambda run: reduced(run, 1000), host_threads)
        assert found == seen
        assert whole <= runs

    def test_what_nobody_can_tell_apart_is_run_once(self, host_threads):
        (whole, left), _ = self.outcomes(three_apart, lambda run: reduced(run, 1000), host_threads)
        assert (whole, left) == (1, 0)

    def test_orders_under_one_lock_are_run_once_each(self, host_threads):
        (whole, _), _ = self.outcomes(three_under_a_lock, lambda run: reduced(run, 1000), host_threads)
        assert whole == 6

    def test_without_preemptions_a_thread_runs_until_it_waits(self, host_threads):
        _, seen = self.outcomes(a_flag_looked_at, lambda run: bounded(run, 0, 1000), host_threads)
        assert seen == {"[(False, False)]"}

    def test_more_than_was_asked_for_is_an_error(self, host_threads):
        with pytest.raises(InputError, match="most"):
            self.outcomes(three_under_a_lock, lambda run: bounded(run, UNBOUNDED, 5), host_threads)


class AllWanted(Reduced):
    """Without looking for races: whoever is awake goes first once."""

    def choose(self, options, may_stay):
        known = len(self._path)
        one = super().choose(options, may_stay)
        if len(self._path) > known:
            self._path[-1].wanted.update(self._path[-1].enabled)
        return one


class TestLoads:
    @staticmethod
    def schedule(sim, layers, *requests, compute="thread", **changes):
        return sim.schedule(
            *requests,
            layout=KvLayout(layers, 1, 1, 1, 4),
            prompts=(tuple(range(8)),),
            compute_s=(sim.layer_s,) * layers,
            compute=compute,
            timed=False,
            **changes,
        )

    @staticmethod
    def run(schedule, threads, jumps=False):
        return lambda chooser: ScheduleRun(schedule, threads, chooser=chooser, jumps=jumps).run()

    @pytest.mark.parametrize("compute", ["thread", "stream"])
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"mode": "bulk"},
            {"group_layers": 2},
            {"plan": "two_ended"},
            {"plan": "two_tiers"},
            {"plan": "two_ended_tiers", "group_layers": 2},
        ],
        ids=str,
    )
    def test_every_order_of_three_layers_holds(self, sim, host_threads, changes, compute):
        schedule = self.schedule(sim, 3, sim.request(**changes), compute=compute)
        whole, _ = reduced(self.run(schedule, host_threads), 1000)
        assert whole >= 1

    @pytest.mark.parametrize("kind", ["raise", "link", "short", "rot", "unpinnable"])
    def test_every_order_of_a_fault_holds(self, sim, host_threads, kind):
        schedule = self.schedule(sim, 2, sim.request(fault=Fault(kind, 1)))
        whole, _ = reduced(self.run(schedule, host_threads), 2000)
        assert whole >= 1

    def test_every_order_of_a_fault_in_one_of_two_tiers_holds(self, sim, host_threads):
        schedule = self.schedule(sim, 1, sim.request(plan="two_tiers", fault=Fault("link", 0)))
        whole, _ = reduced(self.run(schedule, host_threads), 5000)
        assert whole > 10

    def test_calling_it_off_at_any_moment_leaks_nothing(self, sim, host_threads):
        schedule = self.schedule(sim, 2, sim.request(cancel_after=0.0))
        whole, _ = reduced(self.run(schedule, host_threads), 2000)
        assert whole > 10

    @pytest.mark.parametrize(
        ("layers", "changes"),
        [(2, {}), (1, {"fault": Fault("stuck", 0, 1e5)}), (1, {"plan": "two_ended"})],
        ids=str,
    )
    def test_a_deadline_may_pass_at_any_moment(self, sim, host_threads, layers, changes):
        schedule = self.schedule(sim, layers, sim.request(deadline_s=50.0, **changes))
        whole, _ = reduced(self.run(schedule, host_threads, jumps=True), 10_000)
        assert whole > 100

    def test_the_next_request_may_come_while_the_last_ones_copy_is_stuck(self, sim, host_threads):
        stuck = sim.request(deadline_s=50.0, fault=Fault("stuck", 0, 1e5))
        schedule = self.schedule(sim, 1, stuck, sim.request(deadline_s=50.0))
        whole, _ = reduced(self.run(schedule, host_threads), 10_000)
        assert whole >= 1

    @pytest.mark.parametrize(("compute", "preemptions"), [("thread", 0), ("thread", 1), ("stream", 0)])
    def test_every_order_with_few_preemptions_holds_whatever_threads_share(
        self, sim, host_threads, compute, preemptions
    ):
        schedule = self.schedule(sim, 1, compute=compute)
        assert bounded(self.run(schedule, host_threads), preemptions, 20_000) > 1

    def test_nothing_is_lost_by_looking_for_races(self, sim, host_threads, monkeypatch):
        schedule = self.schedule(sim, 1, sim.request(fault=Fault("link", 0)))
        whole, left = reduced(self.run(schedule, host_threads), 5000)
        monkeypatch.setattr("kvlane.streams.simulated.explore.Reduced", AllWanted)
        all_, left_off = reduced(self.run(schedule, host_threads), 5000)
        assert all_ == whole
        assert left < left_off

    def test_a_guard_taken_away_is_noticed_in_the_first_order(self, sim, host_threads, monkeypatch):
        monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)
        with pytest.raises(OrderError):
            reduced(self.run(self.schedule(sim, 2), host_threads), 1)


def test_a_schedule_runs_the_same_again(sim, host_threads):
    schedule = replace(sim.schedule(sim.request(plan="two_tiers"), sim.request()), timed=False, switch=0.5)
    seen = [ScheduleRun(schedule, host_threads) for _ in range(2)]
    first, second = (run.run() for run in seen)
    assert first == second
    assert seen[0].backend.now() == seen[1].backend.now()
