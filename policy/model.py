"""What a model weighs: KV bytes, weights and FLOP, layer by layer.

Formulas: DESIGN section "What a model weighs". A layer's KV per token is `kv_heads * (k_width + v_width)`
elements; attention costs `2 * heads * (k_width + v_width)` FLOP per (query, key) pair (one multiply and one
add for the scores and for the weighted sum), a projection 2 FLOP per weight and token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvlane.policy.errors import InputError

BYTES_PER_ELEMENT: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
}
_TORCH_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

# Decoders whose every layer is full attention and a gated MLP, by `model_type`.
_FULL_ATTENTION = {"llama", "mistral", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}

# Fields that make a layer something else than full attention with a dense MLP: refused by name rather than
# silently costed as full attention.
_NOT_YET = {
    "kv_lora_rank": "multi-head latent attention",
    "index_topk": "sparse attention with an indexer",
    "attention_chunk_size": "chunked attention",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "num_kv_shared_layers": "layers that share KV",
    "hybrid_override_pattern": "a Mamba hybrid",
    "hybrid_layer_pattern": "a mix of attention kinds",
    "full_attention_interval": "linear attention layers",
    "linear_num_key_heads": "linear attention layers",
    "mamba_num_heads": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "v_head_dim": "K and V of different width",
    "cross_attention_layers": "cross attention layers",
}


def attention_pairs(resident: int, new: int) -> float:
    """(query, key) pairs of `new` tokens after `resident` cached ones: `m*p + m*(m+1)/2`."""
    return new * resident + new * (new + 1) / 2


def bytes_per_element(dtype: str, field: str = "kv_dtype") -> float:
    """Bytes of one element of `dtype`; raises `InputError` naming `field` for an unknown one."""
    try:
        return BYTES_PER_ELEMENT[dtype]
    except (KeyError, TypeError):
        raise InputError(field, f"unknown dtype {dtype!r}", ", ".join(BYTES_PER_ELEMENT)) from None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer with full attention; widths are elements per head, weights are counts."""

    heads: int
    kv_heads: int
    k_width: int
    v_width: int
    weights: int

    def kv_elements(self, tp: int = 1) -> int:
        """KV elements per token on one of `tp` ranks; fewer KV heads than ranks are replicated."""
        return -(-self.kv_heads // tp) * (self.k_width + self.v_width)

    @property
    def flop_per_token(self) -> float:
        return 2.0 * self.weights

    @property
    def flop_per_pair(self) -> float:
        return 2.0 * self.heads * (self.k_width + self.v_width)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: its layers in order and what stands around them.

    `weight_dtype` is what the weights are stored in (and computed in, as far as the device has a peak for
    it); `kv_dtype` is what KV is stored in, an input of its own.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab: int
    weight_dtype: str
    kv_dtype: str

    @property
    def uniform(self) -> bool:
        """Whether all layers are alike, so that the O(1) forms of the pipeline hold."""
        return all(layer == self.layers[0] for layer in self.layers)

    def kv_bytes_per_token(self, kv_dtype: str | None = None, tp: int = 1) -> float:
        """Bytes of KV per token on one rank, all layers; `kv_dtype` overrides the model's own."""
        size = bytes_per_element(kv_dtype or self.kv_dtype)
        return sum(layer.kv_elements(tp) for layer in self.layers) * size

    @property
    def layer_weight_bytes(self) -> float:
        """Bytes of all layers' weights (embeddings and LM head apart), over all ranks."""
        return sum(layer.weights for layer in self.layers) * bytes_per_element(
            self.weight_dtype, "weight_dtype"
        )

    @property
    def head_flop(self) -> float:
        """FLOP of the LM head, which runs for one token only."""
        return 2.0 * self.hidden * self.vocab

    @property
    def head_weight_bytes(self) -> float:
        """Bytes of the LM head; quantised checkpoints leave it in two bytes."""
        return self.hidden * self.vocab * max(2.0, bytes_per_element(self.weight_dtype, "weight_dtype"))

    def prefill_flop(self, resident: int, new: int) -> float:
        """FLOP to compute `new` tokens after `resident` cached ones, LM head for one token included."""
        pairs = attention_pairs(resident, new)
        layers = sum(layer.flop_per_token * new + layer.flop_per_pair * pairs for layer in self.layers)
        return layers + self.head_flop

    def check_tp(self, tp: int) -> None:
        """Raises `InputError` naming `tp` when `tp` ranks cannot divide the attention heads evenly."""
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            raise InputError("tp", f"{tp!r} is not a number of ranks", "a whole number of 1 or more")
        for layer in self.layers:
            if layer.heads % tp:
                raise InputError(
                    "tp", f"{tp} ranks do not divide {layer.heads} attention heads", "a divisor of them"
                )
            if layer.kv_heads % tp and tp % layer.kv_heads:
                raise InputError(
                    "tp", f"{tp} ranks neither divide {layer.kv_heads} KV heads nor are a multiple of them"
                )

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any], *, name: str | None = None) -> ModelSpec:
        """Reads a Hugging Face `config.json` (a path, or its parsed content; `text_config` may be nested).

        Raises `InputError` naming the field for anything missing, out of range, or of a kind not known yet;
        nothing is ever costed as something it is not.
        """
        if isinstance(config, (str, Path)):
            path = Path(config)
            config = _read_json(path)
            name = name or path.stem
        if not isinstance(config, Mapping):
            raise InputError(
                "config", f"is a {type(config).__name__}", "an object with a config.json's fields"
            )
        text = config.get("text_config") or config
        if not isinstance(text, Mapping):
            raise InputError("text_config", f"is a {type(text).__name__}", "an object")
        return _from_fields(text, config, name)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError("model", f"{path}: {error.strerror or error}", "a readable config.json") from None
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError("model", f"{path} is not a config.json: {error}", "a JSON object") from None


