"""One request's dealings with one store: it waits for them no longer than they are worth, and leaves nothing pinned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvlane.streams.backend import Backend
from kvlane.streams.faults import in_words
from kvlane.streams.store_thread import Call, StoreThread
from kvlane.transfer.store import StoredRun
from kvlane.transfer.wrapped import WrappedRun

T = TypeVar("T")

CLOSE_WAIT_S = 0.01
"""Long beside any close that goes well, and short beside any answer."""


class Visit:
    """What one request asks of one store. Its methods are the request's thread's, but for `close`.

    Args:
        until_s: nothing is waited for after that, on the backend's clock.
        failed: told in words what went wrong with a close; on any thread, and maybe after the request is over.
    """

    def __init__(
        self, backend: Backend, thread: StoreThread, until_s: float, failed: Callable[[str], object]
    ) -> None:
        self._backend = backend
        self._thread = thread
        self._until_s = until_s
        self._failed = failed
        self._left_s = thread.patience_s  # of all its waiting together

    def ask(self, what: str, call: Callable[[], T], put_away: Callable[[T], object] | None = None) -> Call[T]:
        """See `StoreThread.ask`."""
        return self._thread.ask(what, call, put_away)

    def wait(self, asked: Call[T]) -> T:
        """See `StoreThread.wait`."""
        began = self._backend.now()
        # From when it was asked: stores that are asked at once are waited for at once.
        until = min(asked.asked_s + self._left_s, self._until_s)
        try:
            return self._thread.wait(asked, until - began)
        finally:
            self._left_s -= self._backend.now() - began

    def open(self, opening: Callable[[], StoredRun]) -> VisitedRun:
        """A run of the store's, and a second pin for whoever loads it; what comes too late is closed.

        Raises:
            StoreSilentError: the store did not answer.
            Exception: what `opening` raised.
        """
        return self.wait(self.ask("open", partial(self._open, opening), VisitedRun.put_away))

    def _open(self, opening: Callable[[], StoredRun]) -> VisitedRun:
        run = VisitedRun(opening(), self, CLOSE_WAIT_S)
        # Both at once: each way to the store's thread and back takes as long as the call.
        run.pin()
        return run

    def pin(self, pinning: Callable[[], StoredRun]) -> StoredRun:
        """One more pin, as `open`."""
        return self.wait(self.ask("pin", pinning, self.put_away))

    def close(self, closing: Callable[[], None], wait_s: float) -> None:
        """Have something closed, on the store's thread; it is waited for so long, if it has to be."""
        self._thread.post("close", closing, wait_s)

    def put_away(self, run: StoredRun) -> None:
        """Close a run, on this thread; what that raises is told `failed`."""
        try:
            run.close()
        except BaseException as error:  # noqa: BLE001  nobody depends on it
            self._failed(f"close failed: {in_words(error)}")


class VisitedRun(WrappedRun[StoredRun]):
    """A run that a store is asked to pin, and to let go of, on the store's thread; all else on the caller's.

    Args:
        close_wait_s: how long `close` waits for the store.
    """

    def __init__(self, run: StoredRun, visit: Visit, close_wait_s: float) -> None:
        super().__init__(run)
        self._visit = visit
        self._close_wait_s = close_wait_s
        self._pinned: StoredRun | BaseException | None = None  # for `retain`, or why it is not

    def pin(self) -> None:
        """Pin it once more, for the first `retain`; on this thread."""
        try:
            self._pinned = self._run.retain()
        except BaseException as error:  # noqa: BLE001  it is for whoever retains it
            self._pinned = error

    def retain(self) -> VisitedRun:
        """See `StoredRun`.

        Raises:
            StoreSilentError: the store did not answer.
        """
        pinned, self._pinned = self._pinned, None
        if isinstance(pinned, BaseException):
            try:
                raise pinned
            finally:
                del pinned  # its traceback holds on to this frame
        if pinned is None:
            pinned = self._visit.pin(self._run.retain)
        return VisitedRun(pinned, self._visit, 0.0)

    def close(self) -> None:
        """See `StoredRun`. Returns soon and raises nothing, whatever the store does."""
        self._visit.close(self.put_away, self._close_wait_s)

    def put_away(self) -> None:
        """Close it, and a pin that nobody took, on this thread."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None and not isinstance(pinned, BaseException):
            self._visit.put_away(pinned)
        self._visit.put_away(self._run)
