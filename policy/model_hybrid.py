"""Families that mix attention with layers of constant state: Qwen3-Next and Qwen3.5, Nemotron-H."""

from __future__ import annotations

from dataclasses import replace

from kvlane.policy.errors import InputError
from kvlane.policy.model_families import qwen_mlps
from kvlane.policy.model_fields import Fields
from kvlane.policy.model_layer import LayerSpec
from kvlane.policy.model_parts import (
    LINEAR,
    Frame,
    Heads,
    Mlp,
    check_heads,
    delta_net,
    expert_count,
    gated,
    mamba2,
    plain_mlp,
    read_heads,
    routed,
)


def qwen_hybrid(frame: Frame) -> list[LayerSpec]:
    """Qwen3-Next and Qwen3.5: gated delta-rule layers, and gated full attention in every fourth."""
    f, hidden = frame.f, frame.hidden
    interval = f.whole("full_attention_interval", 4)
    kinds = f.kinds("layer_types", frame.count, LINEAR) or [
        "linear_attention" if (at + 1) % interval else "full_attention" for at in range(frame.count)
    ]
    heads = read_heads(f, hidden)
    gate = f.flag("attn_output_gate", True)
    full = heads.layer(heads.weights(hidden, gate=gate))
    state, weights = delta_net(f, hidden)
    linear = LayerSpec(0, 0, 0, 0, weights, "linear_attention", state=state)
    if f.get("num_experts") or f.get("num_local_experts"):
        mlps = qwen_mlps(frame)
    else:
        if f.get("mlp_only_layers"):
            raise InputError("mlp_only_layers", "names layers of a model without experts", "an empty list")
        mlps = [Mlp(gated(hidden, f.whole("intermediate_size")))] * frame.count
    return [
        frame.layer(full if kind == "full_attention" else linear, mlp)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_NEMOTRON_NAMES = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "moe": "moe",
    "mlp": "mlp",
}


def nemotron_pattern(f: Fields, count: int) -> list[str]:
    """Nemotron-H: one letter (or name) a layer, each a whole layer of one part; raises naming the field."""
    for field in ("layers_block_type", "layer_types"):
        kinds = f.kinds(field, count, _NEMOTRON_NAMES)
        if kinds:
            return kinds
    pattern = f.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) != count or set(pattern) - set(_NEMOTRON_LETTERS):
        raise InputError(
            "hybrid_override_pattern", f"is {str(pattern)[:40]}", f"{count} letters, each of M, *, E, -"
        )
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def _nemotron_heads(f: Fields, hidden: int) -> Heads:
    """Attention heads, whose width older configs call `attention_head_dim`."""
    older = f.get("attention_head_dim")
    if older is None or f.get("head_dim") is not None:
        heads = read_heads(f, hidden)
        if older not in (None, heads.k_width):
            raise InputError(
                "attention_head_dim", f"is {str(older)[:40]}", f"{heads.k_width}, as head_dim says"
            )
        return heads
    count, kv_heads = f.whole("num_attention_heads"), f.whole("num_key_value_heads")
    check_heads(count, kv_heads, "num_key_value_heads")
    width = f.whole("attention_head_dim")
    return Heads(count, kv_heads, width, width)


def nemotron_h(frame: Frame) -> list[LayerSpec]:
    """Nemotron-H: layers of Mamba-2, of attention, of experts (in a latent width, if one is given), of an MLP."""
    f, hidden = frame.f, frame.hidden
    kinds = nemotron_pattern(f, frame.count)
    f.nothing("sliding_window", "sliding-window attention")
    layers: dict[str, LayerSpec] = {}
    if "mamba" in kinds:
        state, weights = mamba2(f, hidden)
        layers["mamba"] = frame.layer(LayerSpec(0, 0, 0, 0, weights, "mamba", state=state), Mlp(0))
    if "attention" in kinds:
        heads = _nemotron_heads(f, hidden)
        layers["attention"] = frame.layer(heads.layer(heads.weights(hidden)), Mlp(0))
    if "mlp" in kinds:
        mlp = Mlp(plain_mlp(hidden, f.whole("intermediate_size")))
        layers["mlp"] = frame.layer(LayerSpec(0, 0, 0, 0, 0, "feed_forward"), mlp)
    if "moe" in kinds:
        latent = f.count("moe_latent_size")
        shared = f.count("n_shared_experts", 1) * f.count("moe_shared_expert_intermediate_size")
        active = f.whole("num_experts_per_tok")
        width, experts = f.whole("moe_intermediate_size"), expert_count(f, "n_routed_experts")
        inner = routed(latent or hidden, experts, active, width, "num_experts_per_tok", gate=False)
        router = hidden * experts
        weights = router + 2 * hidden * latent + plain_mlp(hidden, shared)
        layers["moe"] = frame.layer(
            LayerSpec(0, 0, 0, 0, 0, "feed_forward"), Mlp(weights, inner.experts, router)
        )
    for field in _NEMOTRON_UNUSED:  # sizes of parts that this pattern has none of
        f.get(field)
    return [replace(layers[kind], all_reduces=1) for kind in kinds]


_NEMOTRON_UNUSED = (
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
    "conv_kernel",
    "expand",
    "mamba_ssm_cache_dtype",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_latent_size",
    "n_shared_experts",
    "moe_shared_expert_intermediate_size",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_routed_experts",
    "hybrid_override_pattern",
    "layers_block_type",
    "attention_head_dim",
)
