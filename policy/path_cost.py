"""TTFT of one path, from what its copies and its compute cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlane.policy import pipeline
from kvlane.policy.plan import Executor
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.transfer_cost import TransferCost

# TTFT of loading `[start, end)` of a prompt, as a function of start, end and prompt.
LoadCost = Callable[[int, int, int], float]


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

    def bound(self, transfer: TransferCost, chunk: int | None) -> LoadCost:
        """`load_s` over that transfer and in those chunks, as a function of start, end and prompt.

        A decision asks it some thirty times. Where layers are alike, come one by one and are computed in one chunk, the
        function is one expression of constants; it says what `load_s` says, and that is tested.
        """
        prefill, link = self.prefill, transfer.link

        def whole(start: int, end: int, prompt: int) -> float:
            return self.load_s(transfer, start, end, prompt, chunk)

        if (
            type(transfer) is not TransferCost
            or not (transfer.by_layer and prefill.uniform)
            or link.rate_table
            or self.executor not in ("bulk", "layered")
        ):
            return whole
        bulk, cost, layers = self.executor == "bulk", prefill.extend, prefill.layers
        run, runs_per_layer = transfer.run_tokens, transfer.runs_per_layer
        latency_s, per_copy_s = link.latency_s, link.per_copy_s
        layer_bytes, rate = transfer.layer_bytes_per_token, link.rate_bytes_per_s
        overhead_s, token_s, pair_s = cost.overhead_s, cost.token_s, cost.pair_s
        context_s, rectangle = cost.context_s, cost.rectangle
        head_s, floor_s, floor_context_s = prefill.head_s, prefill.floor_s, prefill.floor_context_s

        def plain(start: int, end: int, prompt: int) -> float:
            new, tokens = prompt - end, end - start
            if tokens <= 0 or new <= 0 or (chunk is not None and new > chunk):
                return whole(start, end, prompt)
            runs = runs_per_layer if run is None else -(-tokens // run) * runs_per_layer
            gap = runs * per_copy_s + tokens * layer_bytes / rate
            work = token_s * new + pair_s * (new * prompt if rectangle else new * end + new * (new + 1) / 2)
            floor = floor_s + floor_context_s * prompt
            compute = overhead_s + (work if work > floor else floor) + context_s * prompt
            if bulk:
                return latency_s + layers * gap + compute + head_s
            behind_first = latency_s + gap + compute
            behind_last = latency_s + layers * gap + compute / layers
            return (behind_last if behind_last > behind_first else behind_first) + head_s

        return plain

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
