"""Who goes on where several could: always the running thread, at random from a seed, or every possibility in turn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvlane.policy.errors import InputError


class InOrder:
    """The running thread goes on for as long as it can, then whoever has waited longest."""

    def choose(self, options: int, may_stay: bool) -> int:  # noqa: ARG002  whatever there is
        return 0

    def stall_s(self) -> float:
        return 0.0


class Seeded:
    """At random; the same numbers again for the same seed.

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

    def choose(self, options: int, may_stay: bool) -> int:
        if may_stay:
            if self._random.random() >= self._switch:
                return 0
            return self._random.randrange(1, options)
        return self._random.randrange(options)

    def stall_s(self) -> float:
        if self._stall and self._random.random() < self._stall:
            stall = self._longest_stall_s * self._random.random() ** 3
            self.stalled_s += stall
            return stall
        return 0.0


class Exhaustive:
    """Every possibility in turn, depth first.

    While the running thread could go on, letting anybody else come first counts as a preemption; where it cannot,
    every choice is free. With `preemptions` None there is no bound, which is out of reach for all but the smallest.

    Use `runs`: one chooser serves all of them, and each run must make the same choices available for the same past.

    Args:
        preemptions: most of them in one run.
    """

    def __init__(self, preemptions: int | None) -> None:
        self._preemptions = preemptions
        self._path: list[tuple[int, int]] = []  # what was chosen, out of how many
        self._at = 0
        self._left = 0

    def choose(self, options: int, may_stay: bool) -> int:
        if self._at == len(self._path):
            bound = options if not may_stay or self._preemptions is None or self._left > 0 else 1
            self._path.append((0, bound))
        one, _ = self._path[self._at]
        self._at += 1
        if may_stay and one:
            self._left -= 1
        return one

    def stall_s(self) -> float:
        return 0.0

    def runs(self, run: Callable[[], None], most: int) -> int:
        """Call `run` once for every possibility; returns how many there are.

        Raises:
            InputError: more than `most`.
        """
        done = 0
        while True:
            self._at, self._left = 0, self._preemptions or 0
            run()
            done += 1
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return done
            if done == most:
                raise InputError("most", f"{most} runs are not all there are", "more, or fewer preemptions")
            one, bound = self._path[-1]
            self._path[-1] = (one + 1, bound)
