"""Two loads at once on one executor: each is told its own failures, and only those."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from kvlane.streams.cpu import CpuBackend
from kvlane.streams.executor import LayerExecutor, LayerLoad, LoadError
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout, KvRegion

LAYOUT = KvLayout(layers=6, kv_heads=2, k_width=4, v_width=4, itemsize=4)
IDENTITY = KvIdentity("model", "r1", None, "float32", LAYOUT.name, 0, 1, "rope", "numerics")
TOKENS = 32
LAYER_BYTES = TOKENS * LAYOUT.layer_bytes_per_token
# As large as the prompt, so that a layer is one copy.
REGION = KvRegion(LAYOUT, TOKENS)


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Interleaving(CpuBackend):
    """Whoever hands copies over is slow about it, so that two who do come between one another; some copies fail."""

    def __init__(self):
        super().__init__()
        self.failing = set()  # (address of the destination, layer)
        self.cancelling = {}  # the same, and what to do before the copy
        self.copied = {}  # bytes by address of the destination
        self.turn = threading.Barrier(2)

    def copy(self, *given, **events_around):
        self._meet()
        super().copy(*given, **events_around)
        time.sleep(0.0005)

    def _meet(self):
        # Both loads hand a layer over at the same time, as long as both are still at it.
        try:
            self.turn.wait(0.02)
        except threading.BrokenBarrierError:
            self.turn = threading.Barrier(2)

    def _copy_piece(self, destination, source, piece):
        at = destination.ctypes.data
        if (at, piece.layer) in self.failing:
            raise OSError("link down")
        super()._copy_piece(destination, source, piece)
        self.copied[at] = self.copied.get(at, 0) + piece.nbytes
        if then := self.cancelling.get((at, piece.layer)):
            then()


class Side:
    """One of the two loads, with bytes of its own."""

    def __init__(self, backend, seed):
        random = np.random.default_rng(seed)
        rows = TOKENS * LAYOUT.k_bytes_per_token
        self.layers = [
            (random.integers(0, 256, rows, np.uint8), random.integers(0, 256, rows, np.uint8))
            for _ in range(LAYOUT.layers)
        ]
        self.expected = np.concatenate([part for layer in self.layers for part in layer])
        self.store = HostStore(8)
        self.store.put(IDENTITY, range(TOKENS), LAYOUT, self.layers)
        self.backend = backend
        self.memory = backend.device_bytes(REGION.nbytes)
        self.memory.fill_(0xFF)

    @property
    def at(self):
        return self.memory.data_ptr()

    def submit(self, executor):
        hit = self.store.lookup(IDENTITY, range(TOKENS))
        with self.store.open(hit, 0, TOKENS) as run:
            return executor.submit([run], self.memory, REGION, mode="layered")

    def check_whole(self, load):
        self.read_all(load)
        load.finish()
        np.testing.assert_array_equal(self.backend.read(self.memory), self.expected)
        assert self.store.bytes_moved == LAYOUT.layers * LAYER_BYTES
        assert self.store.clear() == 0

    def read_all(self, load):
        for layer in range(LAYOUT.layers):
            load.hold(layer)
            its = slice(REGION.key_offset(layer), REGION.value_offset(layer, TOKENS))
            np.testing.assert_array_equal(self.backend.read(self.memory)[its], self.expected[its])

    def check_failed(self, load, layer, match):
        with pytest.raises(LoadError, match=match) as caught:
            self.read_all(load)
        assert layer in (None, caught.value.layer)
        with pytest.raises(LoadError):
            load.finish()
        assert load.settle(10)
        # What was counted is what was copied: a whole number of layers, without the one that failed.
        assert self.store.bytes_moved == self.backend.copied.get(self.at, 0) < LAYOUT.layers * LAYER_BYTES
        assert self.store.clear() == 0


@pytest.mark.parametrize("layer", range(LAYOUT.layers))
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_copy_is_charged_to_its_own_load(failing, layer):
    with Interleaving() as backend:
        executor = LayerExecutor(backend)
        sides = [Side(backend, seed) for seed in range(2)]
        backend.failing = {(sides[failing].at, layer)}
        loads = [side.submit(executor) for side in sides]
        sides[1 - failing].check_whole(loads[1 - failing])
        sides[failing].check_failed(loads[failing], layer, "link down")


@pytest.mark.parametrize("layer", range(LAYOUT.layers))
def test_both_may_fail_each_at_its_own_layer(layer):
    other = (layer + 2) % LAYOUT.layers
    with Interleaving() as backend:
        executor = LayerExecutor(backend)
        one, two = Side(backend, 0), Side(backend, 1)
        backend.failing = {(one.at, layer), (two.at, other)}
        loads = one.submit(executor), two.submit(executor)
        one.check_failed(loads[0], layer, "link down")
        two.check_failed(loads[1], other, "link down")


@pytest.mark.parametrize("layer", range(LAYOUT.layers - 1))
@pytest.mark.parametrize("given_up", [0, 1])
def test_a_load_given_up_takes_nothing_from_the_other(given_up, layer):
    with Interleaving() as backend:
        executor = LayerExecutor(backend)
        sides = [Side(backend, seed) for seed in range(2)]
        loads: list[LayerLoad] = []
        submitted = threading.Event()

        def cancel():
            submitted.wait(10)
            loads[given_up].give_up()

        backend.cancelling = {(sides[given_up].at, layer): cancel}
        loads += [side.submit(executor) for side in sides]
        submitted.set()
        sides[1 - given_up].check_whole(loads[1 - given_up])
        # At which layer is a matter of how far its own thread had come.
        sides[given_up].check_failed(loads[given_up], None, "given up")
