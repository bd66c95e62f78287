"""The CUDA backend on a device: bytes by every method, and every mistake it guards against made once to be seen.

A mistake is widened by a kernel that only waits, so that it is lost always and not sometimes. Where a test makes one,
it checks that the wrong bytes come out: the check beside it, with the guard in place, then means something.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvlane.policy.errors import InputError
from kvlane.streams import cuda_copies
from kvlane.streams.cuda import CudaBackend
from kvlane.streams.cuda_copies import Copier
from kvlane.streams.cuda_memory import PinnedMemory
from kvlane.streams.cuda_methods import METHODS, MethodTable
from kvlane.streams.cuda_probe import measure_methods, scattered
from kvlane.streams.executor import LayerExecutor, LoadError
from kvlane.transfer.layout import CopyDescriptor

pytestmark = pytest.mark.gpu

KIB, MIB = 1024, 1024**2
# Some tens of milliseconds on any device of today.
DELAY_CYCLES = 60_000_000


@pytest.fixture
def backend():
    with CudaBackend() as made:
        yield made


@pytest.fixture(params=METHODS)
def method(request, backend):
    why = backend.copier.missing.get(request.param)
    if why:
        pytest.skip(why)
    backend.copier.methods = MethodTable.only(request.param)
    return request.param


@contextmanager
def delayed(stream):
    """What is given to a stream inside comes after a wait on the device."""
    with torch.cuda.stream(stream.lane.stream if hasattr(stream, "lane") else stream.torch):
        torch.cuda._sleep(DELAY_CYCLES)
    yield


def go(backend, stream, device, host, copies, cancel=None):
    began, done = backend.event(), backend.event()
    backend.copy(stream, device, host, copies, cancel or backend.flag(), began, done)
    return began, done


def finished(backend, done):
    backend.synchronize(done, 30)
    assert backend.failure(done) is None
    return done


def filled(backend, nbytes, seed=0):
    host = backend.host_bytes(nbytes)
    host[:] = np.random.default_rng(seed).integers(1, 256, nbytes).astype(np.uint8)
    return host


def expected(host, room, copies):
    made = np.zeros(room, np.uint8)
    for copy in copies:
        made[copy.destination : copy.destination + copy.nbytes] = host[
            copy.source : copy.source + copy.nbytes
        ]
    return made


PATTERNS = {
    "one": [CopyDescriptor(0, 0, 0, 8 * MIB)],
    "blocks of 32 KiB": scattered(32 * KIB, 256, 8 * MIB, 1),
    "rows of 256 B": scattered(256, 4096, 8 * MIB, 2),
    "rows of 8 B": scattered(8, 500, 8 * MIB, 3),
    "odd places": [CopyDescriptor(0, 3 + 7 * at, 11 * at, 5) for at in range(1000)],
    "a gathered source": [CopyDescriptor(0, 96 * KIB * at, 32 * KIB * at, 32 * KIB) for at in range(80)],
    "long and short": [
        CopyDescriptor(0, 0, 4 * MIB, 3 * MIB + 1),
        *(CopyDescriptor(0, 4 * MIB + 64 * at, 96 * at, 64) for at in range(999)),
    ],
}


class TestMethods:
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_bring_exactly_the_bytes(self, backend, method, pattern):
        copies = PATTERNS[pattern]
        host, device = filled(backend, 8 * MIB), backend.device_bytes(8 * MIB)
        _, done = go(backend, backend.stream("s"), device, host, copies)
        finished(backend, done)
        np.testing.assert_array_equal(backend.read(device), expected(host, 8 * MIB, copies))

    def test_bring_more_than_the_staging_buffer_holds(self, backend, method):
        room = cuda_copies.STAGING_BYTES + 24 * MIB
        copies = scattered(256 * KIB, room // (256 * KIB), room, 4)
        host, device = filled(backend, room), backend.device_bytes(room)
        _, done = go(backend, backend.stream("s"), device, host, copies)
        finished(backend, done)
        np.testing.assert_array_equal(backend.read(device), expected(host, room, copies))

    def test_bring_what_lies_across_registrations(self, backend, method):
        backend.pinned.chunk_bytes = MIB
        host, device = filled(backend, 5 * MIB + 12345), backend.device_bytes(6 * MIB)
        assert len(backend.pinned.boundaries(host)) == 5
        copies = [CopyDescriptor(0, 1000, 0, 5 * MIB)]
        _, done = go(backend, backend.stream("s"), device, host, copies)
        finished(backend, done)
        np.testing.assert_array_equal(backend.read(device), expected(host, 6 * MIB, copies))

    def test_bring_memory_that_is_not_page_locked_too(self, backend, method):
        host, device = np.full(MIB, 7, np.uint8), backend.device_bytes(MIB)
        _, done = go(backend, backend.stream("s"), device, host, [CopyDescriptor(0, 0, 0, MIB)])
        finished(backend, done)
        assert int(device.min()) == int(device.max()) == 7

    def test_leave_the_caller_at_once(self, backend, method):
        host, device, stream = (
            filled(backend, 8 * MIB),
            backend.device_bytes(8 * MIB),
            backend.stream("s"),
        )
        finished(backend, go(backend, stream, device, host, PATTERNS["blocks of 32 KiB"])[1])
        with delayed(stream):
            _, done = go(backend, stream, device, host, PATTERNS["blocks of 32 KiB"])
        assert not backend.fired(done)
        finished(backend, done)

    def test_a_load_given_up_copies_no_more(self, backend, method):
        host, device, cancel = filled(backend, MIB), backend.device_bytes(MIB), backend.flag()
        cancel.set()
        _, done = go(backend, backend.stream("s"), device, host, [CopyDescriptor(0, 0, 0, MIB)], cancel)
        backend.synchronize(done, 30)
        assert backend.failure(done) is not None
        assert not device.any()


class TestMemory:
    def test_is_what_torch_takes_for_pinned(self, backend):
        host = backend.host_bytes(3 * MIB + 5)
        assert torch.from_numpy(host).is_pinned()
        assert backend.pinned.nbytes == host.size
        del host
        gc.collect()
        assert backend.pinned.nbytes == 0

    def test_a_refused_registration_is_rolled_back_and_forgotten(self, backend):
        registrar = backend.pinned.registrar

        class Twice:
            """Asks for the third chunk twice, which the runtime refuses."""

            asked = 0

            def register(self, address, nbytes):
                self.asked += 1
                if self.asked == 3:
                    assert registrar.register(address, nbytes) == 0
                    self.extra = address
                return registrar.register(address, nbytes)

            unregister, describe = registrar.unregister, registrar.describe

        twice = Twice()
        with pytest.raises(Exception, match="CUDA error"):
            PinnedMemory(twice, chunk_bytes=MIB).allocate(4 * MIB)
        assert registrar.unregister(twice.extra) == 0
        # Neither the next kernel nor the next copy hears of it.
        assert float(torch.ones(8, device=backend.device).sum()) == 8
        torch.cuda.synchronize()

    def test_a_source_that_is_let_go_of_is_kept_until_its_copy_is_done(self, backend, method):
        stream, device = backend.stream("s"), backend.device_bytes(8 * MIB)
        finished(backend, go(backend, stream, device, filled(backend, 8 * MIB), PATTERNS["one"])[1])
        host = filled(backend, 8 * MIB, seed=1)
        kept = expected(host, 8 * MIB, PATTERNS["blocks of 32 KiB"])
        with delayed(stream):
            _, done = go(backend, stream, device, host, PATTERNS["blocks of 32 KiB"])
        locked = backend.pinned.nbytes
        del host
        gc.collect()
        assert not backend.fired(done)
        assert backend.pinned.nbytes == locked
        finished(backend, done)
        np.testing.assert_array_equal(backend.read(device), kept)

    def test_without_that_it_is_unlocked_under_the_copy(self, backend):
        stream, device = backend.stream("s"), backend.device_bytes(MIB)
        host = filled(backend, MIB)
        with delayed(stream):
            done = backend.event()
            backend.record(stream, done)
        assert not backend.fired(done)
        del host
        gc.collect()
        assert backend.pinned.nbytes == 0
        finished(backend, done)
        assert not device.any()

    def test_descriptors_let_go_of_early_are_another_copy_s(self, backend, monkeypatch):
        if "mapped" in backend.copier.missing:
            pytest.skip(backend.copier.missing["mapped"])
        backend.copier.methods = MethodTable.only("mapped")
        host = filled(backend, 8 * MIB)
        first, second = scattered(256, 512, 8 * MIB, 1), scattered(256, 512, 8 * MIB, 2)

        def both():
            one, two = backend.device_bytes(8 * MIB), backend.device_bytes(8 * MIB)
            slow, quick = backend.stream("slow"), backend.stream("quick")
            with delayed(slow):
                _, done = go(backend, slow, one, host, first)
            finished(backend, go(backend, quick, two, host, second)[1])
            finished(backend, done)
            return np.array_equal(backend.read(one), expected(host, 8 * MIB, first))

        assert both()
        submit = Copier.submit
        monkeypatch.setattr(Copier, "submit", lambda self, *args: submit(self, *args[:-1], []))
        assert not both()

    def test_a_staging_buffer_shared_by_two_streams_mixes_their_bytes(self, backend, monkeypatch):
        if "staged" in backend.copier.missing:
            pytest.skip(backend.copier.missing["staged"])
        backend.copier.methods = MethodTable.only("staged")
        one_host, two_host = filled(backend, 8 * MIB, 1), filled(backend, 8 * MIB, 2)
        copies = PATTERNS["blocks of 32 KiB"]
        launch, slow = Copier._launch, backend.stream("slow")

        def late(self, lane, *args):
            if lane is slow.lane:
                torch.cuda._sleep(DELAY_CYCLES)
            launch(self, lane, *args)

        monkeypatch.setattr(Copier, "_launch", late)

        def both(shared):
            device = backend.device_bytes(8 * MIB)
            quick = backend.stream("quick")
            _, done = go(backend, slow, device, one_host, copies)
            if shared:
                quick.lane.staging = slow.lane.staging
            finished(backend, go(backend, quick, backend.device_bytes(8 * MIB), two_host, copies)[1])
            finished(backend, done)
            return np.array_equal(backend.read(device), expected(one_host, 8 * MIB, copies))

        assert both(shared=False)
        assert not both(shared=True)


class TestOrder:
    """Each guard, and what comes out without it."""

    @pytest.fixture
    def block(self, backend):
        """A device block of ones, a host block of twos, and a stream to bring these."""
        device, host = backend.device_bytes(4 * MIB), backend.host_bytes(4 * MIB)
        device.fill_(1)
        torch.cuda.synchronize()
        host[:] = 2
        return device, host, backend.stream("s"), [CopyDescriptor(0, 0, 0, 4 * MIB)]

    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_fence_keeps_a_block_until_compute_has_read_it(self, backend, block, fenced):
        device, host, stream, copies = block
        with delayed(backend.compute):
            read = device.clone()
        fence = backend.event()
        backend.record(backend.compute, fence)
        if fenced:
            backend.wait(stream, fence)
        finished(backend, go(backend, stream, device, host, copies)[1])
        assert set(read.unique().tolist()) == ({1} if fenced else {2})

    @pytest.mark.parametrize("waited", [True, False])
    def test_compute_that_waits_reads_what_was_copied(self, backend, block, waited):
        device, host, stream, copies = block
        with delayed(stream):
            _, done = go(backend, stream, device, host, copies)
        if waited:
            backend.wait(backend.compute, done)
        read = device.clone()
        finished(backend, done)
        assert set(read.unique().tolist()) == ({2} if waited else {1})

    @pytest.mark.parametrize("after", [True, False])
    def test_an_event_recorded_before_the_copies_lets_go_too_early(self, backend, block, after):
        device, host, stream, copies = block
        early = backend.event()
        backend.record(stream, early)
        with delayed(stream):
            _, done = go(backend, stream, device, host, copies)
        backend.wait(backend.compute, done if after else early)
        read = device.clone()
        finished(backend, done)
        assert set(read.unique().tolist()) == ({2} if after else {1})

    @pytest.mark.parametrize("held", [True, False])
    def test_a_host_that_waits_knows_that_the_bytes_are_there(self, backend, block, held):
        device, host, stream, copies = block
        with delayed(stream):
            _, done = go(backend, stream, device, host, copies)
        if held:
            backend.synchronize(done, 30)
        read = device.clone()
        finished(backend, done)
        assert set(read.unique().tolist()) == ({2} if held else {1})

    @pytest.mark.parametrize("kept", [True, False])
    def test_a_source_written_before_its_copy_is_done_arrives_changed(self, backend, block, kept):
        device, host, stream, copies = block
        with delayed(stream):
            _, done = go(backend, stream, device, host, copies)
        if kept:
            finished(backend, done)
        host[:] = 3
        finished(backend, done)
        assert set(device.unique().tolist()) == ({2} if kept else {3})

    def test_a_deadline_passes_while_the_copy_stands(self, backend, block):
        device, host, stream, copies = block
        with delayed(stream):
            _, done = go(backend, stream, device, host, copies)
        with pytest.raises(TimeoutError):
            backend.synchronize(done, 1e-3)
        assert not backend.fired(done)
        finished(backend, done)

    def test_an_urgent_load_is_not_behind_a_bulk_one(self, backend):
        room = 1 << 30
        host, device, small = (
            backend.host_bytes(room),
            backend.device_bytes(room),
            backend.device_bytes(MIB),
        )
        bulk, urgent = backend.stream("bulk"), backend.stream("urgent")
        _, last = go(backend, bulk, device, host, [CopyDescriptor(0, 0, 0, room)])
        _, first = go(backend, urgent, small, host[:MIB], [CopyDescriptor(0, 0, 0, MIB)])
        finished(backend, first)
        finished(backend, last)
        assert backend.time_of(first) < backend.time_of(last)

    def test_device_times_lie_where_the_host_saw_them(self, backend, block):
        device, host, stream, copies = block
        before = backend.now()
        with delayed(stream):
            began, done = go(backend, stream, device, host, copies)
        finished(backend, done)
        after, error = backend.now(), backend.clock.latest.error_s + 1e-5
        assert before - error <= backend.time_of(began) < backend.time_of(done) <= after + error

    def test_an_event_is_used_again(self, backend, block):
        device, host, stream, copies = block
        began, done = backend.event(), backend.event()
        times = []
        for _ in range(3):
            with delayed(stream):
                backend.copy(stream, device, host, copies, backend.flag(), began, done)
            finished(backend, done)
            times.append(backend.time_of(done))
            backend.reset(began)
            backend.reset(done)
        assert times == sorted(set(times))


class DelayedBackend(CudaBackend):
    """Every copy comes after a wait on its stream."""

    def copy(self, stream, *args, **kwargs):
        with delayed(stream):
            super().copy(stream, *args, **kwargs)


class TestExecutor:
    def load(self, kit, backend, deadline_s=30.0, mode="layered"):
        """A load of a tiny model's KV, and what it has to bring: `(layer, destination, bytes)` of every copy."""
        model, ids = kit.model(), kit.ids(40)
        store, _ = kit.stored(model, ids)
        identity = store_identity(kit, model)
        with store.open(store.lookup(identity, ids), 0, 32) as run:
            region = run.region
            target = backend.device_bytes(region.nbytes)
            copies = [copy for layer in range(kit.layers) for copy in run.copies(layer, region)]
            parts = [
                (c.layer, c.destination, run.memory[c.source : c.source + c.nbytes].copy()) for c in copies
            ]
            executor = LayerExecutor(backend)
            load = executor.submit([run], target, region, mode=mode, deadline_s=deadline_s)
        return executor, load, target, parts

    @pytest.mark.parametrize("held", [True, False])
    def test_a_layer_that_is_held_for_is_there_however_late_its_copy(self, kit, held):
        with DelayedBackend() as backend:
            executor, load, target, parts = self.load(kit, backend)
            seen = []
            for layer in range(kit.layers):
                if held:
                    load.hold(layer)
                # Enqueued as a model's kernels are: what they read is what is there when the device comes to them.
                seen.append(target.clone())
            load.finish()
            right = [
                np.array_equal(backend.read(seen[layer])[to : to + part.size], part)
                for layer, to, part in parts
            ]
            executor.close()
        assert all(right) == held

    def test_a_load_past_its_deadline_fails_and_settles(self, kit):
        with DelayedBackend() as backend:
            executor, load, _, _ = self.load(kit, backend, deadline_s=1e-3)
            with pytest.raises(LoadError):
                load.hold_all()
            load.close()
            assert load.settle(30)
            executor.close()


