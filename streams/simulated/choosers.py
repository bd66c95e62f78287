"""Who goes on where several could: the running thread for as long as it can, or anybody, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvlane.streams.simulated.host import Touch
from kvlane.streams.simulated.order import Actor


class InOrder:
    """The running thread goes on for as long as it can, then whoever has waited longest."""

    watches = False

    def choose(self, options: Sequence[Actor], may_stay: bool) -> int:  # noqa: ARG002  whatever there is
        return 0

    def took(self, touched: frozenset[Touch]) -> None: ...

    def stall_s(self) -> float:
        return 0.0


class Seeded(InOrder):
    """At random; the same choices again for the same seed.

    Args:
        seed: any number.
        switch: how likely a thread that could go on has to let another come first.
        stall: how likely a thread stands still before a call.
        longest_stall_s: for at most so long; short ones are likelier.
    """

    def __init__(
        self, seed: int, *, switch: float = 0.3, stall: float = 0.0, longest_stall_s: float = 0.0
    ) -> None:
        self._random = Random(seed)
        self._switch = switch
        self._stall = stall
        self._longest_stall_s = longest_stall_s
        self.stalled_s = 0.0  # all threads together

    def choose(self, options: Sequence[Actor], may_stay: bool) -> int:
        if may_stay:
            if self._random.random() >= self._switch:
                return 0
            return self._random.randrange(1, len(options))
        return self._random.randrange(len(options))

    def stall_s(self) -> float:
        if self._stall and self._random.random() < self._stall:
            stall = self._longest_stall_s * self._random.random() ** 3
            self.stalled_s += stall
            return stall
        return 0.0
