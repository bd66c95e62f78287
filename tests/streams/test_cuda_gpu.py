"""Copies on a CUDA device: the bytes by every method, and memory that is kept for as long as a copy needs it.

Mistakes are made once to be seen, each widened by a kernel that only waits, so that it is lost always.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvlane.streams import cuda_copies
from kvlane.streams.cuda import CudaBackend
from kvlane.streams.cuda_copies import Copier
from kvlane.streams.cuda_memory import PinError, PinnedMemory
from kvlane.streams.cuda_methods import METHODS, MethodTable
from kvlane.streams.cuda_probe import measure_methods, scattered
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
        # Kept, and with it the frame that holds the memory: it must not go while a part of it is still locked.
        with pytest.raises(PinError, match="CUDA error") as caught:
            PinnedMemory(twice, chunk_bytes=MIB).allocate(4 * MIB)
        assert registrar.unregister(twice.extra) == 0
        del caught
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

        def forgetful(self, lane, destination, source, runs, cancel, held):
            submit(self, lane, destination, source, runs, cancel, [])

        monkeypatch.setattr(Copier, "submit", forgetful)
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
            # Both before anything waits: an allocation may wait for the device.
            device, other = backend.device_bytes(8 * MIB), backend.device_bytes(8 * MIB)
            quick = backend.stream("quick")
            _, done = go(backend, slow, device, one_host, copies)
            if shared:
                quick.lane.staging = slow.lane.staging
            finished(backend, go(backend, quick, other, two_host, copies)[1])
            finished(backend, done)
            return np.array_equal(backend.read(device), expected(one_host, 8 * MIB, copies))

        assert both(shared=False)
        assert not both(shared=True)


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
