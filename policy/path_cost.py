"""TTFT of one path, from what its copies and its compute cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlane.policy.plan import Executor
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.transfer_cost import Computes, TransferCost


class Part(NamedTuple):
    """Tokens `[start, end)` of a load, from one tier.

    `transfer` is priced for where they end in the load. With `follows` they come over the link of the part before,
    after it.
    """

    tier: str
    transfer: TransferCost
    start: int
    end: int
    follows: bool = False


@dataclass(frozen=True, slots=True)
class PathCost:
    """What paths cost on one engine: its prefill cost and what its executor can do."""

    prefill: PrefillCost
    executor: Executor

    def recompute_s(self, resident: int, prompt: int, chunk: int | None = None) -> float:
        """Seconds to compute tokens `[resident, prompt)` and the first token after them."""
        return self.prefill.prefill_s(resident, prompt - resident, chunk) + self.prefill.head_s

    def load_s(
        self,
        transfer: TransferCost,
        start: int,
        end: int,
        prompt: int,
        chunk: int | None = None,
        *,
        resident: int | None = None,
        busy_s: float = 0.0,
    ) -> float:
        """TTFT when `[start, end)` is loaded and `[end, prompt)` computed.

        Bulk: all copies, then all compute. Otherwise each layer of the first prefill chunk waits for its own KV;
        later chunks find everything there. From `resident` < `start` on, the tokens before the load are computed
        while it runs, in passes of their own. `busy_s` is work ahead on the device: passes wait for it, copies do not.
        """
        computes = self.computes(end, prompt, chunk)
        wait, _ = self.wait_s((Part("", transfer, start, end),), computes)
        front = 0.0 if resident is None else self.prefill.prefill_s(resident, start - resident, chunk)
        return self.recompute_s(end, prompt, chunk) + max(busy_s + front, wait)

    def computes(self, end: int, prompt: int, chunk: int | None) -> Computes:
        """Seconds of each layer of the first pass after `end` loaded tokens."""
        prefill = self.prefill
        new = prompt - end if chunk is None else min(chunk, prompt - end)
        if prefill.uniform:
            return prefill.pass_s(end, new) / prefill.layers
        return prefill.layers_s(end, new)

    def wait_s(self, parts: Sequence[Part], computes: Computes) -> tuple[float, int]:
        """How long the first pass waits for the parts, which arrive beside each other, and how many layers should
        share one event.

        The number that makes the wait shortest is taken: fewer events cost less, and larger groups are waited for
        longer.
        """
        best, group = self._wait_s(parts, computes, 1), 1
        if self.executor == "bulk" or not any(part.transfer.event_s for part in parts):
            return best, group
        for layers in range(2, self.prefill.layers + 1):
            wait = self._wait_s(parts, computes, layers)
            if wait < best:
                best, group = wait, layers
        return best, group

    def copies_s(self, parts: Sequence[Part], group_layers: int) -> float:
        """Seconds until all parts have arrived."""
        # A pass that computes nothing meanwhile waits for the whole of each.
        return self._wait_s(parts, 0.0, group_layers)

    def _wait_s(self, parts: Sequence[Part], computes: Computes, group_layers: int) -> float:
        wait = done = 0.0
        for part in parts:
            transfer, tokens = part.transfer, part.end - part.start
            if part.follows:
                transfer = transfer.behind(done)
            if self.executor == "bulk":
                done = transfer.total_s(tokens)
                wait = max(wait, done)
            else:
                done = transfer.done_s(tokens, group_layers)
                wait = max(wait, transfer.wait_s(tokens, computes, group_layers))
        return wait
