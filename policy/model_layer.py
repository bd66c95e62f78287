"""One decoder layer: what its KV weighs, what computing it takes, what reading its weights takes.

Formulas: DESIGN section "What a model weighs". A matrix costs 2 FLOP per weight and token, attention
`2 * heads * (k_width + v_width)` FLOP per (query, key) pair: a multiply and an add for the scores and for the
weighted sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvlane.policy.model_kv import KvFormat

Kind = Literal[
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "latent_attention",
    "sparse_latent_attention",
    "linear_attention",
    "mamba",
    "feed_forward",
]
LatentCompute = Literal["cheaper", "expanded", "absorbed"]

# One fp32 scale goes with every 128 fp8 values of an indexer key: 132 bytes for a key of 128. So vLLM's
# DeepseekV32IndexerCache and SGLang's indexer buffer store it, whatever the KV dtype.
_INDEXER_GROUP = 128
_INDEXER_SCALE_BYTES = 4


def attention_pairs(resident: int, new: int) -> float:
    """(query, key) pairs of `new` tokens after `resident` cached ones: `m*p + m*(m+1)/2`."""
    return new * resident + new * (new + 1) / 2


def windowed_pairs(resident: int, new: int, window: int) -> float:
    """The same where a query attends at most `window` keys, its own among them."""

    end = resident + new
    inside = end if end < window else window
    before = resident if resident < window else window
    attended = inside * (inside + 1) / 2 + (end - inside) * window
    return attended - (before * (before + 1) / 2 + (resident - before) * window)


def chunked_pairs(resident: int, new: int, chunk: int) -> float:
    """The same where a query attends only the keys of its own chunk of `chunk` tokens, up to itself."""

    def first(tokens: int) -> float:
        whole, rest = divmod(tokens, chunk)
        return whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2

    return first(resident + new) - first(resident)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: a token's K and V are one row of `rank + rotary` values.

    `expanded` computes with the K (`nope + rotary` wide) and V (`value` wide) of every head, up-projected from
    the rows, the prefix's once a pass; `absorbed` computes on the rows themselves; `cheaper` takes the cheaper
    of the two, as engines that have both do.
    """

    rank: int
    rotary: int
    nope: int
    value: int
    compute: LatentCompute = "cheaper"

    def up_flop(self, heads: int) -> float:
        """FLOP of up-projecting one row of the prefix to all heads."""
        return 2.0 * self.rank * heads * (self.nope + self.value)

    def absorbed_flop(self, heads: int) -> float:
        """FLOP per attended pair on the rows themselves."""
        return 2.0 * heads * (2 * self.rank + self.rotary)


