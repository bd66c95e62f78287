"""Bad clients on real sockets: none makes the service fail, grow, or keep good ones waiting."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

GOOD = {"prompt_tokens": 1000, "hits": [{"tier": "host", "tokens": 992}]}
# Seconds of mixed load; the soak sets more.
SECONDS = float(os.environ.get("KVLANE_SOAK_S", "6"))


def talk(port: int, raw: bytes, *, timeout: float = 10.0) -> bytes:
    """Sends raw bytes and returns all that comes back until the other side closes or is silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.sendall(raw)
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except (TimeoutError, ConnectionError):
            pass
        return received


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        "POST /v1/decide HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody speaks TLS
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_what_is_no_request_is_refused_as_a_problem_and_the_connection_closed(
    server: Any, raw: bytes
) -> None:
    answer = talk(server.port, raw)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 421")), answer[:200]
    assert b"application/problem+json" in head
    assert json.loads(body)["code"] in ("malformed_request", "misdirected_host")


def test_http_1_0_is_answered_and_closed(server: Any) -> None:
    answer = talk(server.port, b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Connection: close" in answer


def test_pipelined_requests_are_answered_in_order(server: Any) -> None:
    body = json.dumps(GOOD).encode()
    last = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = talk(server.port, post(body) * 40 + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 41
    assert answer.endswith(b'{"status":"ok"}')


def test_who_asks_for_a_head_gets_no_body_that_could_be_taken_for_the_next_answer(server: Any) -> None:
    asked = [
        b"%b HTTP/1.1\r\nHost: localhost\r\n" % line
        for line in (b"HEAD /healthz", b"HEAD /", b"GET /healthz")
    ]
    answer = talk(server.port, b"\r\n".join(asked) + b"Connection: close\r\n\r\n")
    refused, page, last = answer.split(b"HTTP/1.1 ")[1:]
    assert refused.startswith(b"405 ")
    assert page.startswith(b"200 ")
    assert refused.endswith(b"\r\n\r\n")
    assert page.endswith(b"\r\n\r\n")
    assert last.endswith(b'{"status":"ok"}')


def test_who_waits_to_be_asked_for_the_body_is_asked(server: Any) -> None:
    body = json.dumps(GOOD).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(post(b"", "Expect: 100-continue", length=len(body)))
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_body_announced_too_large_is_refused_before_it_comes(server: Any) -> None:
    answer = talk(server.port, post(b"", length=1 << 40), timeout=5)
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_request_that_comes_too_slowly_is_cut_off_and_others_are_not(serve: Callable[..., Any]) -> None:
    served = serve({"limits": {"request_s": 1.0}})
    body = json.dumps(GOOD).encode()
    begun = time.monotonic()
    slow = [
        socket.create_connection(("127.0.0.1", served.port), timeout=20),  # says nothing
        socket.create_connection(("127.0.0.1", served.port), timeout=20),
        socket.create_connection(("127.0.0.1", served.port), timeout=20),
    ]
    slow[1].sendall(b"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nX-")
    slow[2].sendall(post(body)[:-30])
    patient = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    for _ in range(8):
        patient.request("GET", "/healthz")
        assert patient.getresponse().read()
        for connection in slow[1:]:
            with contextlib.suppress(OSError):
                connection.sendall(b"a")
        time.sleep(0.4)
    patient.request("GET", "/healthz")
    assert patient.getresponse().status == 200
    for connection in slow:
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1000) == b""
        connection.close()
    patient.close()
    assert time.monotonic() - begun < 20
    assert served.metric("kvlane_connections_cut_off_total", reason="slow_request") == 3


def test_who_does_not_read_its_answers_is_cut_off(serve: Callable[..., Any]) -> None:
    served = serve({"limits": {"request_s": 1.0}})
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        connection.settimeout(20)
        before = served.metric("process_resident_memory_bytes")
        try:
            for _ in range(5000):
                connection.sendall(request)
        except OSError:
            pass  # it is cut off, or its own sending is held up
        grown = served.metric("process_resident_memory_bytes") - before
        deadline = time.monotonic() + 15
        while not served.metric("kvlane_connections_cut_off_total", reason="slow_reader"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert grown < 50e6


def test_more_connections_than_allowed_are_told_to_come_back(serve: Callable[..., Any]) -> None:
    served = serve({"limits": {"connections": 5}})
    held = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(5)]
    time.sleep(0.2)
    answer = talk(served.port, b"")
    assert answer.startswith(b"HTTP/1.1 429")
    assert b"Retry-After: 1" in answer
    for connection in held:
        connection.close()
    time.sleep(0.2)
    assert served.ask("GET", "/healthz").status == 200


def test_more_requests_on_their_way_than_allowed_are_told_to_come_back(serve: Callable[..., Any]) -> None:
    served = serve({"limits": {"in_flight": 3}})
    body = json.dumps(GOOD).encode()
    held = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(3)]
    for connection in held:
        connection.sendall(post(body)[:-1])
    time.sleep(0.3)
    answer = served.ask("POST", "/v1/decide", GOOD)
    assert (answer.status, answer.body["code"]) == (429, "too_many_requests")
    assert answer.headers["Retry-After"] == "1"
    # Health is still answered, and so are the three.
    assert served.ask("GET", "/healthz").status == 200
    for connection in held:
        connection.sendall(body[-1:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        connection.close()


class Good:
    """A client that asks again and again, and how long each answer took."""

    def __init__(self, port: int) -> None:
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        body = json.dumps(GOOD)
        while not self._stop.is_set():
            begun = time.perf_counter()
            try:
                connection.request("POST", "/v1/decide", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
                connection.close()
                continue
            self.seconds.append(time.perf_counter() - begun)
            if answer.status != 200:
                self.failures.append(str(answer.status))
            time.sleep(0.002)
        connection.close()

    def end(self) -> list[float]:
        self._stop.set()
        self._thread.join()
        return self.seconds


def bad_bodies(choose: random.Random) -> bytes:
    """One body of the kinds that have broken services before."""
    return choose.choice(
        [
            b"[" * 50_000,
            b'{"a":' * 20_000,
            b'{"prompt_tokens": NaN}',
            b'{"prompt_tokens": 1e308}',
            b'{"prompt_tokens": -1}',
            b'{"prompt_tokens": "many"}',
            b'{"prompt_tokens": 1000, "hits": [{"tier": "tape", "tokens": 5}]}',
            b'{"prompt_tokens": 1000, "deployment": "none"}',
            b'{"prompt_tokens": 1000, "state": {"device_busy_s": 1e308}}',
            b'{"prompt_tokens": 1000, "instance": "%032x"}' % choose.getrandbits(128),
            b'{"prompt_tokens": 9999, "reserve": true, "instance": "%032x", "request_id": "%032x"}'
            % (choose.getrandbits(128), choose.getrandbits(128)),
            bytes(choose.randrange(256) for _ in range(200)),
            many_candidates(choose),
            b'{"prompt_tokens": 1000, "prefix_id": "' + b"x" * 100_000 + b'"}',
        ]
    )


def many_candidates(choose: random.Random) -> bytes:
    """As long a decision as can be asked for, some asked twice at once under one id, some with another body."""
    hits = [{"tier": tier, "tokens": choose.randrange(1, 20_000)} for tier in ("host", "nvme", "remote")]
    spots = [{"instance": f"i{number}", "hits": hits} for number in range(choose.choice([20, 256]))]
    asked = {"prompt_tokens": 20_000, "candidates": spots, "reserve": choose.random() < 0.5, "prefix_id": "p"}
    return json.dumps({**asked, "request_id": f"r{choose.randrange(20)}"}).encode()


def suppositions(choose: random.Random) -> tuple[bytes, bytes]:
    """What takes longest to suppose or to draw, and where it is asked."""
    tokens = choose.choice([1, 1_000_000, 1 << 24])
    hits = [{"tier": tier, "tokens": tokens} for tier in ("host", "nvme", "remote")]
    rates = {"pcie5-x16": choose.choice([1, 1e9, 1e15, 1e308])}
    if choose.random() < 0.5:
        return b"/v1/what-if", json.dumps(
            {"prompt_tokens": tokens, "hits": hits, "link_bytes_per_s": rates}
        ).encode()
    return b"/v1/curves", json.dumps({"longest_tokens": choose.choice([64, 1 << 20]), "points": 128}).encode()


class Bad:
    """A client that does everything wrong; the 5xx it got for it, and the answers that were not its requests'."""

    def __init__(self, port: int, seed: int) -> None:
        self.served_errors: list[bytes] = []
        self.mixed_up: list[tuple[str, bytes]] = []
        self.sent = 0
        self._port, self._choose = port, random.Random(seed)
        self._stop = threading.Event()
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        kinds: list[Callable[[], None]] = [self._malformed] * 10 + [
            self._half_open,
            self._slow,
            self._oversized,
            self._rude,
            self._in_bursts,
            self._in_bursts,
            self._supposing,
        ]
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                self._choose.choice(kinds)()
            self.sent += 1
            time.sleep(0.005)
        for connection in self._held:
            connection.close()

    def _note(self, answer: bytes) -> None:
        if answer[9:10] == b"5":
            self.served_errors.append(answer)

    def _malformed(self) -> None:
        self._note(talk(self._port, post(bad_bodies(self._choose), "Connection: close"), timeout=5))

    def _half_open(self) -> None:
        self._hold(b"")

    def _slow(self) -> None:
        self._hold(post(json.dumps(GOOD).encode())[: self._choose.randrange(1, 150)])

    def _hold(self, raw: bytes) -> None:
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=5)
        connection.sendall(raw)
        self._held.append(connection)
        if len(self._held) > 50:
            self._held.pop(0).close()

    def _oversized(self) -> None:
        self._note(talk(self._port, post(b"x" * 1000, "Connection: close", length=1 << 33), timeout=5))

    def _rude(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=5) as connection:
            connection.sendall(post(json.dumps(GOOD).encode()))
            # Gone, with a reset, before the answer.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

    def _supposing(self) -> None:
        path, body = suppositions(self._choose)
        raw = post(body, "Connection: close").replace(b"/v1/decide", path, 1)
        self._note(talk(self._port, raw, timeout=5))

    def _in_bursts(self) -> None:
        """Some requests at once on a connection that stays, cut anywhere: each must be given its own answer."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as connection:
            answers = connection.makefile("rb")
            for _ in range(20):
                names = [
                    f"{self._choose.getrandbits(64):016x}"
                    for _ in range(self._choose.choice([1, 1, 1, 2, 3]))
                ]
                raw = b"".join(post(json.dumps({**GOOD, "instance": name}).encode()) for name in names)
                cut = self._choose.choice([0, 0, self._choose.randrange(len(raw))])
                connection.sendall(raw[:cut])
                if cut:
                    time.sleep(0.001)
                connection.sendall(raw[cut:])
                for name in names:
                    answer = _read_one(answers)
                    if f'"instance":"{name}"'.encode() not in answer:
                        self.mixed_up.append((name, answer))

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def _read_one(answers: BinaryIO) -> bytes:
    """The body of the next answer."""
    length = 0
    while (line := answers.readline()) not in (b"\r\n", b""):
        if line.startswith(b"Content-Length: "):
            length = int(line[16:])
    return answers.read(length)


def test_good_clients_are_served_as_before_beside_bad_ones(serve: Callable[..., Any]) -> None:
    # Small limits fill within the test: what is remembered is bounded, and memory has to be level after that.
    limits = {"remembered": 2000, "request_ids": 500, "reservations": 1000, "request_s": 3.0}
    served = serve({"limits": limits})
    alone = Good(served.port)
    time.sleep(SECONDS / 3)
    before = alone.end()
    mixed = Good(served.port)
    bad = [Bad(served.port, seed) for seed in range(3)]
    sizes = []
    for _ in range(12):
        time.sleep(SECONDS / 12)
        sizes.append(served.metric("process_resident_memory_bytes"))
    during = mixed.end()
    for each in bad:
        each.end()
    assert alone.failures == mixed.failures == []
    assert [error for each in bad for error in each.served_errors] == []
    assert [mixed for each in bad for mixed in each.mixed_up] == []
    assert sum(each.sent for each in bad) > 20 * SECONDS
    assert served.metric("kvlane_problems_total", code="internal_error") == 0
    assert not [line for line in served.log[1:] if '"error"' in line or '"critical"' in line]
    # Level: the second half has not grown beyond what allocators keep.
    assert max(sizes[6:]) - max(sizes[:6]) < 8e6, sizes
    told = (
        f"{len(before)} decisions alone, {len(during)} beside {sum(each.sent for each in bad)} bad requests"
    )
    for name, seconds in (("alone", before), ("beside bad ones", during)):
        p50, p99 = statistics.quantiles(seconds, n=100)[49:99:49]
        told += (
            f"; {name} p50 {1e3 * p50:.2f} ms, p99 {1e3 * p99:.2f} ms, longest {1e3 * max(seconds):.1f} ms"
        )
    print(f"{told}; RSS {min(sizes) / 1e6:.1f} to {max(sizes) / 1e6:.1f} MB")
    # One core serves all of them here: a good one waits for the bad one before it, never for a deadline of it.
    assert statistics.median(during) < 20 * statistics.median(before) + 0.005
    assert served.ask("GET", "/readyz").status == 200


def test_nothing_is_worked_on_for_those_who_have_gone(serve: Callable[..., Any]) -> None:
    """As many long decisions as may wait, each of which takes seconds, by clients that do not wait for them."""
    served = serve({"deployments": [{"name": "chat", "model": "gemma-3-27b", "machine": "h100-sxm"}]})
    tiers = ("host", "nvme", "remote")
    spots = [
        # Each another, so that none is known from the one before.
        {"instance": f"i{at}", "hits": [{"tier": tier, "tokens": 500_000 + 16 * at} for tier in tiers]}
        for at in range(256)
    ]
    for at in range(80):
        raw = post(json.dumps({"prompt_tokens": 1_000_000 + at, "candidates": spots}).encode())
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
            connection.sendall(raw)
    few = [{"instance": f"i{at}"} for at in range(17)]
    answer = served.ask("POST", "/v1/decide", {"prompt_tokens": 1000, "candidates": few})
    assert answer.status == 200
    assert not [line for line in served.log[1:] if "rror" in line]


def test_a_token_that_was_exchanged_passes_nobody_however_often_it_did(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    served = serve({"token_file": file})

    def ask(connection: socket.socket, token: str) -> bytes:
        connection.sendall(post(json.dumps(GOOD).encode(), f"Authorization: Bearer {token}"))
        return connection.recv(65536)[9:12]

    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as one,
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as other,
    ):
        assert [ask(one, "old") for _ in range(5)] == [b"200"] * 5
        assert [ask(other, token) for token in ("none", "old", "olf", "old")] == [
            b"401",
            b"200",
            b"401",
            b"200",
        ]
        file.write_text("new")
        served.process.send_signal(signal.SIGHUP)
        served.wait_for_log("reloaded")
        assert [ask(one, token) for token in ("old", "new", "new", "old")] == [b"401", b"200", b"200", b"401"]
        assert [ask(other, token) for token in ("old", "new")] == [b"401", b"200"]
