"""Every published config, weighed: bytes worked out by hand from the fields, for each kind of layer there is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvlane.policy import InputError, ModelSpec, load_model
from kvlane.policy.model_layer import Latent, attention_pairs, chunked_pairs, windowed_pairs
from kvlane.policy.model_report import weigh

TOKENS = 12_370


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = Path(__file__).resolve().parents[2].parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared (published model configs) beside the checkout")
    return folder


@dataclass(frozen=True)
class Hand:
    """Layers with full KV and their bytes a token; the same bounded by a window; static bytes; indexer rows."""

    full: int
    row: int
    bounded: int = 0
    bounded_row: int = 0
    window: int = 0
    static: int = 0
    indexer: int = 0

    def move(self, tokens: int) -> int:
        bounded = self.bounded * self.bounded_row * min(tokens, self.window)
        return self.full * self.row * tokens + bounded + self.static

    def reserve(self, tokens: int) -> int:
        return (self.full * self.row + self.bounded * self.bounded_row) * tokens + self.static


# Two bytes an element. GQA: 2 (K and V) * KV heads * head_dim * 2; MLA: (512 + 64) * 2, once.
BY_HAND = {
    "DeepSeek-V3.2.json": Hand(61, (512 + 64) * 2, indexer=61 * (128 + 4)),
    "DeepSeek-V3.json": Hand(61, (512 + 64) * 2),
    "Kimi-K2-Instruct.json": Hand(61, (512 + 64) * 2),
    # Every fourth layer has no rope and attends everything; the others a chunk of 8192.
    "Llama-4-Scout-17B-16E-Instruct.json": Hand(12, 2 * 8 * 128 * 2, 36, 2 * 8 * 128 * 2, 8192),
    "Meta-Llama-3.1-70B.json": Hand(80, 2 * 8 * 128 * 2),
    "Meta-Llama-3.1-8B.json": Hand(32, 2 * 8 * 128 * 2),
    # K 192 wide, V 128; 9 zeros and 39 ones in hybrid_layer_pattern; twice the KV heads in sliding layers.
    "MiMo-V2-Flash.json": Hand(9, 4 * (192 + 128) * 2, 39, 8 * (192 + 128) * 2, 128),
    "MiniMax-M2.5.json": Hand(62, 2 * 8 * 128 * 2),
    "Mixtral-8x7B-v0.1.json": Hand(32, 2 * 8 * 128 * 2),
    # 6 asterisks and 23 M: 64 heads x 64 x 128 floats, and 3 columns of (64*64 + 2*8*128) channels.
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json": Hand(
        6, 2 * 2 * 128 * 2, static=23 * (64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2)
    ),
    "Qwen3-30B-A3B.json": Hand(48, 2 * 4 * 128 * 2),
    "Qwen3-32B-FP8.json": Hand(64, 2 * 8 * 128 * 2),
    "Qwen3-32B.json": Hand(64, 2 * 8 * 128 * 2),
    "Qwen3-8B.json": Hand(36, 2 * 8 * 128 * 2),
    "Qwen3-VL-8B-Instruct.json": Hand(36, 2 * 8 * 128 * 2),
    # 48 delta-rule layers: 48 heads x 128 x 128 floats, and 3 columns of (2*16*128 + 48*128) channels.
    "Qwen3.5-27B.json": Hand(
        16, 2 * 4 * 256 * 2, static=48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 2)
    ),
    # Full layers: 2 heads of 512, one projection for K and V but both cached. Sliding: 8 heads of 256.
    "gemma-4-26B-A4B.json": Hand(5, 2 * 2 * 512 * 2, 25, 2 * 8 * 256 * 2, 1024),
    "gpt-oss-120b.json": Hand(18, 2 * 8 * 64 * 2, 18, 2 * 8 * 64 * 2, 128),
    "gpt-oss-20b.json": Hand(12, 2 * 8 * 64 * 2, 12, 2 * 8 * 64 * 2, 128),
}
# Billions of weights in the layers, all and those one token uses: as published, less embeddings and heads.
WEIGHTS = {
    "DeepSeek-V3.json": (669.2, 35.7),
    "Kimi-K2-Instruct.json": (1024.1, 30.5),
    "Llama-4-Scout-17B-16E-Instruct.json": (105.7, 15.1),
    "MiMo-V2-Flash.json": (307.5, 14.2),
    "MiniMax-M2.5.json": (227.5, 9.8),
    "Mixtral-8x7B-v0.1.json": (46.4, 12.6),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json": (30.9, 2.9),
    "Qwen3-30B-A3B.json": (29.9, 2.7),
    "Qwen3.5-27B.json": (24.4, 24.4),
    "gemma-4-26B-A4B.json": (24.5, 3.1),
    "gpt-oss-120b.json": (115.6, 4.5),
    "gpt-oss-20b.json": (19.7, 3.0),
}
BUILT_IN = {
    "DeepSeek-V3.2.json": "deepseek-v3.2",
    "DeepSeek-V3.json": "deepseek-v3",
    "Kimi-K2-Instruct.json": "kimi-k2",
    "Llama-4-Scout-17B-16E-Instruct.json": "llama-4-scout",
    "Meta-Llama-3.1-70B.json": "llama-3.1-70b",
    "Meta-Llama-3.1-8B.json": "llama-3.1-8b",
    "MiMo-V2-Flash.json": "mimo-v2-flash",
    "MiniMax-M2.5.json": "minimax-m2.5",
    "Mixtral-8x7B-v0.1.json": "mixtral-8x7b",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json": "nemotron-3-nano-30b-a3b",
    "Qwen3-30B-A3B.json": "qwen3-30b-a3b",
    "Qwen3-32B-FP8.json": "qwen3-32b-fp8",
    "Qwen3-32B.json": "qwen3-32b",
    "Qwen3-8B.json": "qwen3-8b",
    "Qwen3-VL-8B-Instruct.json": "qwen3-vl-8b",
    "Qwen3.5-27B.json": "qwen3.5-27b",
    "gemma-4-26B-A4B.json": "gemma-4-26b-a4b",
    "gpt-oss-120b.json": "gpt-oss-120b",
    "gpt-oss-20b.json": "gpt-oss-20b",
}


def read(shared: Path, file: str, **changes: Any) -> ModelSpec:
    config = json.loads((shared / "models" / file).read_text())
    (config.get("text_config") or config).update(changes)
    return ModelSpec.from_config(config, name=file)


def test_no_published_config_is_left_out(shared: Path) -> None:
    published = {path.name for path in (shared / "models").glob("*.json")}
    assert published == set(BY_HAND) == set(BUILT_IN)


@pytest.mark.parametrize(("file", "hand"), BY_HAND.items())
def test_bytes_are_those_worked_out_by_hand(shared: Path, file: str, hand: Hand) -> None:
    model = ModelSpec.from_config(shared / "models" / file)
    assert model.kv_bytes_per_token() == hand.full * hand.row
    assert model.indexer_bytes_per_token == hand.indexer
    assert model.state_bytes() == hand.static
    for tokens in (1, 100, 128, 129, 1024, 8192, TOKENS):
        assert model.move_bytes(tokens) == hand.move(tokens)
        assert model.reserve_bytes(tokens) == hand.reserve(tokens)
    # KV in eight bits halves the rows and leaves states and indexer keys as they are.
    assert model.kv_bytes_per_token("fp8") == hand.full * hand.row / 2
    assert model.move_bytes(TOKENS, "fp8") == (hand.move(TOKENS) - hand.static) / 2 + hand.static


@pytest.mark.parametrize(("file", "hand"), BY_HAND.items())
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_divide_heads_and_replicate_what_they_cannot_divide(
    shared: Path, file: str, hand: Hand, tp: int
) -> None:
    model = ModelSpec.from_config(shared / "models" / file)
    weighed = weigh(model, TOKENS, tp=tp)
    rank = weighed["per_rank"]
    for key, value in rank.items():
        assert weighed[key] == pytest.approx(value * tp)
    heads = {layer.kv_heads for layer in model.layers if layer.window is None and layer.kv_heads}.pop()
    assert rank["bytes_per_token"] == hand.full * hand.row * max(1, heads // tp) / heads
    assert rank["indexer_bytes_per_token"] == hand.indexer  # on every rank
    assert rank["static_bytes"] == hand.static / tp  # heads and groups of all of these divide
    assert weighed["prefill_flop"] == pytest.approx(model.prefill_flop(0, TOKENS))


@pytest.mark.parametrize(("file", "billions"), WEIGHTS.items())
def test_weights_add_up_to_the_published_size(shared: Path, file: str, billions: tuple[float, float]) -> None:
    model = ModelSpec.from_config(shared / "models" / file)
    assert sum(layer.all_weights for layer in model.layers) / 1e9 == pytest.approx(billions[0], abs=0.06)
    assert sum(layer.active_weights for layer in model.layers) / 1e9 == pytest.approx(billions[1], abs=0.06)


@pytest.mark.parametrize(("file", "name"), BUILT_IN.items())
def test_the_built_in_model_is_the_published_one(shared: Path, file: str, name: str) -> None:
    published, built_in = ModelSpec.from_config(shared / "models" / file), load_model(name)
    assert built_in.layers == published.layers
    assert (built_in.hidden, built_in.vocab) == (published.hidden, published.vocab)
    assert (built_in.weight_dtype, built_in.kv_dtype) == (published.weight_dtype, published.kv_dtype)


def test_a_window_bounds_what_moves_and_not_what_is_reserved() -> None:
    gpt_oss = load_model("gpt-oss-20b")
    assert gpt_oss.move_bytes(8192) == 204_472_320
    assert gpt_oss.reserve_bytes(8192) == 402_653_184


def test_layers_that_share_kv_store_none(shared: Path) -> None:
    own = read(shared, "gemma-4-26B-A4B.json")
    shares = read(shared, "gemma-4-26B-A4B.json", num_kv_shared_layers=12)
    # The last 12 layers are two periods: ten sliding, two full.
    assert shares.kv_bytes_per_token() == own.kv_bytes_per_token() * 3 / 5
    assert shares.reserve_bytes(1) == 3 * 4096 + 15 * 8192
    # They still attend, and project Q and the output, but neither K nor V.
    assert shares.layers[-1].attention_flop(100, 10) == own.layers[-1].attention_flop(100, 10)
    assert own.layers[-1].weights - shares.layers[-1].weights == 2816 * 2 * 512
    wide = read(shared, "gemma-4-26B-A4B.json", num_kv_shared_layers=12, use_double_wide_mlp=True)
    assert wide.layers[-1].weights - shares.layers[-1].weights == 3 * 2816 * 2112
    assert wide.layers[0] == shares.layers[0]


def test_one_projection_for_k_and_v_saves_weights_and_no_kv(shared: Path) -> None:
    same = read(shared, "gemma-4-26B-A4B.json")
    # Without it the full layers have the sliding layers' number of KV heads, and a V projection.
    apart = read(shared, "gemma-4-26B-A4B.json", attention_k_eq_v=False)
    assert apart.layers[5].kv_heads == 8
    assert same.layers[5].kv_heads == 2
    assert apart.layers[0] == same.layers[0]


def test_attended_pairs_are_what_counting_them_gives() -> None:
    for resident in (0, 1, 7, 8, 9, 40):
        for new in (0, 1, 5, 8, 33):
            at = range(resident, resident + new)
            assert attention_pairs(resident, new) == sum(i + 1 for i in at)
            assert windowed_pairs(resident, new, 8) == sum(min(i + 1, 8) for i in at)
            assert chunked_pairs(resident, new, 8) == sum(i % 8 + 1 for i in at)


def test_latent_attention_costs_the_cheaper_of_its_two_ways(shared: Path) -> None:
    layer = ModelSpec.from_config(shared / "models" / "DeepSeek-V3.json").layers[0]
    assert layer.latent == Latent(rank=512, rotary=64, nope=128, value=128)
    expanded_pair, absorbed_pair = 2 * 128 * (128 + 64 + 128), 2 * 128 * (512 + 64 + 512)
    up = 2 * 512 * 128 * (128 + 128)
    # A fresh prefill has no prefix to up-project: expanded. One token after a long prefix: absorbed.
    assert layer.attention_flop(0, 1000) == expanded_pair * 500_500
    assert layer.attention_flop(50_000, 1) == absorbed_pair * 50_001
    assert layer.attention_flop(50_000, 2000) == expanded_pair * (2000 * 50_000 + 2_001_000) + up * 50_000
    # Q down and up, KV down and up, and the output: 187,105,280 weights.
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert layer.weights == attention + 3 * 7168 * 18432


def test_an_engine_may_fix_one_way_of_latent_attention() -> None:
    model = load_model("deepseek-v3")
    ways = {
        compute: model.with_latent_compute(compute).prefill_flop(30_000, 1000)
        for compute in ("cheaper", "expanded", "absorbed")
    }
    assert ways["cheaper"] == model.prefill_flop(30_000, 1000) == min(ways["expanded"], ways["absorbed"])
    assert ways["expanded"] != ways["absorbed"]
    assert load_model("qwen3-8b").with_latent_compute("absorbed") == load_model("qwen3-8b")
    with pytest.raises(InputError):
        model.with_latent_compute("magic")  # type: ignore[arg-type]


def test_an_engine_may_free_what_slides_out() -> None:
    model = load_model("gpt-oss-20b")
    assert model.reserve_bytes(8192, frees_windows=True) == model.move_bytes(8192)


def test_sparse_attention_attends_the_best_and_rates_them_all(shared: Path) -> None:
    dense = ModelSpec.from_config(shared / "models" / "DeepSeek-V3.json").layers[0]
    sparse = ModelSpec.from_config(shared / "models" / "DeepSeek-V3.2.json").layers[0]
    rating = 2 * 64 * 128
    # As far as the top 2048 reach, only the rating comes on top; beyond, pairs stop growing.
    assert sparse.attention_flop(0, 2048) == dense.attention_flop(0, 2048) + rating * 2048 * 2049 / 2
    assert sparse.pairs(30_000, 10) == 10 * 2048
    assert sparse.attention_flop(30_000, 10) == 2 * 128 * 1088 * 10 * 2048 + rating * (300_000 + 55)
    assert sparse.weights - dense.weights == 1536 * 64 * 128 + 7168 * (128 + 64)


def test_a_reused_choice_of_keys_stores_and_rates_nothing() -> None:
    glm = load_model("glm-5.2")
    own = [layer for layer in glm.layers if layer.indexer_row_bytes]
    # The first three layers, then every fourth: 21 of 78.
    assert len(own) == 21
    assert glm.indexer_bytes_per_token == 21 * 132
    assert all(layer.pairs(100_000, 1) == 2048 for layer in glm.layers)
    assert load_model("glm-5").indexer_bytes_per_token == 78 * 132


def test_experts_are_computed_as_far_as_active_and_read_as_far_as_touched() -> None:
    mixtral = load_model("mixtral-8x7b")
    layer = mixtral.layers[0]
    expert, attention = 3 * 4096 * 14336, 4096 * 128 * (32 + 8 + 8 + 32)
    router = 4096 * 8
    assert layer.flop_per_token == 2 * (attention + router + 2 * expert)
    assert mixtral.touched_weight_bytes(1) == 32 * 2 * (attention + router + 2 * expert)
    # Two tokens: an expert is spared with probability (6/8)^2.
    assert mixtral.touched_weight_bytes(2) == pytest.approx(
        32 * 2 * (attention + router + 8 * (1 - 9 / 16) * expert)
    )
    assert mixtral.touched_weight_bytes(10_000) == pytest.approx(mixtral.layer_weight_bytes)


def test_shared_experts_and_dense_first_layers(shared: Path) -> None:
    model = ModelSpec.from_config(shared / "models" / "DeepSeek-V3.json")
    assert [layer.experts is None for layer in model.layers] == [True] * 3 + [False] * 58
    attention = model.layers[0].weights - 3 * 7168 * 18432
    assert model.layers[3].weights == attention + 3 * 7168 * 2048 + 7168 * 256
    mimo = ModelSpec.from_config(shared / "models" / "MiMo-V2-Flash.json")
    assert [layer.experts is None for layer in mimo.layers] == [True] + [False] * 47


def test_states_cost_the_same_for_every_token() -> None:
    hybrid = load_model("qwen3.5-27b")
    linear = hybrid.layers[0]
    assert linear.kind == "linear_attention"
    assert linear.attention_flop(10_000, 100) == 0
    assert linear.flop(0, 200) == 2 * linear.flop(99_999, 100)
    assert linear.state_flop_per_token == 6 * 48 * 128 * 128
    nemotron = load_model("nemotron-3-nano-30b-a3b")
    kinds = [layer.kind for layer in nemotron.layers]
    assert (kinds.count("mamba"), kinds.count("full_attention"), kinds.count("feed_forward")) == (23, 6, 23)


def test_experts_of_a_latent_width() -> None:
    # Nemotron 3 Super: 40 layers of 512 experts between projections to and from 1024.
    model = load_model("nemotron-3-super-120b-a12b-nvfp4")
    layer = next(layer for layer in model.layers if layer.experts is not None)
    assert layer.experts is not None
    assert layer.experts.weights == 2 * 1024 * 2688
    assert layer.weights == 4096 * 512 + 2 * 4096 * 1024 + 2 * 4096 * 5376
    assert sum(layer.all_weights for layer in model.layers) / 1e9 == pytest.approx(119.6, abs=1)
    assert model.kv_dtype == "fp8"


def test_a_quantised_checkpoint_keeps_what_its_block_leaves_alone() -> None:
    # gpt-oss: experts in MXFP4 (4 bits and one scale byte for 32), everything else in 16 bits.
    model = load_model("gpt-oss-20b")
    layer = model.layers[0]
    assert layer.experts is not None
    assert layer.wide_weights == layer.weights
    experts = 32 * layer.experts.weights * (0.5 + 1 / 32)
    assert model.layer_weight_bytes == 24 * (2 * layer.weights + experts)
    assert model.layer_weight_bytes == pytest.approx(11.4e9, rel=0.01)


def test_sliding_mistral_and_switched_off_windows() -> None:
    mistral = load_model("mistral-7b")
    assert {(layer.kind, layer.window) for layer in mistral.layers} == {("sliding_attention", 4096)}
    assert mistral.kv_bytes_per_token() == 0
    assert mistral.move_bytes(10_000) == 4096 * 131_072
    assert mistral.reserve_bytes(10_000) == 10_000 * 131_072
    fields = {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "sliding_window": 32,
    }
    off = ModelSpec.from_config({**fields, "use_sliding_window": False, "max_window_layers": 2})
    on = ModelSpec.from_config({**fields, "use_sliding_window": True, "max_window_layers": 2})
    assert [layer.window for layer in off.layers] == [None] * 4
    assert [layer.window for layer in on.layers] == [None, None, 32, 32]


@pytest.mark.parametrize("tp", [3, 5, 16, 24])
def test_ranks_that_do_not_divide_state_heads_are_refused(tp: int) -> None:
    with pytest.raises(InputError) as caught:
        load_model("nemotron-3-nano-30b-a3b" if tp != 16 else "qwen3.5-27b").check_tp(tp)
    assert caught.value.field == "tp"


def test_old_decoders_without_a_gate() -> None:
    gptj = load_model("gpt-j-6b")
    assert gptj.kv_bytes_per_token() == 28 * 2 * 4096 * 2
    assert gptj.layers[0].weights == 4 * 4096 * 4096 + 2 * 4096 * 16384
    falcon = load_model("tiiuae/falcon-180B")
    assert falcon.kv_bytes_per_token() == 80 * 2 * 8 * 64 * 2
    assert falcon.layers[0].weights == 14848 * 64 * (232 + 8 + 8 + 232) + 8 * 14848 * 14848
    # Attention and MLP side by side are reduced together.
    assert gptj.layers[0].all_reduces == falcon.layers[0].all_reduces == 1
