"""The executor over the cpu backend, without a model: order, reports, faults, and what happens without its guards."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.executor import LayerExecutor, LayerLoad, LayerPass, LoadError
from kvlane.streams.part import PartLoad
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout, KvRegion
from kvlane.transfer.store import KvSafetyError

LAYOUT = KvLayout(layers=6, kv_heads=2, k_width=4, v_width=4, itemsize=4)
IDENTITY = KvIdentity("model", "r1", None, "float32", LAYOUT.name, 0, 1, "rope", "numerics")
TOKENS = 32
REGION = KvRegion(LAYOUT, 48)


def filled_store(seed=0):
    store = HostStore(8)
    random = np.random.default_rng(seed)
    rows = TOKENS * LAYOUT.k_bytes_per_token
    layers = [
        (random.integers(0, 256, rows, np.uint8), random.integers(0, 256, rows, np.uint8))
        for _ in range(LAYOUT.layers)
    ]
    store.put(IDENTITY, range(TOKENS), LAYOUT, layers)
    return store, layers


def open_all(store):
    return store.open(store.lookup(IDENTITY, range(TOKENS)), 0, TOKENS)


def layer_of(backend, memory, layer):
    data = backend.read(memory)
    keys = data[REGION.key_offset(layer, 0) : REGION.key_offset(layer, TOKENS)]
    values = data[REGION.value_offset(layer, 0) : REGION.value_offset(layer, TOKENS)]
    return keys.copy(), values.copy()


def run_pass(backend, load, memory, compute_s=0.0):
    """A pass whose `compute` is reading the layer's KV; returns what it read and the report."""
    steps = LayerPass(backend, LAYOUT.layers, load, backend.now())
    read = []
    steps.before()
    for layer in range(LAYOUT.layers):
        steps.begin(layer)
        steps.ready(layer)
        read.append(layer_of(backend, memory, layer))
        time.sleep(compute_s)
        steps.end(layer)
    steps.finish()
    return read, steps.timings()


def submit(backend, run, memory, mode="layered", **options):
    return LayerExecutor(backend).submit([run], memory, REGION, mode=mode, **options)


