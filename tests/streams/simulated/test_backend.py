"""The simulated device by itself: what it does, and each mistake that it has to see in any order."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from kvlane.streams.backend import Backend
from kvlane.streams.simulated.backend import HostCosts, SimulatedBackend
from kvlane.streams.simulated.choosers import InOrder, Seeded
from kvlane.streams.simulated.device import CopyDroppedError, Disturbance
from kvlane.streams.simulated.draw import draw
from kvlane.streams.simulated.links import SimulatedLink
from kvlane.streams.simulated.memory import POISON
from kvlane.streams.simulated.order import OrderError
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import KvSafetyError

WHOLE = (CopyDescriptor(0, 0, 0, 8),)


class Kit:
    """A backend with one copy stream and memory on both sides."""

    def __init__(self, backend):
        self.backend = backend
        self.stream = backend.stream("s")
        self.source = backend.host_bytes(8)
        backend.overwrite(self.source, np.arange(8, dtype=np.uint8))
        self.device = backend.device_bytes(8)
        self.cancel = backend.flag()

    def copy(self, done=None, copies=WHOLE, stream=None, began=None):
        done = done or self.backend.event()
        self.backend.copy(
            stream or self.stream,
            self.device,
            self.source,
            copies,
            self.cancel,
            began=began or self.backend.event(),
            done=done,
        )
        return done

    def attend(self, seconds=1.0):
        self.backend.launch("attention", seconds, reads=[(self.device, 0, 8)])

    def compute(self, seconds=1.0):
        self.backend.launch("compute", seconds, writes=[(self.device, 0, 8)])


def run(program, **options):
    with SimulatedBackend({"*": SimulatedLink(100.0)}, **options) as backend:
        program(Kit(backend))


def kinds(program, computes=("thread", "stream")):
    """What is found of a program over kinds of compute, clocks and seeds; None where nothing is."""
    found: set[str | None] = set()
    for compute, timed, seed in product(computes, (True, False), range(4)):
        try:
            run(program, compute=compute, timed=timed, chooser=Seeded(seed, switch=0.5))
            found.add(None)
        except OrderError as error:
            found.add(error.kind)
    return found


def right(kit):
    done = kit.copy()
    kit.backend.synchronize(done)
    kit.attend()


class TestOrder:
    def test_a_read_after_the_copys_event_is_right(self):
        assert kinds(right) == {None}

    def test_a_read_that_waits_on_the_device_is_right(self):
        def program(kit):
            kit.backend.wait(kit.backend.compute, kit.copy())
            kit.attend()

        assert kinds(program) == {None}

    def test_a_read_without_it_is_not(self):
        def program(kit):
            kit.copy()
            kit.attend()

        assert kinds(program) <= {"unordered_read", "overwritten"}

    def test_nor_is_one_that_came_late_enough_by_luck(self):
        def program(kit):
            kit.copy()
            kit.backend.sleep(1000.0)
            kit.attend()

        assert kinds(program) <= {"unordered_read", "overwritten"}
        with pytest.raises(OrderError, match=r"unordered_read.*attention on 0:main after copy of layer 0"):
            run(program)

    def test_a_read_after_the_beginning_of_the_copy_is_not(self):
        def program(kit):
            began = kit.backend.event()
            kit.copy(began=began)
            kit.backend.synchronize(began)
            kit.attend()

        assert kinds(program) <= {"unordered_read", "overwritten"}

    def test_a_read_after_another_streams_event_is_not(self):
        def program(kit):
            kit.copy()
            other, event = kit.backend.stream("other"), kit.backend.event()
            kit.backend.record(other, event)
            kit.backend.synchronize(event)
            kit.attend()

        assert kinds(program) <= {"unordered_read", "overwritten"}

    def test_what_a_thread_knows_it_hands_on_by_a_flag(self):
        def program(kit):
            copied = kit.backend.flag()
            done = kit.copy()

            def wait():
                kit.backend.synchronize(done)
                copied.set()

            kit.backend.start(wait, "waits")
            copied.wait()
            kit.attend()

        assert kinds(program) == {None}

    def test_and_by_a_watched_lock(self):
        def program(kit):
            with kit.backend.watched_locks():
                lock = threading.Lock()
            seen: list[bool] = []

            def wait():
                kit.backend.synchronize(done)
                with lock:
                    seen.append(True)

            done = kit.copy()
            kit.backend.start(wait, "waits")
            while not seen:
                with lock:
                    pass
                kit.backend.sleep(0.01)
            with lock:
                kit.attend()

        assert kinds(program) == {None}

    def test_but_not_by_a_list(self):
        def program(kit):
            seen: list[bool] = []

            def wait():
                kit.backend.synchronize(done)
                seen.append(True)

            done = kit.copy()
            kit.backend.start(wait, "waits")
            while not seen:
                kit.backend.sleep(0.01)
            kit.attend()

        assert kinds(program) == {"unordered_read"}

    def test_two_copies_into_one_place_from_two_streams(self):
        def program(kit):
            kit.copy()
            kit.copy(stream=kit.backend.stream("other"))

        assert kinds(program) == {"overwritten"}

    def test_a_copy_over_what_compute_still_reads(self):
        def program(kit):
            fence = kit.backend.event()
            kit.compute()
            kit.backend.record(kit.backend.compute, fence)
            kit.attend()
            kit.backend.wait(kit.stream, fence)
            kit.copy()

        # Where the calling thread computes, it has by the time it hands the copy over.
        assert kinds(program, ["thread"]) == {None}
        assert kinds(program, ["stream"]) <= {"overwritten", "unordered_read"}

    def test_a_source_written_before_its_copy_is_done(self):
        def program(kit):
            kit.copy()
            kit.backend.overwrite(kit.source, 0)

        assert kinds(program) == {"source_reused"}

    def test_and_after_it(self):
        def program(kit):
            kit.backend.synchronize(kit.copy())
            kit.backend.overwrite(kit.source, 0)

        assert kinds(program) == {None}

    def test_a_copy_whose_source_nobody_has_seen_filled(self):
        def program(kit):
            kit.backend.start(lambda: kit.backend.overwrite(kit.source, 1), "fills")
            kit.copy()

        assert kinds(program) <= {"source_reused"}

    def test_a_block_that_a_load_given_up_may_still_write(self):
        def program(kit):
            kit.copy()
            kit.cancel.set()
            kit.compute()

        assert kinds(program) == {"quarantined"}

    def test_also_where_the_copy_was_dropped(self):
        def program(kit):
            kit.cancel.set()
            kit.copy()
            kit.backend.sleep(1000.0)
            kit.compute()

        assert kinds(program) == {"quarantined"}

    def test_a_list_of_copies_changed_before_they_were_done(self):
        def program(kit):
            copies = [*WHOLE]
            done = kit.copy(copies=copies)
            copies[0] = CopyDescriptor(0, 0, 0, 4)
            kit.backend.synchronize(done)

        assert kinds(program) == {"descriptors"}

    def test_a_mistake_swallowed_by_the_code_is_raised_at_the_end(self):
        def program(kit):
            kit.copy()
            with suppress(RuntimeError):
                kit.attend()

        with pytest.raises(OrderError, match="unordered_read"):
            run(program)

    def test_a_mistake_of_a_task_is_raised_at_the_end(self):
        def program(kit):
            kit.copy()

            def careless():
                with suppress(RuntimeError):
                    kit.backend.overwrite(kit.source, 0)

            kit.backend.start(careless, "careless")

        with pytest.raises(OrderError, match="source_reused"):
            run(program)


class TestEvents:
    def test_recorded_twice(self):
        def program(kit):
            event = kit.backend.event()
            kit.backend.record(kit.stream, event)
            kit.backend.record(kit.stream, event)

        assert kinds(program) == {"event"}

    def test_waited_for_and_never_recorded(self):
        assert kinds(lambda kit: kit.backend.synchronize(kit.backend.event())) == {"event"}
        assert kinds(lambda kit: kit.backend.fired(kit.backend.event())) == {"event"}
        assert kinds(lambda kit: kit.backend.wait(kit.stream, kit.backend.event())) == {"event"}

    def test_waited_for_by_a_thread_that_cannot_know_it_was_recorded(self):
        def program(kit):
            event = kit.backend.event()
            kit.backend.start(lambda: kit.backend.record(kit.stream, event), "records")
            kit.backend.sleep(10.0)
            kit.backend.synchronize(event)

        assert kinds(program) == {"event"}

    def test_reset_and_recorded_again(self):
        def program(kit):
            event = kit.copy()
            for _ in range(3):
                kit.backend.synchronize(event)
                kit.backend.reset(event)
                kit.copy(event)
            kit.backend.synchronize(event)
            kit.attend()

        assert kinds(program) == {None}

    def test_reset_before_it_has_fired(self):
        assert kinds(lambda kit: kit.backend.reset(kit.copy())) == {"event"}

    def test_reset_when_it_has_by_chance(self):
        def program(kit):
            event = kit.copy()
            kit.backend.sleep(1000.0)
            kit.backend.reset(event)

        assert kinds(program) == {"event"}

    def test_reset_while_a_thread_may_wait_for_it(self):
        def program(kit):
            event = kit.copy()
            kit.backend.start(lambda: kit.backend.synchronize(event), "waits")
            kit.backend.sleep(1000.0)
            kit.backend.synchronize(event)
            kit.backend.reset(event)

        assert kinds(program) == {"event"}

    def test_reset_while_a_stream_may_wait_for_it(self):
        def program(kit):
            event, other = kit.copy(), kit.backend.stream("other")
            kit.backend.wait(other, event)
            kit.backend.synchronize(event)
            kit.backend.reset(event)

        assert kinds(program) == {"event"}

    def test_asked_for_what_is_not_known_yet(self):
        for ask in ("time_of", "failure"):
            assert kinds(lambda kit, ask=ask: getattr(kit.backend, ask)(kit.copy())) == {"event"}


class TestDevice:
    def test_a_copy_carries_the_bytes_and_nothing_else(self):
        with SimulatedBackend(timed=False) as backend:
            kit = Kit(backend)
            backend.synchronize(kit.copy(copies=(CopyDescriptor(0, 1, 4, 3),)))
            assert backend.read(kit.device).tolist() == [POISON] * 4 + [1, 2, 3] + [POISON]

    def test_memory_under_way_holds_nothing_good(self):
        with SimulatedBackend({"*": SimulatedLink(1.0)}) as backend:
            kit = Kit(backend)
            backend.synchronize(kit.copy())
            kit.copy()
            assert kit.device.tolist() == [POISON] * 8

    def test_a_failing_copy_fails_on_its_own_event_after_what_it_did(self):
        torn = iter([Disturbance(failure=OSError("down"), copied=1), None])
        with SimulatedBackend(disturb=lambda stream, copies: next(torn)) as backend:
            kit = Kit(backend)
            halves = (CopyDescriptor(0, 0, 0, 4), CopyDescriptor(0, 4, 4, 4))
            failed = kit.copy(copies=halves)
            backend.synchronize(failed)
            assert isinstance(backend.failure(failed), OSError)
            assert kit.device.tolist() == [0, 1, 2, 3] + [POISON] * 4
            good = kit.copy()
            backend.synchronize(good)
            assert backend.failure(good) is None

    def test_a_copy_given_up_is_dropped_and_says_so(self):
        with SimulatedBackend() as backend:
            kit = Kit(backend)
            kit.cancel.set()
            done = kit.copy()
            backend.synchronize(done)
            assert isinstance(backend.failure(done), CopyDroppedError)

    def test_a_late_copy_holds_its_stream_and_not_the_link(self):
        late = iter([Disturbance(late_s=5.0), None])
        with SimulatedBackend({"*": SimulatedLink(8.0)}, disturb=lambda *_: next(late)) as backend:
            kit = Kit(backend)
            other = backend.device_bytes(8)
            first, second = kit.copy(), backend.event()
            stream = backend.stream("other")
            backend.copy(stream, other, kit.source, WHOLE, kit.cancel, backend.event(), second)
            backend.synchronize(first)
            backend.synchronize(second)
            assert (backend.time_of(first), backend.time_of(second)) == (6.0, 2.0)

    def test_compute_of_a_device_runs_while_the_host_goes_on(self):
        for backend, expected in (
            (SimulatedBackend(compute="stream"), 0.0),
            (SimulatedBackend(compute="thread"), 3.0),
        ):
            with backend:
                kit = Kit(backend)
                kit.compute(3.0)
                assert backend.now() == expected
                backend.read(kit.device)
                assert backend.now() == 3.0

    def test_a_wait_on_the_device_holds_what_comes_after_it(self):
        with SimulatedBackend({"*": SimulatedLink(8.0)}, compute="stream") as backend:
            kit, ended = Kit(backend), backend.event()
            backend.wait(backend.compute, kit.copy())
            kit.attend(1.0)
            backend.record(backend.compute, ended)
            assert backend.now() == 0.0
            backend.synchronize(ended)
            assert backend.time_of(ended) == 2.0

    def test_calls_cost_what_was_said(self):
        costs = HostCosts(event_s=1.0, copy_s=10.0, descriptor_s=100.0)
        with SimulatedBackend(costs=costs) as backend:
            kit = Kit(backend)
            done = kit.copy()
            assert backend.now() == 110.0
            backend.synchronize(done)
            backend.record(kit.stream, backend.event())
            assert backend.now() == 112.0

    def test_links_belong_to_streams_by_name(self):
        with SimulatedBackend({"copy-host": SimulatedLink(8.0)}) as backend:
            backend.release(backend.stream("copy-host"))
            with pytest.raises(KvSafetyError, match="no link"):
                backend.stream("copy-disk")

    def test_a_released_stream_takes_nothing_and_finishes_what_it_has(self):
        with SimulatedBackend() as backend:
            kit = Kit(backend)
            done = kit.copy()
            backend.release(kit.stream)
            backend.release(kit.stream)
            with pytest.raises(KvSafetyError, match="closed"):
                kit.copy()
            backend.synchronize(done)
            assert backend.open_streams == 0

    def test_a_closed_backend_takes_nothing(self):
        with SimulatedBackend() as backend:
            kit = Kit(backend)
        late = [lambda: backend.stream("late"), lambda: backend.start(lambda: None, "late"), kit.copy]
        for call in late:
            with pytest.raises(KvSafetyError, match="closed"):
                call()

    def test_copies_outside_their_blocks_are_refused(self):
        with SimulatedBackend() as backend:
            kit = Kit(backend)
            for copy in (CopyDescriptor(0, 4, 0, 5), CopyDescriptor(0, 0, 4, 5), CopyDescriptor(0, -1, 0, 1)):
                with pytest.raises(KvSafetyError, match="leaves its memory"):
                    kit.copy(copies=(copy,))

    def test_only_flat_bytes_are_memory(self):
        with SimulatedBackend() as backend:
            kit = Kit(backend)
            kit.device = torch.zeros(8)
            with pytest.raises(KvSafetyError, match="flat bytes"):
                kit.copy()

    def test_it_is_a_backend(self):
        backend: Backend = SimulatedBackend()
        backend.close()
        assert backend.name == "simulated"


class TestHost:
    def test_threads_run_one_at_a_time_and_the_same_again(self):
        def order(seed):
            seen = []
            with SimulatedBackend(chooser=Seeded(seed, switch=0.5)) as backend:
                for name in "abc":

                    def work(name=name):
                        for _ in range(5):
                            seen.append(name)
                            backend.flag().set()

                    backend.start(work, name)
            return "".join(seen)

        orders = [order(seed) for seed in range(10)]
        assert orders == [order(seed) for seed in range(10)]
        assert len(set(orders)) > 5

    def test_everything_waiting_for_ever_is_an_error_that_says_who(self):
        def program(kit):
            flag = kit.backend.flag()
            kit.backend.start(flag.wait, "other")
            flag.wait()

        with pytest.raises(OrderError, match=r"stuck.*main waits for a flag.*other waits for a flag"):
            run(program)

    def test_a_lock_taken_twice_is_stuck(self):
        def program(kit):
            with kit.backend.watched_locks():
                lock = threading.Lock()
            with lock, lock:
                pass

        with pytest.raises(OrderError, match=r"stuck.*main waits for a lock"):
            run(program)

    def test_waits_end_at_their_time(self):
        with SimulatedBackend() as backend:
            assert not backend.flag().wait(2.5)
            assert backend.now() == 2.5
            event = backend.event()
            kit = Kit(backend)
            backend.wait(kit.stream, kit.copy())
            backend.record(kit.stream, event)
            backend.synchronize(event, 1.0)
        slow = {"*": SimulatedLink(1.0)}
        with SimulatedBackend(slow) as backend:
            kit = Kit(backend)
            with pytest.raises(TimeoutError):
                backend.synchronize(kit.copy(), 1.5)
            assert backend.now() == 1.5

    def test_an_error_of_a_task_ends_the_run(self):
        def program(kit):
            kit.backend.start(lambda: 1 / 0, "fails")
            kit.backend.flag().wait()

        with pytest.raises(ZeroDivisionError):
            run(program)

    def test_an_error_in_the_main_thread_unwinds_the_others(self):
        unwound = []
        before = threading.active_count()

        def program(kit):
            def wait():
                try:
                    kit.backend.flag().wait()
                finally:
                    unwound.append(True)

            kit.backend.start(wait, "waits")
            kit.backend.sleep(1.0)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run(program)
        assert unwound == [True]
        assert threading.active_count() == before

    def test_stalls_take_time(self):
        chooser = Seeded(1, stall=1.0, longest_stall_s=1.0)
        with SimulatedBackend(chooser=chooser) as backend:
            backend.flag().set()
            assert 0 < backend.now() == chooser.stalled_s <= 1.0

    def test_locks_are_ordinary_outside(self):
        ordinary = type(threading.Lock())
        with SimulatedBackend() as backend:
            with backend.watched_locks():
                assert type(threading.Lock()) is not ordinary
            assert type(threading.Lock()) is ordinary

    def test_in_order_is_the_default(self):
        seen = []
        with SimulatedBackend(chooser=InOrder()) as backend:
            backend.start(lambda: seen.append("task"), "task")
            backend.flag().set()
            seen.append("main")
        assert seen == ["main", "task"]


def test_equal_seeds_draw_equal_schedules():
    assert draw(7) == draw(7)
    assert draw(7) != replace(draw(8), seed=7)
