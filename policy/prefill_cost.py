"""What it costs to compute tokens, given how many are cached before them.

One pass over all layers for `m` new tokens after `p` cached ones takes

    t0 + max(b*m + c*w(p, m), floor) + d*(p + m)

`w` being the attended pairs, or the rectangle `m*(p + m)` where the kernel computes masked entries too, and
`floor` the time to read the weights once and the KV (DESIGN, "What a path costs"). `d` is what goes over the
whole context once a pass whatever `m` is, such as copying K and V to all query heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlane.policy.chunks import attention_flop_of_chunks, moved_tokens_of_chunks
from kvlane.policy.machine import Machine, PrefillEfficiency
from kvlane.policy.model import KvFormat, LayerSpec, ModelSpec, attention_pairs, bytes_per_element
from kvlane.policy.pass_rates import PassRates

# Activations are exchanged between ranks in 16 bits.
_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class PassCost:
    """Coefficients of one pass, in seconds: per pass, per new token, per attended pair, per context token."""

    overhead_s: float
    token_s: float
    pair_s: float
    context_s: float = 0.0
    rectangle: bool = False

    def work_s(self, resident: int, new: int) -> float:
        """The part that arithmetic takes: `b*m + c*w(p, m)`."""
        pairs = new * (resident + new) if self.rectangle else attention_pairs(resident, new)
        return self.token_s * new + self.pair_s * pairs

    def pass_s(self, resident: int, new: int, floor_s: float = 0.0) -> float:
        """Seconds of the pass, its work taking at least `floor_s`."""
        return self.overhead_s + max(self.work_s(resident, new), floor_s) + self.context_s * (resident + new)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The cost of prefill passes on one engine and device.

    `fresh` holds for a pass from token 0, `extend` for one after a cached prefix: some backends run
    different attention kernels for the two. `floor_s` is the time to read the weights once,
    `floor_context_s` that to read one token's KV. `head_s` is the LM head for one token, not in the passes.
    `unlike` holds the layers where they differ: their FLOP then say how a pass divides over them; `kinds` are the
    different ones, `order` which of them each layer is: of one kind where they do not differ.
    """

    layers: int
    fresh: PassCost
    extend: PassCost
    head_s: float = 0.0
    floor_s: float = 0.0
    floor_context_s: float = 0.0
    unlike: tuple[LayerSpec, ...] = ()
    kinds: tuple[LayerSpec, ...] = field(init=False, repr=False, compare=False)
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {layer: number for number, layer in enumerate(dict.fromkeys(self.unlike))}
        object.__setattr__(self, "kinds", tuple(numbers))
        order = [numbers[layer] for layer in self.unlike] if self.unlike else [0] * self.layers
        object.__setattr__(self, "order", tuple(order))

    @property
    def uniform(self) -> bool:
        """Whether every layer takes the same share of a pass."""
        return not self.unlike

    @property
    def floored(self) -> bool:
        """Whether a pass may be bound by memory."""
        return self.floor_s > 0 or self.floor_context_s > 0

    def layers_s(self, resident: int, new: int) -> Sequence[float]:
        """Seconds each layer takes in one pass; their sum is `pass_s`."""
        return self.whole_and_layers_s(resident, new)[1]

    def whole_and_layers_s(self, resident: int, new: int) -> tuple[float, Sequence[float]]:
        """`pass_s` and `layers_s` of the same pass."""
        whole, each = self.whole_and_kinds_s(resident, new)
        return whole, [each[kind] for kind in self.order]

    def whole_and_kinds_s(self, resident: int, new: int) -> tuple[float, Sequence[float]]:
        """`pass_s`, and what each layer of each of `kinds` takes in the same pass."""
        whole = self.pass_s(resident, new)
        if self.uniform:
            return whole, [whole / self.layers]
        each = [layer.flop(resident, new) for layer in self.kinds]
        scale = whole / sum([each[kind] for kind in self.order])
        return whole, [scale * flop for flop in each]

    def coefficients(self, resident: int) -> PassCost:
        return self.extend if resident > 0 else self.fresh

    def floor_of(self, context: int) -> float:
        """Seconds below which no pass over `context` tokens of KV can go."""
        return self.floor_s + self.floor_context_s * context

    def pass_s(self, resident: int, new: int) -> float:
        """Seconds of one pass over all layers, LM head apart; no tokens cost nothing."""
        if new <= 0:
            return 0.0
        # `cost.pass_s` and `floor_of` written out: a decision comes here some fifty times.
        cost = self.extend if resident > 0 else self.fresh
        context = resident + new
        pairs = new * context if cost.rectangle else new * resident + new * (new + 1) / 2
        work = cost.token_s * new + cost.pair_s * pairs
        floor = self.floor_s + self.floor_context_s * context
        return cost.overhead_s + (work if work > floor else floor) + cost.context_s * context

    def prefill_s(self, resident: int, new: int, chunk_tokens: int | None = None) -> float:
        """Seconds of all passes when the engine prefills at most `chunk_tokens` a pass (None: all in one)."""
        if chunk_tokens is None or new <= chunk_tokens:
            return self.pass_s(resident, new)
        total = self.pass_s(resident, chunk_tokens)
        resident += chunk_tokens
        full, rest = divmod(new - chunk_tokens, chunk_tokens)
        total += self._full_chunks_s(resident, full, chunk_tokens)
        return total + self.pass_s(resident + full * chunk_tokens, rest)

    def _full_chunks_s(self, resident: int, count: int, chunk: int) -> float:
        """Seconds of `count` whole chunks after `resident` > 0 tokens, in O(1).

        Work and floor are both linear in the chunk's number, so the larger of them changes sides at most once.
        """
        if count <= 0:
            return 0.0
        cost = self.extend
        work, work_step = cost.work_s(resident, chunk), cost.pair_s * chunk * chunk
        contexts = count * (resident + chunk) + chunk * count * (count - 1) / 2
        fixed = count * cost.overhead_s + cost.context_s * contexts
        if not self.floored:
            return fixed + count * work + work_step * count * (count - 1) / 2
        floor, floor_step = self.floor_of(resident + chunk), self.floor_context_s * chunk
        gap, gap_step = work - floor, work_step - floor_step
        work_first = gap > 0 or (gap == 0 and gap_step > 0)
        first, then = (work, work_step), (floor, floor_step)
        if not work_first:
            first, then = then, first
        turn = count
        if gap * gap_step < 0:
            turn = min(count, int(-gap / gap_step) + 1)  # chunks before the sides change

        def series(start: float, step: float, low: int, high: int) -> float:
            return (high - low) * start + step * (high * (high - 1) - low * (low - 1)) / 2

        passes = series(*first, 0, turn) + series(*then, turn, count)
        return fixed + passes

    @classmethod
    def from_profile(
        cls,
        model: ModelSpec,
        machine: Machine,
        *,
        engine: str = "vllm",
        tp: int = 1,
        kv_dtype: str | KvFormat | None = None,
    ) -> tuple[PrefillCost, PrefillEfficiency]:
        """The cost by FLOP over peak and bytes over memory rate, and the efficiency it rests on.

        Layers that are not all plain and alike are priced one by one. Raises `InputError` when the device
        states no peak for the model's weight dtype, or no interconnect for `tp` > 1.
        """
        model.check_tp(tp)
        dtype = _PEAK_NAMES.get(model.weight_dtype, model.weight_dtype)
        row = machine.efficiency_for(dtype, engine)
        rates = PassRates.of(machine, row, dtype, tp=tp)
        form = model.form(kv_dtype)
        prices = {
            layer: _LayerPrice.of(layer, model, rates, form, tp) for layer in dict.fromkeys(model.layers)
        }
        count = Counter(model.layers)

        def over_layers(part: str) -> float:
            return float(sum(getattr(prices[layer], part) * times for layer, times in count.items()))

        cost = PassCost(
            overhead_s=rates.pass_s + over_layers("fixed_s") + over_layers("weights_s"),
            token_s=over_layers("token_s"),
            pair_s=over_layers("pair_s"),
            context_s=over_layers("context_s"),
        )
        head_s = model.head_flop / rates.wide_flops + model.head_weight_bytes / rates.memory_bytes_per_s
        if model.uniform and model.layers[0].plain:
            return cls(layers=len(model.layers), fresh=cost, extend=cost, head_s=head_s), row
        layerwise = LayerwisePrefill(
            layers=len(model.layers),
            fresh=cost,
            extend=cost,
            head_s=head_s,
            unlike=model.layers,
            prices=tuple(prices.values()),
            pass_overhead_s=rates.pass_s,
        )
        return layerwise, row


