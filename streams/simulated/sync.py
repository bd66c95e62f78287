"""What host threads hand things over with: whoever comes after has heard of what came before."""

from __future__ import annotations

from types import TracebackType

from kvlane.streams.simulated.host import Scheduler, Task
from kvlane.streams.simulated.order import Clock


class SimulatedFlag:
    """See `Flag`. Who has seen it set knows what came before that."""

    __slots__ = ("_clock", "_host", "_waiting", "value")

    def __init__(self, host: Scheduler) -> None:
        self.value = False
        self._host = host
        self._clock: Clock = {}
        self._waiting: list[Task] = []

    def set(self) -> None:
        self._host.point()
        for actor, count in self._host.me.release().items():
            self._clock[actor] = max(self._clock.get(actor, 0), count)
        self.value = True
        self._host.wake(self._waiting)

    def is_set(self) -> bool:
        self._host.point()
        return self._seen()

    def wait(self, timeout: float | None = None) -> bool:
        self._host.point()
        if not self.value:
            self._host.block(self._waiting, "a flag", timeout)
        return self._seen()

    def _seen(self) -> bool:
        if self.value:
            self._host.me.follow(self._clock)
        return self.value


class SimulatedLock:
    """As `threading.Lock`. Who holds it knows what those before it did."""

    __slots__ = ("_clock", "_held", "_host", "_waiting")

    def __init__(self, host: Scheduler) -> None:
        self._host = host
        self._held = False
        self._clock: Clock = {}
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._host.point()
        until = None if timeout < 0 else self._host.time + timeout
        while self._held:
            left = None if until is None else until - self._host.time
            if not blocking or not self._host.block(self._waiting, "a lock", left):
                return False
        self._held = True
        self._host.me.follow(self._clock)
        return True

    def release(self) -> None:
        # Also while a thread is unwound: whoever comes after it in that must not find it held.
        if not self._held:
            raise RuntimeError("release of a lock nobody holds")
        self._held = False
        self._clock = self._host.me.release()
        self._host.wake(self._waiting)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
