"""Loads into KV in blocks, with a real model that reads its KV out of them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from kvlane.streams.engines.transformers import identity_of, layout_of
from kvlane.streams.engines.transformers_forward import ModelForward, PromptForward
from kvlane.streams.executor import LayerExecutor, LayerLoad
from kvlane.streams.paged_kv import PagedPool
from kvlane.streams.prefill import Job, Prefiller, SequenceKv
from kvlane.streams.quarantine import BlockPool
from kvlane.transfer.paged import BlockForm

TOKENS = 83
END = 80
FORMS = {
    "16 tokens, token first": BlockForm(16),
    "16 tokens, keys and values apart": BlockForm(16, kv="apart"),
    "64 tokens, head first and packed": BlockForm(64, order="head", kv="packed"),
    "256 tokens, all layers in a block": BlockForm(256, first="block"),
}


def paged(backend, layout, form, dtype):
    """A sequence's blocks of a pool, in an order of no meaning, and everything poisoned."""
    blocks = -(-128 // form.tokens)
    pool = PagedPool(backend, layout, form, dtype, 2 * blocks)
    pool.memory.view(dtype).fill_(float("nan"))
    return pool.sequence(np.random.default_rng(0).permutation(2 * blocks)[:blocks].tolist())


class PagedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, kv, layer, past, ready):
        super().__init__()
        self.is_initialized = True
        self.kv, self.layer, self.length, self.ready = kv, layer, past, ready

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        self.kv.write(self.layer, self.length, key_states, value_states)
        self.length += key_states.shape[-2]
        self.ready(self.layer)
        return self.kv.gather(self.layer, self.length)

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_max_length(self):
        return self.kv.region.capacity_tokens


class PagedForward(ModelForward):
    def cache_layers(self, block, past, ready):
        return [PagedLayer(block, layer, past, ready) for layer in range(block.region.layout.layers)]


def prefilled(kit, form, dtype, kv_heads, mode):
    """Logits of a prompt whose first tokens were loaded into pages, late, and of the same KV filled at once."""
    model, ids = kit.model("llama", dtype, kv_heads), kit.ids(TOKENS)
    store, full = kit.stored(model, ids)
    layout, identity = layout_of(model), identity_of(model, "tiny", "seed-0")
    forward = PagedForward(model, layout)
    with kit.SlowBackend() as backend:
        backend.delay_s = 0.0005
        pool = BlockPool(lambda: paged(backend, layout, form, dtype))
        prefiller = Prefiller(backend, LayerExecutor(backend), pool, layout.layers)
        sequence = SequenceKv(pool.take())
        with store.open(store.lookup(identity, ids), 0, END) as run:
            job = Job(TOKENS, 0, (run,), backend.now(), mode=mode, group_layers=2)
            prompt: Any = PromptForward(forward, ids.astype(np.uint32))
            outcome = prefiller.run(prompt, sequence, job)
            copies = [len(run.copies(layer, sequence.block.region)) for layer in range(layout.layers)]
        cache = DynamicCache(config=model.config)
        for layer in range(layout.layers):
            cache.update(*sequence.block.gather(layer, END), layer)
        argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        with torch.inference_mode():
            suffix = torch.tensor(ids[END:][None])
            reference = model(input_ids=suffix, use_cache=True, logits_to_keep=1, **{argument: cache})
    assert not outcome.fell_back
    assert [row.copies for row in outcome.parts[0].layers] == copies
    at_once = reference.logits[0, -1].float().numpy()
    return outcome.answer[0].float().numpy(), at_once, outcome.answer[1], full


@pytest.mark.parametrize("mode", ["bulk", "layered"])
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["gqa", "mha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_late_kv_gives_the_bits_of_the_same_kv_filled_at_once(kit, form, dtype, kv_heads, mode):
    late, at_once, token, full = prefilled(kit, FORMS[form], dtype, kv_heads, mode)
    np.testing.assert_array_equal(late, at_once)
    if dtype == torch.float32:
        assert token == full.first_token
        np.testing.assert_allclose(late, full.logits, rtol=0, atol=1e-4)


def test_a_wait_left_out_is_noticed(kit, monkeypatch):
    monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)
    late, at_once, _, _ = prefilled(kit, FORMS["16 tokens, token first"], torch.float32, 2, "layered")
    assert np.isnan(late).all()
    assert np.isfinite(at_once).all()


def test_quarantined_pages_count_for_themselves_and_not_for_the_pool(kit):
    with kit.StuckBackend(layer=0) as backend:
        model, ids = kit.model(), kit.ids(TOKENS)
        store, _ = kit.stored(model, ids)
        layout, identity = layout_of(model), identity_of(model, "tiny", "seed-0")
        pool = BlockPool(lambda: paged(backend, layout, BlockForm(16), torch.float32))
        block = pool.take()
        with store.open(store.lookup(identity, ids), 0, END) as run:
            load = LayerExecutor(backend).submit([run], block.memory, block.region, mode="layered")
        assert backend.reached.wait(10)
        pool.admit()
        load.close()
        pool.quarantine(block, load)
        assert pool.quarantined_bytes == 128 * layout.bytes_per_token == block.region.nbytes // 2
        backend.go.set()
        assert load.settle(10)
        assert pool.quarantined_bytes == 0
