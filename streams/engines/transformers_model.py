"""A transformers model seen from its KV: which kinds run, how KV lies, what identifies it, what its layers are."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvlane.policy.errors import InputError
from kvlane.streams.executor import LayerPass
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders run in the tests: full attention, keys and values in every layer, rotary positions."""

# Rotary kinds whose keys depend on the position alone. Under the others (dynamic, longrope) the same token's key
# depends on how long the prompt is, so it may not be reused in another prompt.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# Not part of what KV is. The attention implementation is among them: eager and sdpa compute the same attention and
# differ by rounding only, as two ways of cutting a prompt into passes do.
_NOT_NUMERIC = frozenset(
    {
        # Names, paths and versions; type and rotary settings have parts of the identity of their own.
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
    return KvLayout(config.num_hidden_layers, kv_heads, head_dim, head_dim, model.dtype.itemsize)


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
def watched(decoder_layers: torch.nn.ModuleList, steps: LayerPass) -> Iterator[None]:
    """Tell the pass when each decoder layer begins and ends, while this is open."""
    with ExitStack() as hooks:
        for index, module in enumerate(decoder_layers):

            def begin(*_: Any, layer: int = index) -> None:
                steps.begin(layer)

            def end(*_: Any, layer: int = index) -> None:
                steps.end(layer)

            hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        yield


def _numerics(config: Any) -> str:
    # Named are the fields left out, so that one nobody thought of makes a miss and never a wrong hit.
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _NOT_NUMERIC and not name.startswith("_")
    }
    canonical = json.dumps(fields, sort_keys=True, default=str)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _refuse_unsupported(config: Any) -> None:
    if config.model_type not in MODEL_TYPES:
        raise InputError("model_type", f"{config.model_type!r} is not supported", ", ".join(MODEL_TYPES))
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        raise InputError("layer_types", f"holds {', '.join(sorted(others))}", "full_attention only")
    if getattr(config, "sliding_window", None) is not None:
        raise InputError("sliding_window", f"is {config.sliding_window}", "null: full attention only")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope_type not in _ROPE_TYPES:
        raise InputError("rope_parameters.rope_type", f"is {rope_type!r}", ", ".join(_ROPE_TYPES))
