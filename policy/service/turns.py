"""Answers that take long, worked out in turns, so that others are answered between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter

from kvlane.policy.service.problems import ProblemError

# So many may wait for each other.
_MOST = 8


class LongAnswers:
    """Answers of one kind, worked on one at a time, so that they take one turn between them.

    After `turn_s` seconds others have theirs, and then so much time of their own as `idle` times what the turn took.
    """

    def __init__(self, turn_s: float = 0.005, idle: float = 0.0) -> None:
        self.turn_s = turn_s
        self._idle = idle
        self._count = 0
        self._one = asyncio.Lock()

    async def finish(self, rest: Iterator[None]) -> None:
        """Goes through what is left of one; raises `ProblemError` where too many wait."""
        if self._count >= _MOST:
            raise ProblemError(
                "too_many_requests",
                "too many answers that take long are being worked out",
                headers={"Retry-After": "1"},
            )
        self._count += 1
        try:
            async with self._one:
                await asyncio.sleep(0)
                began = perf_counter()
                for _ in rest:
                    worked_s = perf_counter() - began
                    if worked_s >= self.turn_s:
                        await asyncio.sleep(self._idle * worked_s)
                        began = perf_counter()
        finally:
            self._count -= 1
