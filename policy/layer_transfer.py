"""Transfers of layers that differ: windows bound what some of them move, states add what none of the tokens do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from kvlane.policy import pipeline
from kvlane.policy.machine import Link, Tier
from kvlane.policy.model import KvFormat, ModelSpec
from kvlane.policy.transfer_cost import Computes, TransferCost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer moves on one rank: `per_token` bytes of the last `window` tokens (None: of all of them),
    lying in `runs` separate runs, and `static` bytes of state in `static_runs` whatever the tokens."""

    per_token: float
    window: int | None = None
    runs: int = 1
    static: float = 0.0
    static_runs: int = 0

    def tokens(self, tokens: int) -> int:
        """Of `tokens` loaded tokens, how many this layer moves KV of."""
        if self.per_token == 0:
            return 0
        return tokens if self.window is None else min(tokens, self.window)

    def bytes(self, tokens: int) -> float:
        return self.tokens(tokens) * self.per_token + self.static if tokens > 0 else 0.0

    def before(self, after: int) -> LayerBytes:
        """What the layer moves for tokens that end `after` before the load does: the rest of its window, no state."""
        if self.window is None and not self.static:
            return self
        window = None if self.window is None else max(0, self.window - after)
        return replace(self, window=window, static=0.0, static_runs=0)


