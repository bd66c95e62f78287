"""The CPU backend: order, errors, pacing, and threads that come back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CopyCancelledError, CpuBackend
from kvlane.streams.probe import probe_link
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.probe import MIB
from kvlane.transfer.store import KvSafetyError


def copy(backend, stream, device, host, copies, *, cancel=None, began=None, done=None):
    done = done or backend.event()
    backend.copy(
        stream, device, host, copies, cancel or backend.flag(), began=began or backend.event(), done=done
    )
    return done


def copy_seconds(backend, stream, device, host, copies):
    began, ended = backend.event(), backend.event()
    copy(backend, stream, device, host, copies, began=began, done=ended)
    backend.synchronize(ended, 30)
    return backend.time_of(ended) - backend.time_of(began)


def whole(nbytes):
    return [CopyDescriptor(0, 0, 0, nbytes)]


class TestStream:
    def test_copies_exactly_what_it_is_given(self):
        with CpuBackend() as backend:
            stream = backend.stream("s")
            device, host = backend.device_bytes(64), backend.host_bytes(64)
            device.zero_()
            host[:] = np.arange(64)
            copies = [CopyDescriptor(0, 3, 40, 5), CopyDescriptor(0, 60, 0, 4)]
            backend.synchronize(copy(backend, stream, device, host, copies), 10)
            expected = np.zeros(64, np.uint8)
            expected[40:45], expected[0:4] = host[3:8], host[60:64]
            np.testing.assert_array_equal(backend.read(device), expected)

    def test_device_memory_made_under_inference_mode_can_be_copied_into(self):
        with CpuBackend() as backend, torch.inference_mode():
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            host[:] = 7
            copy_seconds(backend, backend.stream("s"), device, host, whole(8))
            assert not device.is_inference()
            assert device.tolist() == [7] * 8

    def test_waits_for_an_event_of_another_stream(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            first, second = backend.stream("first"), backend.stream("second")
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            after_second = backend.event()
            after_first = copy(backend, first, device, host, [CopyDescriptor(1, 0, 0, 8)])
            backend.wait(second, after_first)
            backend.record(second, after_second)
            with pytest.raises(TimeoutError):
                backend.synchronize(after_second, 0.02)
            backend.go.set()
            backend.synchronize(after_second, 10)
            assert backend.time_of(after_first) <= backend.time_of(after_second)

    def test_waiting_for_an_event_nobody_recorded_is_an_error(self):
        with CpuBackend() as backend, pytest.raises(KvSafetyError, match="recorded"):
            backend.wait(backend.compute, backend.event(), 1)

    def test_recording_an_event_twice_is_an_error(self):
        with CpuBackend() as backend:
            event = backend.event()
            backend.record(backend.compute, event)
            with pytest.raises(KvSafetyError, match="once"):
                backend.record(backend.compute, event)

    def test_an_event_that_was_reset_is_recorded_again_and_tells_of_the_second_time(self, kit):
        with kit.FailingBackend(layer=1) as backend:
            stream, began, done = backend.stream("s"), backend.event(), backend.event()
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            copy(backend, stream, device, host, [CopyDescriptor(1, 0, 0, 8)], began=began, done=done)
            backend.synchronize(done, 10)
            first = backend.time_of(done)
            assert isinstance(backend.failure(done), OSError)
            backend.reset(began)
            backend.reset(done)
            assert not backend.fired(done)
            with pytest.raises(KvSafetyError, match="recorded"):
                backend.synchronize(done, 1)
            copy(backend, stream, device, host, whole(8), began=began, done=done)
            backend.synchronize(done, 10)
            assert backend.failure(done) is None
            assert backend.time_of(done) > first

    def test_an_event_that_has_not_fired_is_not_reset(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            stream, device, host = backend.stream("s"), backend.device_bytes(8), backend.host_bytes(8)
            for event in (backend.event(), copy(backend, stream, device, host, [CopyDescriptor(1, 0, 0, 8)])):
                with pytest.raises(KvSafetyError, match="not fired"):
                    backend.reset(event)

    def test_an_event_a_stream_still_waits_for_is_not_reset(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            first, second = backend.stream("first"), backend.stream("second")
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            done = copy(backend, first, device, host, whole(8))
            backend.synchronize(done, 10)
            # The second stream comes to the wait only once it is through with its copy.
            stuck = copy(backend, second, device, host, [CopyDescriptor(1, 0, 0, 8)])
            backend.wait(second, done)
            with pytest.raises(KvSafetyError, match="waited for"):
                backend.reset(done)
            after = backend.event()
            backend.record(second, after)
            backend.go.set()
            backend.synchronize(after, 10)
            backend.reset(done)
            assert backend.fired(stuck)

    def test_an_event_a_thread_was_waiting_for_is_reset_once_it_has_gone(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            stream, device, host = backend.stream("s"), backend.device_bytes(8), backend.host_bytes(8)
            done = copy(backend, stream, device, host, [CopyDescriptor(1, 0, 0, 8)])
            with pytest.raises(TimeoutError):
                backend.synchronize(done, 0.01)
            backend.go.set()
            backend.synchronize(done, 10)
            backend.reset(done)

    def test_an_event_that_has_not_fired_tells_nothing(self):
        with CpuBackend() as backend:
            for ask in (backend.time_of, backend.failure):
                with pytest.raises(KvSafetyError, match="fired"):
                    ask(backend.event())

    @pytest.mark.parametrize(
        "device", [torch.zeros(8), torch.zeros(16, dtype=torch.uint8)[::2]], ids=["floats", "with gaps"]
    )
    def test_device_memory_is_flat_bytes(self, device):
        with CpuBackend() as backend, pytest.raises(KvSafetyError, match="bytes"):
            copy(backend, backend.stream("s"), device, backend.host_bytes(8), whole(8))

    def test_a_closed_backend_takes_nothing(self):
        with CpuBackend() as backend:
            stream, device, host = backend.stream("s"), backend.device_bytes(8), backend.host_bytes(8)
        late = [
            lambda: backend.stream("late"),
            lambda: backend.start(lambda: None, "late"),
            lambda: backend.record(stream, backend.event()),
            lambda: copy(backend, stream, device, host, whole(8)),
        ]
        for call in late:
            with pytest.raises(KvSafetyError, match="closed"):
                call()


def test_a_task_that_does_not_end_keeps_no_stream_from_ending(monkeypatch):
    monkeypatch.setattr("kvlane.streams.cpu._CLOSE_TIMEOUT_S", 0.02)
    go = threading.Event()

    def task():
        go.wait(60)

    backend = CpuBackend()
    backend.stream("copy")
    backend.start(task, "stuck")
    with pytest.raises(TimeoutError, match="kvlane-stuck did not end"):
        backend.close()
    try:
        until = time.monotonic() + 20
        while any(thread.name == "kvlane-copy" for thread in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.001)
    finally:
        go.set()
    for thread in threading.enumerate():
        if thread.name == "kvlane-stuck":
            thread.join(20)


def test_the_checks_hold_under_python_o():
    """`assert` is gone there: none of these may rest on one."""
    code = (
        "import numpy as np\n"
        "from kvlane.streams.cpu import CpuBackend\n"
        "from kvlane.streams.executor import LayerPass\n"
        "from kvlane.transfer.host import HostStore\n"
        "from kvlane.transfer.identity import KvIdentity\n"
        "from kvlane.transfer.layout import KvLayout\n"
        "from kvlane.transfer.store import KvSafetyError\n"
        "backend, store, layout = CpuBackend(), HostStore(1), KvLayout(1, 1, 1, 1, 1)\n"
        "identity = KvIdentity('m', 'r', None, 'd', layout.name, 0, 1, 'p', 'n')\n"
        "store.put(identity, [1], layout, [(np.zeros(1, np.uint8),) * 2])\n"
        "run = store.open(store.lookup(identity, [1]), 0, 1)\n"
        "run.close()\n"
        "backend.close()\n"
        "def refused(call):\n"
        "    try:\n"
        "        call()\n"
        "    except KvSafetyError:\n"
        "        return\n"
        "    raise SystemExit('not refused')\n"
        "refused(lambda: run.memory)\n"
        "refused(run.retain)\n"
        "refused(lambda: backend.synchronize(backend.event(), 0.01))\n"
        "refused(lambda: backend.failure(backend.event()))\n"
        "refused(lambda: backend.stream('late'))\n"
        "refused(lambda: backend.start(lambda: None, 'late'))\n"
        "refused(LayerPass(backend, 1, None, 0.0).timings)\n"
    )
    subprocess.run([sys.executable, "-O", "-c", code], check=True)


class TestFailure:
    def test_is_on_the_copys_own_event_only_and_the_stream_goes_on(self, kit):
        with kit.FailingBackend(layer=1) as backend:
            stream, points = backend.stream("s"), [backend.event() for _ in range(3)]
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            done = []
            for layer, point in enumerate(points):
                done.append(copy(backend, stream, device, host, [CopyDescriptor(layer, 0, 0, 8)]))
                backend.record(stream, point)
            backend.synchronize(points[-1], 10)
            assert [type(backend.failure(e)) for e in done] == [type(None), OSError, type(None)]
            assert [backend.failure(e) for e in points] == [None] * 3

    def test_stays_with_its_copy_when_another_was_given_before_the_event_was_asked(self, kit):
        with kit.FailingBackend(layer=1) as backend:
            stream, began = backend.stream("s"), backend.event()
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            failed = copy(backend, stream, device, host, [CopyDescriptor(1, 0, 0, 8)])
            other = copy(backend, stream, device, host, [CopyDescriptor(2, 0, 0, 8)], began=began)
            backend.synchronize(other, 10)
            assert isinstance(backend.failure(failed), OSError)
            assert backend.failure(began) is backend.failure(other) is None

    def test_a_cancelled_copy_is_dropped_and_says_so(self):
        with CpuBackend() as backend:
            stream, cancel = backend.stream("s"), backend.flag()
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            device.zero_()
            host[:] = 1
            cancel.set()
            done = copy(backend, stream, device, host, whole(8), cancel=cancel)
            backend.synchronize(done, 10)
            assert isinstance(backend.failure(done), CopyCancelledError)
            assert device.sum() == 0


class TestPacing:
    RATE = 200e6

    @pytest.mark.parametrize("copies", [1, 8, 1000])
    def test_takes_as_long_as_the_link_would(self, copies):
        # 100 ms in 256 KiB pieces: with plain sleeps every piece would be some per cent late, and that adds up.
        total = 20_000_000
        size = total // copies
        runs = [CopyDescriptor(0, at, at, size) for at in range(0, total, size)]
        with CpuBackend(self.RATE) as backend:
            stream, device, host = backend.stream("s"), backend.device_bytes(total), backend.host_bytes(total)
            ratios = [
                copy_seconds(backend, stream, device, host, runs) / (total / self.RATE) for _ in range(3)
            ]
        assert min(ratios) > 0.99
        assert min(ratios) < 1.03

    def test_follows_on_without_a_gap_between_copies(self):
        total, parts = 10_000_000, 20
        with CpuBackend(self.RATE) as backend:
            stream = backend.stream("s")
            device, host = backend.device_bytes(total), backend.host_bytes(total)
            ratios = []
            for _ in range(3):
                began, ends = backend.event(), []
                for part in range(parts):
                    first = began if part == 0 else None
                    ends.append(copy(backend, stream, device, host, whole(total // parts), began=first))
                backend.synchronize(ends[-1], 30)
                seconds = backend.time_of(ends[-1]) - backend.time_of(began)
                ratios.append(seconds / (total / self.RATE))
        assert 0.99 < min(ratios) < 1.05

    def test_an_idle_link_saves_nothing_up(self):
        total = 4_000_000
        with CpuBackend(self.RATE) as backend:
            stream, device, host = backend.stream("s"), backend.device_bytes(total), backend.host_bytes(total)
            for _ in range(3):
                seconds = copy_seconds(backend, stream, device, host, whole(total))
                assert seconds > 0.97 * total / self.RATE
                time.sleep(0.03)

    def test_two_streams_share_the_link(self):
        total = 8_000_000
        with CpuBackend(self.RATE) as backend:
            streams = [backend.stream("one"), backend.stream("two")]
            device, host = backend.device_bytes(total), backend.host_bytes(total)
            began, ends = backend.now(), [backend.event(), backend.event()]
            for stream, end in zip(streams, ends, strict=True):
                copy(backend, stream, device, host, whole(total), done=end)
            for end in ends:
                backend.synchronize(end, 30)
            seconds = max(backend.time_of(end) for end in ends) - began
        assert seconds > 0.97 * 2 * total / self.RATE

    @pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
    def test_an_impossible_rate_is_refused(self, rate):
        with pytest.raises(InputError, match="link_bytes_per_s"):
            CpuBackend(rate)


class TestThreads:
    def test_end_with_the_backend(self):
        before = threading.active_count()
        with CpuBackend() as backend:
            backend.stream("one")
            backend.stream("two")
            backend.start(lambda: time.sleep(0.02), "task")
            assert threading.active_count() == before + 3
        assert threading.active_count() == before

    def test_finish_their_work_first(self, kit):
        with kit.SlowBackend() as backend:
            stream = backend.stream("s")
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            done = [copy(backend, stream, device, host, whole(8)) for _ in range(5)]
        assert all(backend.fired(event) for event in done)

    def test_of_a_released_stream_ends_once_its_work_is_done(self, kit):
        with kit.StuckBackend(layer=1) as backend:
            stream, device, host = backend.stream("s"), backend.device_bytes(8), backend.host_bytes(8)
            done = copy(backend, stream, device, host, [CopyDescriptor(1, 0, 0, 8)])
            backend.release(stream)
            backend.release(stream)
            with pytest.raises(KvSafetyError, match="closed"):
                copy(backend, stream, device, host, whole(8))
            assert not backend.fired(done)
            backend.go.set()
            stream.thread.join(10)
            assert not stream.thread.is_alive()
            assert backend.fired(done)


def test_a_probe_leaves_no_thread_behind():
    before = set(threading.enumerate())
    with CpuBackend() as backend:
        for copies in (1, 0):
            with pytest.raises(InputError) if copies == 0 else nullcontext():
                probe_link(backend, (MIB,), working_set_bytes=MIB, reps=copies)
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        assert set(threading.enumerate()) == before


def test_a_probe_finds_the_links_rate():
    best = 0.0
    with CpuBackend(400e6) as backend:
        for _ in range(12):  # others on the machine make a link slower, never faster
            (sample,) = probe_link(backend, (MIB,), working_set_bytes=4 * MIB, series_bytes=8 * MIB, reps=3)
            best = max(best, sample.rate_bytes_per_s)
            if best > 0.9 * 400e6:
                break
    assert best == pytest.approx(400e6, rel=0.1)


def test_importing_streams_loads_no_engine_and_touches_no_device():
    code = (
        "import sys, kvlane.streams.executor, kvlane.streams.backend\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'executor'\n"
        "import kvlane.streams.cpu, kvlane.streams.device_kv\n"
        "import torch\n"
        "assert 'transformers' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
