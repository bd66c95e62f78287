"""From a `config.json` to layers: finds the decoder's fields, its family's reader, and its number formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.model_families import dense, falcon, gptj, mixtral, qwen_moe
from kvlane.policy.model_fields import Fields
from kvlane.policy.model_hybrid import nemotron_h, qwen_hybrid
from kvlane.policy.model_latent import latent
from kvlane.policy.model_layer import LayerSpec
from kvlane.policy.model_parts import Frame, Reader
from kvlane.policy.model_quant import read_quantisation
from kvlane.policy.model_windowed import gemma3, gemma4, gpt_oss, llama4, mimo

_MOST_LAYERS = 10_000
_NOT_JSON = re.compile(rb"(?<=[\[:,\s])(?:-?Infinity|NaN)(?=[\],}\s])")

_READERS: Mapping[str, Reader] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text"), dense),
    "qwen3_vl_text": dense,
    "gptj": gptj,
    "falcon": falcon,
    **dict.fromkeys(("mixtral", "minimax_m2"), mixtral),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"), qwen_moe),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), qwen_hybrid),
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "mimo_v2_flash": mimo,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "nemotron_h": nemotron_h,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"), latent),
}
# Families that name the size of the model as GPT-2 did.
_OLD_NAMES = {"gptj": ("n_layer", "n_embd")}


@dataclass(frozen=True, slots=True)
class Reading:
    """What a config says: its layers in order, sizes around them, number formats, and a name if it has one."""

    name: str | None
    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab: int
    weight_dtype: str
    kv_dtype: str | None


def model_kinds() -> list[str]:
    """The `model_type`s that can be read."""
    return sorted(_READERS)


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in that file; raises `InputError` naming `model`."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError("model", f"{path}: {reason}", "a readable config.json") from None
    # Python writes infinities into JSON, which has none: time steps without a limit.
    raw = _NOT_JSON.sub(b"null", raw)
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError("model", f"{path} is not a config.json: {error}", "a JSON object") from None


def _listed(fields: Fields) -> int | None:
    """The number of layers by the list of their kinds, where newer Nemotron-H configs give only that."""
    listed = fields.text.get("layers_block_type")
    return len(listed) if isinstance(listed, (list, tuple)) and listed else None


def read_config(config: Mapping[str, Any]) -> Reading:
    """Reads a parsed config; raises `InputError` naming the field for anything missing, wrong or not understood."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise InputError("text_config", f"is a {type(text).__name__}", "an object")
    fields = Fields(text, config)
    model_type = fields.get("model_type")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise InputError(
            "model_type", f"{str(model_type)[:40]!r} is not a known kind yet", ", ".join(model_kinds())
        )
    layers_field, hidden_field = _OLD_NAMES.get(str(model_type), ("num_hidden_layers", "hidden_size"))
    count = fields.whole(layers_field, _listed(fields), most=_MOST_LAYERS)
    hidden = fields.whole(hidden_field)
    quantisation = read_quantisation(fields, count)
    layers = reader(Frame(fields, count, hidden, quantisation))
    fields.refuse_unread(str(model_type))
    return Reading(
        name=str(config.get("_name_or_path") or config.get("model_type") or "") or None,
        layers=tuple(layers),
        hidden=hidden,
        vocab=fields.whole("vocab_size"),
        weight_dtype=quantisation.weight_dtype,
        kv_dtype=quantisation.kv_dtype,
    )
