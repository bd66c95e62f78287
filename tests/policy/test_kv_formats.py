"""Rows of KV: values, scales and padding, and what a config says its KV cache is stored in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy import InputError, ModelSpec, load_model
from kvlane.policy.model import KvFormat, kv_format
from kvlane.policy.model_kv import KV_FORMATS

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("fp32", 512),
        ("bf16", 256),
        ("fp16", 256),
        ("fp8", 128),
        ("fp8_e5m2", 128),
        ("int8", 128),
        ("fp8_per_token_head", 128 + 4),
        ("nvfp4", 64 + 8),
        ("mxfp4", 64 + 4),
        ("mxfp8", 128 + 4),
        ("q8_0", 4 * 34),
        ("q4_0", 4 * 18),
        ("int4_g64", 64 + 2 * 4),
        ("int4_g32", 64 + 4 * 4),
        ("int8_g128", 128 + 4),
    ],
)
def test_a_row_of_128_values_by_hand(name: str, row: float) -> None:
    assert kv_format(name).row_bytes(128) == row
    # Llama-3.1-8B: 32 layers, K and V of 8 heads.
    assert ModelSpec.from_config(LLAMA).kv_bytes_per_token(name) == 32 * 8 * 2 * row


def test_the_packed_row_of_deepseek_s_sparse_kernels_is_656_bytes() -> None:
    assert kv_format("fp8_ds_mla").row_bytes(512, 64) == 512 + 4 * 4 + 64 * 2
    assert load_model("deepseek-v3.2").kv_bytes_per_token("fp8_ds_mla") == 61 * 656


def test_a_format_of_one_s_own() -> None:
    padded = KvFormat("three bits, padded", 3, group=32, scale_bytes=2, align_bytes=16)
    # 128 values: 48 bytes, four scales of 2, up to the next 16.
    assert padded.row_bytes(128) == 64
    assert ModelSpec.from_config(LLAMA).kv_bytes_per_token(padded) == 32 * 8 * 2 * 64
    assert kv_format(padded) is padded


@given(name=st.sampled_from(sorted(KV_FORMATS)), width=st.integers(0, 1024), rotary=st.integers(0, 128))
def test_a_row_is_never_less_than_its_values(name: str, width: int, rotary: int) -> None:
    form = kv_format(name)
    assert form.row_bytes(width, rotary) >= (width + rotary) * form.bits / 8
    assert form.row_bytes(0, 0) == 0


@pytest.mark.parametrize("name", ["int4", "bfloat16", "BF16", "int4_g0", "", None, 8, ["fp8"]])
def test_an_unknown_format_is_named(name: Any) -> None:
    with pytest.raises(InputError, match="bf16") as caught:
        kv_format(name)
    assert caught.value.field == "kv_dtype"


@pytest.mark.parametrize(
    "changes", [{"bits": 0}, {"bits": -4}, {"group": -1}, {"scale_bytes": -2}, {"align_bytes": 0}]
)
def test_a_format_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        KvFormat("bad", **{"bits": 8, **changes})


@pytest.mark.parametrize(
    ("block", "weights", "kv"),
    [
        ({"quant_method": "fp8"}, "fp8", "bf16"),
        ({"quant_method": "fp8", "kv_cache_scheme": None}, "fp8", "bf16"),
        ({"quant_method": "mxfp4"}, "mxfp4", "bf16"),
        ({"quant_method": "awq", "bits": 4}, "int4", "bf16"),
        ({"quant_method": "gptq", "bits": 8}, "int8", "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8", "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None}, "nvfp4", "bf16"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            },
            "nvfp4",
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            "fp8",
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            "int4",
            "bf16",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            "nvfp4",
            "bf16",
        ),
    ],
)
def test_what_a_quantisation_block_says(block: dict[str, Any], weights: str, kv: str) -> None:
    model = ModelSpec.from_config({**LLAMA, "quantization_config": block})
    assert (model.weight_dtype, model.kv_dtype) == (weights, kv)
    # What is asked for goes before it.
    assert model.kv_bytes_per_token("fp16") == 131_072


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"quant_method": "awq"}, "quant_method"),
        ({"quant_method": "awq", "bits": 3}, "quant_method"),
        ({"quant_method": "exl3"}, "quant_method"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"num_bits": 4, "type": "int"}},
                    "b": {"weights": {"num_bits": 8, "type": "float"}},
                },
            },
            "config_groups",
        ),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 6, "type": "float"}}, "kv_cache_scheme"),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "ODD"}, "kv_cache_quant_algo"),
    ],
)
def test_a_block_that_says_something_else_is_named(block: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelSpec.from_config({**LLAMA, "quantization_config": block})
    assert caught.value.field == f"quantization_config.{field}"


def test_parts_left_in_sixteen_bits() -> None:
    def layer(*listed: str) -> int:
        block = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(listed)}
        return ModelSpec.from_config({**LLAMA, "quantization_config": block}).layers[0].wide_weights

    attention = 4096 * 128 * (32 + 8 + 8 + 32)
    assert layer() == layer("lm_head", "model.layers.*.mlp.gate") == 0
    assert layer("lm_head", "model.layers.*.self_attn*") == attention
    assert layer("re:.*self_attn.*") == attention
    assert layer(*(f"model.layers.{at}.self_attn" for at in range(32))) == attention
    assert layer("model.layers.0.self_attn") == 0
    assert layer("model.layers.*.mlp*") == 3 * 4096 * 14336
