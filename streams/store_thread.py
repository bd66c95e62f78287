"""Calls of a store on a thread of the store's own: who asks waits as long as the answer is worth, and no longer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from kvlane.streams.backend import Backend, Flag
from kvlane.streams.faults import StoreSilentError

T = TypeVar("T")

LINGER_S = 0.1
"""How long a thread stays with nothing to do: to start another costs as much as a few calls, and who closes the
backend waits for it."""


@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """One call of a store's. Only its `StoreThread` changes it, all but the answer under its lock."""

    what: str
    call: Callable[[], T]
    put_away: Callable[[T], object] | None
    done: Flag
    asked_s: float
    due: bool  # must be done, if late, and by whomever
    began_s: float = 0.0
    over: bool = False
    given_up: bool = False
    value: T = field(init=False)
    error: BaseException | None = None


class StoreThread:
    """Calls of one store, one after another on a thread of the backend's. Methods may be called from any thread.

    The thread is made when there is something to do, and ends `LINGER_S` after the last of it. A store that never
    comes back from a call has this one and no other. One that has not come for a call while somebody waited for it is
    replaced, and does nothing more if it comes after all: in a process that was forked there is none.

    Args:
        name: of the thread.
        patience_s: a call under way for longer is one that hangs: nothing more is asked until it has come back.
    """

    def __init__(self, backend: Backend, name: str, patience_s: float) -> None:
        self.patience_s = patience_s
        self._backend = backend
        self._name = name
        self._waiting: deque[Call[Any]] = deque()
        self._at: Call[Any] | None = None  # under way
        self._overdue = False  # somebody has given up because of it
        self._in_vain = False  # somebody who did not have to wait for it has stopped doing so
        self._worker: object | None = None  # which thread it is that does the calls
        self._idle: Flag | None = None  # what the thread waits for where it has nothing to do
        self._lock = threading.Lock()  # never held while the backend is called: it may decide who runs next

    def ask(self, what: str, call: Callable[[], T], put_away: Callable[[T], object] | None = None) -> Call[T]:
        """Have something called; `wait` for the answer.

        Args:
            what: for messages.
            put_away: what becomes of an answer that comes after it was given up, on the store's thread.

        Raises:
            StoreSilentError: an earlier call hangs.
            KvSafetyError: the backend is closed.
        """
        asked, hangs = self._put(what, call, put_away, due=False)
        if hangs is not None:
            raise StoreSilentError(f"not asked: {hangs}")
        return asked

    def wait(self, asked: Call[T], timeout_s: float) -> T:
        """The answer, or the error that the call raised.

        Raises:
            StoreSilentError: there was none within that time. It is not wanted any more, and while what the thread is
                at goes on, nothing is asked.
        """
        try:
            heard = asked.done.wait(max(0.0, timeout_s))
        except BaseException:
            self._leave(asked)
            raise
        why = "" if heard else self._give_up(asked)
        if asked.given_up:
            raise StoreSilentError(why)
        if asked.error is not None:
            try:
                raise asked.error
            finally:
                asked.error = None  # its traceback holds on to this frame
        return asked.value

    def post(self, what: str, call: Callable[[], object], timeout_s: float) -> None:
        """Have something done that must be done, if late; returns once it is, or the time (maybe none) has passed.

        It must not raise. Where an earlier call hangs it is not waited for at all, and where no thread can be had it
        is done on this one.
        """
        try:
            asked, hangs = self._put(what, call, None, due=True)
        except Exception:  # noqa: BLE001  it has been done here
            return
        with self._lock:
            in_vain = self._in_vain
        if timeout_s > 0 and hangs is None and not in_vain and not asked.done.wait(timeout_s):
            with self._lock:
                self._in_vain = self._at is not None

    def _put(
        self,
        what: str,
        call: Callable[[], T],
        put_away: Callable[[T], object] | None,
        *,
        due: bool,
    ) -> tuple[Call[T], str | None]:
        """A call in the queue, or not, and what hangs before it."""
        now = self._backend.now()
        asked = Call(what, call, put_away, self._backend.flag(), now, due)
        idle = worker = None
        with self._lock:
            hangs = self._hangs(now)
            if hangs is None or due:
                self._waiting.append(asked)
                if self._worker is None:
                    worker = self._worker = object()
                idle, self._idle = self._idle, None
        if idle is not None:
            idle.set()
        if worker is not None:
            try:
                self._backend.start(partial(self._work, worker), self._name)
            except BaseException as error:
                self._forsake(asked, error)
                raise
        return asked, hangs

    def _forsake(self, asked: Call[Any], why: BaseException) -> None:
        """No thread comes, for who asked meanwhile neither; unless it has come before who asked was called away."""
        left: Iterable[Call[Any]] = ()
        with self._lock:
            if self._at is None:
                left, self._waiting = self._waiting, deque()
                self._worker = None
        for each in left:
            if each.due:
                each.call()  # a pin that nobody gives up would stay for ever
            elif each is not asked:
                each.error = StoreSilentError(f"not asked: {why}")
            each.done.set()
        if not asked.due:
            self._leave(asked)

    def _hangs(self, now: float) -> str | None:
        """What hangs, in words; under the lock."""
        at = self._at
        if at is None:
            return None
        age_s = now - at.began_s
        if not self._overdue and age_s < self.patience_s:
            return None
        return f"its {at.what} has been under way for {age_s:.3g} s"

    def _give_up(self, asked: Call[Any]) -> str:
        """Nobody waits for it any more, unless it is there after all; why not, in words."""
        now = self._backend.now()
        why = f"no answer within {now - asked.asked_s:.3g} s"
        with self._lock:
            if asked.over:
                return ""
            asked.given_up = True
            self._overdue = self._at is not None
            if asked is self._at:
                return why
            if asked in self._waiting:
                self._waiting.remove(asked)
            if self._at is None:
                self._worker = None
            hangs = self._hangs(now)
        return why if hangs is None else f"{why}: {hangs}"

    def _leave(self, asked: Call[Any]) -> None:
        """Who waited has been called away."""
        self._give_up(asked)
        if not asked.given_up and asked.error is None and asked.put_away is not None:
            put_away, value = asked.put_away, asked.value
            self.post("put away", lambda: put_away(value), 0.0)

    def _work(self, me: object) -> None:
        lingered = False
        while True:
            idle, now = self._backend.flag(), self._backend.now()
            asked = None  # an idle thread must not keep what it came by last
            with self._lock:
                if self._worker not in (me, None):
                    return
                self._worker = me
                self._at, self._overdue, self._in_vain = None, False, False
                self._idle = None if self._waiting or lingered else idle
                if self._waiting:
                    self._at = asked = self._waiting.popleft()
                    asked.began_s = now
                elif lingered:
                    self._worker = None
                    return
            if asked is None:
                lingered = not idle.wait(LINGER_S)
            else:
                lingered = False
                self._do(asked)

    def _do(self, asked: Call[Any]) -> None:
        try:
            asked.value = asked.call()
        except BaseException as error:  # noqa: BLE001  it is for who asked
            asked.error = error
        with self._lock:
            asked.over = True
            if not asked.given_up:
                self._at = None
        if not asked.given_up:
            asked.done.set()
            return
        if asked.error is not None:
            asked.error = None  # its traceback holds on to this frame
        elif asked.put_away is not None:
            # Whatever it raises: without its thread the store would be given up for good.
            with suppress(BaseException):
                asked.put_away(asked.value)