# Formats whose peak a device states under a wider name.
_PEAK_NAMES = {"nvfp4": "fp4", "mxfp4": "fp4"}


@dataclass(frozen=True, slots=True)
class _LayerPrice:
    """What one layer costs in a pass: fixed, per new token, per FLOP over pairs, per byte it reads."""

    layer: LayerSpec
    fixed_s: float
    token_s: float
    attention_flops: float
    weight_element_bytes: float
    weight_byte_s: float
    row_s: float
    # Seconds to read the weights, None where it depends on the tokens how many of them are touched.
    dense_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        dense_s = None if self.layer.experts is not None else self.weights_s
        object.__setattr__(self, "dense_s", dense_s)

    @classmethod
    def of(cls, layer: LayerSpec, model: ModelSpec, rates: PassRates, form: KvFormat, tp: int) -> _LayerPrice:
        token_s = 2.0 * (layer.weights - layer.wide_weights) / rates.dense_flops
        token_s += 2.0 * layer.wide_weights / rates.wide_flops
        token_s += 2.0 * (layer.active_weights - layer.weights) / rates.expert_flops
        token_s += layer.state_flop_per_token / rates.attention_flops
        fixed_s = rates.layer_s
        if rates.exchange_bytes_per_s is not None:
            token_s += layer.all_reduces * model.hidden * _ACTIVATION_BYTES / rates.exchange_bytes_per_s
            fixed_s += layer.all_reduces * rates.exchange_s
        return cls(
            layer=layer,
            fixed_s=fixed_s,
            token_s=token_s,
            attention_flops=rates.attention_flops,
            weight_element_bytes=bytes_per_element(model.weight_dtype, "weight_dtype"),
            weight_byte_s=1 / rates.memory_bytes_per_s,
            # Each rank reads its own rows, replicated ones too, at its own share of the memory rate.
            row_s=(layer.kv_row_bytes(form, tp) + layer.indexer_row_bytes) * tp / rates.memory_bytes_per_s,
        )

    @property
    def weights_s(self) -> float:
        """Seconds to read all of the layer's weights."""
        return self.layer.weight_bytes(self.weight_element_bytes) * self.weight_byte_s

    def touched_s(self, tokens: int) -> float:
        """Seconds to read the weights that `tokens` tokens touch."""
        if self.dense_s is not None:
            return self.dense_s
        return self.layer.weight_bytes(self.weight_element_bytes, tokens) * self.weight_byte_s

    @property
    def pair_s(self) -> float:
        """Seconds per attended pair beyond all windows: none where one bounds the pairs."""
        layer = self.layer
        indexing = 0.0 if layer.indexer is None else layer.indexer.flop_per_pair
        unbounded = layer.window is None and layer.indexer is None
        return (indexing + (layer.flop_per_pair if unbounded else 0.0)) / self.attention_flops

    @property
    def context_s(self) -> float:
        """Seconds to read one more token of context."""
        return self.row_s if self.layer.window is None else 0.0

    def seconds(self, resident: int, new: int) -> float:
        """Seconds of the layer in a pass of `new` tokens after `resident` cached ones."""
        layer = self.layer
        return (
            self.fixed_s
            + self.token_s * new
            + layer.attention_flop(resident, new) / self.attention_flops
            + self.touched_s(new)
            + self.row_s * layer.moved_tokens(resident + new)
        )

    def chunks_s(self, resident: int, chunk: int, count: int) -> float:
        """Seconds of the layer in `count` passes of `chunk` tokens each, the first after `resident` cached ones."""
        layer = self.layer
        each = self.fixed_s + self.token_s * chunk
        each += self.touched_s(chunk)
        return (
            count * each
            + attention_flop_of_chunks(layer, resident, chunk, count) / self.attention_flops
            + self.row_s * moved_tokens_of_chunks(layer, resident, chunk, count)
        )