@dataclass(frozen=True, slots=True)
class Indexer:
    """Sparse attention: `heads` small heads of `width` rate every key, and the `topk` best are attended.

    `heads` is 0 in a layer that reuses an earlier layer's choice and stores no keys of its own.
    """

    heads: int
    width: int
    topk: int

    @property
    def row_bytes(self) -> float:
        """Bytes of one token's indexer key: fp8 values and their scales."""
        if self.heads == 0:
            return 0.0
        return self.width + -(-self.width // _INDEXER_GROUP) * _INDEXER_SCALE_BYTES

    @property
    def flop_per_pair(self) -> float:
        """FLOP of rating one key for one query; the sum over heads, 1/width of it, is left out."""
        return 2.0 * self.heads * self.width


@dataclass(frozen=True, slots=True)
class State:
    """What a linear attention or Mamba layer remembers, however many tokens it has seen.

    `heads` states of `head_elements` values of `element_bytes` each, and the last `kernel - 1` columns of a
    convolution over `heads * head_channels + groups * group_channels` channels, of `conv_bytes` each. (vLLM
    stores those columns; transformers keeps one more, which the next token pushes out.)
    """

    heads: int
    head_elements: int
    element_bytes: float
    groups: int
    head_channels: int
    group_channels: int
    kernel: int
    conv_bytes: float = 2.0
    flop_per_token: float = 0.0

    def bytes(self, tp: int = 1) -> float:
        """Bytes on one of `tp` ranks; groups fewer than ranks are replicated."""
        heads, groups = -(-self.heads // tp), -(-self.groups // tp)
        channels = heads * self.head_channels + groups * self.group_channels
        recurrent = heads * self.head_elements * self.element_bytes
        return recurrent + channels * (self.kernel - 1) * self.conv_bytes


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` routed experts of `weights` weights each, of which a token uses `active`."""

    count: int
    active: int
    weights: int

    def touched(self, tokens: int) -> float:
        """Experts that at least one of `tokens` tokens uses, if each chooses at random."""
        return self.count * (1 - (1 - self.active / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    `heads`, `kv_heads` and the widths (elements per head) are its attention's, 0 where it has none; an MLA
    layer has one KV head, its latent row, and no V. `weights` counts the weights every token passes through,
    `experts` holds the routed ones; `wide_weights` of `weights` stay in 16 bits in a quantised checkpoint.
    `window` bounds a sliding layer to so many tokens, a chunked one to chunks of them. `stores_kv` is false
    where the layer attends another layer's KV. `all_reduces` counts what tensor parallelism adds to a pass: one
    after attention and one after the MLP, or one in all where both run side by side or only one is there.
    """

    heads: int
    kv_heads: int
    k_width: int
    v_width: int
    weights: int
    kind: Kind = "full_attention"
    window: int | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    state: State | None = None
    experts: Experts | None = None
    wide_weights: int = 0
    stores_kv: bool = True
    all_reduces: int = 2

    @property
    def plain(self) -> bool:
        """Whether the layer's costs are linear in tokens and attended pairs, and its KV in tokens."""
        special = (self.window, self.latent, self.indexer, self.state, self.experts)
        return all(part is None for part in special) and self.stores_kv and self.heads > 0

    def kv_elements(self, tp: int = 1) -> int:
        """KV elements per token on one of `tp` ranks; fewer KV heads than ranks are replicated."""
        if not self.stores_kv:
            return 0
        return -(-self.kv_heads // tp) * (self.k_width + self.v_width)

    def kv_row_bytes(self, form: KvFormat, tp: int = 1) -> float:
        """Bytes of KV that one token leaves on one rank, the indexer's apart."""
        if not self.stores_kv or self.kv_heads == 0:
            return 0.0
        if self.latent is not None:
            return form.row_bytes(self.latent.rank, self.latent.rotary)
        return -(-self.kv_heads // tp) * (form.row_bytes(self.k_width) + form.row_bytes(self.v_width))

    @property
    def indexer_row_bytes(self) -> float:
        """Bytes of one token's indexer key, replicated on every rank."""
        return 0.0 if self.indexer is None else self.indexer.row_bytes

    def state_bytes(self, tp: int = 1) -> float:
        """Bytes of recurrent and convolution state on one rank, whatever the number of tokens."""
        return 0.0 if self.state is None else self.state.bytes(tp)

    def moved_tokens(self, tokens: int) -> int:
        """Of `tokens` consecutive ones, how many leave KV that the next token may need."""
        return tokens if self.window is None else min(tokens, self.window)

    def pairs(self, resident: int, new: int) -> float:
        """(query, key) pairs attended."""
        if self.indexer is not None:
            return windowed_pairs(resident, new, self.indexer.topk)
        if self.window is None:
            return attention_pairs(resident, new)
        if self.kind == "chunked_attention":
            return chunked_pairs(resident, new, self.window)
        return windowed_pairs(resident, new, self.window)

    @property
    def flop_per_pair(self) -> float:
        """FLOP per attended pair, of an MLA layer expanded."""
        if self.latent is not None:
            return 2.0 * self.heads * (self.latent.nope + self.latent.rotary + self.latent.value)
        return 2.0 * self.heads * (self.k_width + self.v_width)

    def attention_flop(self, resident: int, new: int) -> float:
        """FLOP over pairs for `new` tokens after `resident` cached ones, projections apart.

        MLA absorbed costs `2 * heads * (2*rank + rotary)` a pair; expanded fewer, but its prefix is up-projected
        anew in each pass (the new tokens' own up-projection costs the same either way: it is in `weights`).
        """
        pairs, latent = self.pairs(resident, new), self.latent
        flop = self.flop_per_pair * pairs
        if latent is None and self.indexer is None:
            return flop
        if latent is not None:
            expanded = flop + latent.up_flop(self.heads) * resident
            flop = latent.absorbed_flop(self.heads) * pairs
            if latent.compute == "expanded" or (latent.compute == "cheaper" and expanded < flop):
                flop = expanded
        if self.indexer is not None:
            flop += self.indexer.flop_per_pair * attention_pairs(resident, new)
        return flop

    @property
    def active_weights(self) -> int:
        """Weights one token passes through."""
        return self.weights + (0 if self.experts is None else self.experts.active * self.experts.weights)

    @property
    def all_weights(self) -> int:
        """Weights the layer holds."""
        return self.weights + (0 if self.experts is None else self.experts.count * self.experts.weights)

    @property
    def state_flop_per_token(self) -> float:
        return 0.0 if self.state is None else self.state.flop_per_token

    @property
    def flop_per_token(self) -> float:
        """FLOP per new token, pairs apart."""
        return 2.0 * self.active_weights + self.state_flop_per_token

    def flop(self, resident: int, new: int) -> float:
        """FLOP of the layer for `new` tokens after `resident` cached ones."""
        return self.flop_per_token * new + self.attention_flop(resident, new)

    def weight_bytes(self, element_bytes: float, tokens: int | None = None) -> float:
        """Bytes of the weights that `tokens` tokens touch (None: all of them), over all ranks."""
        narrow = float(self.weights - self.wide_weights)
        if self.experts is not None:
            touched = self.experts.count if tokens is None else self.experts.touched(tokens)
            narrow += touched * self.experts.weights
        return narrow * element_bytes + self.wide_weights * max(2.0, element_bytes)
