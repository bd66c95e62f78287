"""A config that is wrong or of an unknown kind names its field, and nothing is costed as what it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlane.policy import InputError, ModelSpec, load_machine, load_model

LLAMA = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 128,
    "vocab_size": 100,
}
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
COUNTS = (*NEEDED, "num_key_value_heads", "head_dim")


def refusal(config: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        ModelSpec.from_config(config)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.field}: ")
    return caught.value


def test_the_config_these_tests_break_is_good() -> None:
    assert ModelSpec.from_config(LLAMA).kv_bytes_per_token() == 4 * 2 * 8 * 2 * 2


@pytest.mark.parametrize("field", NEEDED)
@pytest.mark.parametrize("way", ["left out", "null"])
def test_a_missing_count_is_named(field: str, way: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != field}
    if way == "null":
        config[field] = None
    error = refusal(config)
    assert error.field == field
    assert "missing" in error.problem


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -8, True, "8", 8.0, 8.5, float("nan"), [8], {}])
def test_a_count_that_is_none_is_named(field: str, value: Any) -> None:
    assert refusal({**LLAMA, field: value}).field == field


def test_more_layers_than_any_memory_holds_are_named() -> None:
    assert refusal({**LLAMA, "num_hidden_layers": 10**15}).field == "num_hidden_layers"


def test_kv_heads_that_do_not_divide_the_heads_are_named() -> None:
    assert refusal({**LLAMA, "num_key_value_heads": 3}).field == "num_key_value_heads"
    assert refusal({**LLAMA, "num_key_value_heads": 16}).field == "num_key_value_heads"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_lora_rank", 512),
        ("index_topk", 2048),
        ("attention_chunk_size", 8192),
        ("num_experts", 128),
        ("num_local_experts", 8),
        ("n_routed_experts", 256),
        ("num_kv_shared_layers", 10),
        ("hybrid_override_pattern", "MEM*"),
        ("hybrid_layer_pattern", [0, 1]),
        ("full_attention_interval", 4),
        ("linear_num_key_heads", 16),
        ("mamba_num_heads", 64),
        ("ssm_state_size", 128),
        ("v_head_dim", 16),
        ("cross_attention_layers", [3]),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention", "full_attention"]),
        ("layer_types", ["full_attention", "linear_attention", "full_attention", "full_attention"]),
        ("model_type", "mamba2"),
        ("model_type", "rwkv7"),
        ("model_type", None),
    ],
)
def test_what_makes_another_kind_of_model_is_named(field: str, value: Any) -> None:
    # The known fields are all right: only the one that changes the cost may be what refuses it.
    assert refusal({**LLAMA, field: value}).field == field


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_lora_rank": None, "num_experts": None, "sliding_window": None},
        {"num_experts": 0, "attention_chunk_size": False},
        {"v_head_dim": 8},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": None},
        {"text_config": None},
    ],
)
def test_a_field_that_changes_nothing_is_no_reason_to_refuse(changes: dict[str, Any]) -> None:
    assert ModelSpec.from_config({**LLAMA, **changes}) == ModelSpec.from_config(LLAMA)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", "full_attention"),
        ("layer_types", ["full_attention"] * 3),
        ("layer_types", [["full_attention"]] * 4),
        ("text_config", 5),
        ("text_config", "llama"),
        ("dtype", "int4"),
        ("dtype", 16),
        ("torch_dtype", "float8_e4m3fn"),
        # JSON holds lists and objects too, and a lookup by one must not end in a TypeError.
        ("dtype", ["bfloat16"]),
        ("torch_dtype", {}),
        ("model_type", ["llama"]),
        ("model_type", {}),
    ],
)
def test_a_value_of_the_wrong_type_is_named(field: str, value: Any) -> None:
    config = {key: kept for key, kept in LLAMA.items() if key != "dtype"}
    assert refusal({**config, field: value}).field == field


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "awq"}, {"quant_method": None}, {"bits": 4}, "gptq", [1]]
)
def test_an_unknown_quantization_is_named(quantization: Any) -> None:
    assert refusal({**LLAMA, "quantization_config": quantization}).field == "quantization_config.quant_method"


@pytest.mark.parametrize("dtype", ["int4", "BF16", "bfloat16"])
def test_an_unknown_kv_dtype_is_named(dtype: str) -> None:
    model = ModelSpec.from_config(LLAMA)
    with pytest.raises(InputError, match="bf16") as caught:
        model.kv_bytes_per_token(dtype)
    assert caught.value.field == "kv_dtype"


@pytest.mark.parametrize("config", [[], [LLAMA], 5, None])
def test_what_is_not_an_object_is_no_config(config: Any) -> None:
    assert refusal(config).field == "config"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'{"a": 1,}',
        b'{"hidden_size": 1e999}',
        b"\x7fELF\x02\x01",
        b'{"a":"\xff"}',
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    error = refusal(path)
    assert error.field == "model"
    assert "config.json" in error.problem


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    error = refusal(tmp_path / "nowhere.json")
    assert error.field == "model"
    assert "nowhere.json" in error.problem


@pytest.mark.parametrize(("load", "field"), [(load_model, "model"), (load_machine, "machine")])
@pytest.mark.parametrize("name", ["", "no such thing", "x\0y", "x" * 5000, "é"])
def test_a_name_that_is_neither_built_in_nor_a_file_is_refused_as_such(
    load: Any, field: str, name: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(name)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("load", "typo", "meant"),
    [
        (load_model, "llama-3.1-8", "llama-3.1-8b"),
        (load_model, "qwen-3-8b", "qwen3-8b"),
        (load_machine, "h100-smx", "h100-sxm"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(load: Any, typo: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"did you mean {meant}"):
        load(typo)
