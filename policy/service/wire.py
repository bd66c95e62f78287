"""HTTP as far as it is this endpoint's own: connections with deadlines, and replies written in one piece.

aiohttp parses requests and runs handlers. What it leaves to an application is done here: a client that takes too long
over a request, or over reading an answer, is cut off, and the parser's own refusals are problems like all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from time import monotonic
from typing import Any, cast

from aiohttp import web

from kvlane.policy.service import problems
from kvlane.policy.service.config import Limits
from kvlane.policy.service.known import head_of
from kvlane.policy.service.metrics import Cells, count
from kvlane.policy.service.problems import ProblemError

JSON = "application/json"
_LARGE_BUFFER = 1 << 16
# How long a refused body is read and thrown away, so that the refusal can be read.
_LINGER_S = 1.0

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Heads:
    """The beginnings of replies, made once a second for the date in them."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Takes the date of now."""
        self._common = f"Date: {formatdate(usegmt=True)}\r\nX-Content-Type-Options: nosniff"
        self._made: dict[tuple[int, str], bytes] = {}

    def head(self, status: int, content_type: str) -> bytes:
        """Everything up to the length, which is to follow, or up to the last line where there is to be no content."""
        key = (status, content_type)
        made = self._made.get(key)
        if made is None:
            text = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{self._common}"
            if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
                text += f"\r\nContent-Type: {content_type}\r\nContent-Length: "
            made = self._made[key] = text.encode("ascii")
        return made


