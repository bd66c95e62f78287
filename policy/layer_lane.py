"""The same choices on one tier where layers differ: windows bend the cost, states allow only some split points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kvlane.policy.lane import Lane
from kvlane.policy.layer_transfer import LayerwiseTransfer
from kvlane.policy.layer_waits import LayerWaits
from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Estimate, Request
from kvlane.policy.search import closed_in
from kvlane.policy.waits import SURELY, Waits


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
        self.events = cost.executor != "bulk" and bool(transfer.event_s)
        self._eventless: LayerWaits | None = None
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

    def ttft(self, end: int, beyond: float = math.inf) -> float:
        """TTFT when `[start, end)` is loaded, but for rounding; any number above `beyond` where it is."""
        then, busy_s, tokens = self.ends.at(end), self.busy_s, end - self.start
        rest_s = then.rest_s
        if rest_s + busy_s > beyond:
            return rest_s + busy_s
        least_s = rest_s + max(busy_s, self.eventless().seconds(tokens, 0, then))
        if not self.events or least_s > beyond * SURELY:
            return least_s
        return rest_s + max(busy_s, self.waits().seconds(tokens, 0, then))

    def waited(self, end: int) -> Callable[[int], float]:
        """How long a load that ends there is waited for, but for rounding, by where it begins."""
        then, waits = self.ends.at(end), self.waits()
        return lambda begin: waits.seconds(end - begin, 0, then)

    def waits(self) -> Waits:
        return super().waits() if self.events else self.eventless()

    def eventless(self) -> Waits:
        found = self._eventless
        if found is None or found.transfer is not self.transfer:
            assert isinstance(self.transfer, LayerwiseTransfer)
            found = self._eventless = LayerWaits(self.cost, self.transfer)
        return found

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
