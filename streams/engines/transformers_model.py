"""A transformers model seen from its KV: which kinds run, how KV lies, what identifies it, what its layers are."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvlane.policy.errors import InputError
from kvlane.streams.executor import LayerPass
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout
from kvlane.transfer.shapes import LayerShape

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "lfm2")
"""Decoders run in the tests: keys and values in every layer, of all tokens or of a sliding window, rotary positions;
and lfm2, some of whose layers have a short convolution's state in their place."""

_LAYER_TYPES = {"full_attention", "sliding_attention", "conv"}

# Rotary kinds whose keys depend on the position alone. Under the others (dynamic, longrope) the same token's key
# depends on how long the prompt is, so it may not be reused in another prompt.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# Not part of what KV is. The attention implementation is among them: eager and sdpa compute the same attention and
# differ by rounding only, as two ways of cutting a prompt into passes do.
_NOT_NUMERIC = frozenset(
    {
        # Names, paths and versions; type and rotary settings have parts of the identity of their own.
        "_name_or_path",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "rope_parameters",
        # What comes out of a forward, and how.
        "attn_implementation",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        # Heads and tokenizers.
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
        "label2id",
        "problem_type",
        # Training.
        "attention_dropout",
    }
)


def layout_of(model: PreTrainedModel) -> KvLayout:
    """The KV of a model, from its configuration.

    Raises:
        InputError: a kind this adapter does not run, naming the configuration's field.
    """
    config = model.config.get_text_config()
    _refuse_unsupported(config)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    itemsize = model.dtype.itemsize
    full = LayerShape(kv_heads, head_dim, head_dim, itemsize)
    shapes = {"full_attention": full}
    if (window := getattr(config, "sliding_window", None)) is not None:
        shapes["sliding_attention"] = replace(full, window=window)
    if (kernel := getattr(config, "conv_L_cache", None)) is not None:
        shapes["conv"] = LayerShape(state_bytes=config.hidden_size * kernel * itemsize)
    return KvLayout.of(shapes[kind] for kind in _layer_types(config))


def identity_of(
    model: PreTrainedModel, name: str, weights_revision: str, adapter: str | None = None
) -> KvIdentity:
    """The identity of a whole (not sharded) model's KV.

    Args:
        name: the checkpoint, as its users name it.
        weights_revision: what tells its weights from every other revision's.
        adapter: name and revision of the adapter that is active, if any.

    Raises:
        InputError: as `layout_of`.
    """
    return KvIdentity(
        model=name,
        weights_revision=weights_revision,
        adapter=adapter,
        kv_dtype=str(model.dtype).removeprefix("torch."),
        layout=layout_of(model).name,
        tp_rank=0,
        tp_size=1,
        positional=json.dumps(model.config.get_text_config().rope_parameters, sort_keys=True),
        numerics=_numerics(model.config.get_text_config()),
    )


def decoder_layers(model: PreTrainedModel, layers: int) -> torch.nn.ModuleList:
    """The modules whose attention holds KV.

    Raises:
        InputError: the model has no list of them.
    """
    found = getattr(model.get_decoder(), "layers", None)
    if not isinstance(found, torch.nn.ModuleList) or len(found) < layers:
        raise InputError("model", "has no list of decoder layers", f"{layers} in model.get_decoder().layers")
    return found


def cache_argument(model: PreTrainedModel) -> str:
    """What the model calls the cache that its forward takes.

    Raises:
        InputError: it takes none.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise InputError("model", "takes no cache", "a forward with `cache` or `past_key_values`")


@contextmanager
def watched(
    decoder_layers: torch.nn.ModuleList, stateful: Collection[int], steps: LayerPass
) -> Iterator[None]:
    """Tell the pass when each decoder layer begins and ends, and wait for `stateful` ones there, while this is open."""
    with ExitStack() as hooks:
        for index, module in enumerate(decoder_layers):

            def begin(*_: Any, layer: int = index) -> None:
                steps.begin(layer)
                if layer in stateful:
                    steps.ready(layer)

            def end(*_: Any, layer: int = index) -> None:
                steps.end(layer)

            hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        yield


def _numerics(config: Any) -> str:
    # Named are the fields left out, so that one nobody thought of makes a miss and never a wrong hit.
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_NUMERIC}
    canonical = json.dumps(fields, sort_keys=True, default=str)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _refuse_unsupported(config: Any) -> None:
    if config.model_type not in MODEL_TYPES:
        raise InputError("model_type", f"{config.model_type!r} is not supported", ", ".join(MODEL_TYPES))
    kinds = set(_layer_types(config))
    if others := kinds - _LAYER_TYPES:
        raise InputError(
            "layer_types", f"holds {', '.join(sorted(others))}", ", ".join(sorted(_LAYER_TYPES)) + " only"
        )
    if "sliding_attention" in kinds and getattr(config, "sliding_window", None) is None:
        raise InputError("sliding_window", "is null", "a window for the layers that slide")
    if getattr(config, "use_bidirectional_attention", None):
        raise InputError("use_bidirectional_attention", "is set", "false: KV of a causal decoder")
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set of them, or one for each kind of layer.
    for each in (parameters,) if "rope_type" in parameters else parameters.values() or ({},):
        rope_type = each.get("rope_type")
        if rope_type not in _ROPE_TYPES:
            raise InputError("rope_parameters.rope_type", f"is {rope_type!r}", ", ".join(_ROPE_TYPES))


def _layer_types(config: Any) -> list[str]:
    """What every layer is; mistral has no list of them: they all slide, or none does."""
    listed: list[str] | None = getattr(config, "layer_types", None)
    if listed is not None:
        return listed
    sliding = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * int(config.num_hidden_layers)