class Reply(web.StreamResponse):
    """An answer known as a whole: its head and body leave in one write. A body of None is no content at all, and of
    one for HEAD only the length is told."""

    # Neither headers nor a status line are negotiated, so that nothing of the base's state is used.
    def __init__(
        self, head: bytes, body: bytes | None, extra: bytes = b"", *, keep_alive: bool = True
    ) -> None:
        self._head, self._content, self._extra = head, body, extra
        self._stays = keep_alive
        self._asked: web.BaseRequest | None = None

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection stays for another request."""
        return self._stays

    async def prepare(self, request: web.BaseRequest) -> None:
        """Writes all of it."""
        self._asked = request
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        end = b"\r\n\r\n" if self._stays else b"\r\nConnection: close\r\n\r\n"
        body = self._content
        if body is None:
            transport.write(b"".join((self._head, self._extra, end)))
        elif request.method == "HEAD":
            # Whoever asks so reads no body, and would take one for the next answer.
            transport.write(b"".join((self._head, b"%d" % len(body), self._extra, end)))
        else:
            transport.write(b"".join((self._head, b"%d" % len(body), self._extra, end, body)))

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002
        """Waits for a client that does not read, so that answers do not pile up."""
        assert self._asked is not None
        transport = self._asked.transport
        if transport is not None and transport.get_write_buffer_size() > _LARGE_BUFFER:
            await self._asked.writer.drain()
        if self._stays:
            cast(Connection, self._asked.protocol).is_answered()


def fields(headers: Mapping[str, str]) -> bytes:
    """Header lines to follow the length, each with the line end before it."""
    return "".join(f"\r\n{name}: {value}" for name, value in headers.items()).encode("latin-1")


class Connection(web.RequestHandler):
    """One connection: knows since when a request is on its way, and since when an answer is not read.

    A whole request with a known head is answered as soon as it is received; all else aiohttp is given, which answers
    in a task. `received` is what it was given and did not answer yet, None once that is not known any more.
    """

    __slots__ = ("_answered", "_at_once", "heads", "heard_at", "received", "stuck_since")

    def __init__(self, manager: Server, **options: Any) -> None:
        super().__init__(manager, **options)
        self.heads = manager.heads
        self._at_once = manager.at_once
        self.received: bytes | None = b""
        self._answered: bytes | None = None
        # A connection that never says anything is as slow as one that never finishes.
        self.heard_at: float | None = monotonic()
        self.stuck_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes it, or says that there are too many."""
        super().connection_made(transport)
        manager = self._manager
        assert isinstance(manager, Server)
        if len(manager.connections) > manager.limits.connections:
            count(manager.cells.cut_off, "too_many_connections")
            problem = ProblemError("too_many_requests", "too many connections are open")
            body = problem.body()
            head = self.heads.head(problem.status, problems.CONTENT_TYPE)
            length = str(len(body)).encode("ascii")
            written = cast(asyncio.Transport, transport)
            written.write(head + length + b"\r\nRetry-After: 1\r\nConnection: close\r\n\r\n" + body)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Answers a request with a known head; of others it notes when they begin to come in."""
        transport = self.transport
        # The first request of a connection always goes to aiohttp, so that its task is there.
        if self.received == b"" and self._answered is not None and transport is not None:
            answer = self._at_once(data) if transport.get_write_buffer_size() <= _LARGE_BUFFER else None
            if answer is not None:
                transport.write(answer)
                # As after an answer of aiohttp's, the connection may now be idle for so long.
                self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
                return
        if self.heard_at is None:
            self.heard_at = monotonic()
        if self.received is not None:
            self.received = self.received + data if len(self.received) < _LARGE_BUFFER else None
        super().data_received(data)

    def close(self) -> None:
        """Ends the connection after what is being answered; aiohttp does."""
        self.received = None
        super().close()

    def force_close(self) -> None:
        """Ends it now."""
        self.received = None
        super().force_close()

    def head(self, body: bytes) -> bytes | None:
        """The head of the request that is being answered, if it and this body are all that was received."""
        head = None if self.received is None else head_of(self.received, body)
        self._answered = self.received if head is not None else b""
        return head

    def is_answered(self) -> None:
        """Forgets the request: what is received now begins another. If more than it was received, it has begun."""
        if self.received is not None and self.received is self._answered:
            self.received = b""

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The parser's refusals in this endpoint's form; the connection is closed."""
        self.heard_at = None
        if status >= 500:
            self.logger.error("request failed", exc_info=exc)
            problem = ProblemError("internal_error", "the endpoint failed; its log says why")
        else:
            text = " ".join((message or "it could not be parsed").split())[:200]
            problem = ProblemError("malformed_request", text)
        manager = self._manager
        if isinstance(manager, Server):
            count(manager.cells.problems, problem.code)
        head = self.heads.head(problem.status, problems.CONTENT_TYPE)
        return Reply(head, problem.body(), keep_alive=False)


class Server(web.Server):
    """Makes connections, and cuts off those that take too long.

    `at_once` is given what a connection receives between requests, and makes the answer to a request it knows.
    """

    def __init__(
        self,
        handler: Handler,
        at_once: Callable[[bytes], bytes | None],
        limits: Limits,
        cells: Cells,
        heads: Heads,
    ) -> None:
        super().__init__(
            handler,
            access_log=None,
            auto_decompress=False,
            # Nobody is left to read what a client was answered that has gone: long work for it is not gone on with.
            handler_cancellation=True,
            keepalive_timeout=limits.idle_s,
            lingering_time=_LINGER_S,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
        )
        self.limits, self.cells, self.heads = limits, cells, heads
        self.at_once = at_once

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)

    def sweep(self) -> None:
        """Cuts off who has begun a request, or left an answer unread, for too long. To be called every second."""
        now = monotonic()
        for connection in self.connections:
            assert isinstance(connection, Connection)
            transport = connection.transport
            if transport is None:
                continue
            if transport.get_write_buffer_size() == 0:
                connection.stuck_since = None
            elif connection.stuck_since is None:
                connection.stuck_since = now
            for since, reason in (
                (connection.heard_at, "slow_request"),
                (connection.stuck_since, "slow_reader"),
            ):
                if since is not None and now - since > self.limits.request_s:
                    count(self.cells.cut_off, reason)
                    transport.abort()
                    break
