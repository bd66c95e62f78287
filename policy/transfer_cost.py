"""What it costs to bring stored KV to the device over one link.

One layer's transfer takes `copies * per_copy_s + bytes / rate`, and each transfer `latency_s` once (DESIGN,
"What a path costs"). Copy count and size follow from how the KV lies at both ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.policy.machine import Layout, Link, Tier


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Transfers of `layers` equal layers of `layer_bytes_per_token` from one tier, per rank.

    `run_tokens` is the number of tokens one copy moves, None where a whole prefix is one run.
    """

    link: Link
    layers: int
    layer_bytes_per_token: float
    run_tokens: int | None = None
    runs_per_layer: int = 1
    layout: Layout = "layer_major"

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
        )

    @property
    def by_layer(self) -> bool:
        """Whether layers can arrive one after another; a chunk-major store delivers whole chunks."""
        return self.layout == "layer_major"

    @property
    def uniform(self) -> bool:
        """Whether every layer moves the same bytes in the same time."""
        return True

    def copy_bytes(self, tokens: int) -> float:
        """Bytes of one copy when `tokens` tokens are loaded, on average."""
        moved = tokens * self.layer_bytes_per_token * (1 if self.by_layer else self.layers)
        return moved / self.copies(tokens)

    def bytes(self, tokens: int) -> float:
        """Bytes moved for `tokens` tokens, all layers."""
        return tokens * self.layer_bytes_per_token * self.layers

    def copies(self, tokens: int) -> int:
        """Copies one layer of `tokens` tokens takes; all layers travel in one copy in a chunk-major store."""
        runs = 1 if self.run_tokens is None else -(-tokens // self.run_tokens)
        return runs * self.runs_per_layer

    def bends(self) -> list[int]:
        """Token counts at which the cost of a transfer changes its slope: a copy outgrows a row of the table."""
        per_token = self.layer_bytes_per_token * (1 if self.by_layer else self.layers)
        return [int(size * self.runs_per_layer / per_token) for size, _ in self.link.rate_table]

    def run_ends(self, tokens: int) -> tuple[int, int]:
        """The most tokens that take as many copies as `tokens` do, and the most that take one run fewer."""
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
        if link.rate_table:
            return moved / link.rate_at(self.copy_bytes(tokens))  # the table holds the cost of copies
        if link.per_copy_s == 0.0:
            return moved / link.rate_bytes_per_s
        return self.copies(tokens) * link.per_copy_s + moved / link.rate_bytes_per_s

    def _chunks_s(self, tokens: int) -> float:
        rate = self.link.rate_at(self.copy_bytes(tokens))
        return self.copies(tokens) * self.link.per_copy_s + self.bytes(tokens) / rate

    def total_s(self, tokens: int) -> float:
        """Seconds for all layers of `tokens` tokens, latency included; nothing costs nothing."""
        if tokens <= 0:
            return 0.0
        return self.link.latency_s + self.layers * self.layer_s(tokens)

    def arrivals(self, tokens: int) -> list[float]:
        """When each layer of `tokens` tokens has arrived, in seconds from the start of the transfer."""
        if tokens <= 0:
            return [0.0] * self.layers
        if not self.by_layer:
            return [self.total_s(tokens)] * self.layers
        each = self.layer_s(tokens)
        return [self.link.latency_s + (layer + 1) * each for layer in range(self.layers)]

    def fixed_s(self, tokens: int) -> float:
        """What a transfer costs whatever the rate: latency and per-copy cost."""
        copies = self.copies(tokens) * (self.layers if self.by_layer else 1)
        return self.link.latency_s + copies * self.link.per_copy_s