def store_identity(kit, model):
    from kvlane.streams.cpu import CpuBackend

    with CpuBackend() as host:
        engine = kit.engine(model, host)
        identity = engine.identity
        engine.close()
    return identity


def test_the_ways_to_copy_are_measured_and_one_of_them_chosen(backend):
    table = measure_methods(backend, budget_s=2.0)
    assert set(table.rates) == set(backend.copier.possible)
    assert table.thresholds()
    host, device = filled(backend, 8 * MIB), backend.device_bytes(8 * MIB)
    for copies in PATTERNS.values():
        device.zero_()
        torch.cuda.synchronize()
        finished(backend, go(backend, backend.stream("s"), device, host, copies)[1])
        np.testing.assert_array_equal(backend.read(device), expected(host, 8 * MIB, copies))


LOST = """
import torch
from kvlane.streams.cuda import CudaBackend, DeviceLostError
from kvlane.transfer.layout import CopyDescriptor
backend = CudaBackend()
stream, event = backend.stream("s"), backend.event()
host, device = backend.host_bytes(64), backend.device_bytes(64)
torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")]
backend_events = []
try:
    backend.record(backend.compute, event)
    backend.synchronize(event, 30)
    lost = backend.failure(event)
except DeviceLostError as error:
    lost = error
assert isinstance(lost, DeviceLostError), lost
try:
    backend.copy(stream, device, host, [CopyDescriptor(0, 0, 0, 64)], backend.flag(), backend.event(), backend.event())
except DeviceLostError:
    print("told")
backend.close()
import os
os._exit(0)
"""


def test_a_device_that_is_lost_says_so_and_nothing_waits_for_it():
    found = subprocess.run(
        [sys.executable, "-c", LOST], capture_output=True, text=True, timeout=120, check=False
    )
    assert "told" in found.stdout, found.stderr[-2000:]


def test_a_forward_is_not_captured_into_one_graph(kit, backend):
    model = kit.model()
    torch.nn.Module.to(model, "cuda")
    engine = kit.engine(model, backend)
    engine.prefill(kit.ids(16))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InputError, match="cuda_graph"), torch.cuda.graph(graph):
        engine.prefill(kit.ids(16))
    # Outside of it the engine goes on.
    engine.prefill(kit.ids(16))
    engine.close()
