"""Whatever could change KV or FLOP is understood or refused by name, in every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlane.policy import InputError, ModelSpec, model_names
from kvlane.policy.catalog import model_config

FILES = sorted((Path(__file__).resolve().parents[2].parent / "shared" / "models").glob("*.json"))


def refusal(config: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        ModelSpec.from_config(config)
    assert "\n" not in str(caught.value)
    return caught.value


# Fields that no family here has: each stands for a kind of layer that would be costed as another one.
FOREIGN: dict[str, Any] = {
    "compress_ratios": [4, 128],
    "kv_compression_heads": 4,
    "attention_window_size": 512,
    "block_sparse_attention": True,
    "cross_attention_layers": [3],
    "num_memory_layers": 2,
    "linear_attn_config": {"num_heads": 4},
    "expert_interval": 2,
    "dual_chunk_attention_config": {"chunk_size": 8192},
    "cla_share_factor": 2,
    "conv_L_cache": 3,
}


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "qwen3.5-27b", "gemma-4-26b-a4b"]
)
@pytest.mark.parametrize(("field", "value"), FOREIGN.items())
def test_a_foreign_field_is_refused_in_every_family(name: str, field: str, value: Any) -> None:
    _, config = model_config(name)
    assert refusal({**config, field: value}).field == field
    # Empty, it says nothing.
    empty: tuple[Any, ...] = (None, False, 0, [], {})
    for nothing in empty:
        assert ModelSpec.from_config({**config, field: nothing}, name="x") == ModelSpec.from_config(
            config, name="x"
        )


@pytest.mark.parametrize(
    "field",
    [
        "attention_bias",
        "use_cache",
        "rope_theta",
        "num_nextn_predict_layers",
        "initializer_range",
        "some_token_id",
        "transformers_version",
        "router_aux_loss_coef",
    ],
)
def test_a_field_that_changes_no_cost_is_no_reason_to_refuse(field: str) -> None:
    for name in model_names():
        _, config = model_config(name)
        assert ModelSpec.from_config({**config, field: 1}, name="x") == ModelSpec.from_config(
            config, name="x"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_count_that_is_read_is_checked(path: Path) -> None:
    config = json.loads(path.read_text())
    fields = config.get("text_config") or config
    whole = ModelSpec.from_config(config, name="x")
    for field, value in list(fields.items()):
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        changed = {**fields, field: value + 1 if value else 7}
        broken = {**fields, field: -3}
        outer = {**config, "text_config": changed} if "text_config" in config else changed
        try:
            other = ModelSpec.from_config(outer, name="x")
        except InputError:
            other = None  # a size that no longer fits the others
        if other == whole:
            continue  # of no effect: token ids, rope, positions
        outer = {**config, "text_config": broken} if "text_config" in config else broken
        error = refusal(outer)
        assert error.field == field or other is None


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23}, "layer_types"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23 + ["mystery"]}, "layer_types"),
        ("gpt-oss-20b", {"sliding_window": None}, "sliding_window"),
        ("gpt-oss-20b", {"num_experts_per_tok": 64}, "num_experts_per_tok"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [0] * 47}, "hybrid_layer_pattern"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [2] * 48}, "hybrid_layer_pattern"),
        ("mimo-v2-flash", {"attention_chunk_size": 64}, "attention_chunk_size"),
        ("nemotron-3-nano-30b-a3b", {"hybrid_override_pattern": "MX" * 26}, "hybrid_override_pattern"),
        ("nemotron-3-nano-30b-a3b", {"hybrid_override_pattern": "M"}, "hybrid_override_pattern"),
        ("nemotron-3-nano-30b-a3b", {"sliding_window": 4096}, "sliding_window"),
        ("nemotron-3-nano-30b-a3b", {"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype"),
        ("deepseek-v3", {"index_topk": 2048}, "index_topk"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek-v3.2", {"index_head_dim": None}, "index_head_dim"),
        ("glm-5.2", {"index_topk_pattern": "FX" * 39}, "index_topk_pattern"),
        ("gemma-4-26b-a4b", {"num_kv_shared_layers": 31}, "num_kv_shared_layers"),
        ("gemma-4-26b-a4b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma-4-26b-a4b", {"per_layer_config": {"99": {"head_dim": 512}}}, "per_layer_config"),
        ("minimax-m2.5", {"attn_type_list": [0] * 62}, "attn_type_list"),
        ("qwen3.5-27b", {"linear_num_key_heads": 17}, "linear_num_key_heads"),
        ("qwen3.5-27b", {"layer_types": ["sliding_attention"] * 64}, "layer_types"),
        ("llama-4-scout", {"no_rope_layers": [3] * 48}, "no_rope_layers"),
        ("qwen3-30b-a3b", {"num_local_experts": 64}, "num_local_experts"),
        ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("mixtral-8x7b", {"sliding_window": "wide"}, "sliding_window"),
        ("falcon-180b", {"num_kv_heads": 7}, "num_kv_heads"),
    ],
)
def test_what_does_not_fit_its_family_is_named(name: str, changes: dict[str, Any], field: str) -> None:
    _, config = model_config(name)
    assert refusal({**config, **changes}).field == field


def test_infinities_that_python_writes_are_no_reason_to_refuse(tmp_path: Path) -> None:
    _, config = model_config("nemotron-3-nano-30b-a3b")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")], "x": float("nan")}))
    assert ModelSpec.from_config(path, name="x") == ModelSpec.from_config(config, name="x")
