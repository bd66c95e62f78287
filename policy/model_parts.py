"""The parts that layers of every family are made of: weights counted, and what a part needs read from a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvlane.policy.errors import InputError
from kvlane.policy.model_fields import Fields
from kvlane.policy.model_layer import Experts, Kind, LayerSpec, State
from kvlane.policy.model_quant import Quantisation

# transformers' names of layer kinds, and older spellings of the same.
FULL = {"full_attention": "full_attention", "attention": "full_attention"}
SLIDING = {**FULL, "sliding_attention": "sliding_attention"}
CHUNKED = {**FULL, "chunked_attention": "chunked_attention"}
LINEAR = {**FULL, "linear_attention": "linear_attention"}


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads and the widths of K and V, in elements per head."""

    heads: int
    kv_heads: int
    k_width: int
    v_width: int

    def weights(self, hidden: int, *, gate: bool = False, v_proj: bool = True) -> int:
        """Weights of the four projections; `gate` doubles the query's (a gate on the output comes with it)."""
        query = self.heads * self.k_width * (2 if gate else 1)
        value = self.kv_heads * self.v_width if v_proj else 0
        return hidden * (query + self.kv_heads * self.k_width + value + self.heads * self.v_width)

    def layer(self, weights: int, kind: Kind = "full_attention", window: int | None = None) -> LayerSpec:
        return LayerSpec(self.heads, self.kv_heads, self.k_width, self.v_width, weights, kind, window)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A layer's feed-forward part: weights of every token's way, routed experts, and the router's weights."""

    weights: int
    experts: Experts | None = None
    router: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """What a reader is given: the fields, the layer count and width, and the number formats."""

    f: Fields
    count: int
    hidden: int
    quant: Quantisation

    def layer(self, attention: LayerSpec, mlp: Mlp) -> LayerSpec:
        """An attention layer with its feed-forward part added."""
        dense = mlp.weights - mlp.router
        part = "linear" if attention.state is not None else "attention"
        wide = self.quant.wide(part, attention.weights) + self.quant.wide("mlp", dense) + mlp.router
        return replace(
            attention, weights=attention.weights + mlp.weights, experts=mlp.experts, wide_weights=wide
        )


Reader = Callable[[Frame], list[LayerSpec]]


def gated(hidden: int, ffn: int) -> int:
    """Weights of a gated MLP: gate, up and down."""
    return 3 * hidden * ffn


def plain_mlp(hidden: int, ffn: int) -> int:
    """Weights of an MLP without a gate: up and down."""
    return 2 * hidden * ffn


def read_heads(f: Fields, hidden: int, *, kv_heads: str = "num_key_value_heads") -> Heads:
    """Heads and head width; raises `InputError` naming the field that is missing or does not fit."""
    heads = f.whole("num_attention_heads")
    # A config without the field is multi-head attention: every query head has its own K and V.
    kv = f.whole(kv_heads, heads)
    check_heads(heads, kv, kv_heads)
    head_dim = read_head_dim(f, hidden, heads)
    v_width = f.text.get("v_head_dim")
    if v_width == head_dim:
        f.get("v_head_dim")
    return Heads(heads, kv, head_dim, head_dim)


