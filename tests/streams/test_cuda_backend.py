"""The CUDA backend where its driver misbehaves: torch's streams and events are played by ones that tests hold up.

Device memory is host memory here, so that the copies themselves are real; whether a device runs them in order is for
the tests marked `gpu`.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from kvlane.streams import cuda, cuda_copies, cuda_events
from kvlane.streams.cpu import CopyCancelledError
from kvlane.streams.cuda import CudaBackend, DeviceLostError
from kvlane.streams.cuda_memory import PinError, PinnedMemory
from kvlane.streams.cuda_probe import measure_methods
from kvlane.streams.executor import LayerExecutor
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import KvSafetyError


class FakeDriver:
    """A device that runs what it is given at once, unless `stuck`, and fails for good once `error` is set."""

    def __init__(self):
        self.error = None
        self.stuck = threading.Event()
        self.log = []
        self.current = threading.local()

    def check(self):
        if self.error:
            raise RuntimeError(self.error)


class FakeStream:
    def __init__(self, device=None, priority=0):
        self.device, self.priority = device, priority
        self.cuda_stream = id(self)

    def wait_event(self, event):
        DRIVER.check()
        DRIVER.log.append(("wait", self, event))

    def wait_stream(self, stream):
        DRIVER.check()

    def synchronize(self):
        DRIVER.check()


class FakeEvent:
    def __init__(self, enable_timing=False):
        assert enable_timing
        self.at = None
        self.held = False

    def record(self, stream):
        DRIVER.check()
        DRIVER.log.append(("record", stream, self))
        self.held, self.at = DRIVER.stuck.is_set(), time.perf_counter()

    def query(self):
        DRIVER.check()
        return not (self.held and DRIVER.stuck.is_set())

    def elapsed_time(self, other):
        DRIVER.check()
        return (other.at - self.at) * 1e3


class FakeRuntime:
    """Locks every page. In its own right and not patched in, since memory may be let go of after the test."""

    def __init__(self, device):
        pass

    def register(self, address, nbytes):
        return 0

    def unregister(self, address):
        return 0

    def describe(self, code):
        return f"error {code}"


DRIVER = FakeDriver()
DEFAULT = FakeStream()


@pytest.fixture
def driver(monkeypatch):
    global DRIVER
    DRIVER = FakeDriver()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: DRIVER.check())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: getattr(DRIVER.current, "stream", DEFAULT)
    )
    monkeypatch.setattr(cuda, "check_cuda", lambda index: torch.device("cpu", 0))
    monkeypatch.setattr(cuda, "_Runtime", FakeRuntime)
    yield DRIVER
    DRIVER.error = None
    DRIVER.stuck.clear()


@pytest.fixture
def backend(driver):
    with CudaBackend() as made:
        yield made
        driver.stuck.clear()


class Load:
    """One copy of 64 bytes on a stream of its own."""

    def __init__(self, backend, nbytes=64):
        self.backend = backend
        self.stream = backend.stream("s")
        self.device, self.host = backend.device_bytes(nbytes), backend.host_bytes(nbytes)
        self.host[:] = np.arange(nbytes) % 251 + 1
        self.cancel, self.began, self.done = backend.flag(), backend.event(), backend.event()
        self.copies = [CopyDescriptor(0, 0, 0, nbytes)]

    def go(self):
        self.backend.copy(
            self.stream, self.device, self.host, self.copies, self.cancel, self.began, self.done
        )
        return self.done


class TestOrder:
    def test_a_copy_lies_between_its_events_on_its_stream(self, backend, driver, monkeypatch):
        load = Load(backend)
        submit = cuda_copies.Copier.submit
        monkeypatch.setattr(
            cuda_copies.Copier, "submit", lambda *args: (driver.log.append("copies"), submit(*args))
        )
        driver.log.clear()
        load.go()
        lane = load.stream.lane.stream
        assert driver.log == [
            ("record", lane, load.began._torch),
            "copies",
            ("record", lane, load.done._torch),
        ]
        assert backend.failure(load.done) is None
        np.testing.assert_array_equal(backend.read(load.device), load.host)
        assert backend.time_of(load.began) <= backend.time_of(load.done) <= backend.now()

    def test_a_wait_is_the_stream_s_and_returns_at_once(self, backend, driver):
        load = Load(backend)
        fence = backend.event()
        driver.stuck.set()
        backend.record(backend.compute, fence)
        backend.wait(load.stream, fence, 1e-9)
        assert driver.log[-1] == ("wait", load.stream.lane.stream, fence._torch)
        assert not backend.fired(fence)

    def test_copy_streams_go_before_the_model_s_kernels(self, backend):
        assert backend.stream("s").lane.stream.priority < 0

    def test_compute_is_recorded_only_by_a_thread_that_computes_on_it(self, backend, driver):
        driver.current.stream = FakeStream()
        with pytest.raises(KvSafetyError, match="current stream"):
            backend.record(backend.compute, backend.event())
        del driver.current.stream
        backend.record(backend.compute, backend.event())

    def test_waiting_for_an_event_nobody_recorded_is_an_error(self, backend):
        for wait in (lambda e: backend.wait(backend.compute, e), lambda e: backend.synchronize(e, 1)):
            with pytest.raises(KvSafetyError, match="recorded"):
                wait(backend.event())

    def test_an_event_is_recorded_once_until_it_is_reset(self, backend):
        load = Load(backend)
        done = load.go()
        with pytest.raises(KvSafetyError, match="once"):
            backend.record(backend.compute, done)
        with pytest.raises(KvSafetyError, match="once"):
            load.go()
        backend.reset(done)
        assert not backend.fired(done)
        backend.record(backend.compute, done)
        assert backend.fired(done)

    def test_an_event_that_has_not_fired_is_not_reset_or_read(self, backend, driver):
        load = Load(backend)
        driver.stuck.set()
        done = load.go()
        for use in (backend.reset, backend.time_of, backend.failure):
            with pytest.raises(KvSafetyError, match="not fired"):
                use(done)

    def test_an_event_a_thread_waits_for_is_not_reset(self, backend, driver):
        load = Load(backend)
        done = load.go()
        done.join()
        with pytest.raises(KvSafetyError, match="waited for"):
            backend.reset(done)
        done.leave()
        backend.reset(done)

    def test_a_host_s_wait_ends_at_its_deadline(self, backend, driver):
        load = Load(backend)
        driver.stuck.set()
        done = load.go()
        with pytest.raises(TimeoutError):
            backend.synchronize(done, 0.01)
        driver.stuck.clear()
        backend.synchronize(done, 10)


class TestFailures:
    def test_what_fails_in_a_copy_is_on_its_done_and_nowhere_else(self, backend, monkeypatch):
        load, other = Load(backend), Load(backend)

        def refuse(*args):
            raise RuntimeError("invalid argument")

        with monkeypatch.context() as patched:
            patched.setattr(cuda_copies.Copier, "submit", refuse)
            load.go()
        assert str(backend.failure(load.done)) == "invalid argument"
        assert backend.failure(load.began) is None
        assert backend.failure(other.go()) is None

    def test_a_copy_outside_its_blocks_is_never_given(self, backend, driver):
        load = Load(backend)
        load.copies = [CopyDescriptor(0, 0, 60, 5)]
        driver.log.clear()
        with pytest.raises(KvSafetyError, match="outside"):
            load.go()
        assert driver.log == []

    def test_a_load_that_was_given_up_copies_nothing(self, backend):
        load = Load(backend)
        load.cancel.set()
        assert isinstance(backend.failure(load.go()), CopyCancelledError)
        assert not load.device.any()

    def test_a_released_stream_takes_no_more(self, backend):
        load = Load(backend)
        backend.release(load.stream)
        backend.release(load.stream)
        with pytest.raises(KvSafetyError, match="closed"):
            load.go()

    def test_a_copy_that_cannot_be_given_yet_holds_up_no_other_stream(self, backend, monkeypatch):
        load = Load(backend)
        given, go_on = threading.Event(), threading.Event()

        def full(*args):
            given.set()
            go_on.wait(10)

        monkeypatch.setattr(cuda_copies.Copier, "submit", full)
        thread = threading.Thread(target=load.go)
        thread.start()
        assert given.wait(10)
        backend.release(load.stream)
        made = threading.Event()

        def make():
            backend.stream("other")
            made.set()

        other = threading.Thread(target=make)
        other.start()
        in_time = made.wait(5)
        go_on.set()
        thread.join(10)
        other.join(10)
        assert in_time

    def test_a_closed_backend_takes_no_more(self, driver):
        backend = CudaBackend()
        load = Load(backend)
        backend.close()
        backend.close()
        with pytest.raises(KvSafetyError, match="closed"):
            backend.stream("s")
        with pytest.raises(KvSafetyError, match="closed"):
            backend.start(print, "task")
        with pytest.raises(KvSafetyError, match="closed"):
            load.go()


class TestALostDevice:
    def test_ends_every_load_in_flight_and_takes_no_more(self, backend, driver):
        load = Load(backend)
        early = Load(backend).go()
        at = backend.time_of(early)
        driver.stuck.set()
        done = load.go()
        assert not backend.fired(done)
        driver.error = "an illegal memory access was encountered"
        backend.synchronize(done, 10)
        assert backend.fired(done)
        assert isinstance(backend.failure(done), DeviceLostError)
        assert "illegal memory access" in str(backend.failure(done))
        assert backend.time_of(done) <= backend.now()
        # What had fired before keeps what was known of it.
        assert backend.failure(early) is None
        assert backend.time_of(early) == at
        for use in (
            lambda: backend.record(backend.compute, backend.event()),
            lambda: backend.wait(load.stream, done),
            lambda: Load.go(FreshEvents(load)),
        ):
            with pytest.raises(DeviceLostError, match="illegal"):
                use()

    def test_an_error_while_a_copy_is_handed_over_is_that_copy_s(self, backend, driver, monkeypatch):
        load = Load(backend)

        def broken(*args):
            driver.error = "unspecified launch failure"

        monkeypatch.setattr(cuda_copies.Copier, "submit", broken)
        done = load.go()
        assert isinstance(backend.failure(done), DeviceLostError)

    def test_does_not_keep_a_thread_from_its_task(self, backend, driver):
        driver.error = "an illegal memory access was encountered"
        ran = threading.Event()
        backend.start(ran.set, "task")
        assert ran.wait(10)


class FreshEvents(Load):
    """The same load with events nobody has recorded."""

    def __init__(self, load):
        self.__dict__.update(load.__dict__)
        self.began, self.done = self.backend.event(), self.backend.event()


class TestMemory:
    def test_is_kept_until_the_copy_is_done_whoever_lets_go_of_it(self, backend, driver):
        load = Load(backend)
        source, target = weakref.ref(load.host), weakref.ref(load.device)
        driver.stuck.set()
        load.go()
        stream = load.stream
        del load
        gc.collect()
        assert source() is not None
        assert target() is not None
        assert backend._used(stream)
        driver.stuck.clear()
        assert not backend._used(stream)
        gc.collect()
        assert source() is None
        assert target() is None

    def test_is_let_go_of_once_the_copy_is_known_to_be_done(self, backend, driver):
        load = Load(backend)
        source = weakref.ref(load.host)
        driver.stuck.set()
        done = load.go()
        del load
        gc.collect()
        assert not backend.fired(done)
        assert source() is not None
        driver.stuck.clear()
        # No further copy has to come along its stream.
        backend.synchronize(done, 10)
        gc.collect()
        assert source() is None

    def test_of_a_released_stream_is_kept_too(self, backend, driver):
        load = Load(backend)
        source = weakref.ref(load.host)
        driver.stuck.set()
        load.go()
        backend.release(load.stream)
        del load
        backend.stream("another")
        gc.collect()
        assert source() is not None
        driver.stuck.clear()
        backend.stream("a third")
        gc.collect()
        assert source() is None

    def test_of_a_copy_that_does_not_end_outlives_the_backend(self, driver, monkeypatch):
        monkeypatch.setattr(cuda, "_CLOSE_TIMEOUT_S", 0.02)
        monkeypatch.setattr(cuda, "_abandoned", [])
        backend = CudaBackend()
        load = Load(backend)
        source = weakref.ref(load.host)
        driver.stuck.set()
        load.go()
        with pytest.raises(TimeoutError, match="did not end"):
            backend.close()
        del load, backend
        gc.collect()
        assert source() is not None

    def test_that_cannot_be_locked_is_an_error_that_leaves_none_behind(self, driver, monkeypatch):
        codes, cleared = iter([0, 2]), []

        class Cudart:
            @staticmethod
            def cudaHostRegister(address, nbytes, flags):  # noqa: N802
                return next(codes)

            @staticmethod
            def cudaHostUnregister(address):  # noqa: N802
                return 0

        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: cleared.append(args))
        pinned = PinnedMemory(cuda._Runtime(torch.device("cpu")), chunk_bytes=4096)
        with pytest.raises(PinError, match="CUDA error 2"):
            pinned.allocate(8192)
        assert pinned.nbytes == 0
        # The runtime would have told the next kernel of it.
        assert len(cleared) == 1


class TestClock:
    def test_an_anchor_is_renewed_when_it_is_old_and_its_drift_is_known(self, backend, monkeypatch):
        first = backend.clock.anchor()
        assert backend.clock.anchor() is first
        assert backend.clock.drift is None
        monkeypatch.setattr(cuda_events, "_ANCHOR_S", 0.0)
        assert backend.clock.anchor() is not first
        drift = backend.clock.drift
        assert drift is not None
        assert abs(drift) < 1

    def test_a_device_that_does_not_answer_keeps_the_old_one(self, backend, driver, monkeypatch):
        first = backend.clock.anchor()
        monkeypatch.setattr(cuda_events, "_ANCHOR_S", 0.0)
        driver.stuck.set()
        assert backend.clock.anchor() is first
        driver.stuck.clear()
        assert backend.clock.anchor() is not first

    def test_times_are_on_the_host_s_clock(self, backend):
        before = backend.now()
        event = backend.event()
        backend.record(backend.compute, event)
        at = backend.time_of(event)
        error = backend.clock.latest.error_s
        assert before - error <= at <= backend.now() + error


class CompileError(Exception):
    """As cupy's, which is no RuntimeError."""


