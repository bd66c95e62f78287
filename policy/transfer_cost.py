"""What it costs to bring stored KV to the device over one link.

One layer's transfer takes `copies * per_copy_s + bytes / rate`, and each transfer `latency_s` once (DESIGN,
"What a path costs"). Copy count and size follow from how the KV lies at both ends, or are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvlane.policy import pipeline
from kvlane.policy.machine import Layout, Link, Tier

Computes = float | Sequence[float]
"""Seconds of each layer of a pass, in order; one number where all take the same."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Transfers of `layers` equal layers of `layer_bytes_per_token` from one tier, per rank.

    `run_tokens` is the number of tokens one copy moves, None where a whole prefix is one run. `counted` says
    instead how many copies a layer of so many tokens takes, `(tokens, copies)`, counted by who holds the block
    table; fewer tokens are taken to need that share of them. `per_token_s` is the host's work for each loaded token,
    and `queued_s` what else comes before: other copies on the link, a cold peer's first use.
    """

    link: Link
    layers: int
    layer_bytes_per_token: float
    run_tokens: int | None = None
    runs_per_layer: int = 1
    layout: Layout = "layer_major"
    per_token_s: float = 0.0
    queued_s: float = 0.0
    counted: tuple[int, int] | None = None

    @classmethod
    def of_tier(
        cls, tier: Tier, link: Link, layers: int, layer_bytes_per_token: float, load_unit_tokens: int
    ) -> TransferCost:
        """The transfers of `tier` for a model, its paged runs being one load unit long."""
        run = load_unit_tokens if tier.run_tokens == 0 else tier.run_tokens
        return cls(
            link=link,
            layers=layers,
            layer_bytes_per_token=layer_bytes_per_token,
            run_tokens=run,
            runs_per_layer=tier.runs_per_layer,
            layout=tier.layout,
            per_token_s=tier.per_token_s,
        )

    def before(self, after: int) -> TransferCost:  # noqa: ARG002 - plain layers move the same wherever they lie
        """The transfers of a run that ends `after` tokens before the load does."""
        return self

    @property
    def reach(self) -> int:
        """After how many tokens more `before` says nothing else."""
        return 0

    def behind(self, seconds: float) -> TransferCost:
        """The same transfers over a link that is busy for so long."""
        return replace(self, queued_s=seconds) if seconds > self.queued_s else self

    @property
    def event_s(self) -> float:
        """What the event of one group of layers costs; a chunk-major store has no groups."""
        return self.link.per_event_s if self.by_layer else 0.0

    def lead_s(self, tokens: int) -> float:
        """Seconds before the first copy of `tokens` tokens."""
        return self.queued_s + self.link.latency_s + tokens * self.per_token_s

    @property
    def by_layer(self) -> bool:
        """Whether layers can arrive one after another; a chunk-major store delivers whole chunks."""
        return self.layout == "layer_major"

    def copy_bytes(self, tokens: int) -> float:
        """Bytes of one copy when `tokens` tokens are loaded, on average."""
        moved = tokens * self.layer_bytes_per_token * (1 if self.by_layer else self.layers)
        return moved / self.copies(tokens)

    def bytes(self, tokens: int) -> float:
        """Bytes moved for `tokens` tokens, all layers."""
        return tokens * self.layer_bytes_per_token * self.layers

    def copies(self, tokens: int) -> int:
        """Copies one layer of `tokens` tokens takes; all layers travel in one copy in a chunk-major store."""
        if self.counted is not None:
            whole, copies = self.counted
            return max(1, -(-tokens * copies // whole))
        run = self.run_tokens
        return self.runs_per_layer if run is None else -(-tokens // run) * self.runs_per_layer

    def even(self, unit: int) -> bool:
        """Whether every load unit of `unit` tokens costs as much to move as every other, and events are free."""
        runs = self.run_tokens
        return (
            not self.link.rate_table
            and self.counted is None
            and (runs is None or unit % runs == 0)
            and not self.event_s
        )

    def bends(self) -> list[int]:
        """Token counts at which the cost of a transfer changes its slope: a copy outgrows a row of the table."""
        per_token = self.layer_bytes_per_token * (1 if self.by_layer else self.layers)
        return [int(size * self.runs_per_layer / per_token) for size, _ in self.link.rate_table]

    def run_ends(self, tokens: int) -> tuple[int, int]:
        """The most tokens that take as many copies as `tokens` do, and the most that take one run fewer."""
        if self.counted is not None:
            whole, copies = self.counted
            taken = self.copies(tokens)
            return taken * whole // copies, (taken - 1) * whole // copies
        if self.run_tokens is None:
            return tokens, 0
        ends = -(-tokens // self.run_tokens) * self.run_tokens
        return ends, ends - self.run_tokens

    def layer_s(self, tokens: int) -> float:
        """Seconds for one layer of `tokens` tokens, without the transfer's latency."""
        moved = tokens * self.layer_bytes_per_token
        if moved <= 0:
            return 0.0
        if self.layout != "layer_major":
            return self._chunks_s(tokens) / self.layers
        link = self.link
        if not link.rate_table:
            fixed = self.copies(tokens) * link.per_copy_s if link.per_copy_s else 0.0
            return fixed + moved / link.rate_bytes_per_s
        return moved / link.rate_at(self.copy_bytes(tokens))

    def _chunks_s(self, tokens: int) -> float:
        rate = self.link.rate_at(self.copy_bytes(tokens))
        return self.copies(tokens) * self.link.per_copy_s + self.bytes(tokens) / rate

    def layers_s(self, tokens: int) -> list[float]:
        """Seconds for each layer of `tokens` tokens, without the transfer's latency."""
        return [self.layer_s(tokens)] * self.layers

    def total_s(self, tokens: int) -> float:
        """Seconds for all layers of `tokens` tokens, latency included; nothing costs nothing."""
        if tokens <= 0:
            return 0.0
        link = self.link
        if self.layout != "layer_major" or link.rate_table:
            return self.lead_s(tokens) + self.layers * self.layer_s(tokens)
        # `lead_s` and `layer_s` written out: a decision comes here several times.
        fixed = self.copies(tokens) * link.per_copy_s if link.per_copy_s else 0.0
        layer_s = fixed + tokens * self.layer_bytes_per_token / link.rate_bytes_per_s
        return self.queued_s + link.latency_s + tokens * self.per_token_s + self.layers * layer_s

    def done_s(self, tokens: int, group_layers: int) -> float:
        """The same when layers arrive one after another, with an event for each group of them."""
        groups = -(-len(self.moving(tokens)) // group_layers) if self.event_s else 0
        return self.total_s(tokens) + groups * self.event_s

    def arrivals(self, tokens: int, group_layers: int = 1) -> list[float]:
        """When each layer of `tokens` tokens has arrived, in seconds from the start of the transfer.

        With `group_layers` to an event a layer arrives with the last of its group, each event costing the link's
        `per_event_s`.
        """
        if tokens <= 0:
            return [0.0] * self.layers
        if not self.by_layer:
            return [self.total_s(tokens)] * self.layers
        lead, each = self.lead_s(tokens), self.layer_s(tokens)
        copied = [lead + (layer + 1) * each for layer in range(self.layers)]
        return pipeline.grouped(copied, group_layers, self.link.per_event_s)

    def wait_s(self, tokens: int, computes: Computes, group_layers: int = 1) -> float:
        """How long a pass over the layers waits for `tokens` tokens that arrive layer by layer."""
        if tokens <= 0:
            return 0.0
        if self.layout != "layer_major":
            return self.total_s(tokens)
        if isinstance(computes, float):
            link = self.link
            lead = self.queued_s + link.latency_s + tokens * self.per_token_s
            gap = self.layer_s(tokens)
            return pipeline.uniform_wait(lead, gap, computes, self.layers, group_layers, link.per_event_s)
        return pipeline.longest_wait(self.arrivals(tokens, group_layers), computes)

    def group_waits(self, tokens: int, computes: Computes) -> list[float]:
        """What `wait_s` is beyond `lead_s` for 1, 2, ... layers to an event; below 0 where there is time to spare."""
        if not self.by_layer:
            return [self.layers * self.layer_s(tokens)]
        if isinstance(computes, float):
            gap, event_s = self.layer_s(tokens), self.link.per_event_s
            return [
                pipeline.uniform_wait(0.0, gap, computes, self.layers, group, event_s)
                for group in range(1, self.layers + 1)
            ]
        moving, each = self.moving(tokens), self.layers_s(tokens)
        before = list(accumulate(computes, initial=0.0))
        copied = list(accumulate([each[layer] for layer in moving]))
        return pipeline.group_waits(copied, [before[layer] for layer in moving], self.link.per_event_s)

    def moving(self, tokens: int) -> Sequence[int]:  # noqa: ARG002 - every plain layer moves something
        """The layers that anything is moved for; the others are never awaited and are in no group."""
        return range(self.layers)

    def bytes_until(self, tokens: int) -> list[float]:
        """Bytes moved for `tokens` tokens by the time each layer has arrived."""
        if not self.by_layer:
            return [self.bytes(tokens)] * self.layers
        each = tokens * self.layer_bytes_per_token
        return [(layer + 1) * each for layer in range(self.layers)]

    def fixed_until(self, tokens: int) -> list[float]:
        """What the transfer has cost whatever the rate by the time each layer has arrived, events apart."""
        if not self.by_layer:
            return [self.fixed_s(tokens)] * self.layers
        lead, each = self.lead_s(tokens), self.copies(tokens) * self.link.per_copy_s
        return [lead + (layer + 1) * each for layer in range(self.layers)]

    def fixed_s(self, tokens: int) -> float:
        """What a transfer costs whatever the rate: what comes before it, and per-copy cost."""
        per_copy_s = self.link.per_copy_s
        if not per_copy_s:
            return self.lead_s(tokens)
        copies = self.copies(tokens) * (self.layers if self.layout == "layer_major" else 1)
        return self.lead_s(tokens) + copies * per_copy_s
