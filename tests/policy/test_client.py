"""Clients of the endpoint against services that are dead, slow, mad or well, on real sockets.

Whatever a service does, a call answers, and takes no longer than its deadline: services here go on for far longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvlane.policy import InputError
from kvlane.policy.client import RECOMPUTE, UNADVISED, Answer, AsyncClient, Client

DEADLINE_S = 0.2
# Services here would keep a client waiting for a hundredfold: half of that is more than a busy machine adds to a
# deadline, and no absolute time.
SLACK = 50
FOREVER_S = 100 * DEADLINE_S

DECISION = {
    "decision_id": "d-1",
    "path": "load",
    "load_tokens": 512,
    "ttft_s": 0.25,
    "kv_transfer_params": {"max_load_tokens": 512},
    "something_new": [1, 2, 3],
}

Handler = Callable[[socket.socket], None]


@dataclass
class Service:
    """A server socket, and a thread that does the same on each connection."""

    listener: socket.socket
    handler: Handler
    stopped: threading.Event = field(default_factory=threading.Event)
    connections: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self.handler(connection)
        except OSError:
            pass  # the client has gone, or the test is over
        finally:
            connection.close()


@contextmanager
def service(handler: Handler) -> Iterator[Service]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    running = Service(listener, handler)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.stopped.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in running.connections:
            connection.close()
        thread.join()


def read_request(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """Head and body of the next request; None when the client has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    while len(body) < length:
        body += connection.recv(65536)
    return head, body


