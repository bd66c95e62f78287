"""Late KV is bit for bit the same KV filled at once, for every plan: what is read is what was stored, and all of it."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvlane.transfer.host import HostStore

TOKENS = 83  # not a whole number of units

# resident tokens, end of the load: all that is usable, a part, a part after a resident prefix, one load unit.
RUNS = [(0, 80), (0, 40), (13, 64), (72, 80)]


class DiskStore(HostStore):
    tier = "disk"


@pytest.mark.parametrize("mode", ["bulk", "layered"])
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["gqa", "mha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_late_kv_gives_the_bits_of_the_same_kv_filled_at_once(kit, kind, dtype, kv_heads, mode):
    model, ids = kit.model(kind, dtype, kv_heads), kit.ids(TOKENS)
    store, full = kit.stored(model, ids)
    with kit.SlowBackend() as backend:
        engine = kit.engine(model, backend)
        for resident, end in RUNS:
            if resident:
                engine.prefill(ids[:resident])
            engine.poison(resident)
            with store.open(store.lookup(engine.identity, ids), resident, end) as run:
                late = engine.prefill(ids, resident, run, mode=mode)
            assert late.loaded_bytes == run.nbytes == run.bytes_moved
            np.testing.assert_array_equal(late.logits, kit.at_once(model, engine, ids, end))
            if dtype == torch.float32:
                assert late.first_token == full.first_token
                np.testing.assert_allclose(late.logits, full.logits, rtol=0, atol=1e-4)


# resident tokens, and where each run begins and ends: whole, two-ended, from two tiers, and both.
PLANS = [(0, [0, 80]), (5, [32, 72]), (0, [0, 24, 80]), (5, [16, 40, 80])]


@pytest.mark.parametrize("group_layers", [1, 3])
@pytest.mark.parametrize("mode", ["bulk", "layered"])
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["gqa", "mha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_so_does_late_kv_of_every_plan(kit, dtype, kv_heads, mode, group_layers):
    model, ids = kit.model("llama", dtype, kv_heads), kit.ids(TOKENS)
    stores = [kit.stored(model, ids)[0], kit.stored(model, ids, kind=DiskStore)[0]]
    with kit.SlowBackend() as backend:
        backend.delay_s = 0.001
        engine = kit.engine(model, backend)
        full = engine.prefill(ids)
        for resident, cuts in PLANS:
            if resident:
                engine.prefill(ids[:resident])
            engine.poison(resident)
            with ExitStack() as runs:
                late = engine.prefill(
                    ids,
                    resident,
                    [
                        runs.enter_context(store.open(store.lookup(engine.identity, ids), start, end))
                        for store, (start, end) in zip(stores, pairwise(cuts), strict=False)
                    ],
                    mode=mode,
                    group_layers=group_layers,
                )
            assert [part.tier for part in late.parts] == ["host", "disk"][: len(cuts) - 1]
            assert late.loaded_tokens == cuts[-1] - cuts[0]
            np.testing.assert_array_equal(late.logits, kit.at_once(model, engine, ids, cuts[-1]))
            if dtype == torch.float32:
                assert late.first_token == full.first_token
                np.testing.assert_allclose(late.logits, full.logits, rtol=0, atol=1e-4)
