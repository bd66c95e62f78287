"""How long the endpoint's parts take (`make bench-serve` shows it), and that they scale as they should.

Nothing is held against a clock: what is compared ran on this machine, side by side, and the parts of one process.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from time import thread_time
from typing import Any

import msgspec
import pytest

from kvlane.policy.service import types
from kvlane.policy.service.app import Endpoint
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.service import Service
from kvlane.policy.service.wire import Heads

ONE = json.dumps({"prompt_tokens": 12370, "hits": [{"tier": "host", "tokens": 12368}]}).encode()
ROWS = 100
COLUMNS = json.dumps(
    {"prompt_tokens": [12370 + row for row in range(ROWS)], "hits": {"host": [12368] * ROWS}}
).encode()


def served(**options: Any) -> Endpoint:
    one = {"name": "d", "model": "llama-3.1-8b", "machine": "h100-sxm", **options}
    return Endpoint(Service(from_fields({"deployments": [one]})), Heads())


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    return served()


def another(start: int, fields: Mapping[str, Any] | None = None) -> Iterator[bytes]:
    """Requests of which each is another, from a number on that nobody else counts from."""
    for number in range(start, 10**9):
        prompt = 1000 + number % 15_000
        stored = prompt * 3 // 4 + number % 97
        asked = {"prompt_tokens": prompt, "hits": [{"tier": "host", "tokens": stored}], **(fields or {})}
        yield json.dumps(asked).encode()


def at_once(answering: Coroutine[Any, Any, bytes]) -> bytes:
    """The answer of what has nothing to wait for."""
    try:
        answering.send(None)
    except StopIteration as done:
        answer: bytes = done.value
        return answer
    raise AssertionError("it waits")


def test_decode(benchmark: Callable[..., Any]) -> None:
    benchmark(msgspec.json.Decoder(types.DecideRequest).decode, ONE)


def test_encode(benchmark: Callable[..., Any], endpoint: Endpoint) -> None:
    raw = endpoint._on_decide(ONE)
    assert isinstance(raw, bytes)
    answer = msgspec.json.decode(raw)
    benchmark(msgspec.json.Encoder().encode, answer)


def test_decide_what_was_asked_before(benchmark: Callable[..., Any], endpoint: Endpoint) -> None:
    benchmark(endpoint._on_decide, ONE)


# What makes more of a decision than the plainest: how it is served, and what is said in the request.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "resident": ({}, {"resident_tokens": 512}),
    "queued": ({}, {"state": {"device_busy_s": 0.02, "links": {"pcie5-x16": {"queued_bytes": 1e9}}}}),
    "reserved": ({}, {"reserve": True}),
    "chunks": ({"prefill_chunk_tokens": 8192}, {}),
    "layered": ({"executor": "layered"}, {}),
    "two_ended": ({"executor": "two_ended"}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_decide_what_was_not(benchmark: Callable[..., Any], kind: str) -> None:
    options, fields = KINDS[kind]
    endpoint, asked = served(**options), another(1_000_000, fields)
    benchmark(lambda: endpoint._on_decide(next(asked)))


def test_decide_columns(benchmark: Callable[..., Any], endpoint: Endpoint) -> None:
    benchmark(lambda: at_once(endpoint._on_batch(COLUMNS)))


def test_one_request_over_http(benchmark: Callable[..., Any], server: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {"Content-Type": "application/json"}

    def ask() -> bytes:
        connection.request("POST", "/v1/decide", ONE, headers)
        return connection.getresponse().read()

    assert json.loads(benchmark(ask))["path"] == "load"
    connection.close()


def least_s(call: Callable[[], Any], times: int) -> float:
    """CPU seconds of one call, the least disturbed of several rounds."""
    found = []
    for _ in range(7):
        begun = thread_time()
        for _ in range(times):
            call()
        found.append((thread_time() - begun) / times)
    return min(found)


def test_columns_are_many_times_as_quick_a_decision_as_one_at_a_time(endpoint: Endpoint) -> None:
    asked = another(2_000_000)
    single = least_s(lambda: endpoint._on_decide(next(asked)), 200)
    column = least_s(lambda: at_once(endpoint._on_batch(COLUMNS)), 20) / ROWS
    # 20 times is asked of whole requests, where HTTP's share falls away too; of the work alone it is less.
    assert single > 10 * column


def test_what_was_asked_before_is_quicker_than_what_was_not(endpoint: Endpoint) -> None:
    asked = another(3_000_000)
    fresh = least_s(lambda: endpoint._on_decide(next(asked)), 200)
    again = least_s(lambda: endpoint._on_decide(ONE), 200)
    assert again < fresh / 2
