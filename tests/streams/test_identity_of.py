"""What a model's configuration says, changed alone, is a miss: nothing in it is left out but what is named here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvlane.policy.errors import InputError
from kvlane.streams.engines.transformers_model import MODEL_TYPES, identity_of, layout_of
from kvlane.transfer.host import HostStore

UNIT = 8

# Fields that KV does not depend on, which a hit may therefore disagree in. Kept apart from the adapter's own list, so
# that a field can be left out of the identity only in both places.
SAME_KV = {
    "_name_or_path",
    "architectures",
    "transformers_version",
    "attn_implementation",
    "chunk_size_feed_forward",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "id2label",
    "label2id",
    "problem_type",
    "attention_dropout",
    # What the weights were saved as; the KV's own type is the model's, and has a test of its own.
    "dtype",
    "torch_dtype",
}


def other(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 1
    if isinstance(value, str):
        return {"silu": "gelu"}.get(value, value + "x")
    if isinstance(value, (list, tuple)):
        return [*value[1:], "sliding_attention" if value[:1] == ["full_attention"] else "full_attention"]
    if isinstance(value, dict):
        return {key: part if isinstance(part, str) else other(part) for key, part in value.items()}
    return 5


def stored_under(identity, layout):
    store = HostStore(UNIT)
    tokens = 2 * UNIT
    rows: list[Any] = [
        tuple(
            np.zeros(nbytes, np.uint8)
            for nbytes in (
                tokens * shape.k_bytes_per_token,
                tokens * shape.v_bytes_per_token,
                shape.state_bytes,
            )
        )
        for shape in layout.shapes
    ]
    assert store.put(identity, range(tokens), layout, rows, (tokens,)) == tokens
    return store


def identity(model, name="tiny", revision="r1", active=None):
    return identity_of(model, name, revision, active)


def make_model(kind):
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    if kind == "lfm2":
        sizes |= {"layer_types": ["conv", "full_attention"]}
    config = AutoConfig.for_model(kind, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_field_of_a_configuration_changed_alone_is_a_miss(kind):
    model = make_model(kind)
    ours = identity(model)
    store = stored_under(ours, layout_of(model))
    ids = range(2 * UNIT)
    config = model.config
    hits, misses = set[str](), set[str]()
    for name, value in config.to_dict().items():
        object.__setattr__(config, name, other(value))
        try:
            found = store.lookup(identity(model), ids).state
        except InputError:
            found = "miss"  # refused: it gets no identity, so it finds nothing
        object.__setattr__(config, name, value)
        (hits if found == "hit" else misses).add(name)
    assert hits <= SAME_KV, f"fields that are no part of the identity: {sorted(hits - SAME_KV)}"
    assert misses >= {
        "rope_parameters",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
    }
    assert store.lookup(identity(model), ids).state == "hit"


def test_what_no_configuration_says_changed_alone_is_a_miss_too():
    model, ids = make_model("llama"), range(2 * UNIT)
    store = stored_under(identity(model), layout_of(model))
    assert store.lookup(identity(model), ids).state == "hit"
    others = [
        identity(model, name="tiny2"),
        identity(model, revision="r2"),
        identity(model, active="lora-a"),
        identity(model.to(torch.float16)),
        identity(model.to(torch.bfloat16)),
    ]
    assert len(set(others)) == len(others)
    for changed in others:
        assert store.lookup(changed, ids).state == "miss"
