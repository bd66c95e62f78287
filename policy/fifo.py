"""One server's queue of booked seconds, served first come, first served, as time passes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator

import msgspec

# What is left of a turn after that many roundings is nothing.
_NOTHING_S = 1e-12


class Turn(msgspec.Struct, eq=False, gc=False):
    """Booked work: `left_s` of `seconds` are still to be served, none of it before `ready_s` on the clock."""

    seconds: float
    left_s: float
    ready_s: float = -math.inf
    nbytes: float = 0.0


class Fifo:
    """What a device or a link still has to do, in seconds.

    Turns are served in the order in which they are ready, equals in that of booking. `outside_s` is work that somebody
    reported and nobody booked: it is served before all turns. Times are the caller's clock.
    """

    __slots__ = ("_at", "_booked_s", "_later", "_ready", "outside_s")

    def __init__(self, now: float) -> None:
        self._at = now
        self._booked_s = 0.0
        self._ready: dict[Turn, None] = {}
        self._later: list[Turn] = []  # the soonest last
        self.outside_s = 0.0

    def __iter__(self) -> Iterator[Turn]:
        """The turns not served as of the last call, the next one first."""
        yield from self._ready
        yield from reversed(self._later)

    def waiting_s(self, now: float) -> float:
        """Seconds of work ahead of whoever comes next."""
        self._serve(now)
        return max(0.0, self.outside_s + self._booked_s)

    def turns(self, now: float) -> int:
        """Booked turns that have not been served."""
        self._serve(now)
        return len(self._ready) + len(self._later)

    def waiting_bytes(self, now: float) -> float:
        """Booked bytes not served yet."""
        self._serve(now)
        return sum(turn.nbytes * turn.left_s / turn.seconds for turn in self)

    def until_done_s(self, turn: Turn, now: float) -> float:
        """Seconds until a turn that was ready when it was booked is served, 0 when it has been."""
        self._serve(now)
        if turn not in self._ready:
            return 0.0
        ahead = self.outside_s
        for other in self._ready:
            ahead += other.left_s
            if other is turn:
                break
        return ahead

    def add(self, turn: Turn, now: float) -> None:
        """Books a turn; one without seconds takes none."""
        self._serve(now)
        if turn.left_s <= 0:
            return
        self._booked_s += turn.left_s
        if turn.ready_s <= self._at:
            self._ready[turn] = None
        else:
            at = 0  # what is booked last is mostly ready last
            if self._later and turn.ready_s < self._later[0].ready_s:
                at = bisect_left(self._later, -turn.ready_s, key=_soonest_last)
            self._later.insert(at, turn)

    def remove(self, turn: Turn, now: float) -> None:
        """Takes what is left of a turn off the queue: nothing, once it is served."""
        self._serve(now)
        if turn.left_s > 0:
            self._drop(turn)

    def replace(self, waiting_s: float, now: float) -> None:
        """Sets what is waiting to what somebody saw. What was booked first is served first: less than booked
        means that the oldest turns are further on, more means that others came before them."""
        self._serve(now)
        excess = waiting_s - self._booked_s
        self.outside_s = max(0.0, excess)
        for turn in tuple(self) if excess < 0 else ():
            served = min(turn.left_s, -excess)
            self._advance(turn, served)
            excess += served

    def _serve(self, now: float) -> None:
        """Serves what could be served since the last call."""
        if now <= self._at:
            return
        at, self._at = self._at, now
        if self.outside_s:
            served = min(self.outside_s, now - at)
            self.outside_s -= served
            at += served
        while at < now:
            self._admit(at)
            turn = next(iter(self._ready), None)
            if turn is not None:
                served = min(turn.left_s, now - at)
                at += served
                self._advance(turn, served)
            elif self._later:
                at = self._later[-1].ready_s  # idle until then
            else:
                break
        self._admit(now)

    def _admit(self, at: float) -> None:
        while self._later and self._later[-1].ready_s <= at:
            self._ready[self._later.pop()] = None

    def _advance(self, turn: Turn, served: float) -> None:
        turn.left_s -= served
        self._booked_s -= served
        if turn.left_s <= _NOTHING_S:
            self._drop(turn)

    def _drop(self, turn: Turn) -> None:
        if turn in self._ready:
            del self._ready[turn]
        else:
            at = bisect_left(self._later, -turn.ready_s, key=_soonest_last)
            del self._later[self._later.index(turn, at)]
        # An empty queue forgets what rounding has left of the sum.
        self._booked_s = self._booked_s - turn.left_s if self._ready or self._later else 0.0
        turn.left_s = 0.0


def _soonest_last(turn: Turn) -> float:
    return -turn.ready_s
