"""The model of the reproduction: a real `LlamaForCausalLM` with random weights, small enough for one core."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvlane.policy.calibration_apply import model_config_of
from kvlane.policy.errors import InputError
from kvlane.policy.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. Raises `InputError` naming the field for sizes no such model can have."""

    layers: int = 16
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 704
    vocab: int = 2048

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            # Answers are told apart by their two largest logits, so there must be two.
            least = 2 if name == "vocab" else 1
            if value < least:
                raise InputError(name, f"is {value}", f"{least} or more")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise InputError(
                "heads", f"{self.heads} heads of an even size do not fill hidden {self.hidden}", "a divisor"
            )
        if self.heads % self.kv_heads:
            raise InputError(
                "kv_heads", f"{self.kv_heads} does not divide {self.heads} heads", "a divisor of heads"
            )

    @property
    def name(self) -> str:
        """What a calibration calls a model of these sizes."""
        return f"demo-llama-{self.layers}x{self.hidden}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in fp32, embeddings and LM head included."""
        attention = self.hidden * (self.hidden // self.heads) * 2 * (self.heads + self.kv_heads)
        return 4 * (self.layers * (attention + 3 * self.hidden * self.ffn) + 2 * self.vocab * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV in fp32, all layers."""
        return 4 * self.layers * 2 * self.kv_heads * (self.hidden // self.heads)

    def __str__(self) -> str:
        return (
            f"LlamaForCausalLM, {self.layers} layers, hidden {self.hidden}, {self.heads} heads,"
            f" {self.kv_heads} KV heads, FFN {self.ffn}, vocab {self.vocab}, fp32, random weights"
        )


def build_model(shape: Shape, longest_prompt: int, seed: int) -> LlamaForCausalLM:
    """The model in eval mode, the same for the same seed."""
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn,
        vocab_size=shape.vocab,
        max_position_embeddings=max(2048, longest_prompt),
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    """The model's own configuration, as far as a calibration record can hold it."""
    return model_config_of({**model.config.to_dict(), "dtype": str(model.dtype).removeprefix("torch.")})


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """What the policy knows of the model: its own configuration, read as any other."""
    return ModelSpec.from_config(config_of(model), name="random-weight Llama")


def random_prompt(shape: Shape, tokens: int, seed: int) -> npt.NDArray[np.int64]:
    """A prompt of random ids, shape [tokens]."""
    return np.random.default_rng(seed).integers(0, shape.vocab, tokens)
