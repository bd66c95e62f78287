"""Standing in line for the one thread: what takes more than a turn is worked on one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvlane.policy.service.problems import ProblemError

# So long may one request keep all others waiting; then they have their turn.
TURN_S = 0.005


class Line:
    """At most `most` stand in it, the one worked on among them; `what` says of what there are too many."""

    def __init__(self, most: int, what: str) -> None:
        self.count = 0
        self._most, self._what = most, what
        self._one = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether one is worked on."""
        return self._one.locked()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[bool]:
        """Waits until nobody else is worked on, and says whether that took a wait; raises `ProblemError`."""
        if self.count >= self._most:
            raise ProblemError("too_many_requests", f"too many {self._what}", headers={"Retry-After": "1"})
        self.count += 1
        try:
            waits = self.busy
            async with self._one:
                yield waits
        finally:
            self.count -= 1
