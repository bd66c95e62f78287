"""One server's queue of booked seconds, served first come, first served, as time passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

# What is left of a turn after that many roundings is nothing.
_NOTHING_S = 1e-12


@dataclass(slots=True, eq=False)
class Turn:
    """Booked work: `left_s` of `seconds` are still to be served, none of it before `ready_s` on the clock."""

    seconds: float
    left_s: float
    ready_s: float = -math.inf
    nbytes: float = 0.0


class Fifo:
    """What a device or a link still has to do, in seconds.

    Turns are served in the order of booking; one that is not ready yet lets the next one go first. `outside_s` is
    work that somebody reported and nobody booked: it is served before all turns. Times are the caller's clock.
    """

    __slots__ = ("_at", "_booked_s", "_turns", "outside_s")

    def __init__(self, now: float) -> None:
        self._at = now
        self._booked_s = 0.0
        self._turns: dict[Turn, None] = {}
        self.outside_s = 0.0

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    def waiting_s(self, now: float) -> float:
        """Seconds of work ahead of whoever comes next."""
        self._serve(now)
        return max(0.0, self.outside_s + self._booked_s)

    def turns(self, now: float) -> int:
        """Booked turns that have not been served."""
        self._serve(now)
        return len(self._turns)

    def waiting_bytes(self, now: float) -> float:
        """Booked bytes not served yet."""
        self._serve(now)
        return sum(turn.nbytes * turn.left_s / turn.seconds for turn in self._turns)

    def until_done_s(self, turn: Turn, now: float) -> float:
        """Seconds until that turn is served, 0 when it has been."""
        self._serve(now)
        if turn not in self._turns:
            return 0.0
        ahead = self.outside_s
        for other in self._turns:
            ahead += other.left_s
            if other is turn:
                break
        return ahead

    def add(self, turn: Turn, now: float) -> None:
        """Books a turn behind all others; one without seconds takes none."""
        self._serve(now)
        if turn.left_s > 0:
            self._turns[turn] = None
            self._booked_s += turn.left_s

    def remove(self, turn: Turn, now: float) -> float:
        """Takes what is left of a turn off the queue and returns its seconds; a turn served takes nothing."""
        self._serve(now)
        if turn not in self._turns:
            return 0.0
        self._drop(turn)
        left, turn.left_s = turn.left_s, 0.0
        return left

    def replace(self, waiting_s: float, now: float) -> None:
        """Sets what is waiting to what somebody saw. What was booked first is served first: less than booked
        means that the oldest turns are further on, more means that others came before them."""
        self._serve(now)
        excess = waiting_s - self._booked_s
        self.outside_s = max(0.0, excess)
        while excess < 0 and self._turns:
            turn = next(iter(self._turns))
            served = min(turn.left_s, -excess)
            excess += served
            self._advance(turn, served)

    def _serve(self, now: float) -> None:
        """Serves what could be served since the last call."""
        if now <= self._at:
            return
        at, self._at = self._at, now
        if self.outside_s:
            served = min(self.outside_s, now - at)
            self.outside_s -= served
            at += served
        while at < now and self._turns:
            turn = next((turn for turn in self._turns if turn.ready_s <= at), None)
            if turn is None:
                at = min(turn.ready_s for turn in self._turns)
                continue
            served = min(turn.left_s, now - at)
            at += served
            self._advance(turn, served)

    def _advance(self, turn: Turn, served: float) -> None:
        turn.left_s -= served
        self._booked_s -= served
        if turn.left_s <= _NOTHING_S:
            self._drop(turn)
            turn.left_s = 0.0

    def _drop(self, turn: Turn) -> None:
        del self._turns[turn]
        # An empty queue forgets what rounding has left of the sum.
        self._booked_s = self._booked_s - turn.left_s if self._turns else 0.0
