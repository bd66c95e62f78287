"""A head seen before: the answer is the same as after parsing it, and nothing passes that would not pass then."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from aiohttp import web

from kvlane.policy.service import known as known_heads
from kvlane.policy.service.app import Endpoint
from kvlane.policy.service.auth import Gate
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.known import KnownHeads, head_of
from kvlane.policy.service.service import Service
from kvlane.policy.service.wire import Heads, Server

ONE = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
GOOD = {"prompt_tokens": 1000, "hits": [{"tier": "host", "tokens": 992}]}


def post(fields: Any, *headers: str, host: str = "localhost") -> bytes:
    body = json.dumps(fields).encode()
    lines = [
        "POST /v1/decide HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Talk:
    """One connection to a served endpoint, and which of its requests were answered at once."""

    def __init__(
        self,
        endpoint: Endpoint,
        at_once: list[bool],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.endpoint, self.at_once = endpoint, at_once
        self.reader, self.writer = streams

    async def answer(self) -> tuple[int, str, bytes]:
        """The next answer: status, head and body, without what is another in each."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"Content-Length: (\d+)", head)
        assert length is not None
        body = await self.reader.readexactly(int(length[1]))
        return (
            int(head.split()[1]),
            re.sub(r"Date: .*\r\n|Content-Length: \d+", "", head),
            re.sub(rb'"decision_id":"[^"]*"', b"", body),
        )

    async def ask(self, *pieces: bytes) -> tuple[int, str, bytes]:
        for piece in pieces:
            self.writer.write(piece)
            await asyncio.sleep(0.02 if len(pieces) > 1 else 0)
        return await self.answer()


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[Talk]:
    heads, at_once = Heads(), list[bool]()
    endpoint = Endpoint(Service(from_fields({"deployments": [ONE], "limits": limits})), heads)

    def noted(data: bytes) -> bytes | None:
        answer = endpoint.at_once(data)
        at_once.append(answer is not None)
        return answer

    settings = endpoint.service.settings
    server = Server(endpoint.handle, noted, settings.limits, endpoint.service.cells, heads)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    streams = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
    try:
        yield Talk(endpoint, at_once, streams)
    finally:
        streams[1].close()
        await runner.cleanup()


