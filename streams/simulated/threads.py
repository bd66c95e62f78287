"""Real threads that are used again and again: starting one costs more than a small schedule."""

from __future__ import annotations

import threading
from _thread import LockType, allocate_lock
from collections.abc import Callable
from types import TracebackType
from typing import Self


def held_lock() -> LockType:
    """A lock that whoever acquires it has to wait for."""
    lock = allocate_lock()
    lock.acquire()
    return lock


class Worker:
    """One thread: runs its job each time its baton is released."""

    def __init__(self, name: str) -> None:
        self.baton = held_lock()
        self.job: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            if self.job is None:
                return
            self.job()


class HostThreads:
    """Any number of workers. Only the thread that holds its scheduler's baton calls `take` and `give`.

    One may serve many backends one after another; close it, or use it as a context manager.
    """

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._all: list[Worker] = []

    def take(self) -> Worker:
        """A worker without a job; `give` it back."""
        if self._idle:
            return self._idle.pop()
        self._all.append(Worker(f"kvlane-simulated-{len(self._all)}"))
        return self._all[-1]

    def give(self, worker: Worker) -> None:
        self._idle.append(worker)

    def close(self) -> None:
        """End the threads; each must have been given back."""
        for worker in self._all:
            worker.job = None
            worker.baton.release()
            worker.thread.join()
        self._all.clear()
        self._idle.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
