"""Multi-head latent attention, with and without an indexer: DeepSeek V2 to V3.2, Kimi K2, GLM-5."""

from __future__ import annotations

from kvlane.policy.errors import InputError
from kvlane.policy.model_fields import Fields
from kvlane.policy.model_layer import Indexer, Kind, Latent, LayerSpec
from kvlane.policy.model_parts import FULL, Frame, Mlp, expert_count, gated, routed

_SPARSE = ("deepseek_v32", "glm_moe_dsa")
_KINDS = dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), "sparse")


def latent(frame: Frame) -> list[LayerSpec]:
    """MLA in every layer; an MLP in the first layers, experts in the others; an indexer in V3.2 and GLM-5."""
    f, hidden, count = frame.f, frame.hidden, frame.count
    heads = f.whole("num_attention_heads")
    f.get("num_key_value_heads")  # as many as heads, and of no effect: KV is the latent row
    f.get("head_dim")  # of the rotary part or of all, by family, and given by the parts below
    f.get("qk_head_dim")
    f.kinds("layer_types", count, _KINDS if f.text.get("model_type") in _SPARSE else FULL)
    part = Latent(
        rank=f.whole("kv_lora_rank"),
        rotary=f.whole("qk_rope_head_dim"),
        nope=f.whole("qk_nope_head_dim"),
        value=f.whole("v_head_dim"),
    )
    query_rank = f.count("q_lora_rank")
    query = heads * (part.nope + part.rotary)
    weights = hidden * (part.rank + part.rotary) + part.rank * heads * (part.nope + part.value)
    weights += heads * part.value * hidden
    weights += hidden * query_rank + query_rank * query if query_rank else hidden * query
    indexers = _indexers(f, count)
    layers = []
    for indexer, mlp in zip(indexers, _mlps(frame), strict=True):
        own = 0
        if indexer is not None and indexer.heads:
            own = query_rank * indexer.heads * indexer.width + hidden * (indexer.width + indexer.heads)
        kind: Kind = "latent_attention" if indexer is None else "sparse_latent_attention"
        attention = LayerSpec(
            heads, 1, part.rank + part.rotary, 0, weights + own, kind, latent=part, indexer=indexer
        )
        layers.append(frame.layer(attention, mlp))
    return layers


def _mlps(frame: Frame) -> list[Mlp]:
    f, hidden, count = frame.f, frame.hidden, frame.count
    first, step = f.count("first_k_dense_replace"), f.whole("moe_layer_freq", 1)
    named = f.kinds("mlp_layer_types", count, {"dense": "dense", "sparse": "sparse"})
    kinds = named or ["sparse" if at >= first and at % step == 0 else "dense" for at in range(count)]
    dense = Mlp(gated(hidden, f.whole("intermediate_size")))
    if "sparse" not in kinds:
        return [dense] * count
    width = f.whole("moe_intermediate_size")
    experts, active = expert_count(f, "n_routed_experts"), f.whole("num_experts_per_tok")
    shared = f.count("n_shared_experts") * width
    sparse = routed(hidden, experts, active, width, "num_experts_per_tok", shared=shared)
    return [sparse if kind == "sparse" else dense for kind in kinds]


def _indexers(f: Fields, count: int) -> list[Indexer | None]:
    if f.text.get("model_type") not in _SPARSE:
        return [None] * count
    own = Indexer(f.whole("index_n_heads"), f.whole("index_head_dim"), f.whole("index_topk"))
    reused = Indexer(0, 0, own.topk)
    known = {"full": "full", "shared": "shared"}
    kinds = f.kinds("indexer_types", count, known)
    step, offset = f.whole("index_topk_freq", 1), f.count("index_skip_topk_offset", 2)
    pattern = f.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != count or set(pattern) - {"F", "S"}:
            raise InputError("index_topk_pattern", f"is {str(pattern)[:40]}", f"{count} letters, F or S")
        kinds = ["full" if letter == "F" else "shared" for letter in pattern]
    if kinds is None:
        kinds = ["full" if max(at - offset + 1, 0) % step == 0 else "shared" for at in range(count)]
    return [own if kind == "full" else reused for kind in kinds]
