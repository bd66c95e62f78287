"""Order on a CUDA device: each guard, and what comes out when it is left out.

A mistake is widened by a kernel that only waits, so that it is lost always and not sometimes: the wrong bytes have to
come out of it, or the test with the guard in place would mean nothing.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.cuda import CudaBackend
from kvlane.streams.executor import LayerExecutor, LoadError
from kvlane.transfer.layout import CopyDescriptor

pytestmark = pytest.mark.gpu

MIB = 1024**2
# Some tens of milliseconds on any device of today.
DELAY_CYCLES = 60_000_000


@pytest.fixture
def backend():
    with CudaBackend() as made:
        yield made


@contextmanager
def delayed(stream):
    """What is given to a stream inside comes after a wait on the device."""
    with torch.cuda.stream(stream.lane.stream if hasattr(stream, "lane") else stream.torch):
        torch.cuda._sleep(DELAY_CYCLES)
    yield


def go(backend, stream, device, host, copies):
    began, done = backend.event(), backend.event()
    backend.copy(stream, device, host, copies, backend.flag(), began, done)
    return began, done


def finished(backend, done):
    backend.synchronize(done, 30)
    assert backend.failure(done) is None
    return done


class TestGuards:
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
    with CpuBackend() as host:
        engine = kit.engine(model, host)
        identity = engine.identity
        engine.close()
    return identity


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
    print("told", flush=True)  # the process ends without a flush
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