def run(test: Callable[[Talk], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        async with served(**limits) as talk:
            await asyncio.wait_for(test(talk), 30)

    asyncio.run(main())


def test_the_second_of_a_kind_is_answered_at_once_and_as_the_first() -> None:
    async def test(talk: Talk) -> None:
        first = await talk.ask(post(GOOD))
        assert (first[0], talk.at_once) == (200, [])
        assert [await talk.ask(post(GOOD)) for _ in range(3)] == [first] * 3
        assert talk.at_once == [True] * 3
        assert talk.endpoint.service.cells.latency_s.total > 0
        assert sum(talk.endpoint.service.cells.latency_s.counts) == 4

    run(test)


def test_a_refusal_is_the_same_too() -> None:
    async def test(talk: Talk) -> None:
        bad = post({**GOOD, "prompt_tokens": 100})  # fewer than are stored
        assert len(bad) == len(post({**GOOD, "prompt_tokens": 995}))
        parsed = await talk.ask(bad)
        assert (parsed[0], json.loads(parsed[2])["code"]) == (422, "invalid_value")
        assert (await talk.ask(post({**GOOD, "prompt_tokens": 995})))[0] == 200
        assert await talk.ask(bad) == parsed
        assert talk.at_once == [False, True]
        assert talk.endpoint.service.cells.problems == {"invalid_value": 2}

    run(test)


@pytest.mark.parametrize("pieces", [1, 40, 150, -1])
def test_what_comes_in_pieces_is_put_together(pieces: int) -> None:
    async def test(talk: Talk) -> None:
        first = await talk.ask(post(GOOD))
        assert await talk.ask(post(GOOD)[:pieces], post(GOOD)[pieces:]) == first
        assert await talk.ask(post(GOOD)) == first
        assert talk.at_once == [False, True]

    run(test)


def test_what_comes_together_is_answered_in_order() -> None:
    async def test(talk: Talk) -> None:
        await talk.ask(post(GOOD))
        others = [{**GOOD, "prompt_tokens": 1000 + number} for number in range(20)]
        talk.writer.write(b"".join(map(post, others)))
        together = [await talk.answer() for _ in others]
        async with served() as other:
            assert together == [await other.ask(post(each)) for each in others]
            assert any(other.at_once)
        assert not any(talk.at_once)

    run(test)


def test_another_head_is_looked_at_anew() -> None:
    async def test(talk: Talk) -> None:
        for _ in range(2):
            assert (await talk.ask(post(GOOD)))[0] == 200
        assert (await talk.ask(post(GOOD, host="evil.example")))[0] == 421
        assert talk.at_once == [True, False]

    run(test)


@pytest.mark.parametrize(
    "header",
    [
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
        "Upgrade: websocket",
        "Expect: 100-continue",
    ],
)
def test_what_is_answered_in_a_way_of_its_own_is_parsed_each_time(header: str) -> None:
    async def test(talk: Talk) -> None:
        answers = [await talk.ask(post(GOOD, header)) for _ in range(2)]
        assert answers[0] == answers[1]
        assert not any(talk.at_once)

    run(test)


def test_a_head_passes_only_the_gate_it_has_passed() -> None:
    async def test(talk: Talk) -> None:
        for _ in range(2):
            assert (await talk.ask(post(GOOD)))[0] == 200
        talk.endpoint.service.gate = Gate("secret")
        assert (await talk.ask(post(GOOD)))[0] == 401
        known = post(GOOD, "Authorization: Bearer secret")
        async with served() as other:
            other.endpoint.service.gate = talk.endpoint.service.gate
            assert [(await other.ask(known))[0] for _ in range(2)] == [200, 200]
            assert (await other.ask(post(GOOD, "Authorization: Bearer secre0")))[0] == 401
            assert other.at_once == [True, False]
        assert talk.at_once == [True, False]

    run(test)


def test_a_head_that_passed_the_gate_before_is_not_known_to_the_one_after() -> None:
    """A token is exchanged while a request that has the old one is still coming in: that one is answered, no more."""

    async def test(talk: Talk) -> None:
        service = talk.endpoint.service
        service.gate = Gate("old")
        known = post(GOOD, "Authorization: Bearer old")
        talk.writer.write(known[:-10])
        while not talk.endpoint._in_flight:
            await asyncio.sleep(0)
        service.gate = Gate("new")
        assert (await talk.ask(known[-10:]))[0] == 200
        assert (await talk.ask(known))[0] == 401
        assert talk.at_once == [False]

    run(test)


def test_when_it_drains_the_connection_is_closed_after_the_answer() -> None:
    async def test(talk: Talk) -> None:
        for _ in range(2):
            await talk.ask(post(GOOD))
        talk.endpoint.draining = True
        status, head, _ = await talk.ask(post(GOOD))
        assert (status, "Connection: close" in head) == (200, True)
        assert await talk.reader.read() == b""
        assert talk.at_once == [True, False]

    run(test)


def test_a_connection_is_idle_from_its_last_answer_on() -> None:
    async def test(talk: Talk) -> None:
        for _ in range(6):
            assert (await talk.ask(post(GOOD)))[0] == 200
            await asyncio.sleep(0.4)
        assert talk.at_once == [True] * 5
        assert await talk.reader.read() == b""

    run(test, idle_s=1.0)


def test_who_does_not_read_for_a_while_is_given_every_answer_in_its_place() -> None:
    async def test(talk: Talk) -> None:
        spots = [{"instance": f"{number:0200}"} for number in range(256)]
        asked = [post(GOOD), post({"prompt_tokens": 1000, "candidates": spots})]
        first = [await talk.ask(raw) for raw in asked]
        talk.writer.transport.pause_reading()  # type: ignore[attr-defined]
        # Their answers are more than the sockets between hold.
        for raw in asked * 100:
            talk.writer.write(raw)
            await asyncio.sleep(0.002)
        talk.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert [await talk.answer() for _ in range(200)] == first * 100

    run(test)


def test_of_many_heads_the_latest_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_heads, "_MOST_HEADS", 3)

    async def test(talk: Talk) -> None:
        for number in range(10):
            assert (await talk.ask(post(GOOD, f"X: {number}")))[0] == 200
        for number in (8, 9, 0):
            assert (await talk.ask(post(GOOD, f"X: {number}")))[0] == 200
        assert talk.at_once[-3:-1] != [False, False]
        assert talk.at_once[-1] is False
        long = post(GOOD, "X: " + "x" * 1024)
        for _ in range(2):
            assert (await talk.ask(long))[0] == 200
        assert talk.at_once[-2:] == [False, False]

    run(test)


def test_heads_are_told_apart_by_every_byte_and_bodies_by_their_length() -> None:
    class Asked:
        headers: ClassVar[dict[str, str]] = {}
        content_length = 2

    known, gate, head = KnownHeads(), Gate(), b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n"
    known.learn(head, Asked(), gate)  # type: ignore[arg-type]
    assert known.body(head + b"{}", gate) == b"{}"
    for other in (head, head + b"{", head + b"{}}", head[1:] + b"{}", b"{}", b"", head.lower() + b"{}"):
        assert known.body(other, gate) is None
    assert known.body(head + b"{}", Gate()) is None


def test_what_was_received_is_one_request_or_is_not() -> None:
    assert head_of(b"A\r\n\r\nbody", b"body") == b"A\r\n\r\n"
    assert head_of(b"GET\r\n\r\n", b"") == b"GET\r\n\r\n"
    for received, body in (
        (b"A\r\n\r\nbodyB", b"body"),  # another has begun
        (b"A\r\n\r\nbo\r\n\r\nbody", b"body"),  # one came before
        (b"A\r\n\r\n4\r\nbody\r\n0\r\n\r\n", b"body"),  # it came in chunks
        (b"A\r\n\r\nbody", b""),  # it was not read
        (b"", b""),
    ):
        assert head_of(received, body) is None
