"""`kvlane models`, and the known answers about models through it: files in, JSON out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlane.policy import ModelSpec, Planner, Request, load_machine, load_model, model_names
from kvlane.policy.cli import app, run_app

KEYS = {
    "bytes_per_token",
    "indexer_bytes_per_token",
    "static_bytes",
    "move_bytes",
    "reserve_bytes",
    "prefill_flop",
}
Weigh = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def known() -> dict[str, dict[str, Any]]:
    path = Path(__file__).resolve().parents[2].parent / "shared" / "known_answers.json"
    if not path.is_file():
        pytest.skip("needs ../shared/known_answers.json beside the checkout")
    return {case["id"]: case for case in json.loads(path.read_text())["kv_bytes"]}


@pytest.fixture
def weigh(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Weigh:
    """What the command says of a built-in name, a file, or fields written to one."""

    def run(model: str | Path | dict[str, Any], *arguments: str) -> dict[str, Any]:
        if isinstance(model, dict):
            path = tmp_path / "config.json"
            path.write_text(json.dumps(model))
            model = path
        assert run_app(app, "kvlane", ["models", str(model), *arguments, "--json"]) == 0
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        return said

    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_app(app, "kvlane", ["models", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


def decoder(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
        "vocab_size": 1000,
        **fields,
    }


def test_latent_rows_are_not_doubled_and_stand_on_every_rank(
    weigh: Weigh, known: dict[str, dict[str, Any]]
) -> None:
    case = known["mla"]
    fields = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": case["layers"],
        "kv_lora_rank": case["kv_lora_rank"],
        "qk_rope_head_dim": case["qk_rope_head_dim"],
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "intermediate_size": 18432,
        "first_k_dense_replace": case["layers"],
        "vocab_size": 129280,
    }
    assert weigh(fields)["bytes_per_token"] == case["bytes_per_token"]
    eight = weigh(fields, "--tp", "8")
    assert eight["per_rank"]["bytes_per_token"] == case["tp8_per_rank"]
    assert eight["bytes_per_token"] == case["tp8_sum"]


def test_head_dim_is_a_field(weigh: Weigh, known: dict[str, dict[str, Any]]) -> None:
    case = known["explicit_head_dim"]
    fields = decoder(
        num_hidden_layers=case["layers"],
        hidden_size=case["hidden"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=case["head_dim"],
    )
    said = weigh(fields, "--tokens", str(case["tokens"]))
    assert said["bytes_per_token"] == case["bytes_per_token"]
    assert said["move_bytes"] == said["reserve_bytes"] == case["bytes"]


def test_what_is_reserved_is_not_what_is_moved(weigh: Weigh, known: dict[str, dict[str, Any]]) -> None:
    case = known["sliding_window"]
    fields = {
        "model_type": "gpt_oss",
        "num_hidden_layers": case["full_layers"] + case["window_layers"],
        "sliding_window": case["window"],
        "num_key_value_heads": case["kv_heads"],
        "head_dim": case["head_dim"],
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
    }
    said = weigh(fields, "--tokens", str(case["tokens"]))
    assert said["reserve_bytes"] == case["reserve_bytes"]
    assert said["move_bytes"] == case["move_bytes"]
    # Beyond the window only half of the layers grow.
    assert said["bytes_per_token"] == case["full_layers"] * 2 * case["kv_heads"] * case["head_dim"] * 2
    assert {kind["kind"] for kind in said["layers"]} == {"full_attention", "sliding_attention"}


def test_only_attending_layers_grow(weigh: Weigh, known: dict[str, dict[str, Any]]) -> None:
    case = known["hybrid"]
    fields = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": case["layers"],
        "full_attention_interval": case["full_attention_interval"],
        "num_key_value_heads": case["kv_heads"],
        "head_dim": case["head_dim"],
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "vocab_size": 248320,
    }
    said = weigh(fields)
    assert said["bytes_per_token"] == case["bytes_per_token"]
    assert said["static_bytes"] > 0


@pytest.mark.parametrize("tp", [4, 8])
def test_fewer_kv_heads_than_ranks_are_replicated(
    weigh: Weigh, known: dict[str, dict[str, Any]], tp: int
) -> None:
    case = known["replicated_heads"]
    fields = decoder(
        num_hidden_layers=case["layers"], num_key_value_heads=case["kv_heads"], head_dim=case["head_dim"]
    )
    said = weigh(fields, "--tp", str(tp))
    assert said["per_rank"]["bytes_per_token"] == case[f"tp{tp}_per_rank"]
    assert said["bytes_per_token"] == case[f"tp{tp}_sum"]


def test_grouped_queries_are_a_quarter(weigh: Weigh, known: dict[str, dict[str, Any]]) -> None:
    for kind, name in (("mha", "meta-llama/Llama-2-7b-hf"), ("gqa", "meta-llama/Llama-3.1-8B")):
        assert weigh(name)["bytes_per_token"] == known["mha_vs_gqa"][kind]["bytes_per_token"]


@pytest.mark.parametrize("name", model_names())
def test_every_built_in_model_is_weighed_in_the_promised_keys(weigh: Weigh, name: str) -> None:
    said = weigh(name, "--tokens", "12370", "--tp", "2")
    assert set(said) >= KEYS | {"per_rank", "layers"}
    assert set(said["per_rank"]) == KEYS
    spec = load_model(name)
    assert said["move_bytes"] == 2 * spec.move_bytes(12_370, tp=2)
    assert said["reserve_bytes"] == 2 * spec.reserve_bytes(12_370, tp=2)
    assert said["prefill_flop"] == pytest.approx(spec.prefill_flop(0, 12_370))
    assert sum(kind["count"] for kind in said["layers"]) == len(spec.layers)
    for key in KEYS - {"prefill_flop"}:
        assert sum(kind[key] for kind in said["layers"]) == pytest.approx(said[key])
    assert all(kind["formula"] for kind in said["layers"])


def test_the_kv_dtype_asked_for_goes_before_the_config_s(weigh: Weigh) -> None:
    assert weigh("nemotron-3-super-120b-a12b-nvfp4")["kv_dtype"] == "fp8"
    assert weigh("nemotron-3-super-120b-a12b-nvfp4", "--kv-dtype", "bf16")["bytes_per_token"] == 2 * 4096
    assert weigh("llama-3.1-8b", "--kv-dtype", "fp8")["bytes_per_token"] == 65_536


def test_the_same_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "kvlane", ["models", "gpt-oss-20b", "--tokens", "8192", "--tp", "2"]) == 0
    out = capsys.readouterr().out
    assert (
        "12 x sliding attention: 2 x 8 KV heads x 64 x 2 bytes a token, moved for the last 128 tokens" in out
    )
    assert "12 x full attention: 2 x 8 KV heads x 64 x 2 bytes a token" in out
    assert "204,472,320 bytes to move (204 MB), 402,653,184 to reserve (403 MB)" in out
    assert "per rank" in out


def test_the_list_names_every_model_and_its_hugging_face_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "kvlane", ["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == model_names()
    assert any("Qwen/Qwen3-8B" in line for line in lines)
    assert run_app(app, "kvlane", ["models", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == model_names()


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("qwen-3-8b", "qwen3-8b"),
        ("deepseek-v3.3", "deepseek-v3"),
        ("Qwen/Qwen3-32b-fp88", "qwen/qwen3-32b-fp8"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], typo: str, meant: str
) -> None:
    assert f"did you mean {meant}" in refused(capsys, typo)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing like it",),
        ("qwen3-8b", "--tokens", "0"),
        ("qwen3-8b", "--tokens", "99999999999"),
        ("qwen3-8b", "--tp", "3"),
        ("qwen3-8b", "--kv-dtype", "int4"),
        ("missing.json",),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    refused(capsys, *arguments)


def test_a_hit_of_a_recurrent_model_is_worth_its_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["decide", "--model", "qwen3.5-27b", "--machine", "h100-sxm", "--prompt-tokens", "12370"]
    base += ["--hit", "host=12368", "--json"]
    assert run_app(app, "kvlane", base) == 0
    nothing = json.loads(capsys.readouterr().out)
    assert nothing["path"] == "recompute"
    assert nothing["estimates"]["load"] is None
    assert "checkpoint" in nothing["unavailable"]["load"]
    assert run_app(app, "kvlane", [*base, "--state-checkpoint", "host=8192,12288"]) == 0
    some = json.loads(capsys.readouterr().out)
    assert some["usable_tokens"] == some["estimates"]["load"]["load_tokens"] == 12_288
    assert some["estimates"]["split"]["load_tokens"] == 8192
    assert some["estimates"]["load"]["load_bytes"] == 12_288 * 65_536 + 153_944_064


@pytest.mark.parametrize(
    ("checkpoints", "field"),
    [
        ({"host": (0,)}, "state_checkpoints.host"),
        ({"host": (-5,)}, "state_checkpoints.host"),
        ({"host": ("8192",)}, "state_checkpoints.host"),
        ({"disk": (8192,)}, "state_checkpoints.disk"),
        ({"host": "8192"}, "state_checkpoints"),
        ((True,), "state_checkpoints"),
    ],
)
def test_checkpoints_that_are_none_are_named(checkpoints: Any, field: str) -> None:
    with pytest.raises(ValueError, match="state_checkpoints") as caught:
        Request(10_000, {"host": 9000}, state_checkpoints=checkpoints)
    assert getattr(caught.value, "field", None) == field


def test_checkpoints_hold_for_every_tier_unless_one_is_named() -> None:
    request = Request(10_000, {"host": 9000, "disk": 9000}, state_checkpoints=(4096,))
    assert request.checkpoints("host") == request.checkpoints("disk") == (4096,)
    request = Request(10_000, {"host": 9000, "disk": 9000}, state_checkpoints={"disk": (4096,)})
    assert request.checkpoints("host") == ()
    assert request.checkpoints("disk") == (4096,)


@pytest.mark.parametrize("executor", ["bulk", "layered"])
@pytest.mark.parametrize("name", model_names())
def test_every_built_in_model_is_decided(name: str, executor: str) -> None:
    spec: ModelSpec = load_model(name)
    tp = math.gcd(8, *(layer.heads for layer in spec.layers))
    planner = Planner(spec, load_machine("h100-sxm"), executor=executor, tp=tp)  # type: ignore[arg-type]
    plan = planner.decide(Request(12_370, {"host": 12_368}, state_checkpoints=(8192, 12_288)))
    load = plan.estimates["load"]
    assert load is not None
    moved = spec.move_bytes(load.end, tp=tp) + load.end * spec.indexer_bytes_per_token
    assert load.load_bytes == round(moved)
    assert json.loads(json.dumps(plan.to_dict(), allow_nan=False))["path"] == plan.path