@pytest.mark.parametrize("mode", ["bulk", "layered"])
class TestPass:
    def test_reads_every_layer_whole_however_late_it_comes(self, kit, mode):
        store, layers = filled_store()
        with kit.SlowBackend() as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            read, rows = run_pass(backend, submit(backend, run, memory, mode), memory)
        for got, expected in zip(read, layers, strict=True):
            np.testing.assert_array_equal(got[0], expected[0])
            np.testing.assert_array_equal(got[1], expected[1])
        assert sum(row.bytes for row in rows) == run.nbytes == run.bytes_moved == store.bytes_moved
        assert store.clear() == 0

    def test_copies_and_enqueues_off_the_compute_thread(self, kit, mode, monkeypatch):
        enqueuing = set()
        issue = PartLoad._issue

        def noted(self, *copies):
            enqueuing.add(threading.get_ident())
            issue(self, *copies)

        monkeypatch.setattr(PartLoad, "_issue", noted)
        store, _ = filled_store()
        with kit.SlowBackend() as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            run_pass(backend, submit(backend, run, memory, mode), memory)
            assert len(backend.copy_threads) == len(enqueuing) == 1
            assert len(backend.copy_threads | enqueuing | {threading.get_ident()}) == 3

    def test_reports_every_layer_in_order(self, kit, mode):
        store, _ = filled_store()
        with kit.SlowBackend() as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            began = backend.now()
            _, rows = run_pass(backend, submit(backend, run, memory, mode), memory, compute_s=0.001)
            took = backend.now() - began
        assert [row.layer for row in rows] == list(range(LAYOUT.layers))
        for row in rows:
            assert row.bytes == TOKENS * LAYOUT.layer_bytes_per_token
            assert row.copies == 2
            assert row.enqueue_s <= row.start_s <= row.arrive_s <= took
            assert row.compute_begin_s <= row.compute_end_s <= took
            assert row.copy_s > 0
            assert 0 < row.compute_s <= row.compute_end_s - row.compute_begin_s
        for one, two in pairwise(rows):
            assert one.arrive_s <= two.start_s
            assert one.compute_end_s <= two.compute_begin_s
        if mode == "layered":
            for row in rows:
                assert row.compute_begin_s <= row.reached_s
                assert row.reached_s + row.exposed_s >= row.arrive_s
                assert row.reached_s + row.exposed_s <= row.compute_end_s
        else:
            assert rows[0].compute_begin_s >= rows[-1].arrive_s
            assert rows[0].exposed_s > 0
            assert all(row.exposed_s == 0 and row.reached_s is None for row in rows[1:])

    @pytest.mark.parametrize("layer", range(LAYOUT.layers))
    def test_a_copy_that_raises_ends_it_with_the_layer(self, kit, mode, layer):
        store, _ = filled_store()
        with kit.FailingBackend(layer) as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            load = submit(backend, run, memory, mode)
            with pytest.raises(LoadError, match="link down") as caught:
                run_pass(backend, load, memory)
            assert caught.value.layer == layer
            assert isinstance(caught.value.__cause__, OSError)
            # Every later wait of this load raises too.
            with pytest.raises(LoadError):
                load.hold(LAYOUT.layers - 1)
            with pytest.raises(LoadError):
                load.finish()
            assert load.settle(10)
            assert run.bytes_moved < run.nbytes
        assert store.clear() == 0

    @pytest.mark.parametrize("layer", [0, 3])
    def test_an_enqueue_that_raises_ends_it_with_the_layer(self, kit, mode, layer, monkeypatch):
        store, _ = filled_store()
        with CpuBackend() as backend, open_all(store) as run:
            copies = type(run).copies

            def broken(self, at, region):
                if at == layer:
                    raise OSError("no descriptors")
                return copies(self, at, region)

            monkeypatch.setattr(type(run), "copies", broken)
            memory = backend.device_bytes(REGION.nbytes)
            load = submit(backend, run, memory, mode)
            with pytest.raises(LoadError, match="no descriptors") as caught:
                run_pass(backend, load, memory, compute_s=0.001)
            assert caught.value.layer == layer
            assert load.settle(10)
        assert store.clear() == 0

    def test_a_copy_that_stands_still_is_not_waited_for_past_the_deadline(self, kit, mode):
        store, _ = filled_store()
        with kit.StuckBackend(layer=2) as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            load = submit(backend, run, memory, mode, deadline_s=0.05)
            assert backend.reached.wait(10)
            with pytest.raises(LoadError, match="deadline") as caught:
                run_pass(backend, load, memory)
            assert caught.value.layer == 2
            # The stuck copy still reads the source and may yet write: both stay taken.
            run.close()
            assert not load.settled
            assert store.clear() == 1
            backend.go.set()
            assert load.settle(10)
            assert store.clear() == 0
            # What had not begun was dropped.
            assert run.bytes_moved <= 3 * TOKENS * LAYOUT.layer_bytes_per_token


def test_a_stuck_stream_goes_back_once_its_load_has_settled(kit, monkeypatch):
    """Another takes its place meanwhile; nothing has to be submitted for the old one to be released."""
    store, _ = filled_store()
    released = []
    with kit.StuckBackend(layer=2) as backend, open_all(store) as run:
        release = backend.release

        def noted(stream):
            released.append(stream)
            release(stream)

        monkeypatch.setattr(backend, "release", noted)
        executor = LayerExecutor(backend)
        memories = [backend.device_bytes(REGION.nbytes) for _ in range(2)]
        stuck = executor.submit([run], memories[0], REGION, mode="layered")
        assert backend.reached.wait(10)
        stuck.close()
        other = executor.submit([run], memories[1], REGION, mode="layered")
        other.hold(1)
        assert released == []
        backend.go.set()
        assert stuck.settle(10)
        until = time.monotonic() + 10
        while not released:
            assert time.monotonic() < until
            time.sleep(0.001)
        other.finish()
        executor.close()
    assert len(released) == len(set(map(id, released))) == 2