@dataclass(frozen=True, slots=True)
class LayerwisePrefill(PrefillCost):
    """The same for layers that differ, or whose cost is not linear in tokens and pairs: each priced by itself.

    `prices` are those of `kinds`. `fresh` and `extend` are then what holds beyond all windows and with every expert
    touched.
    """

    prices: tuple[_LayerPrice, ...] = ()
    pass_overhead_s: float = 0.0

    def pass_s(self, resident: int, new: int) -> float:
        """Seconds of one pass over all layers, LM head apart; no tokens cost nothing."""
        if new <= 0:
            return 0.0
        return self.whole_and_kinds_s(resident, new)[0]

    def whole_and_kinds_s(self, resident: int, new: int) -> tuple[float, Sequence[float]]:
        """`pass_s`, and what each layer of each of `kinds` takes, the pass's own overhead shared among them."""
        if new <= 0:
            return 0.0, [0.0] * len(self.prices)
        each = [price.seconds(resident, new) for price in self.prices]
        shared = self.pass_overhead_s / self.layers
        return self.pass_overhead_s + sum([each[kind] for kind in self.order]), [shared + one for one in each]

    def prefill_s(self, resident: int, new: int, chunk_tokens: int | None = None) -> float:
        """Seconds of all passes when the engine prefills at most `chunk_tokens` a pass (None: all in one)."""
        if chunk_tokens is None or new <= chunk_tokens:
            return self.pass_s(resident, new)
        count, rest = divmod(new, chunk_tokens)
        each = [price.chunks_s(resident, chunk_tokens, count) for price in self.prices]
        total = count * self.pass_overhead_s + sum([each[kind] for kind in self.order])
        return total + self.pass_s(resident + count * chunk_tokens, rest)
