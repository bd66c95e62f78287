"""The same choices on one tier where layers differ: windows bend the cost, states allow only some split points."""

from __future__ import annotations

from itertools import accumulate

from kvlane.policy.lane import Lane
from kvlane.policy.layer_transfer import LayerwiseTransfer
from kvlane.policy.path_cost import LoadCost, PathCost
from kvlane.policy.plan import Estimate, Request

# Split points tried first, evenly spaced; the best of them is then closed in on.
_GRID = 48


class LayerwiseLane(Lane):
    """A lane over a `LayerwiseTransfer`. With `recurrent` layers a hit ends, and may be split, only where a
    snapshot of their state was stored; one snapshot is moved."""

    def __init__(
        self,
        cost: PathCost,
        transfer: LayerwiseTransfer,
        tier: str,
        request: Request,
        band: float,
        arrives: LoadCost | None = None,
        *,
        recurrent: bool,
    ) -> None:
        super().__init__(cost, transfer, tier, request, band, arrives)
        assert isinstance(self.transfer, LayerwiseTransfer)
        self.parts = self.transfer
        self.recurrent = recurrent
        self.stored = self.usable
        self.checkpoints: tuple[int, ...] = ()
        if recurrent:
            listed = request.checkpoints(tier)
            self.checkpoints = tuple(at for at in listed if at <= self.usable and at % self.unit == 0)
            self.usable = max(self.checkpoints, default=0)
            self.gain = max(0, self.usable - self.start)

    def no_gain(self) -> str:
        if self.recurrent and self.stored > self.start and self.usable == 0:
            return (
                f"{self.tier}: {self.stored} stored tokens are worth nothing without a state checkpoint at a load"
                " unit's end among them"
            )
        return super().no_gain()

    def best_split(self) -> Estimate | None:
        """The fastest proper split found, None where none may end strictly inside the usable run."""
        if self.recurrent:
            ends = [at for at in self.checkpoints if self.start < at < self.usable]
            return self.estimate(min(ends, key=self.ttft)) if ends else None
        low, high = self.start // self.unit + 1, self.usable // self.unit - 1
        if low > high:
            return None
        step = max(1, (high - low) // _GRID)
        points = {*range(low, high + 1, step), high}
        for window in {layer.window for layer in self.parts.kinds if layer.window is not None}:
            # Beyond a window, loading more moves nothing more in that layer.
            at = (self.start + window) // self.unit
            points.update(point for point in (at, at + 1) if low <= point <= high)
        known = {point: self.ttft(point * self.unit) for point in sorted(points)}
        best = min(known, key=known.__getitem__)
        while step > 1:
            step = (step + 1) // 2
            for point in (best - step, best + step):
                if low <= point <= high and point not in known:
                    known[point] = self.ttft(point * self.unit)
            best = min(known, key=known.__getitem__)
        return self.estimate(best * self.unit)

    def break_even(self) -> tuple[float | None, str]:
        """The flat link rate at which loading everything usable ties with recomputing, this executor's fixed
        costs included: the largest that any layer's arrival asks for."""
        if self.parts.bytes(self.gain) == 0:
            return None, "these layers keep nothing that a load would have to move"
        if self.cost.executor == "bulk" or not self.transfer.by_layer:
            return super().break_even()
        request, cost, chunk = self.request, self.cost, self.request.prefill_chunk_tokens
        saved = cost.recompute_s(self.start, request.prompt_tokens, chunk)
        saved -= cost.recompute_s(self.usable, request.prompt_tokens, chunk)
        first = cost.prefill.layers_s(self.usable, self._first_pass(self.usable))
        hidden = [0.0, *accumulate(first)]
        moved = accumulate(layer.bytes(self.gain) for layer in self.parts.of)
        fixed = self.parts.fixed_until(self.gain)
        budgets = [
            (size, self.busy_s + saved + before - spent)
            for size, before, spent in zip(moved, hidden, fixed, strict=False)
            if size > 0
        ]
        if self.busy_s:
            budgets.append((0.0, saved))
        if any(budget <= 0 for _, budget in budgets):
            return None, "loading saves less time than its fixed cost, at any rate"
        return max(
            size / budget for size, budget in budgets
        ), "above this link rate loading everything is faster"