def layer_bytes(model: ModelSpec, form: KvFormat, tp: int, runs_per_layer: int) -> tuple[LayerBytes, ...]:
    """What each layer of `model` moves on one of `tp` ranks, indexer rows included.

    An MLA layer has one row a token, so one run; an indexer's keys lie in a run of their own; so do the
    recurrent and the convolution state.
    """
    layers = []
    for layer in model.layers:
        state = layer.state_bytes(tp)
        runs = 1 if layer.latent is not None else runs_per_layer
        layers.append(
            LayerBytes(
                per_token=layer.kv_row_bytes(form, tp) + layer.indexer_row_bytes,
                window=layer.window,
                runs=runs + (1 if layer.indexer_row_bytes else 0),
                static=state,
                static_runs=2 if state else 0,
            )
        )
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class LayerwiseTransfer(TransferCost):
    """Transfers of layers that differ, from one tier to one rank.

    `kinds` holds the different layers, `order` which of them each layer is. `layer_bytes_per_token` is the mean
    growth, beyond all windows.
    """

    kinds: tuple[LayerBytes, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def of(self) -> list[LayerBytes]:
        """What each layer moves."""
        return [self.kinds[kind] for kind in self.order]

    def _each(self, per_kind: Sequence[T]) -> list[T]:
        return [per_kind[kind] for kind in self.order]

    @classmethod
    def over(
        cls, tier: Tier, link: Link, of: Sequence[LayerBytes], load_unit_tokens: int
    ) -> LayerwiseTransfer:
        """The transfers of `tier` for those layers, its paged runs being one load unit long."""
        growth = sum(layer.per_token for layer in of if layer.window is None)
        kinds = list(dict.fromkeys(of))
        return cls(
            link=link,
            layers=len(of),
            layer_bytes_per_token=growth / len(of),
            run_tokens=load_unit_tokens if tier.run_tokens == 0 else tier.run_tokens,
            runs_per_layer=tier.runs_per_layer,
            layout=tier.layout,
            per_token_s=tier.per_token_s,
            kinds=tuple(kinds),
            order=tuple(kinds.index(layer) for layer in of),
        )

    def before(self, after: int) -> LayerwiseTransfer:
        kinds = tuple(layer.before(after) for layer in self.kinds)
        return replace(self, kinds=kinds) if after and kinds != self.kinds else self

    @property
    def reach(self) -> int:
        return max([1, *(layer.window for layer in self.kinds if layer.window is not None)])

    def bytes(self, tokens: int) -> float:
        """Bytes moved when `tokens` tokens are loaded, all layers and states."""
        return sum(self._each([layer.bytes(tokens) for layer in self.kinds]))

    def copies(self, tokens: int) -> int:
        """Copies the layer with most of them takes; all layers travel in one copy in a chunk-major store."""
        return max(1, max(self._copies(layer, tokens) for layer in self.kinds))

    def _copies(self, layer: LayerBytes, tokens: int) -> int:
        moved = layer.tokens(tokens)
        if moved <= 0:
            return layer.static_runs
        if self.counted is not None:
            whole, copies = self.counted
            runs = max(1, -(-moved * copies // (whole * self.runs_per_layer)))
        else:
            runs = 1 if self.run_tokens is None else -(-moved // self.run_tokens)
        return runs * layer.runs + layer.static_runs

    def _all_copies(self, tokens: int) -> list[int]:
        return self._each([self._copies(layer, tokens) for layer in self.kinds])

    def copy_bytes(self, tokens: int) -> float:
        """Bytes of one copy, on average."""
        if not self.by_layer:
            return self.bytes(tokens) / self.copies(tokens)
        return self.bytes(tokens) / max(1, sum(self._all_copies(tokens)))

    def _one_s(self, layer: LayerBytes, tokens: int) -> float:
        moved, copies = layer.bytes(tokens), self._copies(layer, tokens)
        if moved <= 0:
            return 0.0
        return copies * self.link.per_copy_s + moved / self.link.rate_at(moved / copies)

    def layers_s(self, tokens: int) -> list[float]:
        if tokens <= 0:
            return [0.0] * self.layers
        if not self.by_layer:
            copies, moved = self.copies(tokens), self.bytes(tokens)
            whole = copies * self.link.per_copy_s + (
                moved / self.link.rate_at(moved / copies) if moved else 0.0
            )
            return [whole / self.layers] * self.layers
        return self._each([self._one_s(layer, tokens) for layer in self.kinds])

    def layer_s(self, tokens: int) -> float:
        """Seconds for a layer on average, without the transfer's latency."""
        return sum(self.layers_s(tokens)) / self.layers

    def total_s(self, tokens: int) -> float:
        """Seconds for all layers, latency included; nothing costs nothing."""
        return self.lead_s(tokens) + sum(self.layers_s(tokens)) if tokens > 0 else 0.0

    def moving(self, tokens: int) -> Sequence[int]:
        moves = [layer.bytes(tokens) > 0 for layer in self.kinds]
        return [layer for layer, kind in enumerate(self.order) if moves[kind]]

    def arrivals(self, tokens: int, group_layers: int = 1) -> list[float]:
        """When each layer has arrived, in seconds from the start of the transfer; 0 where nothing is moved."""
        arrivals = [0.0] * self.layers
        moving = self.moving(tokens)
        if not self.by_layer:
            whole = self.total_s(tokens)
            for layer in moving:
                arrivals[layer] = whole
            return arrivals
        each = self.layers_s(tokens)
        copied = list(accumulate((each[layer] for layer in moving), initial=self.lead_s(tokens)))[1:]
        for layer, at in zip(
            moving, pipeline.grouped(copied, group_layers, self.link.per_event_s), strict=True
        ):
            arrivals[layer] = at
        return arrivals

    def wait_s(self, tokens: int, computes: Computes, group_layers: int = 1) -> float:
        """How long a pass over the layers waits for `tokens` tokens that arrive layer by layer."""
        each = [computes] * self.layers if isinstance(computes, float) else computes
        if not self.by_layer:
            moving = self.moving(tokens)
            return max(0.0, self.total_s(tokens) - sum(each[: moving[0]])) if moving else 0.0
        if self.event_s:
            return pipeline.longest_wait(self.arrivals(tokens, group_layers), each)
        # The same in one go: most of what a decision about unlike layers takes.
        copies = [self._one_s(layer, tokens) for layer in self.kinds]
        at, before, wait = self.lead_s(tokens), 0.0, 0.0
        for kind, compute in zip(self.order, each, strict=True):
            if copies[kind] > 0:
                at += copies[kind]
                wait = at - before if at - before > wait else wait
            before += compute
        return wait

    def group_waits(self, tokens: int, computes: Computes) -> list[float]:
        each = [computes] * self.layers if isinstance(computes, float) else computes
        if not self.by_layer:
            lead = self.lead_s(tokens)
            return [pipeline.longest_wait(self.arrivals(tokens), each) - lead]
        return TransferCost.group_waits(self, tokens, each)

    def bytes_until(self, tokens: int) -> list[float]:
        """Bytes moved for `tokens` tokens by the time each layer has arrived."""
        if not self.by_layer:
            return [self.bytes(tokens)] * self.layers
        return list(accumulate(self._each([layer.bytes(tokens) for layer in self.kinds])))

    def fixed_until(self, tokens: int) -> list[float]:
        """What the transfer has cost whatever the rate by the time each layer has arrived, events apart."""
        if not self.by_layer:
            return [self.fixed_s(tokens)] * self.layers
        each = [copies * self.link.per_copy_s for copies in self._all_copies(tokens)]
        return list(accumulate(each, initial=self.lead_s(tokens)))[1:]

    def fixed_s(self, tokens: int) -> float:
        """What a transfer costs whatever the rate: what comes before it, and per-copy cost."""
        copies = sum(self._all_copies(tokens)) if self.by_layer else self.copies(tokens)
        return self.lead_s(tokens) + copies * self.link.per_copy_s
