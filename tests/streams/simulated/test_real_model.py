"""A real model on the simulated device: the backend is one like any other, and late KV is the KV filled at once."""

from __future__ import annotations

import numpy as np
import pytest

from kvlane.streams.cpu import CpuBackend
from kvlane.streams.simulated.backend import SimulatedBackend
from kvlane.streams.simulated.choosers import Seeded
from kvlane.streams.simulated.device import Disturbance
from kvlane.streams.simulated.links import SimulatedLink
from kvlane.transfer.host import HostStore

TOKENS, LOADED = 40, 32


@pytest.fixture
def computed(kit):
    """A model, a prompt, what comes out of it, and its KV."""
    model, ids = kit.model(), kit.ids(TOKENS)
    with CpuBackend() as backend:
        engine = kit.engine(model, backend)
        expected = engine.prefill(ids)
        layers = [(keys.copy(), values.copy()) for keys, values, *_ in engine.layer_bytes(0, TOKENS)]
        engine.close()
    return model, ids, expected, layers


def prefill(kit, backend, model, ids, layers, **options):
    with backend.watched_locks():
        store = HostStore(kit.unit, allocate=backend.host_bytes)
        engine = kit.engine(model, backend)
    store.put(engine.identity, ids, engine.layout, layers)
    with store.open(store.lookup(engine.identity, ids), 0, LOADED) as run:
        result = engine.prefill(ids, 0, run, **options)
    engine.close()
    return result


@pytest.mark.parametrize("mode", ["layered", "bulk"])
@pytest.mark.parametrize("seed", range(4))
def test_prefills_as_on_the_cpu_whatever_comes_first(kit, computed, seed, mode):
    model, ids, expected, layers = computed
    with SimulatedBackend(timed=False, chooser=Seeded(seed, switch=0.5)) as backend:
        result = prefill(kit, backend, model, ids, layers, mode=mode)
    assert result.loaded_tokens == LOADED
    assert result.first_token == expected.first_token
    np.testing.assert_allclose(result.logits, expected.logits, atol=1e-5)


def test_recomputes_past_a_stuck_copy_in_no_time_at_all(kit, computed):
    """A minute of the virtual clock; the copy stands still for an hour."""
    model, ids, expected, layers = computed
    stuck = Disturbance(late_s=3600.0)
    with SimulatedBackend({"*": SimulatedLink(1e6)}, disturb=lambda stream, copies: stuck) as backend:
        result = prefill(kit, backend, model, ids, layers, deadline_s=60.0)
    assert result.fell_back
    assert result.loaded_tokens == 0
    assert 60.0 <= result.total_s < 61.0
    np.testing.assert_array_equal(result.logits, expected.logits)