class TestGuards:
    """Each control run takes a guard away and must be noticed; the guarded run beside it must not."""

    def test_the_host_waits_until_a_layers_event_is_recorded(self, monkeypatch):
        issue = PartLoad._issue

        def late(self, *copies):
            time.sleep(0.01)
            issue(self, *copies)

        monkeypatch.setattr(PartLoad, "_issue", late)
        store, layers = filled_store()
        with CpuBackend() as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            read, _ = run_pass(backend, submit(backend, run, memory), memory)
            np.testing.assert_array_equal(read[0][0], layers[0][0])
            submit(backend, run, memory).finish()

            # Control: on CUDA this would be a wait for nothing, here it is an error.
            load = submit(backend, run, memory)
            load.parts[0].decided = [AlwaysSet()] * LAYOUT.layers
            with pytest.raises(KvSafetyError, match="recorded"):
                load.hold(0)
            assert load.settle(10)

    def test_a_wait_left_out_reads_what_was_there_before(self, kit, monkeypatch):
        store, layers = filled_store()
        with kit.SlowBackend() as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            memory.fill_(0xFF)
            monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)
            read, _ = run_pass(backend, submit(backend, run, memory), memory)
        assert any(
            not np.array_equal(got[0], expected[0]) for got, expected in zip(read, layers, strict=True)
        )

    def test_the_copies_wait_for_earlier_compute(self):
        events = []

        class Noting(CpuBackend):
            def record(self, stream, event):
                events.append(("record", stream.name, event))
                super().record(stream, event)

            def wait(self, stream, event, timeout_s=None):
                events.append(("wait", stream.name, event))
                super().wait(stream, event, timeout_s)

            def copy(self, stream, *rest, **events_around):
                events.append(("copy", stream.name, None))
                super().copy(stream, *rest, **events_around)

        store, _ = filled_store()
        with Noting() as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            assert submit(backend, run, memory).settle(10)
        fence = next(event for kind, name, event in events if (kind, name) == ("record", "compute"))
        kinds = [(kind, name, event is fence) for kind, name, event in events]
        assert kinds.index(("wait", "copy-host", True)) < kinds.index(("copy", "copy-host", False))

    def test_a_load_given_up_raises_and_frees_its_source(self, kit):
        store, _ = filled_store()
        with kit.SlowBackend() as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            load = submit(backend, run, memory)
            load.give_up()
            with pytest.raises(LoadError):
                load.hold(LAYOUT.layers - 1)
            assert load.settle(10)
            assert run.bytes_moved < run.nbytes
        assert store.clear() == 0


class AlwaysSet:
    def is_set(self):
        return True

    def set(self):
        pass

    def wait(self, timeout=None):
        return True


