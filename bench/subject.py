"""The model to calibrate: random weights in the shape of the demo, of a built-in model or of a config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvlane.bench.device_memory import check_device_memory
from kvlane.bench.shape import Shape, build_model, config_of
from kvlane.policy.catalog import load_model, model_config, model_names
from kvlane.policy.errors import InputError
from kvlane.policy.model import ModelSpec
from kvlane.policy.units import show_bytes
from kvlane.streams.engines.transformers import MODEL_TYPES

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Activations, the allocator and the interpreter, beside weights and KV.
_SPARE_BYTES = 1e9
# Device block, store and one copy on the way.
_KV_COPIES = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in eval mode and what the policy knows of it.

    `config` holds its numbers under a config.json's field names, None for a built-in model: those are known.
    """

    name: str
    model: PreTrainedModel
    spec: ModelSpec
    config: dict[str, Any] | None
    vocab: int


def demo_subject(shape: Shape, longest_prompt: int, seed: int) -> Subject:
    """The reproduction's own model; raises `InputError` naming `tokens` when it does not fit."""
    model = build_model(shape, longest_prompt, seed)
    subject = _subject(shape.name, model, shape.vocab, built_in=False)
    _check_memory(subject.spec, longest_prompt)
    return subject


def named_subject(
    name: str | Path,
    longest_prompt: int,
    seed: int,
    device: torch.device | None = None,
    *,
    host_grows: bool = False,
) -> Subject:
    """A built-in model or a config.json, its weights drawn at random, on a CUDA device if one is given.

    `host_grows` is for `check_device_memory`.

    Raises `InputError` naming `--model` for a kind that does not run here or does not fit into memory.
    """
    spec = load_model(name)
    short, fields = model_config(name)
    text: Mapping[str, Any] = fields.get("text_config") or fields
    kind = text.get("model_type")
    if kind not in MODEL_TYPES:
        raise InputError(
            "--model", f"{short} is of kind {kind!r}, which does not run here", ", ".join(MODEL_TYPES)
        )
    if any(layer.window is not None or layer.state is not None for layer in spec.layers):
        # A load of it is no prefix that a shorter one could be cut from, as measuring prefills after a load needs.
        raise InputError(
            "--model", f"{short} has layers with a sliding window or a state", "full attention in every layer"
        )
    dtype = _TORCH_DTYPES.get(spec.weight_dtype)
    if dtype is None:
        raise InputError(
            "--model",
            f"{short} has {spec.weight_dtype} weights, which cannot be drawn at random",
            ", ".join(_TORCH_DTYPES),
        )
    if device is None:
        _check_memory(spec, longest_prompt)
    else:
        check_device_memory(spec, longest_prompt, device, host_grows=host_grows)
    plain = {key: value for key, value in text.items() if key not in ("model_type", "torch_dtype", "dtype")}
    plain["max_position_embeddings"] = max(longest_prompt, int(plain.get("max_position_embeddings") or 0))
    config = AutoConfig.for_model(str(kind), **plain)
    torch.manual_seed(seed)
    with device or nullcontext():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return _subject(short, model, spec.vocab, built_in=short in model_names())


def _subject(name: str, model: PreTrainedModel, vocab: int, *, built_in: bool) -> Subject:
    config = config_of(model)
    spec = load_model(name) if built_in else ModelSpec.from_config(config, name=name)
    return Subject(name, model, spec, None if built_in else config, vocab)


def _check_memory(spec: ModelSpec, tokens: int) -> None:
    weights = spec.layer_weight_bytes + 2 * spec.head_weight_bytes
    kv = _KV_COPIES * tokens * spec.kv_bytes_per_token(spec.weight_dtype)
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return  # a system that does not say
    if weights + kv + _SPARE_BYTES > available:
        raise InputError(
            "--model",
            f"{spec.name} with {tokens} tokens needs about {show_bytes(weights + kv + _SPARE_BYTES)},"
            f" {show_bytes(available)} are free",
            "a smaller model or fewer --tokens",
        )
