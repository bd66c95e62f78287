"""Families that mix sliding or chunked attention with full: gpt-oss, Llama 4, MiMo-V2, Gemma 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvlane.policy.errors import InputError
from kvlane.policy.model_fields import Fields
from kvlane.policy.model_layer import LayerSpec
from kvlane.policy.model_parts import (
    CHUNKED,
    SLIDING,
    Frame,
    Heads,
    Mlp,
    check_heads,
    expert_count,
    gated,
    read_heads,
    routed,
    routed_experts,
    windowed,
)


def gpt_oss(frame: Frame) -> list[LayerSpec]:
    """gpt-oss: sliding and full attention in turn, every layer a mixture of experts."""
    f = frame.f
    kinds = f.kinds("layer_types", frame.count, SLIDING) or [
        "full_attention" if at % 2 else "sliding_attention" for at in range(frame.count)
    ]
    window = f.whole("sliding_window")
    heads = read_heads(f, frame.hidden)
    weights = heads.weights(frame.hidden)
    f.get("experts_per_token")  # the same as num_experts_per_tok, under its older name
    mlp = routed_experts(frame, "num_local_experts", f.whole("intermediate_size"))
    return [frame.layer(windowed(heads, weights, kind, window), mlp) for kind in kinds]


def llama4(frame: Frame) -> list[LayerSpec]:
    """Llama 4: chunked attention with rope, full attention without in every fourth layer; one expert and a
    shared one, in every `interleave_moe_layer_step`-th layer."""
    f, hidden = frame.f, frame.hidden
    interval = f.whole("no_rope_layer_interval", 4)
    rope = f.numbers("no_rope_layers", frame.count, (0, 1)) or [
        int((at + 1) % interval != 0) for at in range(frame.count)
    ]
    chunk = None if f.get("attention_chunk_size") is None else f.whole("attention_chunk_size")
    kinds = f.kinds("layer_types", frame.count, CHUNKED) or [
        "chunked_attention" if has_rope and chunk else "full_attention" for has_rope in rope
    ]
    heads = read_heads(f, hidden)
    weights = heads.weights(hidden)
    step = f.whole("interleave_moe_layer_step", 1)
    listed = f.get("moe_layers")
    moe = set(range(step - 1, frame.count, step) if listed is None else listed)
    width = f.whole("intermediate_size")
    sparse = routed_experts(frame, "num_local_experts", width, width)
    dense_mlp = Mlp(gated(hidden, f.whole("intermediate_size_mlp", width)))
    return [
        frame.layer(windowed(heads, weights, kind, chunk or 1), sparse if at in moe else dense_mlp)
        for at, kind in enumerate(kinds)
    ]


def mimo(frame: Frame) -> list[LayerSpec]:
    """MiMo-V2: K and V of different width, full and sliding layers with different heads, experts but in some."""
    f, hidden, count = frame.f, frame.hidden, frame.count
    pattern = f.numbers("hybrid_layer_pattern", count, (0, 1))
    kinds = f.kinds("layer_types", count, SLIDING)
    if pattern is not None:
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    if kinds is None:
        raise InputError("hybrid_layer_pattern", "is missing", "0 (full) or 1 (sliding) for each layer")
    window = f.whole("sliding_window")
    for alias in ("sliding_window_size", "attention_chunk_size"):  # further names of the one window
        if f.get(alias) not in (None, window):
            raise InputError(alias, f"is {str(f.get(alias))[:40]}", f"{window}, as sliding_window says")
    full = _wide_heads(f, "")
    sliding = _wide_heads(f, "swa_", full)
    every = f.numbers("moe_layer_freq", count, (0, 1))
    named = f.kinds("mlp_layer_types", count, {"dense": "dense", "sparse": "sparse"})
    sparse_at = every or [int(kind == "sparse") for kind in named or ["sparse"] * count]
    sparse = routed_experts(frame, "n_routed_experts", f.whole("moe_intermediate_size"), _shared_width(f))
    dense_mlp = Mlp(gated(hidden, f.whole("intermediate_size")))
    layers = []
    for kind, is_sparse in zip(kinds, sparse_at, strict=True):
        heads = full if kind == "full_attention" else sliding
        layer = windowed(heads, heads.weights(hidden), kind, window)
        layers.append(frame.layer(layer, sparse if is_sparse else dense_mlp))
    return layers


def _wide_heads(f: Fields, prefix: str, other: Heads | None = None) -> Heads:
    """Heads whose K and V widths differ, under names that begin with `prefix`; `other` where those are silent."""
    heads = f.whole(f"{prefix}num_attention_heads", other.heads if other else None)
    # MiMo's own modelling code gives sliding layers twice the KV heads where the config is silent.
    kv_heads = f.whole(f"{prefix}num_key_value_heads", 2 * other.kv_heads if other else None)
    check_heads(heads, kv_heads, f"{prefix}num_key_value_heads")
    k_width = f.whole(f"{prefix}head_dim", other.k_width if other else None)
    return Heads(
        heads, kv_heads, k_width, f.whole(f"{prefix}v_head_dim", other.v_width if other else k_width)
    )


def _shared_width(f: Fields) -> int:
    """Width of the shared experts together: as wide as a routed one each."""
    return f.count("n_shared_experts") * f.whole("moe_intermediate_size")


def gemma4(frame: Frame) -> list[LayerSpec]:
    """Gemma 4: five sliding layers to a full one, of different heads; the last layers may share earlier KV."""
    f, hidden, count = frame.f, frame.hidden, frame.count
    kinds = f.kinds("layer_types", count, SLIDING) or [
        "sliding_attention" if (at + 1) % 6 else "full_attention" for at in range(count)
    ]
    kinds[-1] = "full_attention"  # the modelling code forces it
    if f.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise InputError("use_bidirectional_attention", "'all' is no decoder", "null or vision")
    local = read_heads(f, hidden)
    same = f.flag("attention_k_eq_v", False)
    wide = f.whole("global_head_dim", 512)
    declared = f.get("num_global_key_value_heads")
    kv_heads = f.whole("num_global_key_value_heads") if same and declared is not None else local.kv_heads
    check_heads(local.heads, kv_heads, "num_global_key_value_heads")
    # With K and V of one projection they still differ in the cache: K is rotated, V is not.
    full = Heads(local.heads, kv_heads, wide, wide)
    own = _own_heads(f, count, local, full, kinds)
    window = f.whole("sliding_window")
    shared_from = count - f.count("num_kv_shared_layers")
    if shared_from < 0:
        raise InputError("num_kv_shared_layers", "is more than num_hidden_layers", f"at most {count}")
    # Per-layer inputs: a gate and a projection back in each layer, and its share of the model's projection.
    per_layer = f.count("hidden_size_per_layer_input")
    ffn, double = f.whole("intermediate_size"), f.flag("use_double_wide_mlp", False)
    experts = None
    if f.flag("enable_moe_block", False):
        active = f.whole("top_k_experts")
        width = f.whole("moe_intermediate_size")
        experts = routed(hidden, expert_count(f, "num_experts"), active, width, "top_k_experts")
    layers = []
    for at, kind in enumerate(kinds):
        heads, shares = own[at], at >= shared_from
        weights = heads.weights(hidden, v_proj=not (same and kind == "full_attention"))
        if shares:
            weights = hidden * heads.heads * (heads.k_width + heads.v_width)  # only Q and the output
        layer = replace(windowed(heads, weights + 3 * hidden * per_layer, kind, window), stores_kv=not shares)
        mlp = Mlp(gated(hidden, ffn * (2 if double and shares else 1)))
        if experts is not None:
            mlp = Mlp(mlp.weights + experts.weights, experts.experts, experts.router)
        layers.append(frame.layer(layer, mlp))
    return layers


def _own_heads(f: Fields, count: int, local: Heads, full: Heads, kinds: list[str]) -> list[Heads]:
    """Each layer's heads; newer configs give them in `per_layer_config`, by layer and only where they differ."""
    listed = f.get("per_layer_config")
    if not listed:
        return [full if kind == "full_attention" else local for kind in kinds]
    if not isinstance(listed, Mapping):
        raise InputError("per_layer_config", f"is a {type(listed).__name__}", "an object of objects")
    own = [local] * count
    for at, given in listed.items():
        if not str(at).isdecimal() or int(at) >= count or not isinstance(given, Mapping):
            raise InputError("per_layer_config", f"has {str(at)[:40]}", f"layers below {count}")
        layer = Fields(given, given)
        kv_heads = layer.whole("num_key_value_heads", local.kv_heads)
        check_heads(local.heads, kv_heads, "num_key_value_heads")
        width = layer.whole("head_dim", local.k_width)
        layer.refuse_unread("per_layer_config")
        own[int(at)] = Heads(local.heads, kv_heads, width, width)
    return own


def gemma3(frame: Frame) -> list[LayerSpec]:
    """Gemma 3: five sliding layers to a full one, gated MLPs."""
    f, hidden = frame.f, frame.hidden
    # The underscore is how transformers writes the same field back.
    step = f.whole("sliding_window_pattern", f.whole("_sliding_window_pattern", 6))
    kinds = f.kinds("layer_types", frame.count, SLIDING) or [
        "sliding_attention" if (at + 1) % step else "full_attention" for at in range(frame.count)
    ]
    if f.get("use_bidirectional_attention"):
        raise InputError("use_bidirectional_attention", "is no decoder", "false")
    heads, window = read_heads(f, hidden), f.whole("sliding_window")
    mlp = Mlp(gated(hidden, f.whole("intermediate_size")))
    return [frame.layer(windowed(heads, heads.weights(hidden), kind, window), mlp) for kind in kinds]
