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
        prefill = self.prefill
        if chunk is None:
            return prefill.pass_s(resident, prompt - resident) + prefill.head_s
        return prefill.prefill_s(resident, prompt - resident, chunk) + prefill.head_s

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
        computes, rest = self.after(end, prompt, chunk)
        wait = self.alone_s(transfer, end - start, computes)
        front = 0.0 if resident is None else self.prefill.prefill_s(resident, start - resident, chunk)
        return rest + max(busy_s + front, wait)

    def after(self, end: int, prompt: int, chunk: int | None) -> tuple[Computes, float]:
        """`computes` and `recompute_s` after `end` loaded tokens."""
        prefill = self.prefill
        if chunk is not None or self.executor == "bulk":
            return self.computes(end, prompt, chunk), self.recompute_s(end, prompt, chunk)
        # One pass is the first and all there is.
        if prefill.unlike:
            whole_s, layers_s = prefill.whole_and_layers_s(end, prompt - end)
            return layers_s, whole_s + prefill.head_s
        pass_s = prefill.pass_s(end, prompt - end)
        return pass_s / prefill.layers, pass_s + prefill.head_s

    def computes(self, end: int, prompt: int, chunk: int | None) -> Computes:
        """Seconds of each layer of the first pass after `end` loaded tokens, under which others may arrive."""
        if self.executor == "bulk":
            return 0.0
        prefill = self.prefill
        new = prompt - end if chunk is None else min(chunk, prompt - end)
        if prefill.uniform:
            return prefill.pass_s(end, new) / prefill.layers
        return prefill.layers_s(end, new)

    def alone_s(
        self, transfer: TransferCost, tokens: int, computes: Computes, group_layers: int | None = None
    ) -> float:
        """How long the first pass waits for one load of `tokens` tokens, with the best number of layers to an event
        where none is given."""
        if self.executor == "bulk":
            return transfer.total_s(tokens)
        if group_layers is not None or not transfer.event_s:
            return transfer.wait_s(tokens, computes, 1 if group_layers is None else group_layers)
        return self.arrival((Part("", transfer, 0, tokens),), computes)[0]

    def arrival(self, parts: Sequence[Part], computes: Computes) -> tuple[float, float, int]:
        """How long the first pass waits for parts that arrive beside each other, when all of them are there, and how
        many layers should share an event.

        The number that makes the wait shortest is taken: fewer events cost less, and larger groups are waited for
        longer.
        """
        group = 1
        if self.executor != "bulk" and any(part.transfer.event_s for part in parts):
            group = self._best_group(parts, computes)
        return self._arrival(parts, computes, group)

    def _best_group(self, parts: Sequence[Part], computes: Computes) -> int:
        sizes = range(1, self.prefill.layers + 1)
        waits, done = [0.0 for _ in sizes], [0.0 for _ in sizes]
        for _, transfer, start, end, follows in parts:
            tokens = end - start
            beyond = transfer.group_waits(tokens, computes)
            awaited = len(transfer.moving(tokens))
            queued, event = transfer.queued_s, transfer.event_s
            own = transfer.lead_s(tokens) - queued
            copying = transfer.total_s(tokens) - transfer.lead_s(tokens)
            for at, size in enumerate(sizes):
                lead = own + (max(queued, done[at]) if follows else queued)
                done[at] = lead + copying + -(-awaited // size) * event
                if beyond:
                    late = lead + beyond[at if at < len(beyond) else -1]
                    waits[at] = late if late > waits[at] else waits[at]
        return waits.index(min(waits)) + 1

    def _arrival(
        self, parts: Sequence[Part], computes: Computes, group_layers: int
    ) -> tuple[float, float, int]:
        bulk = self.executor == "bulk"
        wait = last = done = 0.0
        for _, transfer, start, end, follows in parts:
            tokens = end - start
            if follows:
                transfer = transfer.behind(done)
            if bulk:
                waited = done = transfer.total_s(tokens)
            else:
                waited = transfer.wait_s(tokens, computes, group_layers)
                done = transfer.done_s(tokens, group_layers)
            wait = waited if waited > wait else wait
            last = done if done > last else last
        return wait, last, group_layers
