"""The number of copies a layer takes, as the cost model counts them: so many for every run of so many tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvlane.policy.machine import Tier
from kvlane.transfer.copies import WHOLE, check_regions, row_copies
from kvlane.transfer.layout import Region
from kvlane.transfer.shapes import TpShard


@dataclass(frozen=True, slots=True)
class CopyPattern:
    """What `policy.machine.Tier` says of the copies from one region to another.

    Attributes:
        run_tokens: tokens after which new copies begin on one side or the other; None where that is never.
        runs_per_layer: the copies that one such run of one layer takes.
    """

    run_tokens: int | None
    runs_per_layer: int

    def of(self, tier: Tier) -> Tier:
        """The tier with these copies."""
        return replace(tier, run_tokens=self.run_tokens, runs_per_layer=self.runs_per_layer)

    def priced_tokens(self, start: int, end: int) -> int:
        """The token count whose price a load of `[start, end)` has: a start inside a run begins that run's copies."""
        return end - start if self.run_tokens is None else end - start // self.run_tokens * self.run_tokens


def copy_pattern(
    source: Region, destination: Region, layer: int = 0, *, unit_tokens: int = 1, shard: TpShard = WHOLE
) -> CopyPattern:
    """The copies of a layer between two regions whose blocks nowhere follow one another on both sides.

    Blocks that do make them fewer, never more, so a cost model that is told this never counts too few.

    Args:
        layer: one that keeps rows.
        unit_tokens: loads begin and end at multiples of it. Where these are not ends of runs, a run that is loaded in
            part may take more copies than a whole one, and every run is counted as if it did.

    Raises:
        InputError: as `layer_copies`.
    """
    check_regions(source, destination, shard)
    sides = source.rows(layer), destination.rows(layer)
    heads = shard.heads(source.layout.shape(layer).kv_heads)

    def copies(tokens: int) -> int:
        return len(row_copies(*sides, heads, 0, tokens))

    blocks = [rows[0].block_tokens for rows in sides if len(rows[0].blocks) > 1]
    run = math.gcd(*blocks) if blocks else min(source.capacity_tokens, destination.capacity_tokens)
    one = copies(1)
    if run > 1 and copies(2) > one:
        return CopyPattern(1, one)  # each token lies apart from the next
    runs = copies(run) if unit_tokens % run == 0 else max(copies(run), copies(max(1, run - 1)))
    return CopyPattern(run if blocks else None, runs)
