"""Families whose layers are alike: decoders with full (or all sliding) attention, with an MLP or with experts.

Every reader takes what its family's published modelling code takes (transformers, `models/<model_type>`), and
reads every field that could change KV or FLOP: what is left unread is refused by name.
"""

from __future__ import annotations

from dataclasses import replace

from kvlane.policy.errors import InputError
from kvlane.policy.model_layer import LayerSpec
from kvlane.policy.model_parts import (
    FULL,
    SLIDING,
    Frame,
    Heads,
    Mlp,
    check_heads,
    gated,
    plain_mlp,
    read_head_dim,
    read_heads,
    routed_experts,
)


def _attention_layers(
    frame: Frame, heads: Heads, window_from: int | None, window: int | None
) -> list[LayerSpec]:
    """Full attention up to layer `window_from`, then sliding; all of it full where there is no window."""
    weights = heads.weights(frame.hidden)
    layers = []
    for index in range(frame.count):
        slides = window is not None and window_from is not None and index >= window_from
        layers.append(heads.layer(weights, *(("sliding_attention", window) if slides else ())))
    return layers


def _optional_window(frame: Frame) -> tuple[int | None, int | None]:
    """Where sliding starts and how far it sees, for families that may slide; nothing where switched off."""
    f, model_type = frame.f, frame.f.text.get("model_type")
    slides = model_type in ("mistral", "mixtral")  # all layers slide once a window is given
    kinds = f.kinds("layer_types", frame.count, SLIDING)
    start = f.count("max_window_layers", frame.count)
    if not f.flag("use_sliding_window", slides) or f.get("sliding_window") in (None, False):
        if kinds and "sliding_attention" in kinds:
            raise InputError("sliding_window", "is missing, and layer_types has sliding layers", "a window")
        f.get("sliding_window")
        return None, None
    window = f.whole("sliding_window")
    if slides:
        start = 0
    if kinds:
        expected = ["sliding_attention" if at >= start else "full_attention" for at in range(frame.count)]
        if kinds != expected:
            raise InputError("layer_types", "differs from max_window_layers", "the same layers in both")
    return start, window


def _full_only(frame: Frame) -> tuple[None, None]:
    f = frame.f
    f.kinds("layer_types", frame.count, FULL)
    if not f.flag("use_sliding_window", True):
        f.get("sliding_window")
    f.get("max_window_layers")
    return None, None


def dense(frame: Frame) -> list[LayerSpec]:
    """Full (or optionally sliding) attention and a gated MLP: Llama, Mistral, Qwen2, Qwen3."""
    f = frame.f
    may_slide = f.text.get("model_type") in ("mistral", "qwen2", "qwen3")
    window = _optional_window(frame) if may_slide else _full_only(frame)
    attention = _attention_layers(frame, read_heads(f, frame.hidden), *window)
    mlp = Mlp(gated(frame.hidden, f.whole("intermediate_size")))
    return [frame.layer(layer, mlp) for layer in attention]


def gptj(frame: Frame) -> list[LayerSpec]:
    """GPT-J: multi-head attention beside an MLP without a gate, four times as wide as the model by default."""
    f, hidden = frame.f, frame.hidden
    heads = f.whole("n_head")
    check_heads(hidden, heads, "n_head")
    width = Heads(heads, heads, hidden // heads, hidden // heads)
    mlp = Mlp(plain_mlp(hidden, f.whole("n_inner", 4 * hidden)))
    return [replace(frame.layer(width.layer(width.weights(hidden)), mlp), all_reduces=1)] * frame.count


def falcon(frame: Frame) -> list[LayerSpec]:
    """Falcon: grouped, multi-query or multi-head attention beside an MLP without a gate."""
    f, hidden = frame.f, frame.hidden
    heads = f.whole("num_attention_heads")
    if f.flag("new_decoder_architecture", False):
        kv_heads = f.whole("num_kv_heads", heads)
    else:
        kv_heads = 1 if f.flag("multi_query", True) else heads
        f.get("num_kv_heads")
    f.get("multi_query")
    check_heads(heads, kv_heads, "num_kv_heads")
    head_dim = read_head_dim(f, hidden, heads)
    width = Heads(heads, kv_heads, head_dim, head_dim)
    mlp = Mlp(plain_mlp(hidden, f.whole("ffn_hidden_size", 4 * hidden)))
    beside = f.flag("parallel_attn", True) or f.flag("new_decoder_architecture", False)
    layer = frame.layer(width.layer(width.weights(hidden)), mlp)
    return [replace(layer, all_reduces=1 if beside else 2)] * frame.count


def mixtral(frame: Frame) -> list[LayerSpec]:
    """Every layer a mixture of `num_local_experts` experts as wide as `intermediate_size`: Mixtral, MiniMax-M2."""
    f, hidden = frame.f, frame.hidden
    if f.text.get("model_type") == "mixtral":
        window = _optional_window(frame)
    else:
        # MiniMax's earlier models mix in lightning attention, 0 in this list.
        f.numbers("attn_type_list", frame.count, (1,))
        window = _full_only(frame)
    attention = _attention_layers(frame, read_heads(f, hidden), *window)
    shared = f.count("shared_intermediate_size")
    mlp = routed_experts(frame, "num_local_experts", f.whole("intermediate_size"), shared)
    return [frame.layer(layer, mlp) for layer in attention]


def qwen_mlps(frame: Frame) -> list[Mlp]:
    """Qwen's mixtures: every `decoder_sparse_step`-th layer, but for `mlp_only_layers`."""
    f, hidden = frame.f, frame.hidden
    step = f.whole("decoder_sparse_step", 1)
    only = f.get("mlp_only_layers") or []
    if not isinstance(only, (list, tuple)):
        raise InputError("mlp_only_layers", f"is a {type(only).__name__}", "a list of layers")
    shared = f.count("shared_expert_intermediate_size")
    sparse = routed_experts(frame, "num_experts", f.whole("moe_intermediate_size"), shared)
    if shared:
        sparse = replace(sparse, weights=sparse.weights + hidden)  # the shared expert's gate
    every = [at not in only and (at + 1) % step == 0 for at in range(frame.count)]
    # Where all layers are mixtures the dense width stands in the config and is nobody's.
    wide = f.get("intermediate_size") if all(every) else f.whole("intermediate_size")
    dense_mlp = Mlp(gated(hidden, wide)) if not all(every) else sparse
    return [sparse if is_sparse else dense_mlp for is_sparse in every]


def qwen_moe(frame: Frame) -> list[LayerSpec]:
    """Qwen2-MoE and Qwen3-MoE: full attention, mixtures of experts."""
    window = _optional_window(frame)
    attention = _attention_layers(frame, read_heads(frame.f, frame.hidden), *window)
    return [frame.layer(layer, mlp) for layer, mlp in zip(attention, qwen_mlps(frame), strict=True)]