def read_head_dim(f: Fields, hidden: int, heads: int) -> int:
    if f.get("head_dim") is None and hidden % heads:
        raise InputError(
            "head_dim",
            f"is missing and {heads} heads do not divide hidden_size {hidden}",
            "an explicit head_dim",
        )
    return f.whole("head_dim", hidden // heads)


def check_heads(heads: int, kv_heads: int, field: str) -> None:
    if heads % kv_heads:
        raise InputError(field, f"{kv_heads} does not divide {heads} attention heads", "a divisor of them")


def routed(
    hidden: int, experts: int, active: int, width: int, field: str, *, shared: int = 0, gate: bool = True
) -> Mlp:
    """A mixture of `experts` MLPs `width` wide, and shared ones of `shared` in all; raises naming `field`."""
    if active > experts:
        raise InputError(field, f"{active} of {experts} experts", f"at most {experts}")
    size = gated if gate else plain_mlp
    router = hidden * experts
    return Mlp(
        size(hidden, shared) + router if shared else router,
        Experts(experts, active, size(hidden, width)),
        router,
    )


def routed_experts(frame: Frame, count: str, width: int, shared: int = 0) -> Mlp:
    """The same read from a config that names them `count` and `num_experts_per_tok`."""
    active = frame.f.whole("num_experts_per_tok")
    return routed(
        frame.hidden, expert_count(frame.f, count), active, width, "num_experts_per_tok", shared=shared
    )


def expert_count(f: Fields, field: str) -> int:
    """The number of experts under the family's own name, or under the one transformers 5 writes back."""
    count = f.whole(field, f.whole("num_local_experts", f.whole("num_experts", 0, least=0), least=0), least=0)
    for other in ("num_local_experts", "num_experts", "n_routed_experts"):
        if f.text.get(other) not in (None, count):
            raise InputError(other, f"is {str(f.text.get(other))[:40]}", f"{count}, as {field} says")
        f.get(other)
    return f.whole(field) if count == 0 else count


def windowed(heads: Heads, weights: int, kind: str, window: int) -> LayerSpec:
    """A layer of that kind: full attention, or bounded to `window` tokens."""
    if kind == "full_attention":
        return heads.layer(weights)
    known: Kind = "chunked_attention" if kind == "chunked_attention" else "sliding_attention"
    return heads.layer(weights, known, window)


def delta_net(f: Fields, hidden: int) -> tuple[State, int]:
    """A gated delta-rule layer (Qwen3-Next, Qwen3.5): its state, and its projections' weights.

    State: a `key x value` matrix per value head, and the convolution over Q, K and V. Each token reads it twice
    and updates it once: `6 * heads * key * value` FLOP. Raises `InputError` naming the field.
    """
    keys, values = f.whole("linear_num_key_heads"), f.whole("linear_num_value_heads")
    key, value = f.whole("linear_key_head_dim"), f.whole("linear_value_head_dim")
    kernel = f.whole("linear_conv_kernel_dim")
    check_heads(values, keys, "linear_num_key_heads")
    channels = 2 * keys * key + values * value
    state = State(
        heads=values,
        head_elements=key * value,
        element_bytes=state_element_bytes(f, "mamba_ssm_dtype"),
        groups=keys,
        head_channels=value,
        group_channels=2 * key,
        kernel=kernel,
        flop_per_token=6.0 * values * key * value,
    )
    weights = hidden * (channels + values * value + 2 * values) + values * value * hidden + channels * kernel
    return state, weights


def mamba2(f: Fields, hidden: int) -> tuple[State, int]:
    """A Mamba-2 layer: its state, and its projections' weights.

    State: `head_dim x state_size` per head, and the convolution over x, B and C. Each token updates and reads
    it: `4 * heads * head_dim * state_size` FLOP. Raises `InputError` naming the field.
    """
    heads, width, size = f.whole("mamba_num_heads"), f.whole("mamba_head_dim"), f.whole("ssm_state_size")
    groups, kernel = f.whole("n_groups"), f.whole("conv_kernel")
    check_heads(heads, groups, "n_groups")
    f.get("expand")  # only a default for heads times width, which are given
    inner = heads * width
    channels = inner + 2 * groups * size
    state = State(
        heads=heads,
        head_elements=width * size,
        element_bytes=state_element_bytes(f, "mamba_ssm_cache_dtype"),
        groups=groups,
        head_channels=width,
        group_channels=2 * size,
        kernel=kernel,
        flop_per_token=4.0 * heads * width * size,
    )
    return state, hidden * (inner + channels + heads) + inner * hidden + channels * kernel


def state_element_bytes(f: Fields, field: str) -> float:
    """Bytes of one element of a recurrent state; transformers keeps it in 32 bits unless the config says else."""
    value = f.get(field)
    known = {None: 4.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
    if not isinstance(value, (str, type(None))) or value not in known:
        raise InputError(field, f"unknown dtype {str(value)[:40]!r}", "float32, bfloat16 or float16")
    return known[value]
