"""What a model weighs: KV bytes, weights and FLOP, layer by layer and in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from kvlane.policy.errors import InputError
from kvlane.policy.model_config import read_config, read_json
from kvlane.policy.model_kv import BYTES_PER_ELEMENT, KvFormat, bytes_per_element, kv_format
from kvlane.policy.model_layer import LatentCompute, LayerSpec, attention_pairs

__all__ = [
    "BYTES_PER_ELEMENT",
    "KvFormat",
    "LayerSpec",
    "ModelSpec",
    "attention_pairs",
    "bytes_per_element",
    "gain_tokens",
    "kv_format",
    "usable_tokens",
]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: its layers in order and what stands around them.

    `weight_dtype` is what the weights are stored in (and computed in, as far as the device has a peak for
    it); `kv_dtype` is what KV is stored in, an input of its own: a name, or a `KvFormat`. All bytes are of one
    rank of `tp`; KV heads fewer than ranks and latent rows are replicated, so times `tp` is their sum.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    hidden: int
    vocab: int
    weight_dtype: str
    kv_dtype: str | KvFormat

    @property
    def uniform(self) -> bool:
        """Whether all layers are alike, so that the O(1) forms of the pipeline hold."""
        return all(layer == self.layers[0] for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        """Whether some layer keeps a state, which exists only where it was snapshotted."""
        return any(layer.state is not None for layer in self.layers)

    def next_layer_with_kv(self, after: int) -> int | None:
        """The first layer after `after` that has KV or state to load: the one to prefetch, None at the end."""
        for index in range(after + 1, len(self.layers)):
            layer = self.layers[index]
            if layer.stores_kv and layer.kv_heads > 0:
                return index
        return None

    def kv_bytes_per_token(self, kv_dtype: str | KvFormat | None = None, tp: int = 1) -> float:
        """Bytes of KV per further token on one rank beyond all windows, all layers, indexer rows apart."""
        form = self.form(kv_dtype)
        return sum(layer.kv_row_bytes(form, tp) for layer in self.layers if layer.window is None)

    def form(self, kv_dtype: str | KvFormat | None = None) -> KvFormat:
        """The KV format of that name, else the model's own; raises `InputError` naming `kv_dtype`."""
        return kv_format(self.kv_dtype if kv_dtype is None else kv_dtype)

    @property
    def indexer_bytes_per_token(self) -> float:
        """Bytes of indexer keys per token, all layers; on every rank."""
        return sum(layer.indexer_row_bytes for layer in self.layers)

    def state_bytes(self, tp: int = 1) -> float:
        """Static bytes on one rank: recurrent and convolution state, whatever the number of tokens."""
        return sum(layer.state_bytes(tp) for layer in self.layers)

    def move_bytes(self, tokens: int, kv_dtype: str | KvFormat | None = None, tp: int = 1) -> float:
        """Bytes to bring to one rank so that it can go on after `tokens` tokens: KV and state, indexer apart.

        Sliding and chunked layers need `[max(0, tokens - window), tokens)`; one snapshot of each state.
        """
        form = self.form(kv_dtype)
        return self.state_bytes(tp) + sum(
            layer.moved_tokens(tokens) * layer.kv_row_bytes(form, tp) for layer in self.layers
        )

    def reserve_bytes(
        self, tokens: int, kv_dtype: str | KvFormat | None = None, tp: int = 1, *, frees_windows: bool = False
    ) -> float:
        """Bytes one rank reserves for `tokens` tokens, indexer apart: every layer's KV whole, and the states.

        `frees_windows` is for an engine that gives back what has slid out of a window: it then reserves what
        would be moved.
        """
        if frees_windows:
            return self.move_bytes(tokens, kv_dtype, tp)
        form = self.form(kv_dtype)
        return self.state_bytes(tp) + tokens * sum(layer.kv_row_bytes(form, tp) for layer in self.layers)

    def with_latent_compute(self, compute: LatentCompute) -> ModelSpec:
        """The same model on an engine that computes MLA in one way only; nothing changes without MLA."""
        if compute not in get_args(LatentCompute):
            raise InputError("compute", f"unknown way {compute!r}", ", ".join(get_args(LatentCompute)))
        layers = (
            layer if layer.latent is None else replace(layer, latent=replace(layer.latent, compute=compute))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def layer_weight_bytes(self) -> float:
        """Bytes of all layers' weights (embeddings and LM head apart), over all ranks."""
        size = bytes_per_element(self.weight_dtype, "weight_dtype")
        return sum(layer.weight_bytes(size) for layer in self.layers)

    def touched_weight_bytes(self, tokens: int) -> float:
        """Bytes of those weights that a pass of `tokens` tokens reads: of the experts, the ones it touches."""
        size = bytes_per_element(self.weight_dtype, "weight_dtype")
        return sum(layer.weight_bytes(size, tokens) for layer in self.layers)

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
        return sum(layer.flop(resident, new) for layer in self.layers) + self.head_flop

    def check_tp(self, tp: int) -> None:
        """Raises `InputError` naming `tp` when `tp` ranks cannot divide the attention heads evenly."""
        if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
            raise InputError("tp", f"{tp!r} is not a number of ranks", "a whole number of 1 or more")
        for layer in self.layers:
            state_heads = 0 if layer.state is None else layer.state.heads
            for heads, what in ((layer.heads, "attention"), (state_heads, "state")):
                if heads % tp:
                    raise InputError(
                        "tp", f"{tp} ranks do not divide {heads} {what} heads", "a divisor of them"
                    )
            if layer.kv_heads and layer.kv_heads % tp and tp % layer.kv_heads:
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
            config = read_json(path)
            name = name or path.stem
        if not isinstance(config, Mapping):
            raise InputError(
                "config", f"is a {type(config).__name__}", "an object with a config.json's fields"
            )
        reading = read_config(config)
        return cls(
            name=name or reading.name or "model",
            layers=reading.layers,
            hidden=reading.hidden,
            vocab=reading.vocab,
            weight_dtype=reading.weight_dtype,
            kv_dtype=reading.kv_dtype or "bf16",
        )


def usable_tokens(hit: int, prompt: int, unit: int, tail: int = 1) -> int:
    """Stored tokens that may be used: `floor(min(hit, prompt - tail) / unit) * unit`, never below zero."""
    return max(0, min(hit, prompt - tail) // unit * unit)


def gain_tokens(hits: tuple[int, ...], resident: int) -> int:
    """Tokens a load can add beyond `resident`: the rank with the smallest hit counts."""
    return max(0, min(hits) - resident)
