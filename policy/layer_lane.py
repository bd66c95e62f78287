"""The same choices on one tier where layers differ: windows bend the cost, states allow only some split points."""

from __future__ import annotations

from collections.abc import Sequence

from kvlane.policy.lane import Lane
from kvlane.policy.layer_transfer import LayerwiseTransfer
from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Estimate, Request
from kvlane.policy.search import closed_in


class LayerwiseLane(Lane):
    """A lane over a `LayerwiseTransfer`. With `recurrent` layers a load ends, and runs of it meet, only where
    a snapshot of their state was stored; one snapshot is moved."""

    def __init__(
        self,
        cost: PathCost,
        transfer: LayerwiseTransfer,
        tier: str,
        request: Request,
        band: float,
        *,
        recurrent: bool,
    ) -> None:
        super().__init__(cost, transfer, tier, request, band)
        self.kinds = transfer.kinds
        self.recurrent = recurrent
        self.stored = self.usable
        self.checkpoints: tuple[int, ...] = ()
        if recurrent:
            listed = sorted(set(request.checkpoints(tier)))
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

    def cuts(self, low: int, high: int) -> Sequence[int]:
        """Where a load may end, or be cut in two: at a checkpoint of recurrent layers, else at a load unit's end."""
        if self.recurrent:
            return [at for at in self.checkpoints if low < at < high]
        return super().cuts(low, high)

    def best_split(self) -> Estimate | None:
        """The fastest proper split found, None where none may end strictly inside the usable run."""
        points = self.cuts(self.start, self.usable)
        if not points:
            return None
        if self.recurrent:
            return self.estimate(self.start, min(points, key=self.ttft))
        # Beyond a window, loading more moves nothing more in that layer.
        bends = {self.start + layer.window for layer in self.kinds if layer.window is not None}
        return self.estimate(self.start, closed_in(self.ttft, points, bends))