class TestMeasuring:
    def test_a_way_that_fails_is_left_out_whatever_it_raises(self, backend, monkeypatch):
        copy = cuda_copies.Copier._copy

        def submit(self, lane, destination, source, runs, cancel, held):
            method = self.methods.choose(1, 1, self.possible)
            if method == "batch":
                raise CompileError("cannot compile")
            copy(self, "engine", lane, destination, source, runs, cancel, held)

        monkeypatch.setattr(cuda_copies.Copier, "submit", submit)
        backend.copier.missing = {"mapped": "no", "staged": "no"}
        table = measure_methods(backend, [65536], series_bytes=1 << 18, reps=1, budget_s=0.1)
        assert set(table.rates) == {"engine"}
        assert "cannot compile" in backend.copier.missing["batch"]
        assert backend.copier.methods is table


def test_the_executor_runs_on_it_unchanged(backend, kit):
    model, ids = kit.model(), kit.ids(40)
    store, _ = kit.stored(model, ids)
    with CudaBackend() as other:
        engine = kit.engine(model, other)
        region = engine.kv.region
        executor = LayerExecutor(backend, ring_sets=1)
        target = backend.device_bytes(region.nbytes)
        for _ in range(2):
            hit = store.lookup(engine.identity, ids)
            with store.open(hit, 0, 32) as run:
                load = executor.submit([run], target, region, mode="layered", deadline_s=10)
                for layer in range(kit.layers):
                    load.hold(layer)
                load.finish()
                assert load.settle(10)
                for layer in range(kit.layers):
                    for copy in run.copies(layer, region):
                        arrived = target.numpy()[copy.destination : copy.destination + copy.nbytes]
                        stored = run.memory[copy.source : copy.source + copy.nbytes]
                        np.testing.assert_array_equal(arrived, stored)
            target.zero_()
        executor.close()
        engine.close()
