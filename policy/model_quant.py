"""What a config says of number formats: its weights', and its KV cache's where it says anything of that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlane.policy.errors import InputError
from kvlane.policy.model_fields import Fields

_TORCH_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_BLOCK = "quantization_config"
_METHODS = "fp8, mxfp4, modelopt, compressed-tensors, awq, gptq, auto-round"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Storage dtype of the weights, KV dtype if one is stated, and the parts that stay in 16 bits."""

    weight_dtype: str
    kv_dtype: str | None = None
    wide_parts: frozenset[str] = frozenset()

    def wide(self, part: str, weights: int) -> int:
        """How many of these weights of a part ("attention", "linear", "mlp") stay in 16 bits."""
        return weights if part in self.wide_parts else 0


def read_quantisation(fields: Fields, layers: int) -> Quantisation:
    """Reads dtypes and the quantisation block; raises `InputError` naming the field."""
    block = fields.text.get(_BLOCK) or fields.outer.get(_BLOCK)
    if not block:
        return Quantisation(_torch_dtype(fields))
    method = block.get("quant_method") if isinstance(block, Mapping) else block
    if not isinstance(block, Mapping) or not isinstance(method, str):
        raise InputError(f"{_BLOCK}.quant_method", f"{str(method)[:40]!r} is not supported yet", _METHODS)
    kv_dtype = _kv_dtype(block)
    if method == "mxfp4":
        # The checkpoints' MXFP4 covers the experts alone.
        return Quantisation("mxfp4", kv_dtype, frozenset(("attention", "linear", "mlp")))
    return Quantisation(_weight_dtype(block, method), kv_dtype, _wide_parts(block, layers))


def _torch_dtype(fields: Fields) -> str:
    for where in (fields.text, fields.outer):
        for field in ("dtype", "torch_dtype"):
            value = where.get(field)
            if value is not None:
                if not isinstance(value, str) or value not in _TORCH_DTYPES:
                    raise InputError(field, f"unknown dtype {str(value)[:40]!r}", ", ".join(_TORCH_DTYPES))
                return _TORCH_DTYPES[value]
    return "bf16"


def _weight_dtype(block: Mapping[str, Any], method: str) -> str:
    at = f"{_BLOCK}.quant_method"
    if method in ("fp8", "fbgemm_fp8", "modelopt_fp8"):
        return "fp8"
    if method in ("modelopt_fp4", "nvfp4"):
        return "nvfp4"
    if method == "modelopt":
        algorithm = block.get("quant_algo")
        known = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_AWQ": "int4", "MXFP4": "mxfp4", "INT8_SQ": "int8"}
        if not isinstance(algorithm, str) or algorithm not in known:
            raise InputError(
                f"{_BLOCK}.quant_algo", f"{str(algorithm)[:40]!r} is not supported yet", ", ".join(known)
            )
        return known[algorithm]
    if method in ("awq", "gptq", "gptq_marlin", "auto-round", "auto_round"):
        bits = block.get("bits")
        if bits not in (4, 8):
            raise InputError(
                at, f"{method!r} with bits = {str(bits)[:40]} is not supported yet", "bits 4 or 8"
            )
        return "int4" if bits == 4 else "int8"
    if method == "compressed-tensors":
        return _group_dtype(block)
    raise InputError(at, f"{method[:40]!r} is not supported yet", _METHODS)


def _group_dtype(block: Mapping[str, Any]) -> str:
    """compressed-tensors: what its groups of modules store their weights in; all groups must agree."""
    at = f"{_BLOCK}.config_groups"
    groups = block.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            found.add((weights.get("type"), weights.get("num_bits"), weights.get("group_size")))
    dtypes = set()
    for kind, bits, size in found:
        known = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}.get((str(kind), bits or 0))
        if (kind, bits) == ("float", 4):
            known = "mxfp4" if size == 32 else "nvfp4"
        dtypes.add(known)
    if len(dtypes) != 1 or None in dtypes:
        raise InputError(
            at, "do not store weights in one known format", "int4, int8, fp8 or fp4 in every group"
        )
    return str(dtypes.pop())


def _kv_dtype(block: Mapping[str, Any]) -> str | None:
    scheme = block.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        named = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "nvfp4"}
        key = (str(scheme.get("type")), scheme.get("num_bits"))
        if key not in named:
            raise InputError(f"{_BLOCK}.kv_cache_scheme", f"{key} is not supported yet", "8-bit float or int")
        return named[key]
    algorithm = scheme or block.get("kv_cache_quant_algo")
    if not algorithm or str(algorithm).lower() in ("auto", "none"):
        return None
    known = {"fp8": "fp8", "int8": "int8", "nvfp4": "nvfp4"}
    if str(algorithm).lower() not in known:
        raise InputError(
            f"{_BLOCK}.kv_cache_quant_algo", f"{str(algorithm)[:40]!r} is not supported yet", "FP8"
        )
    return known[str(algorithm).lower()]


_PART_MODULES = {"attention": "self_attn", "linear": "linear_attn", "mlp": "mlp"}


def _wide_parts(block: Mapping[str, Any], layers: int) -> frozenset[str]:
    """Parts named whole among the modules left alone, by a pattern or in nearly every layer."""
    listed = block.get("modules_to_not_convert") or block.get("ignore") or block.get("exclude_modules") or ()
    if not isinstance(listed, (list, tuple)):
        return frozenset()
    parts = set()
    for part, module in _PART_MODULES.items():
        named = 0
        for entry in listed:
            text = str(entry).removeprefix("re:").rstrip("$*.\\")
            if text.endswith(module):
                digits = re.findall(r"layers\D*(\d+)", text)
                named += 1 if digits else layers
        if named >= layers / 2:
            parts.add(part)
    return frozenset(parts)
