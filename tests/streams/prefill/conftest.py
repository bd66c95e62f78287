"""A toy model, a prompt of it stored in two tiers, and plans for it."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlane.streams.executor import (
    LayerExecutor,
)
from kvlane.streams.prefill import Job, Prefiller, SequenceKv
from kvlane.streams.quarantine import BlockPool
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout, KvRegion

LAYOUT = KvLayout(layers=5, kv_heads=2, k_width=4, v_width=4, itemsize=1)
IDENTITY = KvIdentity("model", "r1", None, "uint8", LAYOUT.name, 0, 1, "rope", "numerics")
UNIT = 4
STORED = 32
TOKENS = 37


def kv_of(ids, layer):
    """The toy model's keys and values, uint8 [tokens, 8] each: they depend on every token up to their own."""
    rows, state = [], hashlib.sha256(bytes([layer]))
    for token in ids:
        state.update(int(token).to_bytes(4, "little"))
        rows.append(np.frombuffer(state.digest()[:16], np.uint8))
    both = np.stack(rows)
    return both[:, :8], both[:, 8:]


class Block:
    def __init__(self, backend, layout=LAYOUT, capacity=48):
        self.region = KvRegion(layout, capacity)
        self.memory = backend.device_bytes(self.region.nbytes)
        self.memory.fill_(0xEE)

    def rows(self, layer, start, end):
        data, region = self.memory.numpy(), self.region
        return (
            data[region.key_offset(layer, start) : region.key_offset(layer, end)].reshape(-1, 8),
            data[region.value_offset(layer, start) : region.value_offset(layer, end)].reshape(-1, 8),
        )


class Toy:
    """A prompt of the toy model. Its answer is a digest of all KV it read, so that one wrong byte shows."""

    def __init__(self, ids, on_layer=None):
        self.ids = ids
        self.on_layer = on_layer or (lambda start, layer: None)

    def extend(self, block, start, end, steps):
        self.answer(block, start, end, steps)

    def answer(self, block, start, end, steps):
        read = hashlib.sha256()
        for layer in range(LAYOUT.layers):
            steps.begin(layer)
            self.on_layer(start, layer)
            for rows, new in zip(block.rows(layer, start, end), kv_of(self.ids[:end], layer), strict=True):
                rows[:] = new[start:]
            steps.ready(layer)
            for rows in block.rows(layer, 0, end):
                read.update(rows.tobytes())
            steps.end(layer)
        return read.hexdigest()

    def carry(self, source, target, tokens):
        for layer in range(LAYOUT.layers):
            for its, mine in zip(source.rows(layer, 0, tokens), target.rows(layer, 0, tokens), strict=True):
                mine[:] = its


class DiskStore(HostStore):
    tier = "disk"


def ids_of(seed=0, tokens=TOKENS):
    return np.random.default_rng(seed).integers(0, 1000, tokens)


def fill(store, ids):
    layers = [
        tuple(np.ascontiguousarray(rows).ravel() for rows in kv_of(ids[:STORED], layer))
        for layer in range(LAYOUT.layers)
    ]
    store.put(IDENTITY, ids[:STORED], LAYOUT, layers)


class Rig:
    """A device, a prompt stored in two tiers, and one sequence."""

    def __init__(self, backend, ring_sets=3, most=2):
        self.backend = backend
        self.executor = LayerExecutor(backend, ring_sets=ring_sets)
        self.made = []
        self.pool = BlockPool(self.make, most)
        self.prefiller = Prefiller(backend, self.executor, self.pool, LAYOUT.layers)
        self.ids = ids_of()
        self.stores: dict[str, Any] = {
            kind.tier: kind(UNIT, checksums=True) for kind in (HostStore, DiskStore)
        }
        self.sequence = SequenceKv(self.pool.take())
        self.expected = self.recompute(SequenceKv(Block(backend)))

    def make(self):
        self.made.append(Block(self.backend))
        return self.made[-1]

    def recompute(self, sequence):
        return self.prefiller.run(Toy(self.ids), sequence, self.job(0, ())).answer

    def job(self, resident, parts, **options):
        return Job(TOKENS, resident, tuple(parts), self.backend.now(), **options)

    def open(self, *segments):
        """Runs of (tier, start, end), stored anew where a test has cleared the store."""
        runs = []
        for tier, start, end in segments:
            store = self.stores[tier]
            fill(store, self.ids)
            runs.append(store.open(store.lookup(IDENTITY, self.ids), start, end))
        return runs

    def run(self, resident, *segments, forward=None, **options):
        """A prefill with the rest of the block overwritten before."""
        if resident:
            prompt = replace(self.job(0, ()), tokens=resident)
            self.prefiller.run(Toy(self.ids[:resident]), self.sequence, prompt)
        for layer in range(LAYOUT.layers):
            for rows in self.sequence.block.rows(layer, resident, 48):
                rows[:] = 0xEE
        runs = self.open(*segments)
        try:
            return self.prefiller.run(
                forward or Toy(self.ids), self.sequence, self.job(resident, runs, **options)
            )
        finally:
            for run in runs:
                run.close()

    def check(self, outcome):
        assert outcome.answer == self.expected
        assert self.sequence.tokens == TOKENS
        for layer in range(LAYOUT.layers):
            for rows, expected in zip(
                self.sequence.block.rows(layer, 0, TOKENS), kv_of(self.ids, layer), strict=True
            ):
                np.testing.assert_array_equal(rows, expected)

    def check_nothing_left(self, kit):
        assert all(kit.freed(store) for store in self.stores.values())
        wait_for(lambda: self.executor.ring.free == 3 and self.pool.quarantined == 0)
        for _ in range(self.pool.most):
            self.pool.admit()  # no place was lost
        for _ in range(self.pool.most):
            self.pool.dismiss()


def wait_for(condition, timeout_s=10.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


PLANS = {
    "whole hit": (0, [("host", 0, 32)]),
    "prefix split": (0, [("host", 0, 20)]),
    "after a resident prefix": (7, [("host", 7, 24)]),
    "two-ended": (0, [("host", 12, 32)]),
    "two-ended after a resident prefix": (5, [("host", 16, 28)]),
    "two tiers": (3, [("host", 3, 16), ("disk", 16, 32)]),
    "two-ended from two tiers": (3, [("disk", 8, 16), ("host", 16, 32)]),
    "two runs of a tier": (0, [("host", 0, 8), ("host", 8, 32)]),
}


def stuck(rig, **options):
    """A load that is looked at only once a copy stands still, however busy the machine."""

    def when_reached(start, layer):
        if start == 32:
            rig.backend.reached.wait(10)

    rig.backend.reached.clear()
    return rig.run(5, ("host", 5, 32), forward=Toy(rig.ids, when_reached), deadline_s=0.02, **options)


class ToyKit:
    """A fixture, because test folders are not importable."""

    LAYOUT, UNIT, STORED, TOKENS = LAYOUT, UNIT, STORED, TOKENS
    Rig = Rig
    Toy = Toy
    stuck = staticmethod(stuck)
    wait_for = staticmethod(wait_for)


@pytest.fixture(scope="session")
def toy():
    return ToyKit


@pytest.fixture(params=PLANS)
def plan(request):
    """Resident tokens, and the runs to load: (tier, start, end)."""
    return PLANS[request.param]
