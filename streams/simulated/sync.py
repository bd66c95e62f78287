"""What host threads hand things over with: whoever comes after has heard of what came before."""

from __future__ import annotations

from types import TracebackType

from kvlane.streams.simulated.host import Scheduler, Task, Use
from kvlane.streams.simulated.order import Clock


class SimulatedFlag:
    """See `Flag`. Who has seen it set knows what came before that."""

    __slots__ = ("_clock", "_host", "_waiting", "thing", "value")

    def __init__(self, host: Scheduler) -> None:
        self.value = False
        self.thing = host.thing()
        self._host = host
        self._clock: Clock = {}
        self._waiting: list[Task] = []

    def set(self) -> None:
        self._host.point()
        for actor, count in self._host.me.release().items():
            self._clock[actor] = max(self._clock.get(actor, 0), count)
        self._host.touch(self.thing, "change" if self.value else "open")
        self.value = True
        self._host.wake(self._waiting)

    def is_set(self) -> bool:
        self._host.point()
        return self._seen("look")

    def wait(self, timeout: float | None = None) -> bool:
        # Not a point of its own where it is unset: there is nothing to do before somebody sets it.
        if self.value:
            self._host.point()
        elif not self._host.block(self._waiting, "a flag", timeout, self.thing):
            return self._seen("look")
        return self._seen("await")

    def _seen(self, use: Use) -> bool:
        self._host.touch(self.thing, use)
        if self.value:
            self._host.me.follow(self._clock)
        return self.value


class SimulatedLock:
    """As `threading.Lock`, without its timeout. Who holds it knows what those before it did."""

    __slots__ = ("_clock", "_host", "_thing", "open")

    def __init__(self, host: Scheduler) -> None:
        self.open = True
        self._host = host
        self._thing = host.thing()
        self._clock: Clock = {}

    def acquire(self, blocking: bool = True) -> bool:
        self._host.point(self if blocking else None)
        self._host.touch(self._thing, "take")
        if not self.open:
            return False
        self.open = False
        self._host.me.follow(self._clock)
        return True

    def release(self) -> None:
        # Also while a thread is unwound: whoever comes after it in that must not find it held.
        if self.open:
            raise RuntimeError("release of a lock nobody holds")
        self.open = True
        self._host.touch(self._thing, "open")
        self._clock = self._host.me.release()

    def locked(self) -> bool:
        return not self.open

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
