"""Loads of several parts: a stream and a thread each, events out of a ring, layers that bring nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.executor import LayerExecutor, LoadError, LoadRefusedError
from kvlane.streams.ring import EventRing
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout, KvRegion
from kvlane.transfer.shapes import LayerShape
from kvlane.transfer.store import KvSafetyError

FULL = LayerShape(2, 4, 4, 1)
LAYOUT = KvLayout.of([FULL] * 4)
# Full, windowed, nothing, a state.
MIXED = KvLayout.of([FULL, LayerShape(2, 4, 4, 1, window=8), LayerShape(), LayerShape(state_bytes=24)])
TOKENS = 32


class DiskStore(HostStore):
    tier = "disk"


def identity(layout):
    return KvIdentity("model", "r1", None, "uint8", layout.name, 0, 1, "rope", "numerics")


def filled(kind=HostStore, layout=LAYOUT, checkpoints=()):
    random = np.random.default_rng(7)
    layers = []
    for shape in layout.shapes:
        rows = [random.integers(0, 256, TOKENS * size, np.uint8) for size in (shape.k_bytes_per_token,) * 2]
        state = [random.integers(0, 256, shape.state_bytes * len(checkpoints), np.uint8)] * bool(
            shape.state_bytes
        )
        layers.append((*rows, *state))
    store = kind(8)
    store.put(identity(layout), range(TOKENS), layout, layers, checkpoints)
    return store


def opened(store, start, end, layout=LAYOUT, **options):
    return store.open(store.lookup(identity(layout), range(TOKENS)), start, end, **options)


class Device:
    def __init__(self, backend, layout=LAYOUT):
        self.region = KvRegion(layout, TOKENS)
        self.memory = backend.device_bytes(self.region.nbytes)
        self.memory.fill_(0xEE)


def submit(executor, device, runs, **options):
    try:
        return executor.submit(runs, device.memory, device.region, mode="layered", **options)
    finally:
        for run in runs:
            run.close()


class CountingBackend(CpuBackend):
    def __init__(self):
        super().__init__()
        self.events = self.resets = 0

    def event(self):
        self.events += 1
        return super().event()

    def reset(self, event):
        self.resets += 1
        super().reset(event)


class TestTiers:
    def test_bring_their_parts_at_the_same_time(self):
        together = threading.Barrier(2)

        class Meeting(CpuBackend):
            def _copy_piece(self, destination, source, piece):
                together.wait(10)
                super()._copy_piece(destination, source, piece)

        with CpuBackend() as backend:
            expected = Device(backend)
            submit(LayerExecutor(backend), expected, [opened(filled(), 0, 32)]).finish()
        with Meeting() as backend:
            device = Device(backend)
            runs = [opened(filled(), 0, 16), opened(filled(DiskStore), 16, 32)]
            submit(LayerExecutor(backend), device, runs).finish()
            np.testing.assert_array_equal(backend.read(device.memory), backend.read(expected.memory))

    def test_one_that_stands_still_does_not_hold_up_the_other(self, kit):
        with CpuBackend() as backend:
            device, host = Device(backend), filled()
            disk = kit.FaultyStore(filled(DiskStore), "standing still", 0)
            load = submit(
                LayerExecutor(backend), device, [opened(disk, 0, 16), opened(host, 16, 32)], deadline_s=0.3
            )
            until = time.monotonic() + 10
            while host.bytes_moved < 16 * LAYOUT.bytes_per_token:
                assert time.monotonic() < until
                time.sleep(0.001)
            with pytest.raises(LoadError, match="deadline") as caught:
                load.hold(0)
            assert (caught.value.tier, caught.value.layer) == ("disk", 0)
            assert not load.settled
            disk.go.set()
            assert load.settle(10)

    def test_have_a_stream_each_that_later_loads_use_again(self):
        made = []

        class Noting(CpuBackend):
            def stream(self, name):
                made.append(name)
                return super().stream(name)

        with Noting() as backend:
            executor = LayerExecutor(backend)
            for _ in range(3):
                runs = [opened(filled(), 0, 16), opened(filled(DiskStore), 16, 32)]
                submit(executor, Device(backend), runs).finish()
        assert made == ["copy-host", "copy-disk"]

    def test_stores_are_verified_before_their_copies_and_off_the_compute_thread(self, monkeypatch):
        store = filled()
        calls: list[tuple[int, str, int]] = []
        with CpuBackend() as backend:
            run = opened(store, 0, 32)
            copies = type(run).copies

            def noted_copies(run, layer, region):
                calls.append((threading.get_ident(), "copies", layer))
                return copies(run, layer, region)

            def noted_verify(run, layer):
                calls.append((threading.get_ident(), "verify", layer))

            monkeypatch.setattr(type(run), "copies", noted_copies)
            monkeypatch.setattr(type(run), "verify", noted_verify)
            submit(LayerExecutor(backend), Device(backend), [run]).finish()
        assert [call[1:] for call in calls] == [
            (what, at) for at in range(4) for what in ("verify", "copies")
        ]
        assert threading.get_ident() not in {call[0] for call in calls}

    @pytest.mark.parametrize("broken", ["host", "disk"])
    def test_a_part_whose_thread_does_not_start_fails_the_load(self, kit, broken):
        class Starting(CpuBackend):
            def start(self, task, name):
                if name == f"enqueue-{broken}":
                    raise RuntimeError("no thread")
                super().start(task, name)

        host, disk = filled(), filled(DiskStore)
        with Starting() as backend:
            executor = LayerExecutor(backend)
            with pytest.raises(LoadError, match="not started: no thread") as caught:
                # Before anything was started there is no load to hand out.
                submit(executor, Device(backend), [opened(host, 0, 16), opened(disk, 16, 32)]).finish()
            assert (caught.value.tier, caught.value.layer) == (broken, 0)
            assert kit.freed(host)
            assert kit.freed(disk)

    def test_a_part_that_cannot_be_pinned_takes_the_others_back(self, kit):
        host, disk = filled(), filled(DiskStore)
        with CpuBackend() as backend:
            executor = LayerExecutor(backend)
            with pytest.raises(LoadError, match="not pinned") as caught:
                submit(
                    executor,
                    Device(backend),
                    [opened(host, 0, 16), opened(kit.FaultyStore(disk, "pin"), 16, 32)],
                )
            assert caught.value.tier == "disk"
            assert kit.freed(host)
            assert kit.freed(disk)
            assert executor.ring.free == 3


def test_a_load_that_has_ended_keeps_nothing_of_its_source():
    store = filled()
    gc.disable()
    try:
        with CpuBackend() as backend:
            executor = LayerExecutor(backend)
            run = opened(store, 0, 32)
            memory = weakref.ref(run.memory)
            load = submit(executor, Device(backend), [run])
            load.finish()
            del run
            assert store.clear() == 0
            until = time.monotonic() + 10
            while memory() is not None:
                assert time.monotonic() < until
                time.sleep(0.001)
            assert load.settled
    finally:
        gc.enable()


class TestRing:
    def test_events_are_used_again_each_time_after_a_reset(self):
        with CountingBackend() as backend:
            executor = LayerExecutor(backend, ring_sets=2)
            for _ in range(10):
                submit(executor, Device(backend), [opened(filled(), 0, 32)], group_layers=2).finish()
            # Two sets of a pair for each of two groups; and a fence for each load.
            assert backend.events == 2 * 4 + 10
            assert backend.resets == 8 * 4

    def test_a_load_that_is_not_let_go_keeps_its_set(self):
        with CpuBackend() as backend:
            executor = LayerExecutor(backend, ring_sets=2)
            loads = [submit(executor, Device(backend), [opened(filled(), 0, 32)]) for _ in range(2)]
            assert all(load.settle(10) for load in loads)
            with pytest.raises(LoadRefusedError):
                submit(executor, Device(backend), [opened(filled(), 0, 32)])
            loads[0].close()
            loads[0].close()
            assert executor.ring.free == 1
            submit(executor, Device(backend), [opened(filled(), 0, 32)]).finish()

    def test_a_refused_load_leaves_no_pin(self, kit):
        store = filled()
        with CpuBackend() as backend:
            executor = LayerExecutor(backend, ring_sets=1)
            load = submit(executor, Device(backend), [opened(filled(), 0, 32)])
            with pytest.raises(LoadRefusedError):
                submit(executor, Device(backend), [opened(store, 0, 32)])
            assert store.clear() == 0
            load.finish()

    def test_a_set_let_go_too_early_is_noticed_when_it_is_taken_again(self, kit):
        """Control: what the ring is asked on every reuse."""
        with kit.StuckBackend(layer=1) as backend:
            ring = EventRing(backend, 1)
            events = ring.take(1)
            done = events.take()
            device, host = backend.device_bytes(8), backend.host_bytes(8)
            stream = backend.stream("s")
            backend.copy(
                stream,
                device,
                host,
                opened(filled(), 0, 8).copies(1, KvRegion(LAYOUT, 8))[:1],
                backend.flag(),
                events.take(),
                done,
            )
            events.note_recorded(done)
            ring.let_go(events)
            with pytest.raises(KvSafetyError, match="not fired"):
                ring.take(1)

    def test_has_at_least_one_set(self):
        with CpuBackend() as backend, pytest.raises(InputError, match="ring_sets"):
            LayerExecutor(backend, ring_sets=0)


class TestLayersThatDiffer:
    def test_those_that_bring_nothing_are_never_awaited(self):
        with CpuBackend() as backend:
            device = Device(backend, MIXED)
            store = filled(layout=MIXED, checkpoints=(16, 32))
            load = submit(LayerExecutor(backend), device, [opened(store, 0, 32, MIXED)], group_layers=2)
            assert load.awaits(0)
            assert not load.awaits(2)
            load.hold(2)
            load.hold(0)
            assert [load.awaits(layer) for layer in range(4)] == [False, False, False, True]
            load.finish()
            (part,) = load.timings(0.0)
            assert [(row.layer, row.bytes, row.group) for row in part.layers] == [
                (0, 32 * 16, 0),
                (1, 8 * 16, 0),
                (3, 24, 3),
            ]

    def test_a_part_may_bring_nothing_for_a_layer(self):
        with CpuBackend() as backend:
            device = Device(backend, MIXED)
            host, disk = (filled(kind, MIXED, (16, 32)) for kind in (HostStore, DiskStore))
            runs = [opened(host, 0, 16, MIXED, load_end=32), opened(disk, 16, 32, MIXED)]
            load = submit(LayerExecutor(backend), device, runs)
            load.finish()
            assert [[row.bytes for row in part.layers] for part in load.timings(0.0)] == [
                [16 * 16],
                [16 * 16, 8 * 16, 24],
            ]

    def test_parts_that_take_different_ends_for_the_loads_are_refused(self):
        with CpuBackend() as backend:
            host, disk = (filled(kind, MIXED, (16, 32)) for kind in (HostStore, DiskStore))
            runs = [opened(host, 0, 16, MIXED), opened(disk, 16, 32, MIXED)]
            with pytest.raises(InputError, match="parts"):
                submit(LayerExecutor(backend), Device(backend, MIXED), runs)


@pytest.mark.parametrize(
    ("field", "ranges", "options"),
    [
        ("parts", [], {}),
        ("parts", [(0, 8), (16, 32)], {}),
        ("parts", [(8, 16), (0, 8)], {}),
        ("group_layers", [(0, 8)], {"group_layers": 0}),
    ],
)
def test_what_does_not_add_up_is_refused(field, ranges, options):
    store = filled()
    with CpuBackend() as backend, pytest.raises(InputError) as caught:
        submit(LayerExecutor(backend), Device(backend), [opened(store, *ends) for ends in ranges], **options)
    assert caught.value.field == field
    assert store.clear() == 0