def _whole(fields: Mapping[str, Any], field: str, default: int | None = None, most: int = 10**9) -> int:
    value = fields.get(field)
    if value is None:
        if default is None:
            raise InputError(field, "is missing", "a whole number of 1 or more")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(field, f"is {str(value)[:40]}", f"a whole number from 1 to {most:,}")
    return value


def _refuse_other_kinds(text: Mapping[str, Any]) -> None:
    model_type = text.get("model_type")
    for field, kind in _NOT_YET.items():
        value = text.get(field)
        if value is None or value is False or value == 0:
            continue
        if field == "v_head_dim" and value == text.get("head_dim"):
            continue
        raise InputError(
            field, f"{kind} ({field} = {str(value)[:40]}) is not supported yet", "a full-attention decoder"
        )
    kinds = text.get("layer_types") or []
    if not isinstance(kinds, (list, tuple)):
        raise InputError("layer_types", f"is a {type(kinds).__name__}", "a list")
    for kind in kinds:
        if kind != "full_attention":
            raise InputError("layer_types", f"{kind!r} layers are not supported yet", "full_attention")
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        raise InputError("sliding_window", "sliding-window attention is not supported yet", "null")
    if not isinstance(model_type, str) or model_type not in _FULL_ATTENTION:
        raise InputError(
            "model_type", f"{model_type!r} is not a known kind yet", ", ".join(sorted(_FULL_ATTENTION))
        )


def _weight_dtype(text: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    quantisation = text.get("quantization_config") or outer.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        if method != "fp8":
            raise InputError("quantization_config.quant_method", f"{method!r} is not supported yet", "fp8")
        return "fp8"
    for fields in (text, outer):
        for field in ("dtype", "torch_dtype"):
            value = fields.get(field)
            if value is not None:
                if not isinstance(value, str) or value not in _TORCH_DTYPES:
                    raise InputError(field, f"unknown dtype {value!r}", ", ".join(_TORCH_DTYPES))
                return _TORCH_DTYPES[value]
    return "bf16"


def _from_fields(text: Mapping[str, Any], outer: Mapping[str, Any], name: str | None) -> ModelSpec:
    _refuse_other_kinds(text)
    count = _whole(text, "num_hidden_layers", most=10_000)
    kinds = text.get("layer_types")
    if kinds and len(kinds) != count:
        raise InputError("layer_types", f"lists {len(kinds)} layers", f"{count}, as num_hidden_layers says")
    hidden = _whole(text, "hidden_size")
    heads = _whole(text, "num_attention_heads")
    # A config without the field is multi-head attention: every query head has its own K and V.
    kv_heads = _whole(text, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            "num_key_value_heads", f"{kv_heads} does not divide {heads} attention heads", "a divisor of them"
        )
    if text.get("head_dim") is None and hidden % heads:
        raise InputError(
            "head_dim",
            f"is missing and {heads} heads do not divide hidden_size {hidden}",
            "an explicit head_dim",
        )
    head_dim = _whole(text, "head_dim", hidden // heads)
    ffn = _whole(text, "intermediate_size")
    weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn
    layer = LayerSpec(heads=heads, kv_heads=kv_heads, k_width=head_dim, v_width=head_dim, weights=weights)
    return ModelSpec(
        name=name or str(outer.get("_name_or_path") or outer.get("model_type") or "model"),
        layers=(layer,) * count,
        hidden=hidden,
        vocab=_whole(text, "vocab_size"),
        weight_dtype=_weight_dtype(text, outer),
        kv_dtype="bf16",
    )


def usable_tokens(hit: int, prompt: int, unit: int, tail: int = 1) -> int:
    """Stored tokens that may be used: `floor(min(hit, prompt - tail) / unit) * unit`, never below zero."""
    return max(0, min(hit, prompt - tail) // unit * unit)


def gain_tokens(hits: tuple[int, ...], resident: int) -> int:
    """Tokens a load can add beyond `resident`: the rank with the smallest hit counts."""
    return max(0, min(hits) - resident)
