"""TTFT of one path, from what its copies and its compute cost."""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.policy import pipeline
from kvlane.policy.plan import Executor
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.transfer_cost import TransferCost


@dataclass(frozen=True, slots=True)
class PathCost:
    """What paths cost on one engine: its prefill cost and what its executor can do."""

    prefill: PrefillCost
    executor: Executor

    def recompute_s(self, resident: int, prompt: int, chunk: int | None = None) -> float:
        """Seconds to compute tokens `[resident, prompt)` and the first token after them."""
        prefill, new = self.prefill, prompt - resident
        if chunk is None or new <= chunk:
            return prefill.pass_s(resident, new) + prefill.head_s
        return prefill.prefill_s(resident, new, chunk) + prefill.head_s

    def load_s(
        self, transfer: TransferCost, start: int, end: int, prompt: int, chunk: int | None = None
    ) -> float:
        """TTFT when `[start, end)` is loaded and `[end, prompt)` computed.

        Bulk: all copies, then all compute. Layered: each layer of the first prefill chunk waits for its own
        KV; later chunks find everything there.
        """
        prefill = self.prefill
        if self.executor == "bulk":
            return transfer.total_s(end - start) + self.recompute_s(end, prompt, chunk)
        first = prompt - end if chunk is None else min(chunk, prompt - end)
        if not (transfer.uniform and prefill.uniform):
            done = pipeline.closed_form(transfer.arrivals(end - start), prefill.layers_s(end, first))
        elif transfer.by_layer:
            gap = transfer.layer_s(end - start)
            compute = prefill.pass_s(end, first) / prefill.layers
            done = pipeline.uniform(transfer.link.latency_s + gap, gap, compute, prefill.layers)
        else:
            done = transfer.total_s(end - start) + prefill.pass_s(end, first)
        return done + prefill.prefill_s(end + first, prompt - end - first, chunk) + prefill.head_s
