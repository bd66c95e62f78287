"""Models whose layers differ: sliding windows, alone and mixed with full attention, and short convolutions' states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.executor import LayerLoad
from kvlane.transfer.host import HostStore

TOKENS = 83
WINDOW = 16
MIXED = ["full_attention", "sliding_attention"] * 2
SLIDING: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mistral": (MistralConfig, MistralForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "layer_types": MIXED}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM, {"head_dim": 16, "layer_types": MIXED}),
}
LFM2: tuple[Any, Any, dict[str, Any]] = (
    Lfm2Config,
    Lfm2ForCausalLM,
    {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 16},
)


def make_model(kind, dtype=torch.float32, kv_heads=2):
    config_class, model_class, extra = {**SLIDING, "lfm2": LFM2}[kind]
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 96,
        "vocab_size": 160,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        # gemma's norms multiply by 1 + weight, and lfm2 ties its embeddings: without it every token answers itself.
        "tie_word_embeddings": False,
    }
    if kind != "lfm2":
        sizes["sliding_window"] = WINDOW
    config = config_class(**{**sizes, **extra})
    torch.manual_seed(0)
    return model_class(config).to(dtype).eval()


def saved(kit, model, ids, tokens):
    """A store with the KV of the first tokens, and the no-cache answer to the whole prompt."""
    store = HostStore(kit.unit)
    with CpuBackend() as backend:
        engine = kit.engine(model, backend)
        engine.prefill(ids[:tokens])
        assert engine.save(store, ids, tokens) == tokens
        return store, engine.prefill(ids)


def load(engine, store, ids, resident, start, end, **options):
    """A prefill with all that is neither resident nor computed poisoned before."""
    engine.poison()
    if resident:
        engine.prefill(ids[:resident])
        engine.kv.poison(resident)
    with store.open(store.lookup(engine.identity, ids), start, end) as run:
        result = engine.prefill(ids, resident, run, **options)
        assert result.loaded_bytes == run.nbytes == run.bytes_moved
    assert not result.fell_back
    return result


@pytest.mark.parametrize("mode", ["bulk", "layered"])
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["gqa", "mha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SLIDING)
def test_a_sliding_window_gives_the_bits_of_the_same_kv_filled_at_once(kit, kind, dtype, kv_heads, mode):
    model, ids = make_model(kind, dtype, kv_heads), kit.ids(TOKENS)
    store, full = saved(kit, model, ids, 80)
    with kit.SlowBackend() as backend:
        backend.delay_s = 0.001
        engine = kit.engine(model, backend)
        # A whole hit, less than the window, a part after a resident prefix, one unit, and two-ended.
        for resident, start, end in [(0, 0, 80), (0, 0, 8), (13, 13, 64), (72, 72, 80), (5, 40, 80)]:
            late = load(engine, store, ids, resident, start, end, mode=mode, group_layers=1 + end // 40)
            np.testing.assert_array_equal(late.logits, kit.at_once(model, engine, ids, end))
            if dtype == torch.float32:
                assert late.first_token == full.first_token
                np.testing.assert_allclose(late.logits, full.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", SLIDING)
def test_the_answer_is_that_of_a_plain_forward(kit, kind):
    model, ids = make_model(kind), kit.ids(TOKENS)
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor(ids[None])).logits[0, -1].numpy()
    store, _ = saved(kit, model, ids, 80)
    with kit.SlowBackend() as backend:
        late = load(kit.engine(model, backend), store, ids, 0, 0, 80)
    assert late.first_token == plain.argmax()
    np.testing.assert_allclose(late.logits, plain, rtol=0, atol=1e-4)
    runner_up, best = np.sort(plain)[-2:]
    assert best - runner_up > 1e-3


class TestWindow:
    def test_bounds_what_moves(self, kit):
        model, ids = make_model("qwen2"), kit.ids(TOKENS)
        store, _ = saved(kit, model, ids, 80)
        with CpuBackend() as backend:
            result = load(kit.engine(model, backend), store, ids, 0, 0, 80)
        row = result.layers[0].bytes // 80
        assert [layer.bytes for layer in result.layers] == [80 * row, WINDOW * row] * 2

    def test_leaves_no_shorter_prefix_to_go_on_from_and_none_to_store(self, kit):
        model, ids = make_model("qwen2"), kit.ids(TOKENS)
        store, full = saved(kit, model, ids, 80)
        with CpuBackend() as backend:
            engine = kit.engine(model, backend)
            load(engine, store, ids, 0, 0, 64)
            for resident in (1, 63):
                with pytest.raises(InputError, match="windows"):
                    engine.prefill(ids, resident)
            with pytest.raises(InputError, match="window"):
                engine.save(HostStore(kit.unit), ids, 80)
            for resident in (64, 70):
                again = engine.prefill(ids, resident)
                np.testing.assert_allclose(again.logits, full.logits, rtol=0, atol=1e-4)
            # Nothing is missing once it was computed, or when the load was not longer than the window.
            engine.prefill(ids)
            assert engine.save(HostStore(kit.unit), ids, 80) == 80
            load(engine, store, ids, 0, 0, WINDOW)
            engine.prefill(ids, 3)

    @pytest.mark.parametrize("layer", range(4))
    def test_that_fails_to_load_costs_a_recompute(self, kit, layer):
        model, ids = make_model("qwen2"), kit.ids(TOKENS)
        store, full = saved(kit, model, ids, 80)
        with kit.FailingBackend(layer) as backend:
            engine = kit.engine(model, backend)
            engine.prefill(ids[:13])
            engine.kv.poison(13)
            with store.open(store.lookup(engine.identity, ids), 13, 80) as run:
                result = engine.prefill(ids, 13, run)
            assert (result.failures[0].layer, result.passes[0].start) == (layer, 13)
            np.testing.assert_allclose(result.logits, full.logits, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("layer", range(4))
    def test_whose_wait_is_left_out_is_noticed(self, kit, layer, monkeypatch):
        model, ids = make_model("qwen2"), kit.ids(TOKENS)
        store, _ = saved(kit, model, ids, 80)
        hold = LayerLoad.hold
        monkeypatch.setattr(LayerLoad, "hold", lambda self, at: None if at == layer else hold(self, at))
        with kit.SlowBackend() as backend:
            backend.delay_s = 0.03  # no busy machine is as late as that
            assert np.isnan(load(kit.engine(model, backend), store, ids, 0, 0, 80).logits).all()


class TestState:
    END = 64

    @pytest.mark.parametrize("mode", ["bulk", "layered"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("tokens", [END + 1, END + 2, TOKENS])
    def test_is_loaded_whole_at_its_checkpoint(self, kit, dtype, mode, tokens):
        model, ids = make_model("lfm2", dtype), kit.ids(tokens)
        store, full = saved(kit, model, ids, self.END)
        with kit.SlowBackend() as backend:
            engine = kit.engine(model, backend)
            hit = store.lookup(engine.identity, ids)
            assert (hit.tokens, hit.checkpoints) == (self.END, (self.END,))
            late = load(engine, store, ids, 0, 0, self.END, mode=mode)
            expected = [64 * 3 * dtype.itemsize, self.END * 2 * 2 * 16 * dtype.itemsize] * 2
            assert [layer.bytes for layer in late.layers] == expected
            if dtype == torch.float32:
                assert late.first_token == full.first_token
                np.testing.assert_allclose(late.logits, full.logits, rtol=0, atol=1e-4)
            # The same KV and states, filled at once.
            engine.prefill(ids[: self.END])
            states = {layer: engine.kv.state(layer).clone() for layer in (0, 2)}
            np.testing.assert_array_equal(late.logits, kit.at_once(model, engine, ids, self.END, states))

    def test_makes_a_hit_without_a_checkpoint_worth_nothing(self, kit):
        model, ids = make_model("lfm2"), kit.ids(TOKENS)
        store, _ = saved(kit, model, ids, self.END)
        with CpuBackend() as backend:
            engine = kit.engine(model, backend)
            other = np.concatenate([ids[:40], kit.ids(30, seed=2)])
            assert store.lookup(engine.identity, other).tokens == 0
            with pytest.raises(InputError, match="state"):
                store.open(store.lookup(engine.identity, ids), 0, 40)

    def test_is_of_all_the_tokens_held_and_of_no_fewer(self, kit):
        model, ids = make_model("lfm2"), kit.ids(TOKENS)
        with CpuBackend() as backend:
            engine = kit.engine(model, backend)
            engine.prefill(ids[:48])
            with pytest.raises(InputError, match="states"):
                engine.prefill(ids, 40)
            with pytest.raises(InputError, match="states"):
                engine.save(HostStore(kit.unit), ids, 40)
            going_on = engine.prefill(ids, 48)
            np.testing.assert_allclose(going_on.logits, engine.prefill(ids).logits, rtol=0, atol=1e-4)
            engine.poison(40)
            assert engine.held_tokens == 0

    def test_takes_no_two_ended_split(self, kit):
        model, ids = make_model("lfm2"), kit.ids(TOKENS)
        store, _ = saved(kit, model, ids, self.END)
        with CpuBackend() as backend:
            engine = kit.engine(model, backend)
            hit = store.lookup(engine.identity, ids)
            with store.open(hit, 16, self.END) as run, pytest.raises(InputError, match="states"):
                engine.prefill(ids, 0, run)

    @pytest.mark.parametrize("layer", range(4))
    def test_that_fails_to_load_costs_a_recompute_of_everything(self, kit, layer):
        model, ids = make_model("lfm2"), kit.ids(TOKENS)
        store, full = saved(kit, model, ids, self.END)
        with kit.FailingBackend(layer) as backend:
            engine = kit.engine(model, backend)
            engine.prefill(ids[:16])
            with store.open(store.lookup(engine.identity, ids), 16, self.END) as run:
                result = engine.prefill(ids, 16, run)
            # The states of the resident tokens were overwritten by the pass that failed.
            assert (result.failures[0].layer, result.passes[0].start) == (layer, 0)
            assert result.first_token == full.first_token
            np.testing.assert_allclose(result.logits, full.logits, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("layer", range(4))
    def test_whose_wait_is_left_out_is_noticed(self, kit, layer, monkeypatch):
        model, ids = make_model("lfm2"), kit.ids(TOKENS)
        store, _ = saved(kit, model, ids, self.END)
        hold = LayerLoad.hold
        monkeypatch.setattr(LayerLoad, "hold", lambda self, at: None if at == layer else hold(self, at))
        with kit.SlowBackend() as backend:
            backend.delay_s = 0.03  # no busy machine is as late as that
            assert np.isnan(load(kit.engine(model, backend), store, ids, 0, 0, self.END).logits).all()
