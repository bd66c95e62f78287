"""Links on the virtual clock: one copy after another, or all at once at a share of the rate each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, Protocol, TypeAlias

from kvlane.policy.errors import InputError
from kvlane.streams.simulated.host import Scheduler, Timer

Sharing: TypeAlias = Literal["exclusive", "fair"]


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """What carries a stream's copies.

    A batch of copies takes `copies * per_copy_s + bytes / bytes_per_s + per_batch_s`, and `latency_s` before it where
    its stream did not come from another batch.

    Attributes:
        bytes_per_s: the rate.
        per_copy_s: what each copy costs whatever its size.
        per_batch_s: what each batch costs besides, with the event that closes it.
        latency_s: once for batches that follow one another.
        sharing: `exclusive` serves one batch after another in the order they came, `fair` all at once, each with an
            equal share of the rate (processor sharing); what a batch costs whatever its bytes then holds up no other.

    Raises:
        InputError: a rate that is not positive, a time below zero.
    """

    bytes_per_s: float = math.inf
    per_copy_s: float = 0.0
    latency_s: float = 0.0
    per_batch_s: float = 0.0
    sharing: Sharing = "exclusive"

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or (self.sharing == "fair" and self.bytes_per_s == math.inf):
            raise InputError(
                "bytes_per_s", f"is {self.bytes_per_s}", "a positive rate, finite where it is shared"
            )
        for name in ("per_copy_s", "latency_s", "per_batch_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(name, f"is {getattr(self, name)}", "zero or more seconds")
        if self.sharing not in ("exclusive", "fair"):
            raise InputError("sharing", f"is {self.sharing!r}", "exclusive or fair")

    def carrier(self, host: Scheduler) -> Carrier:
        """The link itself, empty, on a clock."""
        return _Exclusive(self, host) if self.sharing == "exclusive" else _Fair(self, host)

    def fixed_s(self, copies: int, *, follows: bool) -> float:
        """What a batch costs whatever its bytes; `follows` another one on its stream."""
        return copies * self.per_copy_s + self.per_batch_s + (0.0 if follows else self.latency_s)


class Carrier(Protocol):
    def carry(self, fixed_s: float, nbytes: int, then: Callable[[], None]) -> None:
        """Move a batch of bytes that is ready now, and call `then` at the time it has arrived."""


class _Exclusive:
    def __init__(self, link: SimulatedLink, host: Scheduler) -> None:
        self._link = link
        self._host = host
        self._queue: deque[tuple[float, int, Callable[[], None]]] = deque()

    def carry(self, fixed_s: float, nbytes: int, then: Callable[[], None]) -> None:
        self._queue.append((fixed_s, nbytes, then))
        if len(self._queue) == 1:
            self._serve()

    def _serve(self) -> None:
        fixed_s, nbytes, then = self._queue[0]

        def arrived() -> None:
            self._queue.popleft()
            # Before what follows from the arrival: whoever waits in the queue came first.
            if self._queue:
                self._serve()
            then()

        self._host.at(self._host.time + fixed_s + nbytes / self._link.bytes_per_s, arrived)


class _Fair:
    """Processor sharing. `_passed` counts the bytes that a batch on the link all along would have had carried."""

    def __init__(self, link: SimulatedLink, host: Scheduler) -> None:
        self._link = link
        self._host = host
        self._passed = 0.0
        self._since = 0.0
        self._active: list[tuple[float, int, Callable[[], None]]] = []  # by the count at which each is done
        self._begun = 0
        self._timer: Timer | None = None

    def carry(self, fixed_s: float, nbytes: int, then: Callable[[], None]) -> None:
        def begin() -> None:
            self._catch_up()
            self._begun += 1
            heappush(self._active, (self._passed + nbytes, self._begun, then))
            self._aim()

        if fixed_s > 0:
            self._host.at(self._host.time + fixed_s, begin)
        else:
            begin()

    def _catch_up(self) -> None:
        if self._active:
            self._passed += (self._host.time - self._since) * self._link.bytes_per_s / len(self._active)
        self._since = self._host.time

    def _aim(self) -> None:
        if self._timer is not None:
            self._timer.off = True
        left = (self._active[0][0] - self._passed) * len(self._active) / self._link.bytes_per_s
        self._timer = self._host.at(self._host.time + max(0.0, left), self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._catch_up()
        # Exactly, whatever the sums above were rounded to: equal batches that began together end together.
        self._passed = self._active[0][0]
        done = []
        while self._active and self._active[0][0] <= self._passed:
            done.append(heappop(self._active)[2])
        if self._active:
            self._aim()
        for then in done:
            then()
