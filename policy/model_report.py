"""What a model weighs, put together for people and for JSON: by layer kind and in all, per rank and summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlane.policy.model import KvFormat, LayerSpec, ModelSpec

# Keys of a weighing, in the order they are told in.
KEYS = (
    "bytes_per_token",
    "indexer_bytes_per_token",
    "static_bytes",
    "move_bytes",
    "reserve_bytes",
    "prefill_flop",
)


@dataclass(frozen=True, slots=True)
class Weighing:
    """What some layers weigh at `tokens` tokens on `tp` ranks: bytes, and FLOP of a prefill from token 0."""

    layers: Sequence[LayerSpec]
    form: KvFormat
    tokens: int
    tp: int
    head_flop: float = 0.0

    def per_rank(self) -> dict[str, int | float]:
        """On one rank; FLOP are divided evenly, bytes replicated where heads are fewer than ranks."""
        rows = [layer.kv_row_bytes(self.form, self.tp) for layer in self.layers]
        static = sum(layer.state_bytes(self.tp) for layer in self.layers)
        growing = sum(row for layer, row in zip(self.layers, rows, strict=True) if layer.window is None)
        moved = sum(
            row * layer.moved_tokens(self.tokens) for layer, row in zip(self.layers, rows, strict=True)
        )
        flop = sum(layer.flop(0, self.tokens) for layer in self.layers) + self.head_flop
        values = (
            growing,
            sum(layer.indexer_row_bytes for layer in self.layers),
            static,
            moved + static,
            sum(rows) * self.tokens + static,
            flop / self.tp,
        )
        return {key: _whole(value) for key, value in zip(KEYS, values, strict=True)}

    def summed(self) -> dict[str, int | float]:
        """Over all ranks."""
        return {key: _whole(value * self.tp) for key, value in self.per_rank().items()}


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def weigh(
    model: ModelSpec, tokens: int, *, tp: int = 1, kv_dtype: str | KvFormat | None = None
) -> dict[str, Any]:
    """Everything `kvlane models NAME` tells, JSON-ready.

    The top level is summed over the `tp` ranks, `per_rank` holds the same keys for one of them; KV and state at
    `tokens` tokens are in `move_bytes` and `reserve_bytes`, indexer keys apart. `layers` lists the kinds. Raises
    `InputError` naming `tp` or `kv_dtype`.
    """
    model.check_tp(tp)
    form = model.form(kv_dtype)
    whole = Weighing(model.layers, form, tokens, tp, model.head_flop)
    kinds: dict[tuple[Any, ...], list[LayerSpec]] = {}
    for layer in model.layers:
        key = (layer.kind, layer.kv_heads, layer.k_width, layer.v_width, layer.window, layer.stores_kv)
        kinds.setdefault((*key, layer.indexer, layer.state), []).append(layer)
    return {
        "model": model.name,
        "tokens": tokens,
        "tp": tp,
        "kv_dtype": form.name,
        "weight_dtype": model.weight_dtype,
        "layer_count": len(model.layers),
        **whole.summed(),
        "per_rank": whole.per_rank(),
        "layers": [
            {
                "kind": layers[0].kind,
                "count": len(layers),
                "formula": formula(layers[0], form),
                **Weighing(layers, form, tokens, tp).summed(),
                "per_rank": Weighing(layers, form, tokens, tp).per_rank(),
            }
            for layers in kinds.values()
        ],
    }


def formula(layer: LayerSpec, form: KvFormat) -> str:
    """What one such layer keeps, in words."""
    if layer.state is not None:
        state = layer.state
        channels = state.heads * state.head_channels + state.groups * state.group_channels
        return (
            f"no KV; a state of {state.heads} heads x {state.head_elements:,} values x {state.element_bytes:g} bytes"
            f" + {channels:,} convolution channels x {state.kernel - 1} columns x {state.conv_bytes:g} bytes"
        )
    if layer.heads == 0:
        return "no attention, so no KV"
    if not layer.stores_kv:
        return "attends an earlier layer's KV, so none of its own"
    width = _format_words(form)
    if layer.latent is not None:
        text = f"one row of {layer.latent.rank} latent + {layer.latent.rotary} rotary values{width}, on every rank"
        if layer.indexer is not None:
            own = (
                f"an indexer key of {layer.indexer_row_bytes:g} bytes"
                if layer.indexer.heads
                else "no key of its own"
            )
            text += f"; the best {layer.indexer.topk:,} tokens attended; {own}"
        return text
    if layer.k_width == layer.v_width:
        text = f"2 x {layer.kv_heads} KV heads x {layer.k_width}{width} a token"
    else:
        text = f"{layer.kv_heads} KV heads x ({layer.k_width} K + {layer.v_width} V){width} a token"
    if layer.window is not None:
        text += f", moved for the last {layer.window:,} tokens"
    return text


def _format_words(form: KvFormat) -> str:
    if form.scale_bytes == 0 and form.rotary_bits is None and form.align_bytes == 1:
        return f" x {form.bits / 8:g} bytes"
    group = f"every {form.group} values" if form.group else "a row"
    text = f" x {form.bits:g} bits + {form.scale_bytes:g} bytes of scales for {group}"
    return text + (f", rows padded to {form.align_bytes} bytes" if form.align_bytes > 1 else "")
