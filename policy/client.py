"""Clients of `kvlane serve`: an answer within a deadline, or a default in its place.

    with Client(deadline_ms=20) as client:
        answer = client.decide({"prompt_tokens": 12370, "hits": [{"tier": "host", "tokens": 12368}]})
        params = answer.kv_transfer_params

No call raises for what a service, a network or a resolver does, and none takes longer than its deadline: looking up the
name, connecting, sending and reading the last byte are all within it. What stands in is the client's `default`, counted
by why. A body that cannot be JSON, and a deadline that cannot be, are the caller's own errors and raised.
"""

from __future__ import annotations

import os
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvlane.policy.client_socket import Addresses, Deadline, TimedConnection
from kvlane.policy.client_wire import (
    DEADLINE_MS,
    IDLE_S,
    MOST_BYTES,
    RECOMPUTE,
    TOO_LONG,
    UNADVISED,
    URL,
    Answer,
    Call,
    Columns,
    Failure,
    NoAnswerError,
    Observed,
    Wire,
    seconds,
)

if TYPE_CHECKING:
    from kvlane.policy.client_async import AsyncClient

__all__ = ["RECOMPUTE", "UNADVISED", "Answer", "AsyncClient", "Client", "Columns", "Failure", "Observed"]

T = TypeVar("T")

# Connections kept for later calls, as many as there are likely to be threads.
_MOST_IDLE = 64


class Client:
    """Asks the service at `url` from any number of threads, over connections kept between calls.

    `default` answers in the service's place; `UNADVISED` leaves the engine to itself, `RECOMPUTE` loads nothing. A
    `token` of None is `KVLANE_TOKEN` of the environment, an `observe_token` of None `KVLANE_OBSERVE_TOKEN`, or else the
    token. Raises `InputError` naming `url`, `deadline_ms` or `token`.
    """

    def __init__(
        self,
        url: str = URL,
        *,
        deadline_ms: float = DEADLINE_MS,
        default: Answer = UNADVISED,
        token: str | None = None,
        observe_token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._wire = Wire(url, deadline_ms, default, token, observe_token)
        parts = self._wire.url
        secure = parts.scheme == "https"
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if secure else 80)
        self._addresses = Addresses(self._host, self._port)
        self._idle: deque[tuple[TimedConnection, float, int]] = deque()

    @property
    def counts(self) -> dict[str, int]:
        """Calls so far: `answered`, and those that were not by why."""
        return self._wire.counts

    def decide(self, request: Mapping[str, Any], *, deadline_ms: float | None = None) -> Answer:
        """The decision for one request, as `POST /v1/decide` takes it."""
        return self._ask(self._wire.decide(request), deadline_ms)

    def decide_batch(self, columns: Mapping[str, Any], *, deadline_ms: float | None = None) -> Columns:
        """The decisions for many requests, as `POST /v1/decide/batch` takes them."""
        return self._ask(self._wire.decide_batch(columns), deadline_ms)

    def observe(self, records: Sequence[Mapping[str, Any]], *, deadline_ms: float | None = None) -> Observed:
        """Tells the service what was measured, as `POST /v1/observe` takes it."""
        return self._ask(self._wire.observe(records), deadline_ms)

    def release(self, decision_id: str, *, deadline_ms: float | None = None) -> bool:
        """Releases what a decision reserved. False where it is not known, or nobody answered: it expires by itself."""
        return self._ask(self._wire.release(decision_id), deadline_ms)

    def close(self) -> None:
        """Closes the connections that are not in use."""
        while self._idle:
            self._idle.pop()[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, call: Call[T], deadline_ms: float | None) -> T:
        wire = self._wire
        deadline = Deadline(wire.deadline_s if deadline_ms is None else seconds(deadline_ms))
        try:
            answer = call.heard(*self._exchange(call, deadline))
        except NoAnswerError as error:
            wire.count(error.failure)
            return call.instead(error)
        wire.count("answered")
        return answer

    def _exchange(self, call: Call[T], deadline: Deadline) -> tuple[int, bytes]:
        """Status and body; raises `NoAnswerError`."""
        while True:
            connection = self._reusable()
            reused = connection is not None
            if connection is None:
                connection = TimedConnection(self._addresses, self._host, self._port, self._tls)
            try:
                return self._on(connection, call, deadline)
            except TimeoutError as error:
                raise NoAnswerError("timeout", str(error)) from None
            except ConnectionError as error:
                # A kept connection may have been hung up on meanwhile: that says nothing about the service.
                if not (reused and call.again):
                    raise NoAnswerError("unreachable", str(error)) from None
            except OSError as error:
                raise NoAnswerError("unreachable", str(error)) from None
            except HTTPException as error:
                raise NoAnswerError("garbage", f"{type(error).__name__}: {error}"[:200]) from None

    def _on(self, connection: TimedConnection, call: Call[T], deadline: Deadline) -> tuple[int, bytes]:
        """The same on one connection, which is kept where all went well; raises what the socket and HTTP do."""
        keep, reply = False, None
        try:
            connection.use(deadline)
            connection.request(call.method, call.path, call.body, dict(call.headers))
            reply = connection.getresponse()
            expected = reply.length or 0
            raw = reply.read(MOST_BYTES + 1) if expected <= MOST_BYTES else b""
            if max(len(raw), expected) > MOST_BYTES:
                raise NoAnswerError("garbage", TOO_LONG)
            if len(raw) < expected:
                raise NoAnswerError("unreachable", "the service hung up in the middle of its answer")
            keep = reply.isclosed() and not reply.will_close and len(self._idle) < _MOST_IDLE
        finally:
            if not keep:
                connection.close()
                if reply is not None:
                    reply.close()
        if keep:
            self._idle.append((connection, monotonic() + IDLE_S, os.getpid()))
        return reply.status, raw

    def _reusable(self) -> TimedConnection | None:
        """The connection used last, when it can be used again; one of another process is left alone."""
        while True:
            try:
                connection, until, process = self._idle.pop()
            except IndexError:
                return None
            if process == os.getpid():
                if monotonic() < until:
                    return connection
                connection.close()


def __getattr__(name: str) -> Any:
    if name == "AsyncClient":  # whoever needs no event loop loads none
        from kvlane.policy.client_async import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