class TestSubmit:
    def test_a_pass_without_a_load_reports_compute_only(self):
        with CpuBackend() as backend:
            memory = backend.device_bytes(REGION.nbytes)
            _, rows = run_pass(backend, None, memory)
        for row in rows:
            assert (row.bytes, row.copies, row.exposed_s) == (0, 0, 0.0)
            assert row.enqueue_s is row.start_s is row.arrive_s is row.reached_s is row.copy_s is None

    @pytest.mark.parametrize(
        ("field", "options"),
        [
            ("mode", {"mode": "two_ended"}),
            ("deadline_s", {"deadline_s": 0}),
            ("deadline_s", {"deadline_s": float("nan")}),
            ("deadline_s", {"deadline_s": float("inf")}),
            ("deadline_s", {"deadline_s": 1e300}),
        ],
    )
    def test_bad_options_are_refused(self, field, options):
        store, _ = filled_store()
        with CpuBackend() as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            with pytest.raises(InputError) as caught:
                submit(backend, run, memory, **options)
            assert caught.value.field == field

    @pytest.mark.parametrize("region", [KvRegion(LAYOUT, 16), KvRegion(KvLayout(6, 2, 4, 4, 2), 48)])
    def test_a_run_that_does_not_fit_is_refused_and_stays_unpinned(self, region):
        store, _ = filled_store()
        with CpuBackend() as backend:
            with open_all(store) as run, pytest.raises(InputError):
                LayerExecutor(backend).submit(
                    [run], backend.device_bytes(region.nbytes), region, mode="layered"
                )
            assert store.clear() == 0

    def test_on_a_closed_backend_raises_and_leaves_no_pin_and_no_thread(self):
        store, _ = filled_store()
        before = threading.active_count()
        with CpuBackend() as backend:
            executor, memory = LayerExecutor(backend), backend.device_bytes(REGION.nbytes)
        with open_all(store) as run, pytest.raises(KvSafetyError, match="closed"):
            executor.submit([run], memory, REGION, mode="layered")
        assert store.clear() == 0
        assert threading.active_count() == before

    @pytest.mark.parametrize("mode", ["bulk", "layered"])
    def test_closing_lets_loads_settle_and_refuses_the_next(self, kit, mode):
        store, _ = filled_store()
        before = set(threading.enumerate())
        with kit.StuckBackend(layer=1) as backend, open_all(store) as run:
            memory = backend.device_bytes(REGION.nbytes)
            executor = LayerExecutor(backend)
            load = executor.submit([run], memory, REGION, mode=mode)
            load.hold(0)
            executor.close()
            executor.close()
            assert not load.settled
            with pytest.raises(KvSafetyError, match="closed"):
                executor.submit([run], memory, REGION, mode=mode)
            backend.go.set()
            assert load.settle(10)
            for thread in set(threading.enumerate()) - before:
                thread.join(10)
            # The backend is open, and the executor's thread is gone.
            assert set(threading.enumerate()) == before
            submit(backend, run, memory).finish()
        assert store.clear() == 0

    def test_closing_before_a_layer_is_enqueued_fails_the_load_there(self, monkeypatch):
        store, _ = filled_store()
        reached, closed = threading.Event(), threading.Event()
        issue = PartLoad._issue

        def interrupted(self, copies, moves):
            if copies[0].layer == 2:
                reached.set()
                closed.wait(10)
            issue(self, copies, moves)

        monkeypatch.setattr(PartLoad, "_issue", interrupted)
        with CpuBackend() as backend, open_all(store) as run:
            executor = LayerExecutor(backend)
            load = executor.submit([run], backend.device_bytes(REGION.nbytes), REGION, mode="layered")
            assert reached.wait(10)
            load.hold(1)
            executor.close()
            closed.set()
            with pytest.raises(LoadError, match="closed") as caught:
                load.finish()
            assert caught.value.layer == 2
            assert load.settle(10)
            assert run.bytes_moved == 2 * TOKENS * LAYOUT.layer_bytes_per_token
        assert store.clear() == 0

    def test_a_pass_that_left_a_layer_out_gives_no_report(self):
        with CpuBackend() as backend:
            steps = LayerPass(backend, LAYOUT.layers, None, backend.now())
            steps.begin(0)
            steps.end(0)
            with pytest.raises(KvSafetyError, match="every layer"):
                steps.timings()

    def test_the_callers_handle_may_be_closed_at_once(self, kit):
        store, layers = filled_store()
        with kit.SlowBackend() as backend:
            memory = backend.device_bytes(REGION.nbytes)
            with open_all(store) as run:
                load = submit(backend, run, memory)
            assert store.clear() == 1
            read, _ = run_pass(backend, load, memory)
            np.testing.assert_array_equal(read[-1][1], layers[-1][1])
            assert store.clear() == 0
