"""The client of `kvlane serve` for an event loop, over aiohttp; the other one is in `kvlane.policy.client`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import aiohttp

from kvlane.policy.client_wire import (
    DEADLINE_MS,
    IDLE_S,
    MOST_BYTES,
    TOO_LONG,
    UNADVISED,
    URL,
    Answer,
    Call,
    Columns,
    NoAnswerError,
    Observed,
    Wire,
    seconds,
)

T = TypeVar("T")


class AsyncClient:
    """What `Client` is, for the event loop that it is first used on; arguments and answers are the same."""

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
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Calls so far: `answered`, and those that were not by why."""
        return self._wire.counts

    async def decide(self, request: Mapping[str, Any], *, deadline_ms: float | None = None) -> Answer:
        """The decision for one request, as `POST /v1/decide` takes it."""
        return await self._ask(self._wire.decide(request), deadline_ms)

    async def decide_batch(self, columns: Mapping[str, Any], *, deadline_ms: float | None = None) -> Columns:
        """The decisions for many requests, as `POST /v1/decide/batch` takes them."""
        return await self._ask(self._wire.decide_batch(columns), deadline_ms)

    async def observe(
        self, records: Sequence[Mapping[str, Any]], *, deadline_ms: float | None = None
    ) -> Observed:
        """Tells the service what was measured, as `POST /v1/observe` takes it."""
        return await self._ask(self._wire.observe(records), deadline_ms)

    async def release(self, decision_id: str, *, deadline_ms: float | None = None) -> bool:
        """Releases what a decision reserved. False where it is not known, or nobody answered: it expires by itself."""
        return await self._ask(self._wire.release(decision_id), deadline_ms)

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _ask(self, call: Call[T], deadline_ms: float | None) -> T:
        wire = self._wire
        deadline_s = wire.deadline_s if deadline_ms is None else seconds(deadline_ms)
        try:
            answer = call.heard(*await self._exchange(call, deadline_s))
        except NoAnswerError as error:
            wire.count(error.failure)
            return call.instead(error)
        wire.count("answered")
        return answer

    async def _exchange(self, call: Call[T], deadline_s: float) -> tuple[int, bytes]:
        """Status and body; raises `NoAnswerError`."""
        if self._session is None:
            self._session = self._open()
        try:
            async with asyncio.timeout(deadline_s):
                try:
                    return await self._once(self._session, call)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                    # A kept connection may have been hung up on meanwhile: that says nothing about the service.
                    if isinstance(error, aiohttp.ClientConnectorError) or not call.again:
                        raise
                    return await self._once(self._session, call)
        except TimeoutError:
            raise NoAnswerError("timeout", "the deadline has passed") from None
        except aiohttp.ClientResponseError as error:
            raise NoAnswerError("garbage", str(error)[:200]) from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswerError("unreachable", str(error)[:200]) from None

    async def _once(self, session: aiohttp.ClientSession, call: Call[T]) -> tuple[int, bytes]:
        parts = self._wire.url
        url = f"{parts.scheme}://{parts.netloc}{call.path}"
        async with session.request(
            call.method, url, data=call.body, headers=call.headers, allow_redirects=False
        ) as reply:
            if (reply.content_length or 0) > MOST_BYTES:
                raise NoAnswerError("garbage", TOO_LONG)
            raw = bytearray()
            async for piece in reply.content.iter_any():
                raw += piece
                if len(raw) > MOST_BYTES:
                    raise NoAnswerError("garbage", TOO_LONG)
            return reply.status, bytes(raw)

    def _open(self) -> aiohttp.ClientSession:
        """A session without what an answer of a few hundred bytes does not need, or a deadline of ours rules."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=self._tls or True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
        )
