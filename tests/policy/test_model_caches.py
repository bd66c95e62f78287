"""Our bytes against the cache tensors of real models: tiny, random-weight ones of each kind, on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvlane.policy import ModelSpec
from kvlane.policy.model_layer import LayerSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS, WINDOW = 40, 8
BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    **EXPERTS,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "num_hidden_layers": 2},
    "mistral": {**BASE, "num_hidden_layers": 2, "sliding_window": WINDOW},
    "qwen3_moe": {**BASE, **EXPERTS, "num_hidden_layers": 2, "num_experts": 4},
    "gpt_oss": {
        **BASE,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "gemma3_text": {**BASE, "num_hidden_layers": 6, "sliding_window": WINDOW},
    "gemma4_text": {
        **BASE,
        "num_hidden_layers": 12,
        "sliding_window": WINDOW,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
    },
    "llama4_text": {
        **BASE,
        "num_hidden_layers": 4,
        "num_local_experts": 2,
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 96,
    },
    "mimo_v2_flash": {
        **BASE,
        **EXPERTS,
        "num_hidden_layers": 6,
        "head_dim": 24,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "sliding_window": WINDOW,
    },
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16},
    "qwen3_5_text": {**BASE, **DELTA, "num_hidden_layers": 4},
    "qwen3_next": {
        **BASE,
        **DELTA,
        **EXPERTS,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "nemotron_h": {
        **BASE,
        **EXPERTS,
        "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
    },
}


def bytes_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest) -> tuple[ModelSpec, Any, Any]:
    """The model as we read its own config, the real one, and its cache after a prompt."""
    model_type = request.param
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.for_model(model_type, **TINY[model_type])
    except ValueError:
        pytest.skip(f"this transformers has no {model_type}")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    with torch.no_grad():
        answer = model(torch.arange(TOKENS)[None], use_cache=True)
    fields = json.loads(config.to_json_string())
    fields["dtype"] = "bfloat16"
    cache = answer.cache if hasattr(answer, "cache") else answer.past_key_values
    return ModelSpec.from_config(fields, name=model_type), model, cache


def test_every_layer_keeps_what_its_cache_keeps(tiny: tuple[ModelSpec, Any, Any]) -> None:
    spec, _, cache = tiny
    form = spec.form()
    storing = [layer for layer in spec.layers if layer.stores_kv]
    assert not any(layer.stores_kv for layer in spec.layers[len(storing) :])
    layers = list(cache.layers)[: len(storing)]
    assert len(layers) == len(storing)
    for ours, theirs in zip(storing, layers, strict=True):
        if ours.state is not None:
            check_state(ours, theirs)
        elif ours.heads == 0:
            assert getattr(theirs, "keys", None) is None
        else:
            # MLA caches its latent as keys and the rotary part as values.
            kept = theirs.keys.shape[-2]
            assert bytes_of(theirs.keys) + bytes_of(theirs.values) == ours.kv_row_bytes(form) * kept
            # A window keeps one less than it attends: the next token brings the last one itself.
            assert kept == (TOKENS if ours.window is None else WINDOW - 1)
            assert ours.moved_tokens(TOKENS) >= kept


def check_state(ours: LayerSpec, theirs: Any) -> None:
    state = ours.state
    assert state is not None
    recurrent = sum(bytes_of(tensor) for tensor in theirs.recurrent_states.values())
    assert recurrent == state.heads * state.head_elements * state.element_bytes
    # transformers keeps as many columns as the kernel has; the oldest is not needed again.
    (convolution,) = theirs.conv_states.values()
    assert convolution.shape[-1] == state.kernel
    needed = bytes_of(convolution) * (state.kernel - 1) / state.kernel
    assert ours.state_bytes() == recurrent + needed


def test_the_indexer_keeps_one_key_a_token(tiny: tuple[ModelSpec, Any, Any]) -> None:
    spec, _, cache = tiny
    for ours, theirs in zip(spec.layers, cache.layers, strict=False):
        keys = getattr(theirs, "indexer_keys", None)
        assert (keys is None) == (ours.indexer is None)
        if keys is not None and ours.indexer is not None:
            # Theirs in 16 bits; engines keep fp8 with one fp32 scale, which is what we count.
            assert keys.shape[-2:] == (TOKENS, ours.indexer.width)
            assert ours.indexer_row_bytes == ours.indexer.width + 4


def test_weights_are_those_of_the_real_layers(tiny: tuple[ModelSpec, Any, Any]) -> None:
    spec, model, _ = tiny
    # Norms, biases, sinks and per-head scalars are what we leave out: one-dimensional, all of them.
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and not any(part in name for part in ("embed", "lm_head", "bias"))
    ]
    assert sum(layer.all_weights for layer in spec.layers) == sum(each.numel() for each in matrices)
