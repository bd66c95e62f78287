"""What a model weighs: read from configs as published, or refused by the name of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy import InputError, LayerSpec, ModelSpec, load_model
from kvlane.policy.model import attention_pairs

# KV bytes per token in the model's own 16 bits, by hand: layers * kv_heads * head_dim * (K and V) * 2 bytes.
SUPPORTED = {
    "Meta-Llama-3.1-8B.json": 32 * 8 * 128 * 2 * 2,
    "Meta-Llama-3.1-70B.json": 80 * 8 * 128 * 2 * 2,
    "Qwen3-8B.json": 36 * 8 * 128 * 2 * 2,
    "Qwen3-32B.json": 64 * 8 * 128 * 2 * 2,
    "Qwen3-32B-FP8.json": 64 * 8 * 128 * 2 * 2,
    "Qwen3-VL-8B-Instruct.json": 36 * 8 * 128 * 2 * 2,
}
NOT_YET = (
    "DeepSeek-V3.2.json",
    "DeepSeek-V3.json",
    "Kimi-K2-Instruct.json",
    "Llama-4-Scout-17B-16E-Instruct.json",
    "MiMo-V2-Flash.json",
    "MiniMax-M2.5.json",
    "Mixtral-8x7B-v0.1.json",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json",
    "Qwen3-30B-A3B.json",
    "Qwen3.5-27B.json",
    "gemma-4-26B-A4B.json",
    "gpt-oss-120b.json",
    "gpt-oss-20b.json",
)
LLAMA = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def llama(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**LLAMA, **changes})


def without(*fields: str) -> dict[str, Any]:
    return {field: value for field, value in LLAMA.items() if field not in fields}


def test_every_published_config_is_either_weighed_or_refused_below(shared: Path) -> None:
    published = {path.name for path in (shared / "models").glob("*.json")}
    assert published == {*SUPPORTED, *NOT_YET}


@pytest.mark.parametrize(("file", "kv_bytes"), SUPPORTED.items())
def test_published_config_gives_the_kv_bytes_worked_out_by_hand(
    shared: Path, file: str, kv_bytes: int
) -> None:
    path = shared / "models" / file
    model = ModelSpec.from_config(path)
    assert model.kv_bytes_per_token() == kv_bytes
    assert model.kv_bytes_per_token("fp8") == kv_bytes / 2
    assert model.name == path.stem
    assert model == ModelSpec.from_config(str(path))
    assert model == ModelSpec.from_config(json.loads(path.read_text()), name=path.stem)


@pytest.mark.parametrize(
    ("name", "huggingface_id", "file"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "Meta-Llama-3.1-8B.json"),
        ("Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B", "Meta-Llama-3.1-70B.json"),
        ("qwen3-8b", "Qwen/Qwen3-8B", "Qwen3-8B.json"),
        ("qwen3-32b", "Qwen/Qwen3-32B", "Qwen3-32B.json"),
        ("qwen3-32b-fp8", "Qwen/Qwen3-32B-FP8", "Qwen3-32B-FP8.json"),
    ],
)
def test_built_in_model_is_the_published_config(
    shared: Path, name: str, huggingface_id: str, file: str
) -> None:
    read = load_model(shared / "models" / file)
    for built_in in (load_model(name), load_model(huggingface_id), load_model(huggingface_id.upper())):
        assert built_in.layers == read.layers
        assert built_in.weight_dtype == read.weight_dtype
        assert built_in.kv_bytes_per_token() == read.kv_bytes_per_token()
        assert built_in.prefill_flop(12368, 2) == read.prefill_flop(12368, 2)
        assert built_in.head_weight_bytes == read.head_weight_bytes


def test_a_config_without_kv_heads_is_multi_head_attention() -> None:
    model = ModelSpec.from_config(without("num_key_value_heads"))
    assert model.layers[0].kv_heads == 32
    assert model == llama(num_key_value_heads=None)
    assert model.kv_bytes_per_token() == 4 * llama().kv_bytes_per_token()


def test_an_explicit_head_dim_goes_before_hidden_over_heads() -> None:
    derived, explicit = llama(), llama(head_dim=64)
    assert derived.layers[0].k_width == 128
    assert explicit.kv_bytes_per_token() == derived.kv_bytes_per_token() / 2
    assert explicit.layers[0].weights < derived.layers[0].weights
    # A null stands in many published configs and means hidden/heads, as a missing field does.
    assert llama(head_dim=None) == derived


def test_heads_that_do_not_divide_hidden_need_an_explicit_head_dim() -> None:
    with pytest.raises(InputError) as caught:
        llama(hidden_size=4100)
    assert caught.value.field == "head_dim"
    assert llama(hidden_size=4100, head_dim=128).kv_bytes_per_token() == llama().kv_bytes_per_token()


def test_a_nested_text_config_counts_and_the_outer_fields_do_not() -> None:
    outer = {"model_type": "qwen3_vl", "num_hidden_layers": 7, "hidden_size": 1, "text_config": LLAMA}
    assert ModelSpec.from_config(outer, name="inner") == ModelSpec.from_config(LLAMA, name="inner")


def test_weights_and_flop_of_llama_8b_by_hand() -> None:
    model = llama()
    attention = 4096 * 128 * (32 + 8 + 8 + 32)  # q, k, v and o projections
    gated_mlp = 3 * 4096 * 14336
    assert model.layers[0].weights == attention + gated_mlp
    assert model.layer_weight_bytes == 32 * (attention + gated_mlp) * 2
    assert model.head_flop == 2 * 4096 * 128256
    # A multiply and an add per weight, and per width element of QK and PV over the attended pairs.
    flop = 32 * (2 * (attention + gated_mlp) * 5 + 2 * 2 * 4096 * (5 * 100 + 15)) + model.head_flop
    assert model.prefill_flop(100, 5) == flop
    assert model.uniform


def test_fp8_weights_are_half_as_many_bytes_while_kv_and_head_stay_in_16_bits() -> None:
    wide, narrow = llama(), llama(quantization_config={"quant_method": "fp8"})
    assert (wide.weight_dtype, narrow.weight_dtype) == ("bf16", "fp8")
    assert narrow.layer_weight_bytes == wide.layer_weight_bytes / 2
    assert narrow.kv_bytes_per_token() == wide.kv_bytes_per_token()
    assert narrow.head_weight_bytes == wide.head_weight_bytes
    # Published beside a nested text config, it stands outside of it.
    assert (
        ModelSpec.from_config(
            {"text_config": LLAMA, "quantization_config": {"quant_method": "fp8"}}
        ).weight_dtype
        == "fp8"
    )


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_weight_dtype_under_both_of_its_names(field: str, dtype: str, size: int) -> None:
    model = ModelSpec.from_config({**without("dtype"), field: dtype})
    assert model.layer_weight_bytes == size * 32 * model.layers[0].weights


@given(
    layers=st.integers(1, 100),
    kv_heads=st.sampled_from((1, 2, 4, 8, 16, 64)),
    group=st.sampled_from((1, 4)),
    head_dim=st.integers(1, 512),
    tp=st.sampled_from((1, 2, 4, 8, 64)),
    dtype=st.sampled_from((("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1), ("fp8_e4m3", 1))),
)
def test_kv_bytes_are_k_and_v_of_every_layer_with_replicated_heads_on_more_ranks(
    layers: int, kv_heads: int, group: int, head_dim: int, tp: int, dtype: tuple[str, int]
) -> None:
    model = llama(
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    name, size = dtype
    heads_of_a_rank = max(1, kv_heads // tp)
    assert model.kv_bytes_per_token(name, tp) == layers * heads_of_a_rank * 2 * head_dim * size


def test_k_and_v_may_differ_in_width() -> None:
    assert LayerSpec(heads=8, kv_heads=2, k_width=192, v_width=128, weights=1).kv_elements() == 2 * (
        192 + 128
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_ranks_that_divide_the_heads_are_accepted(tp: int) -> None:
    llama().check_tp(tp)


@pytest.mark.parametrize("tp", [0, -1, 3, 5, 64, 2.0, True, "2", None])
def test_ranks_that_do_not_divide_the_heads_are_refused(tp: Any) -> None:
    with pytest.raises(InputError) as caught:
        llama().check_tp(tp)
    assert caught.value.field == "tp"


def test_ranks_between_the_divisors_and_the_multiples_of_kv_heads_are_refused() -> None:
    # 24 query heads on 8 ranks are fine; 6 KV heads are neither divided nor replicated evenly.
    with pytest.raises(InputError, match="KV heads"):
        llama(num_attention_heads=24, num_key_value_heads=6, head_dim=128).check_tp(8)


@given(resident=st.integers(0, 300), new=st.integers(0, 300))
def test_attended_pairs_are_what_counting_them_gives(resident: int, new: int) -> None:
    assert attention_pairs(resident, new) == sum(resident + row + 1 for row in range(new))
