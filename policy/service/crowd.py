"""Answering `/v1/decide` with candidates: many of them are weighed in turns with what others ask."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from time import monotonic, perf_counter

from kvlane.policy.service.decide import Desk
from kvlane.policy.service.line import Line
from kvlane.policy.service.types import DecideRequest

# So many may be worked on or wait: the slowest take half a second each.
_MOST_LONG = 64
# So few are begun at once even while others are worked on.
_FEW = 16


class Crowds:
    """Decisions among many candidates, one worked on at a time; those that take less than a turn wait for none."""

    def __init__(self) -> None:
        self._line = Line(_MOST_LONG, "decisions among many candidates are worked on")

    async def decide(self, desk: Desk, asked: DecideRequest) -> bytes:
        """The answer as JSON; raises `ProblemError`. Who asks under the same id meanwhile is given the same answer."""
        if asked.request_id is None:
            return await self._decide(desk, asked)
        while True:
            known = desk.promises.kept(asked, monotonic())
            if known is not None:
                return known
            first = desk.promises.begun(asked)
            if first is None:
                break
            given = await asyncio.shield(first)  # it is not theirs alone
            if given is not None:
                return given
        given = None
        done = desk.promises.begin(asked)
        try:
            given = await self._decide(desk, asked)
        finally:
            # None where it failed: whoever waits for it asks by themselves.
            desk.promises.end(asked)
            done.set_result(given)
        return given

    async def _decide(self, desk: Desk, asked: DecideRequest) -> bytes:
        since, turns = perf_counter(), None
        if not self._line.busy or (asked.candidates and len(asked.candidates) <= _FEW):
            turns = desk.turns(asked)
            answer = _next(turns)
            if answer is not None:
                return answer
        async with self._line.place() as waited:
            if turns is None or waited:
                turns = desk.turns(asked, since)  # what was seen before the wait is no longer so
            answer = None
            while answer is None:
                await asyncio.sleep(0)
                answer = _next(turns)
            return answer


def _next(turns: Generator[None, None, bytes]) -> bytes | None:
    """Works for a turn; the answer, if that was the last."""
    try:
        next(turns)
    except StopIteration as last:
        answer: bytes = last.value
        return answer
    return None