def reply(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def answers(raw: bytes) -> Handler:
    """Answers every request of a connection with the same bytes."""

    def handle(connection: socket.socket) -> None:
        while read_request(connection) is not None:
            connection.sendall(raw)

    return handle


def drips(first: bytes, then: bytes) -> Handler:
    """Sends `first`, and then a little again and again for as long as anybody listens."""

    def handle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(first)
        until = time.monotonic() + FOREVER_S
        while time.monotonic() < until:
            connection.sendall(then)
            time.sleep(DEADLINE_S / 20)

    return handle


def floods(first: bytes, then: bytes) -> Handler:
    """The same as fast as it is read."""

    def handle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(first)
        while True:
            connection.sendall(then)

    return handle


def silent(connection: socket.socket) -> None:
    read_request(connection)
    time.sleep(FOREVER_S)


def hangs_up(connection: socket.socket) -> None:
    read_request(connection)


def hangs_up_midway(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(reply(json.dumps(DECISION).encode())[:-5])


@dataclass
class Asked:
    """What a call came to."""

    answer: Answer
    counts: dict[str, int]
    took_s: float


Ask = Callable[..., Asked]


def ask_sync(url: str, body: Mapping[str, Any] | None = None, **options: Any) -> Asked:
    with Client(url, **{"deadline_ms": 1e3 * DEADLINE_S, **options}) as client:
        started = time.monotonic()
        answer = client.decide(body or {"prompt_tokens": 1000})
        return Asked(answer, client.counts, time.monotonic() - started)


def ask_async(url: str, body: Mapping[str, Any] | None = None, **options: Any) -> Asked:
    async def run() -> Asked:
        async with AsyncClient(url, **{"deadline_ms": 1e3 * DEADLINE_S, **options}) as client:
            started = time.monotonic()
            answer = await client.decide(body or {"prompt_tokens": 1000})
            return Asked(answer, client.counts, time.monotonic() - started)

    return asyncio.run(run())


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    found: Ask = request.param
    return found


def assert_default(asked: Asked, failure: str) -> None:
    """The default stands in, counted once as what happened, and in time."""
    assert asked.answer.failure == failure, asked.answer
    assert asked.answer.detail
    assert (asked.answer.path, asked.answer.load_tokens) == ("recompute", 0)
    assert asked.answer.kv_transfer_params == {"max_load_tokens": 0}
    assert asked.answer.body == {}
    assert {name: count for name, count in asked.counts.items() if count} == {failure: 1}
    assert asked.took_s < SLACK * DEADLINE_S


class TestAnswers:
    def test_a_decision_is_read_and_what_is_new_in_it_kept(self, ask: Ask) -> None:
        with service(answers(reply(json.dumps(DECISION).encode()))) as running:
            asked = ask(running.url, deadline_ms=30_000)
        answer = asked.answer
        assert (answer.path, answer.load_tokens, answer.ttft_s) == ("load", 512, 0.25)
        assert (answer.decision_id, answer.kv_transfer_params) == ("d-1", {"max_load_tokens": 512})
        assert (answer.failure, answer.detail, answer.body) == (None, "", DECISION)
        assert asked.counts["answered"] == 1

    def test_no_cap_is_none(self, ask: Ask) -> None:
        bare = {key: value for key, value in DECISION.items() if key != "kv_transfer_params"}
        with service(answers(reply(json.dumps(bare).encode()))) as running:
            assert ask(running.url, deadline_ms=30_000).answer.kv_transfer_params is None

    def test_an_answer_in_chunks_is_one_too(self, ask: Ask) -> None:
        body = json.dumps(DECISION).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % letter for letter in body) + b"0\r\n\r\n"
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        with service(answers(head + chunks)) as running:
            assert ask(running.url, deadline_ms=30_000).answer.load_tokens == 512

    def test_what_is_asked_arrives_with_the_token(self, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
        heard: list[tuple[bytes, bytes]] = []

        def handle(connection: socket.socket) -> None:
            while (request := read_request(connection)) is not None:
                heard.append(request)
                connection.sendall(reply(json.dumps(DECISION).encode()))

        with service(handle) as running:
            for expected, options in (
                (b"Bearer given\r\n", {"token": "given"}),
                (b"Bearer from-the-environment\r\n", {}),
            ):
                monkeypatch.setenv("KVLANE_TOKEN", "from-the-environment")
                heard.clear()
                ask(running.url + "/behind/", {"prompt_tokens": 7}, deadline_ms=30_000, **options)
                head, body = heard[-1]
                assert head.startswith(b"POST /behind/v1/decide HTTP/1.1\r\n")
                assert b"Authorization: " + expected in head + b"\r\n"
                assert b"Content-Type: application/json" in head
                assert f"Host: {running.url.removeprefix('http://')}".encode() in head
                assert json.loads(body) == {"prompt_tokens": 7}

    def test_the_default_leaves_the_engine_to_itself(self, ask: Ask) -> None:
        with service(hangs_up) as running:
            answer = ask(running.url, deadline_ms=30_000).answer
        assert answer.failure == "unreachable"
        assert (answer.path, answer.kv_transfer_params) == (UNADVISED.path, None)


class TestBadServices:
    def test_a_dead_port(self, ask: Ask) -> None:
        with socket.create_server(("127.0.0.1", 0)) as bound:
            port = bound.getsockname()[1]
        assert_default(ask(f"http://127.0.0.1:{port}", default=RECOMPUTE), "unreachable")

    def test_a_black_hole(self, ask: Ask) -> None:
        # A listener whose queue is full drops whoever comes next, as a firewall does.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = listener.getsockname()
            waiting = []
            try:
                for _ in range(8):
                    one = socket.socket()
                    one.setblocking(False)
                    waiting.append(one)
                    one.connect_ex(address)
                time.sleep(0.05)
                asked = ask(f"http://127.0.0.1:{address[1]}", default=RECOMPUTE)
            finally:
                for one in waiting:
                    one.close()
        assert_default(asked, "timeout")

    @pytest.mark.parametrize(
        "handler",
        [
            silent,
            drips(b"", b"H"),
            drips(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
            drips(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"{"),
            drips(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
            drips(b"HTTP/1.1 200 OK\r\n\r\n", b"{"),
            drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        ],
        ids=["silent", "status", "headers", "body", "chunks", "no_length", "continue"],
    )
    def test_a_slow_one(self, ask: Ask, handler: Handler) -> None:
        with service(handler) as running:
            asked = ask(running.url, default=RECOMPUTE)
        # So many small headers may be refused for their number before the time is over.
        assert_default(asked, "timeout" if asked.answer.failure == "timeout" else "garbage")
        if handler is silent:
            assert asked.answer.failure == "timeout"

    @pytest.mark.parametrize(
        "handler",
        [
            floods(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"{" * 65536),
            floods(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"10000\r\n" + b"{" * 65536 + b"\r\n",
            ),
            floods(b"HTTP/1.1 200 OK\r\n\r\n", b"{" * 65536),
            floods(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000),
            floods(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 65536),
        ],
        ids=["length", "chunks", "no_length", "headers", "header"],
    )
    def test_an_answer_without_end_is_given_up_for_its_size(self, ask: Ask, handler: Handler) -> None:
        with service(handler) as running:
            assert_default(ask(running.url, default=RECOMPUTE, deadline_ms=60_000), "garbage")

    def test_beginnings_without_end(self, ask: Ask) -> None:
        with service(floods(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)) as running:
            asked = ask(running.url, default=RECOMPUTE)
        assert_default(asked, "garbage" if asked.answer.failure == "garbage" else "timeout")

    def test_one_that_never_reads(self) -> None:
        def handle(connection: socket.socket) -> None:
            time.sleep(FOREVER_S)

        # More than both ends' buffers hold.
        body = {"prompt_tokens": 5, "request_id": "x" * 20_000_000}
        with service(handle) as running:
            assert_default(ask_sync(running.url, body, default=RECOMPUTE), "timeout")

    @pytest.mark.parametrize("handler", [hangs_up, hangs_up_midway], ids=["at_once", "midway"])
    def test_one_that_hangs_up(self, ask: Ask, handler: Handler) -> None:
        with service(handler) as running:
            assert_default(ask(running.url, default=RECOMPUTE, deadline_ms=30_000), "unreachable")

    @pytest.mark.parametrize(
        "raw",
        [
            b"\x00\xff\x13" * 100 + b"\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.6\r\n",
            reply(b""),
            reply(b"<html>"),
            reply(b"\xff\xfe"),
            reply(b"[" * 100_000),
            reply(b'{"a":' * 100_000),
            reply(b"[1, 2]"),
            reply(json.dumps({**DECISION, "path": "sideways"}).encode()),
            reply(json.dumps({**DECISION, "load_tokens": -1}).encode()),
            reply(json.dumps({**DECISION, "load_tokens": "many"}).encode()),
            reply(json.dumps({**DECISION, "kv_transfer_params": 7}).encode()),
            reply(json.dumps({"path": "load"}).encode()),
            b"HTTP/1.1 200 OK\r\nContent-Length: many\r\nConnection: close\r\n\r\n",
        ],
    )
    def test_one_that_talks_garbage(self, ask: Ask, raw: bytes) -> None:
        def handle(connection: socket.socket) -> None:
            read_request(connection)
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            time.sleep(DEADLINE_S / 10)

        with service(handle) as running:
            assert_default(ask(running.url, default=RECOMPUTE, deadline_ms=30_000), "garbage")

    @pytest.mark.parametrize(
        ("status", "failure"),
        [
            ("500 Internal Server Error", "failed"),
            ("503 Service Unavailable", "failed"),
            ("301 Moved Permanently", "failed"),
            ("429 Too Many Requests", "busy"),
            ("400 Bad Request", "refused"),
            ("401 Unauthorized", "refused"),
            ("422 Unprocessable Content", "refused"),
        ],
    )
    def test_one_that_refuses_or_fails(self, ask: Ask, status: str, failure: str) -> None:
        problem = {"type": "about:blank", "code": "some_code", "detail": "in words", "pointer": "/hits/0"}
        elsewhere = "Location: http://127.0.0.1:1/\r\nRetry-After: 1\r\n"
        for body in (json.dumps(problem).encode(), b"<html>oops", b"[" * 100_000):
            with service(answers(reply(body, status, elsewhere))) as running:
                asked = ask(running.url, default=RECOMPUTE, deadline_ms=30_000)
            assert_default(asked, failure)
            assert asked.answer.detail.startswith(status[:3])
            if body.startswith(b"{"):
                assert "some_code: /hits/0: in words" in asked.answer.detail

    def test_a_name_that_nobody_resolves_in_time(self, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
        real, over = socket.getaddrinfo, threading.Event()

        def slow(host: Any, *arguments: Any, **options: Any) -> Any:
            if host == "slow.invalid" and not options.get("flags", 0) & socket.AI_NUMERICHOST:
                over.wait(FOREVER_S)
            return real(host, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", slow)
        # The loop of an asynchronous client waits for its resolver's thread as it ends: only the call counts.
        threading.Timer(3 * DEADLINE_S, over.set).start()
        asked = ask("http://slow.invalid:1", default=RECOMPUTE)
        assert asked.answer.failure == "timeout"
        assert asked.took_s < SLACK * DEADLINE_S

    def test_a_name_that_does_not_exist(self, ask: Ask) -> None:
        asked = ask("http://does-not-exist.invalid:1", default=RECOMPUTE, deadline_ms=10_000)
        assert asked.answer.failure in ("unreachable", "timeout")

    def test_tls_that_never_comes(self, ask: Ask) -> None:
        def handle(connection: socket.socket) -> None:
            connection.recv(65536)
            time.sleep(FOREVER_S)

        with service(handle) as running:
            url = running.url.replace("http:", "https:")
            assert_default(ask(url, default=RECOMPUTE, tls=ssl.create_default_context()), "timeout")

    def test_plain_text_where_tls_is_due(self, ask: Ask) -> None:
        def handle(connection: socket.socket) -> None:
            connection.recv(65536)
            connection.sendall(reply(json.dumps(DECISION).encode()))

        with service(handle) as running:
            url = running.url.replace("http:", "https:")
            assert_default(ask(url, default=RECOMPUTE), "unreachable")


class TestConnections:
    def counting(self, closes_after: int | None = None) -> Handler:
        def handle(connection: socket.socket) -> None:
            served = 0
            while closes_after is None or served < closes_after:
                if read_request(connection) is None:
                    return
                connection.sendall(reply(json.dumps(DECISION).encode()))
                served += 1

        return handle

    def test_one_is_kept_for_call_after_call(self) -> None:
        with service(self.counting()) as running, Client(running.url, deadline_ms=30_000) as client:
            assert all(client.decide({"prompt_tokens": 5}).failure is None for _ in range(20))
            assert len(running.connections) == 1

    def test_a_loop_keeps_one_too(self) -> None:
        async def run(url: str) -> None:
            async with AsyncClient(url, deadline_ms=30_000) as client:
                for _ in range(20):
                    assert (await client.decide({"prompt_tokens": 5})).failure is None

        with service(self.counting()) as running:
            asyncio.run(run(running.url))
            assert len(running.connections) == 1

    def test_one_that_was_hung_up_on_meanwhile_is_replaced(self) -> None:
        async def run(url: str) -> list[str | None]:
            async with AsyncClient(url, deadline_ms=30_000) as client:
                found: list[str | None] = []
                for _ in range(6):
                    found.append((await client.decide({"prompt_tokens": 5})).failure)
                    await asyncio.sleep(0.02)
                return found

        with service(self.counting(closes_after=2)) as running:
            with Client(running.url, deadline_ms=30_000) as client:
                for _ in range(6):
                    assert client.decide({"prompt_tokens": 5}).failure is None
                    time.sleep(0.02)
            assert len(running.connections) == 3
            assert asyncio.run(run(running.url)) == [None] * 6

    def test_what_would_be_booked_twice_is_not_sent_twice(self) -> None:
        booking = {"prompt_tokens": 5, "reserve": True}
        # With an id the service knows the second one for the first.
        bodies: list[dict[str, Any]] = [booking, booking]
        bodies += [{**booking, "request_id": "r"}, {**booking, "request_id": "s"}]
        expected = [None, "unreachable", None, None]

        async def run(url: str) -> list[str | None]:
            async with AsyncClient(url, deadline_ms=30_000) as client:
                return [(await client.decide(body)).failure for body in bodies]

        with (
            service(self.counting(closes_after=1)) as running,
            Client(running.url, deadline_ms=3e4) as client,
        ):
            assert [client.decide(body).failure for body in bodies] == expected

        def handle(connection: socket.socket) -> None:
            # Hangs up only once the next request is there, so that no loop can have noticed before.
            read_request(connection)
            connection.sendall(reply(json.dumps(DECISION).encode()))
            read_request(connection)

        with service(handle) as running:
            assert asyncio.run(run(running.url)) == expected

    def test_one_left_in_the_middle_is_never_used_again(self) -> None:
        first = threading.Event()

        def handle(connection: socket.socket) -> None:
            read_request(connection)
            if not first.is_set():
                first.set()
                time.sleep(2 * DEADLINE_S)
                connection.sendall(reply(json.dumps({**DECISION, "load_tokens": 1}).encode()))
            while True:
                connection.sendall(reply(json.dumps({**DECISION, "load_tokens": 2}).encode()))
                if read_request(connection) is None:
                    return

        with service(handle) as running, Client(running.url) as client:
            assert client.decide({"prompt_tokens": 5}, deadline_ms=1e3 * DEADLINE_S).failure == "timeout"
            assert client.decide({"prompt_tokens": 5}, deadline_ms=30_000).load_tokens == 2

    def test_another_process_leaves_it_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with service(self.counting()) as running, Client(running.url, deadline_ms=30_000) as client:
            client.decide({"prompt_tokens": 5})
            parent = os.getpid()
            monkeypatch.setattr(os, "getpid", lambda: parent + 1)
            client.decide({"prompt_tokens": 5})
            assert len(running.connections) == 2

    def test_threads_share_a_client_and_none_hears_another_s_answer(self) -> None:
        def handle(connection: socket.socket) -> None:
            while (request := read_request(connection)) is not None:
                tokens = json.loads(request[1])["prompt_tokens"]
                connection.sendall(reply(json.dumps({**DECISION, "load_tokens": tokens}).encode()))

        with service(handle) as running, Client(running.url, deadline_ms=30_000) as client:
            with ThreadPoolExecutor(16) as pool:
                found = pool.map(
                    lambda tokens: client.decide({"prompt_tokens": tokens}).load_tokens, range(800)
                )
                assert list(found) == list(range(800))
            assert client.counts["answered"] == 800
            assert len(running.connections) <= 16


class TestOtherCalls:
    def test_columns(self) -> None:
        body = {"path": ["load", "recompute"], "load_tokens": [5, 0], "ttft_s": [0.1, 0.2]}
        asked = {"prompt_tokens": [10, 20]}
        with service(answers(reply(json.dumps(body).encode()))) as running:
            with Client(running.url, deadline_ms=30_000) as client:
                found = client.decide_batch(asked)
                assert (found.path, found.load_tokens, found.body) == (["load", "recompute"], [5, 0], body)
                # As many rows as were asked for, or none.
                found = client.decide_batch({"prompt_tokens": [10, 20, 30]})
            assert (found.failure, found.path, found.load_tokens) == ("garbage", [None] * 3, [None] * 3)
            found = asyncio.run(self.batch(running.url, asked))
            assert found.load_tokens == [5, 0]

    async def batch(self, url: str, asked: Mapping[str, Any]) -> Any:
        async with AsyncClient(url, deadline_ms=30_000, default=RECOMPUTE) as client:
            return await client.decide_batch(asked)

    def test_records(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVLANE_OBSERVE_TOKEN", raising=False)
        heads: list[bytes] = []

        def handle(connection: socket.socket) -> None:
            while (request := read_request(connection)) is not None:
                heads.append(request[0])
                refused = [{"index": 1, "field": "bytes", "reason": "is too many"}]
                connection.sendall(
                    reply(json.dumps({"accepted": 1, "refused": refused}).encode(), "202 Accepted")
                )

        with service(handle) as running, Client(running.url, deadline_ms=30_000, token="ask") as client:
            found = client.observe([{"type": "transfer"}, {"type": "transfer"}])
            assert (found.accepted, found.refused[0]["field"], found.failure) == (1, "bytes", None)
            assert b"Authorization: Bearer ask" in heads[-1]
            with Client(running.url, deadline_ms=30_000, token="ask", observe_token="tell") as other:
                other.observe([])
            assert b"Authorization: Bearer tell" in heads[-1]
        with service(hangs_up) as running, Client(running.url, deadline_ms=30_000) as client:
            found = client.observe([{"type": "transfer"}])
            assert (found.accepted, found.failure) == (0, "unreachable")

    @pytest.mark.parametrize(
        ("status", "released"),
        [("204 No Content", True), ("404 Not Found", False), ("500 Oops", False)],
    )
    def test_release(self, status: str, released: bool) -> None:
        paths: list[bytes] = []

        def handle(connection: socket.socket) -> None:
            while (request := read_request(connection)) is not None:
                paths.append(request[0].split(b" ")[1])
                connection.sendall(reply(b"", status))

        async def run(url: str) -> bool:
            async with AsyncClient(url, deadline_ms=30_000) as client:
                return await client.release("a/b?c")

        with service(handle) as running:
            with Client(running.url, deadline_ms=30_000) as client:
                assert client.release("a/b?c") == released
            assert asyncio.run(run(running.url)) == released
        assert paths == [b"/v1/decisions/a%2Fb%3Fc"] * 2


class TestTheCallersOwnErrors:
    @pytest.mark.parametrize(
        "url",
        ["", "127.0.0.1:80", "ftp://host", "http://", "http://host:port", "http://u:p@host", "http://h/?q"],
    )
    def test_what_is_no_address(self, url: str) -> None:
        for kind in (Client, AsyncClient):
            with pytest.raises(InputError) as refused:
                kind(url)
            assert refused.value.field == "url"

    @pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), True, "50"])
    def test_what_is_no_deadline(self, deadline: Any) -> None:
        with pytest.raises(InputError) as refused:
            Client(deadline_ms=deadline)
        assert refused.value.field == "deadline_ms"
        with pytest.raises(InputError):
            Client().decide({"prompt_tokens": 1}, deadline_ms=deadline)

    def test_a_token_that_no_header_can_hold(self) -> None:
        with pytest.raises(InputError) as refused:
            Client(token="two\r\nlines")
        assert refused.value.field == "token"
        assert "lines" not in str(refused.value)

    def test_columns_without_rows(self) -> None:
        with pytest.raises(InputError) as refused:
            Client().decide_batch({"prompt_tokens": 5})
        assert refused.value.field == "prompt_tokens"

    def test_a_cancelled_task_is_cancelled(self) -> None:
        async def run(url: str) -> None:
            async with AsyncClient(url, deadline_ms=1e3 * FOREVER_S) as client:
                task = asyncio.create_task(client.decide({"prompt_tokens": 5}))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert sum(client.counts.values()) == 0

        with service(silent) as running:
            asyncio.run(run(running.url))


def test_the_sync_client_needs_no_aiohttp() -> None:
    script = (
        "import sys; from kvlane.policy.client import Client\n"
        "answer = Client('http://127.0.0.1:1').decide({'prompt_tokens': 5})\n"
        "print(answer.failure, *[name for name in ('aiohttp', 'numpy', 'asyncio.events') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.split()[0] == "unreachable", run.stderr
    assert "aiohttp" not in run.stdout
    assert "numpy" not in run.stdout
