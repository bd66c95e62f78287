"""Guards taken out of the real executor, driver and pool, one at a time: each must be noticed.

A mistake in the order of things has to be caught in every run that the guard matters in, whatever came first there. One
that shows only in the answer, or in what comes back, has to be caught in some of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from kvlane.streams import part as part_module
from kvlane.streams import prefill as prefill_module
from kvlane.streams.load import LayerLoad
from kvlane.streams.part import PartLoad
from kvlane.streams.quarantine import BlockPool
from kvlane.streams.ring import EventRing, EventSet
from kvlane.streams.simulated.backend import SimulatedBackend
from kvlane.streams.simulated.engine import SimulatedForward, _LayerWork
from kvlane.streams.simulated.order import OrderError
from kvlane.streams.simulated.schedules import ScheduleRun, run_schedule
from kvlane.streams.simulated.tier import Fault, FaultyRun
from kvlane.transfer.host_run import HostRun
from kvlane.transfer.layout import CopyDescriptor

SEEDS = range(6)


def caught(schedule, threads, computes, clocks):
    """How often each kind of mistake was found."""
    found: Counter[str] = Counter()
    for seed, compute, timed in product(SEEDS, computes, clocks):
        try:
            run_schedule(replace(schedule, seed=seed, compute=compute, timed=timed), threads)
            found["nothing"] += 1
        except OrderError as error:
            found[error.kind] += 1
    return found


@pytest.fixture
def runs(monkeypatch):
    """The runs made so far."""
    made: list[ScheduleRun] = []
    set_up = ScheduleRun._set_up

    def noted(self):
        made.append(self)
        set_up(self)

    monkeypatch.setattr(ScheduleRun, "_set_up", noted)
    return made


@pytest.fixture
def check(host_threads, monkeypatch):
    """Runs schedules with a guard, and then without it."""

    def run(schedule, take_away, kinds, *, always=True, computes=("thread", "stream"), timed=(True, False)):
        assert set(caught(schedule, host_threads, computes, timed)) == {"nothing"}
        take_away(monkeypatch)
        found = caught(schedule, host_threads, computes, timed)
        missed = found.pop("nothing", 0)
        assert set(found) <= set(kinds), found
        assert found, "nobody noticed"
        if always:
            assert missed == 0, (missed, found)

    return run


RACE = ("unordered_read", "overwritten")
"""Which of the two a race is called depends on who came first."""


class TestWhatComputeWaitsFor:
    def test_nothing(self, sim, check):
        def take_away(patch):
            patch.setattr(LayerLoad, "hold", lambda self, layer: None)
            patch.setattr(LayerLoad, "finish", lambda self: self.close())

        check(sim.schedule(), take_away, [*RACE, "quarantined", "wrong_kv"])

    def test_nothing_for_one_layer(self, sim, check):
        hold = LayerLoad.hold

        def take_away(patch):
            patch.setattr(LayerLoad, "hold", lambda self, layer: None if layer == 2 else hold(self, layer))

        check(sim.schedule(), take_away, RACE)

    def test_the_layer_before(self, sim, check):
        hold = LayerLoad.hold

        def take_away(patch):
            patch.setattr(LayerLoad, "hold", lambda self, layer: hold(self, max(0, layer - 1)))

        check(sim.schedule(), take_away, RACE)

    def test_the_first_layers_in_bulk(self, sim, check):
        def take_away(patch):
            patch.setattr(LayerLoad, "hold_all", lambda self: self.hold(1))

        check(sim.schedule(sim.request(mode="bulk")), take_away, RACE)

    def test_the_group_before(self, sim, check):
        def take_away(patch):
            awaits = LayerLoad._await
            patch.setattr(
                LayerLoad, "_await", lambda self, part, group: awaits(self, part, max(0, group - 1))
            )

        check(sim.schedule(sim.request(group_layers=2)), take_away, RACE)

    def test_the_beginning_of_the_copy(self, sim, check):
        def take_away(patch):
            init = PartLoad.__init__

            def swapped(self, *args, **options):
                init(self, *args, **options)
                self.began, self.done = self.done, self.began

            patch.setattr(PartLoad, "__init__", swapped)
            # The copies fire them in the right order; who waits takes the wrong one of the two.
            copy = SimulatedBackend.copy

            def straight(self, stream, destination, source, copies, cancel, began, done):
                copy(self, stream, destination, source, copies, cancel, began=done, done=began)

            patch.setattr(SimulatedBackend, "copy", straight)

        check(sim.schedule(), take_away, [*RACE, "source_reused", "event", "leak"])

    def test_one_of_two_tiers(self, sim, check):
        def take_away(patch):
            awaits = LayerLoad._await

            def of_the_first(self, part, group):
                if part is self.parts[0]:
                    awaits(self, part, group)

            patch.setattr(LayerLoad, "_await", of_the_first)

        check(sim.schedule(sim.request(plan="two_tiers")), take_away, RACE)

    def test_nothing_in_the_tail_of_a_two_ended_split(self, sim, check):
        def take_away(patch):
            steps = prefill_module.Prefiller._steps
            patch.setattr(prefill_module.Prefiller, "_steps", lambda self, job, load=None: steps(self, job))

        check(sim.schedule(sim.request(plan="two_ended")), take_away, [*RACE, "wrong_kv", "leak"])

    def test_the_event_without_knowing_that_it_was_recorded(self, sim, check):
        class Open:
            def set(self):
                pass

            def wait(self, timeout=None):
                return True

        def take_away(patch):
            init = PartLoad.__init__

            def not_asking(self, *args, **options):
                init(self, *args, **options)
                self.decided = [Open() for _ in self.decided]

            patch.setattr(PartLoad, "__init__", not_asking)

        check(sim.schedule(), take_away, ["event"])

    def test_a_prefix_whose_length_is_reported_late(self, sim, check):
        """Asked for before anything has arrived: the new tokens do not look at what is still on its way."""

        def take_away(patch):
            init = _LayerWork.__init__

            def alone(self, kv, block, layer, start, end, seen):
                init(self, kv, block, layer, start, end, seen)
                self._old, self.old = (), []

            patch.setattr(_LayerWork, "__init__", alone)

        check(sim.schedule(), take_away, ["wrong_kv"])

    def test_a_pass_that_begins_where_the_load_begins(self, sim, check):
        def take_away(patch):
            answer = SimulatedForward.answer

            def over_all(self, block, start, end, steps):
                return answer(self, block, 0, end, steps)

            patch.setattr(SimulatedForward, "answer", over_all)

        check(sim.schedule(before_share=0.5), take_away, RACE)


class TestWhatCopiesWaitFor:
    """The second request loads into a block that what the first one left behind on the device still reads.

    On a thread that computes by itself nothing is left behind, and handing the copies over orders them. Where the first
    load has not settled in time the second gets another block, and there is nothing to notice.
    """

    @staticmethod
    def schedule(sim):
        failing = sim.request(fault=Fault("link", 3), on_failure="raise")
        return sim.schedule(failing, sim.request(prompt=1))

    def test_nothing(self, sim, check):
        def take_away(patch):
            patch.setattr(SimulatedBackend, "wait", lambda self, stream, event, timeout_s=None: None)

        check(self.schedule(sim), take_away, ["overwritten"], computes=("stream",), always=False)

    def test_a_fence_of_the_load_before(self, sim, check):
        def take_away(patch):
            wait = SimulatedBackend.wait
            first: dict[object, object] = {}

            def the_first(self, stream, event, timeout_s=None):
                wait(self, stream, first.setdefault(self, event), timeout_s)

            patch.setattr(SimulatedBackend, "wait", the_first)

        check(self.schedule(sim), take_away, ["overwritten"], computes=("stream",), always=False)


class TestEvents:
    def test_never_recorded(self, sim, check):
        """A layer that is left out: whoever waits for it would not, on a device."""

        def take_away(patch):
            copy = SimulatedBackend.copy

            def but_layer_two(self, stream, destination, source, copies, *rest, **events):
                if copies[0].layer != 2:
                    copy(self, stream, destination, source, copies, *rest, **events)

            patch.setattr(SimulatedBackend, "copy", but_layer_two)

        check(sim.schedule(), take_away, ["event"])

    def test_recorded_before_the_copies(self, sim, check):
        def take_away(patch):
            copy = SimulatedBackend.copy

            def too_early(self, stream, destination, source, copies, cancel, began, done):
                self.record(stream, done)
                copy(self, stream, destination, source, copies, cancel, began, self.event())

            patch.setattr(SimulatedBackend, "copy", too_early)

        check(sim.schedule(), take_away, [*RACE, "source_reused"])

    def test_used_again_without_a_reset(self, sim, check):
        def take_away(patch):
            patch.setattr(SimulatedBackend, "reset", lambda self, event: None)

        check(sim.schedule(*[sim.request()] * 3, ring_sets=1), take_away, ["event"], always=False)

    def test_a_ring_that_gives_its_sets_back_as_the_load_begins(self, sim, check):
        def take_away(patch):
            take = EventRing.take

            def at_once(self, users):
                events = take(self, users)
                self._free.append(events)
                return events

            patch.setattr(EventRing, "take", at_once)
            patch.setattr(EventRing, "let_go", lambda self, events, users=1: None)

        stuck = sim.request(fault=Fault("stuck", 1, 200.0))
        check(sim.schedule(stuck, sim.request(), ring_sets=1), take_away, ["event", "leak"])

    def test_a_ring_that_counts_one_user_too_few(self, sim, check):
        def take_away(patch):
            take = EventRing.take
            patch.setattr(EventRing, "take", lambda self, users: take(self, users - 1))

        stuck = sim.request(fault=Fault("stuck", 1, 200.0))
        check(sim.schedule(stuck, sim.request(), ring_sets=1), take_away, ["event", "leak"])

    def test_a_set_used_again_with_events_still_waited_for(self, sim, check):
        def take_away(patch):
            def unasked(self):
                for event in self._recorded:
                    event.fired, event.recorded = False, None
                self._recorded.clear()
                self._taken = 0

            patch.setattr(EventSet, "renew", unasked)
            patch.setattr(EventRing, "let_go", lambda self, events, users=1: None)
            take = EventRing.take

            def at_once(self, users):
                events = take(self, users)
                self._free.append(events)
                return events

            patch.setattr(EventRing, "take", at_once)

        stuck = sim.request(fault=Fault("stuck", 1, 200.0))
        check(sim.schedule(stuck, sim.request(), ring_sets=1), take_away, ["event", "source_reused", *RACE])


class TestSources:
    def test_freed_before_the_last_copy(self, sim, check, runs):
        def take_away(patch):
            enqueue = PartLoad._enqueue

            def then_close(self):
                enqueue(self)
                self._source.close()
                runs[-1].tiers["host"].evict()

            patch.setattr(PartLoad, "_enqueue", then_close)
            # The caller's own pin hides it.
            patch.setattr(FaultyRun, "retain", lambda self: self)

        check(sim.schedule(), take_away, ["source_reused"])

    def test_freed_after_the_first_copy(self, sim, check, runs):
        def take_away(patch):
            run = PartLoad.run

            def for_the_first(self):
                enqueue = self._enqueue

                def then_expect_one():
                    enqueue()
                    issued, self._issued = self._issued, 1
                    self._backend.synchronize(self.done[0])
                    self._source.close()
                    runs[-1].tiers["host"].evict()
                    self._issued = issued

                self._enqueue = then_expect_one
                run(self)

            patch.setattr(PartLoad, "run", for_the_first)
            patch.setattr(FaultyRun, "retain", lambda self: self)

        check(sim.schedule(), take_away, ["source_reused"])

    def test_pinned_by_the_caller_only(self, sim, check):
        def take_away(patch):
            patch.setattr(part_module, "_pinned", lambda source, layer: source)

        late = sim.request(fault=Fault("stuck", 1, 100.0), deadline_s=0.01)
        check(sim.schedule(late, evictions=(1.0,)), take_away, ["source_reused"], timed=(True,))

    def test_descriptors_changed_while_they_are_used(self, sim, check):
        def take_away(patch):
            issue = PartLoad._issue
            shared: list[CopyDescriptor] = []

            def into_one_list(self, copies, moves):
                shared[:] = copies
                issue(self, shared, moves)

            patch.setattr(PartLoad, "_issue", into_one_list)

        check(sim.schedule(), take_away, ["descriptors"])


STUCK: dict[str, object] = {"fault": Fault("stuck", 1, 100.0), "deadline_s": 0.01}


class TestQuarantine:
    def test_recomputing_in_the_block_a_late_copy_may_write(self, sim, check):
        def take_away(patch):
            patch.setattr(LayerLoad, "settled", True)

        check(sim.schedule(sim.request(**STUCK)), take_away, ["quarantined"], timed=(True,))

    def test_a_block_handed_out_before_its_load_has_settled(self, sim, check):
        def take_away(patch):
            patch.setattr(
                BlockPool, "quarantine", lambda self, block, load: (self.give_back(block), self.dismiss())
            )

        schedule = sim.schedule(sim.request(**STUCK), sim.request(**STUCK), sim.request(prompt=1))
        check(schedule, take_away, ["quarantined"], timed=(True,))

    def test_resident_tokens_left_behind_in_it(self, sim, check):
        def take_away(patch):
            patch.setattr(SimulatedForward, "carry", lambda self, source, target, tokens: None)

        schedule = sim.schedule(
            sim.request(prompt=1), sim.request(resident=0.9, **STUCK), prompts=sim.schedule().prompts
        )
        check(schedule, take_away, ["wrong_kv"], timed=(True,))

    def test_a_block_lost(self, sim, check):
        def take_away(patch):
            patch.setattr(BlockPool, "quarantine", lambda self, block, load: self.dismiss())

        check(sim.schedule(sim.request(**STUCK)), take_away, ["leak"], timed=(True,))

    def test_a_place_in_it_kept_for_ever(self, sim, check):
        def take_away(patch):
            patch.setattr(BlockPool, "dismiss", lambda self: None)

        check(sim.schedule(), take_away, ["leak"])


class TestFaultsTakenForGoodLoads:
    @pytest.mark.parametrize("kind", ["link", "torn"])
    def test_a_failed_copy(self, sim, check, kind):
        def take_away(patch):
            patch.setattr(SimulatedBackend, "failure", lambda self, event: None)

        check(sim.schedule(sim.request(fault=Fault(kind, 2))), take_away, ["wrong_kv"])

    def test_rotten_bytes(self, sim, check):
        def take_away(patch):
            patch.setattr(HostRun, "verify", lambda self, layer: None)

        check(sim.schedule(sim.request(fault=Fault("rot", 2))), take_away, ["wrong_kv"])

    def test_a_short_layer(self, sim, check):
        def take_away(patch):
            patch.setattr(
                PartLoad, "_copies_of", lambda self, layer: self._source.copies(layer, self._region)
            )

        check(sim.schedule(sim.request(fault=Fault("short", 2))), take_away, ["wrong_kv"])

    def test_a_layer_without_copies(self, sim, check):
        """The event is recorded and fires; nothing was copied."""

        def take_away(patch):
            copies_of = PartLoad._copies_of
            patch.setattr(
                PartLoad, "_copies_of", lambda self, layer: () if layer == 3 else copies_of(self, layer)
            )

        check(sim.schedule(), take_away, ["wrong_kv"])

    def test_the_last_layer_in_no_group(self, sim, check):
        def take_away(patch):
            groups = part_module._groups
            patch.setattr(part_module, "_groups", lambda *run: tuple(g[:-1] for g in groups(*run)))

        check(sim.schedule(sim.request(group_layers=4)), take_away, ["wrong_kv"])

    def test_a_part_that_has_not_arrived_kept(self, sim, check):
        def take_away(patch):
            patch.setattr(PartLoad, "whole", True)

        check(sim.schedule(sim.request(fault=Fault("link", 1))), take_away, ["wrong_kv", "quarantined"])

    def test_reported_with_another_layer(self, sim, check):
        def take_away(patch):
            fail = LayerLoad._fail
            patch.setattr(
                LayerLoad,
                "_fail",
                lambda self, part, layer, *rest: fail(self, part, max(0, layer - 1), *rest),
            )

        check(sim.schedule(sim.request(fault=Fault("raise", 3))), take_away, ["unreported"])


class TestTime:
    def test_waiting_for_a_stuck_copy(self, sim, check):
        def take_away(patch):
            patch.setattr(LayerLoad, "_left", lambda self: None)

        schedule = sim.schedule(sim.request(fault=Fault("stuck", 1, 100.0), deadline_s=0.01))
        check(schedule, take_away, ["late"], timed=(True,))

    def test_going_on_over_layers_that_arrived(self, sim, check):
        """The last layer never comes, and compute gets to it long after the deadline."""

        def take_away(patch):
            patch.setattr(LayerLoad, "check", lambda self: None)

        layers = sim.schedule().layout.layers
        stuck = sim.request(fault=Fault("stuck", layers - 1, 100.0), deadline_s=0.5 * sim.layer_s, loaded=0.1)
        check(sim.schedule(stuck), take_away, ["late"], computes=("thread",), timed=(True,))

    def test_a_load_given_up_for_nothing(self, sim, check):
        def take_away(patch):
            hold = LayerLoad.hold

            def too_short(self, layer):
                self._deadline = 0.0
                hold(self, layer)

            patch.setattr(LayerLoad, "hold", too_short)

        check(sim.schedule(), take_away, ["no_cause"], timed=(True,))


class TestWhatComesBack:
    def test_a_stream(self, sim, check):
        def take_away(patch):
            patch.setattr(SimulatedBackend, "release", lambda self, stream: None)

        check(sim.schedule(), take_away, ["leak"])

    def test_a_pin(self, sim, check):
        def take_away(patch):
            pinned = part_module._pinned

            def twice(source, layer):
                source.retain()
                return pinned(source, layer)

            patch.setattr(part_module, "_pinned", twice)

        check(sim.schedule(), take_away, ["leak"])

    def test_an_event_set_of_a_load_called_off(self, sim, check):
        def take_away(patch):
            patch.setattr(LayerLoad, "close", lambda self: self.give_up())

        check(sim.schedule(), take_away, ["leak"])
