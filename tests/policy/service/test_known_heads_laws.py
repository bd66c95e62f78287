"""Whatever a client sends, however it is cut: what comes back is the same with known heads and without them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, pairwise
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy.service.app import Endpoint
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.service import Service
from kvlane.policy.service.wire import Heads, Server

ONE = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_UNIQUE = count()

Talk = list[tuple[bytes, list[int], bool]]


class Both:
    """Two endpoints that are asked the same; only `fast` answers at once."""

    def __init__(self) -> None:
        self.at_once = 0
        self._ports: dict[bool, int] = {}
        self._runners: list[web.ServerRunner] = []

    async def start(self) -> None:
        for fast in (True, False):
            heads = Heads()
            endpoint = Endpoint(Service(from_fields({"deployments": [ONE]})), heads)

            def at_once(data: bytes, fast: bool = fast, endpoint: Endpoint = endpoint) -> bytes | None:
                answer = endpoint.at_once(data) if fast else None
                self.at_once += answer is not None
                return answer

            service = endpoint.service
            server = Server(endpoint.handle, at_once, service.settings.limits, service.cells, heads)
            runner = web.ServerRunner(server, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._runners.append(runner)
            self._ports[fast] = runner.addresses[0][1]

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def answers(self, fast: bool, talk: Talk) -> bytes:
        """All that comes back until the connection is closed, without dates and ids of decisions."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[fast])
        received = bytearray()

        async def read() -> None:
            with suppress(ConnectionError):
                while part := await reader.read(1 << 16):
                    received.extend(part)

        reading = asyncio.create_task(read())
        for asked, (raw, cuts, waits) in enumerate([*talk, (LAST, [], True)], start=1):
            edges = [0, *sorted(cut % len(raw) for cut in cuts), len(raw)]
            for low, high in pairwise(edges):
                if reading.done():
                    break
                writer.write(raw[low:high])
                # Long enough for what is sent to be received by itself, mostly; it need not be.
                await asyncio.sleep(0.001 if high < len(raw) else 0)
            if waits:
                for _ in range(20):
                    if received.count(b"HTTP/1.1 ") >= asked or reading.done():
                        break
                    await asyncio.sleep(0.001)
        await asyncio.wait_for(reading, 20)
        writer.close()
        told = re.sub(rb"Date: [^\r]*", b"", bytes(received))
        return re.sub(rb'"decision_id":"[^"]*"', b"", told)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[asyncio.Runner, Both]]:
    with asyncio.Runner() as runner:
        found = Both()
        runner.run(found.start())
        yield runner, found
        runner.run(found.stop())


def raw(fields: Any, head: str = "POST /v1/decide HTTP/1.1", *headers: str, more: int = 0) -> bytes:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    body += b" " * (-len(body) % 128)  # so that heads come again
    lines = [head, "Host: localhost", "Content-Type: application/json", *headers]
    if not any("ncoding: chunked" in header for header in headers):
        lines.append(f"Content-Length: {len(body) + more}")
    else:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


good = st.builds(
    lambda prompt, tokens, more: {
        "prompt_tokens": prompt,
        "hits": [{"tier": "host", "tokens": tokens}],
        **more,
    },
    st.integers(0, 40_000),
    st.integers(0, 20_000),
    st.sampled_from(
        [
            {},
            {},
            {"instance": "a"},
            {"request_id": "same"},
            {"request_id": "same", "reserve": True, "instance": "same"},
            {"ttft_slo_s": 0.5},
            {"state": {"device_busy_s": 0.1, "links": {"pcie5-x16": {"queued_bytes": 1e9}}}},
            {"candidates": [{"instance": "x"}, {"instance": "y", "resident_tokens": 64}]},
            {"hits": [], "candidates": [{"instance": "x"}, {"instance": "y", "resident_tokens": 64}]},
            {"colour": "red"},
        ]
    ),
)
bodies = (
    good
    | good
    | good
    | st.sampled_from(
        [
            b'{"prompt_tokens":\r\n\r\n1000}',
            b"\r\n\r\n" + b'{"prompt_tokens": 10}',
            b'{"prompt_tokens": 1000',
            b"",
            b'{"prompt_tokens": 1e308}',
            b"\xff\xfe",
            b"[" * 3000,
            LAST,
            b"POST /v1/decide HTTP/1.1\r\n\r\n",
        ]
    )
)
# Heads with which the connection goes on, and heads with which it may not.
usual = st.builds(
    raw, bodies, st.just("POST /v1/decide HTTP/1.1"), st.sampled_from(["X: 1", "X: 1", "x: 1", "X:  1"])
)
headers = st.sampled_from(
    [
        "Connection: keep-alive",
        "Connection: close",
        "Transfer-Encoding: chunked",
        "transfer-encoding: chunked",
        "Expect: 100-continue",
        "Upgrade: websocket",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
        "Content-Length: 3",
        "Content-Length : 3",
        "Content-Encoding: gzip",
        "X: a\r\n b",
        "X: a\nY: b",
        "Host: evil.example",
        "Authorization: Bearer none",
    ]
)
targets = st.sampled_from(
    [
        "POST /v1/decide HTTP/1.1",
        "POST /v1/decide HTTP/1.0",
        "post /v1/decide HTTP/1.1",
        "POST http://localhost/v1/decide HTTP/1.1",
        "POST /v1/decide?a=b HTTP/1.1",
        "POST //v1/decide HTTP/1.1",
        "POST /v1/what-if HTTP/1.1",
        "PUT /v1/decide HTTP/1.1",
        "\r\nPOST /v1/decide HTTP/1.1",
        "\r\n\r\nPOST /v1/decide HTTP/1.1",
        "GET / HTTP/1.1",
        "HEAD /healthz HTTP/1.1",
        "DELETE /v1/decisions/none HTTP/1.1",
    ]
)
odd = st.builds(
    lambda body, head, header, more: raw(body, head, header, more=more),
    bodies,
    targets,
    headers,
    st.sampled_from([0, 0, 0, 1, -1]),
)
gets = st.sampled_from(
    [b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a.b\r\n\r\n"]
)
# Most come whole and one after the other, for else nothing is answered at once.
nowhere = st.builds(list[int])
whole = st.tuples(usual, nowhere, st.just(True))
cut = st.tuples(usual | odd | gets, st.lists(st.integers(0, 500), max_size=2), st.booleans())
steps = st.one_of([whole] * 5 + [cut])


def test_an_answer_is_the_same_and_in_its_place_whether_heads_are_known_or_not(
    both: tuple[asyncio.Runner, Both],
) -> None:
    runner, served = both

    @given(talk=st.lists(steps, min_size=2, max_size=10))
    @settings(max_examples=150, deadline=None)
    def law(talk: Talk) -> None:
        # What an id was given to before, and what is booked, must not depend on other examples.
        mark = b'"%04x"' % next(_UNIQUE)
        named = [(one.replace(b'"same"', mark), cuts, waits) for one, cuts, waits in talk]
        for _ in range(2):  # the second time heads are known
            told = [runner.run(served.answers(fast, named)) for fast in (True, False)]
            assert told[0] == told[1]

    law()
    assert served.at_once > 10  # how many is a matter of chance; none at all would show nothing
