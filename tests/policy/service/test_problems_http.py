"""Every refusal: its status, its stable code and its pointer, and that it never costs the service anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy.service import problems
from kvlane.policy.service.app import Endpoint
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.service import Service
from kvlane.policy.service.types import DecideRequest
from kvlane.policy.service.wire import Heads

GOOD: dict[str, Any] = {"prompt_tokens": 1000, "hits": [{"tier": "host", "tokens": 992}]}
HIT = {"tier": "host", "tokens": 5}

BAD: list[tuple[Any, int, str, str | None]] = [
    (b"", 400, "malformed_json", None),
    (b"{", 400, "malformed_json", None),
    (b'{"prompt_tokens": 1000} x', 400, "malformed_json", None),
    (b'{"prompt_tokens": NaN}', 400, "malformed_json", None),
    (b'{"prompt_tokens": Infinity}', 400, "malformed_json", None),
    (b"\xff\xfe", 400, "malformed_json", None),
    (b"[" * 100_000, 422, "invalid_value", ""),
    (b'{"a":' * 100_000, 422, "unknown_field", "/a"),
    (b"null", 422, "invalid_value", ""),
    ({}, 422, "invalid_value", "/prompt_tokens"),
    ({"prompt_tokens": 0}, 422, "invalid_value", "/prompt_tokens"),
    # Longer than anything is booked: after so long a wait it would be first after eleven days.
    ({**GOOD, "state": {"device_busy_s": 1e6}, "reserve": True}, 422, "invalid_value", "/reserve"),
    ({"prompt_tokens": -1}, 422, "invalid_value", "/prompt_tokens"),
    ({"prompt_tokens": "1000"}, 422, "invalid_value", "/prompt_tokens"),
    ({"prompt_tokens": 1.5}, 422, "invalid_value", "/prompt_tokens"),
    ({"prompt_tokens": True}, 422, "invalid_value", "/prompt_tokens"),
    ({"prompt_tokens": (1 << 24) + 1}, 422, "invalid_value", "/prompt_tokens"),
    ({"prompt_tokens": 10**400}, 422, "invalid_value", "/prompt_tokens"),
    (b'{"prompt_tokens": 1e308}', 422, "invalid_value", "/prompt_tokens"),
    ({**GOOD, "promt_tokens": 5}, 422, "unknown_field", "/promt_tokens"),
    ({**GOOD, "a/b~c": 5}, 422, "unknown_field", "/a~1b~0c"),
    ({**GOOD, "resident_tokens": 1000}, 422, "invalid_value", "/resident_tokens"),
    ({**GOOD, "hits": [{"tier": "tape", "tokens": 5}]}, 422, "invalid_value", "/hits/0/tier"),
    ({**GOOD, "hits": [HIT, {"tier": "nvme", "tokens": 1001}]}, 422, "invalid_value", "/hits/1/tokens"),
    ({**GOOD, "hits": [HIT, HIT]}, 422, "invalid_value", "/hits/1/tier"),
    ({**GOOD, "hits": [{"tier": "host"}]}, 422, "invalid_value", "/hits/0/tokens"),
    ({**GOOD, "hits": [{**HIT, "state": "maybe"}]}, 422, "invalid_value", "/hits/0/state"),
    ({**GOOD, "hits": [{**HIT, "layers": 5}]}, 422, "unknown_field", "/hits/0/layers"),
    ({**GOOD, "hits": [{**HIT, "tokens": [1, -1]}]}, 422, "invalid_value", "/hits/0/tokens/1"),
    ({**GOOD, "hits": [{**HIT, "tokens": [5, 1001]}]}, 422, "invalid_value", "/hits/0/tokens"),
    ({**GOOD, "hits": [HIT] * 17}, 422, "invalid_value", "/hits"),
    ({**GOOD, "hits": {"host": 5}}, 422, "invalid_value", "/hits"),
    ({**GOOD, "executor": "magic"}, 422, "invalid_value", "/executor"),
    ({**GOOD, "objective": "cost"}, 422, "invalid_value", "/objective"),
    ({**GOOD, "ttft_slo_s": 0}, 422, "invalid_value", "/ttft_slo_s"),
    ({**GOOD, "load_unit_tokens": 0}, 422, "invalid_value", "/load_unit_tokens"),
    ({**GOOD, "instance": ""}, 422, "invalid_value", "/instance"),
    ({**GOOD, "instance": "x" * 201}, 422, "invalid_value", "/instance"),
    ({**GOOD, "reserve": 1}, 422, "invalid_value", "/reserve"),
    ({**GOOD, "state": {"device_busy_s": -1}}, 422, "invalid_value", "/state/device_busy_s"),
    ({**GOOD, "state": {"device_busy_s": 1e308}}, 422, "invalid_value", "/state/device_busy_s"),
    (
        {**GOOD, "state": {"links": {"a": {"queued_bytes": 1}, "b/c": {"queued_bytes": -1}}}},
        422,
        "invalid_value",
        "/state/links/b~1c/queued_bytes",
    ),
    ({**GOOD, "state": {"links": {"a": {"bytes": 1}}}}, 422, "unknown_field", "/state/links/a/bytes"),
    ({**GOOD, "state": {"links": {"a": {"queued_bytes": 1}}}}, 422, "invalid_value", "/state/links/a"),
    ({**GOOD, "deployment": "other"}, 404, "unknown_deployment", "/deployment"),
    ({"prompt_tokens": 9, "candidates": []}, 422, "invalid_value", "/candidates"),
    ({**GOOD, "candidates": [{"instance": "a"}]}, 422, "invalid_value", "/hits"),
    ({"prompt_tokens": 9, "candidates": [{"instance": "a"}] * 257}, 422, "invalid_value", "/candidates"),
    (
        {"prompt_tokens": 9, "candidates": [{"instance": "a"}, {"instance": "b", "resident_tokens": 9}]},
        422,
        "invalid_value",
        "/candidates/1/resident_tokens",
    ),
    (
        {"prompt_tokens": 9, "candidates": [{"instance": "a", "hits": [{"tier": "tape", "tokens": 1}]}]},
        422,
        "invalid_value",
        "/candidates/0/hits/0/tier",
    ),
]


@pytest.mark.parametrize(("body", "status", "code", "pointer"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_request_says_what_is_wrong_and_where(
    server: Any, body: Any, status: int, code: str, pointer: str | None
) -> None:
    answer = server.ask("POST", "/v1/decide", body)
    assert answer.status == status
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.body["code"] == code
    assert answer.body.get("pointer") == pointer
    assert answer.body["status"] == status
    assert answer.body["detail"]


def test_the_request_these_tests_break_is_good(server: Any) -> None:
    assert server.ask("POST", "/v1/decide", GOOD).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v2/decide", 404, "not_found"),
        ("POST", "/v1/decide/", 404, "not_found"),
        ("GET", "/v1/decide", 405, "method_not_allowed"),
        ("PUT", "/v1/observe", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/decide", 405, "method_not_allowed"),
        ("GET", "/v1/decisions/x", 405, "method_not_allowed"),
        ("DELETE", "/v1/decisions/x", 404, "unknown_decision"),
        ("DELETE", "/v1/decisions/", 404, "not_found"),
        ("DELETE", "/v1/decisions/a/b", 404, "not_found"),
    ],
)
def test_paths_and_methods_that_are_none(server: Any, method: str, path: str, status: int, code: str) -> None:
    answer = server.ask(method, path)
    assert (answer.status, answer.body["code"]) == (status, code)
    assert ("Allow" in answer.headers) is (status == 405)


def test_a_query_changes_nothing(server: Any) -> None:
    assert server.ask("GET", "/healthz?verbose=1").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": ""},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_a_body_that_is_not_declared_plain_json_is_not_read(server: Any, headers: dict[str, str]) -> None:
    # A page in a browser may send the first three to any address without asking.
    answer = server.ask("POST", "/v1/decide", json.dumps(GOOD).encode(), headers)
    assert (answer.status, answer.body["code"]) == (415, "unsupported_media_type")


def test_a_charset_beside_the_type_is_no_offence(server: Any) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert server.ask("POST", "/v1/decide", GOOD, headers).status == 200


def test_a_body_above_the_limit_is_refused(serve: Callable[..., Any]) -> None:
    served = serve({"limits": {"body_bytes": 1000}})
    assert served.ask("POST", "/v1/decide", GOOD).status == 200
    answer = served.ask("POST", "/v1/decide", {**GOOD, "prefix_id": "x" * 2000})
    assert (answer.status, answer.body["code"]) == (413, "body_too_large")
    # Also where nobody said how long it would be.
    headers = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (2000, b" " * 2000)
    answer = served.ask("POST", "/v1/decide", chunked, headers)
    assert (answer.status, answer.body["code"]) == (413, "body_too_large")


def test_observations_point_into_the_list(server: Any) -> None:
    good = {"type": "prefill", "observation_id": "x", "resident_tokens": 0, "new_tokens": 5, "seconds": 1}
    for bad, pointer in (
        ([good, {**good, "new_tokens": 0}], "/1/new_tokens"),
        ([{**good, "type": "decode"}], "/0/type"),
        ([{key: value for key, value in good.items() if key != "type"}], "/0/type"),
        ([{**good, "extra": 1}], "/0/extra"),
        ({"observations": []}, ""),
        ([good] * 1001, ""),
    ):
        answer = server.ask("POST", "/v1/observe", bad)
        assert (answer.status, answer.body["pointer"]) == (422, pointer)
    assert server.metric("kvlane_observations_total") == 0


def test_problems_are_counted_by_code_alone(server: Any) -> None:
    before = server.metric("kvlane_problems_total", code="unknown_field")
    server.ask("POST", "/v1/decide", {**GOOD, "never-seen-name": 1})
    assert server.metric("kvlane_problems_total", code="unknown_field") == before + 1
    assert b"never-seen-name" not in server.ask("GET", "/metrics").raw


def test_every_problem_has_a_code_of_its_own_status() -> None:
    assert all(400 <= status < 600 and title for status, title in problems.CODES.values())


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    settings = from_fields({"deployments": [{"name": "d", "model": "llama-3.1-8b", "machine": "h100-sxm"}]})
    return Endpoint(Service(settings), Heads())


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["host", "nvme", "ttft", "load", 1e308, -1e308, 1 << 24, 1 << 63, 1 << 64]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(
    [
        "prompt_tokens",
        "deployment",
        "instance",
        "resident_tokens",
        "hits",
        "prefix_id",
        "load_unit_tokens",
        "executor",
        "state",
        "objective",
        "ttft_slo_s",
        "request_id",
        "reserve",
        "candidates",
        "links",
        "tier",
        "tokens",
    ]
)
hits = st.lists(
    st.fixed_dictionaries(
        {"tier": st.sampled_from(["host", "nvme", "cxl", "tape"]), "tokens": st.integers(-1, 1 << 25)},
        optional={"state": st.sampled_from(["hit", "pending", "miss"]), "x": json_values},
    ),
    max_size=3,
)
nearly = st.fixed_dictionaries(
    {"prompt_tokens": st.integers(0, 1 << 24)},
    optional={
        "hits": hits,
        "resident_tokens": st.integers(0, 1 << 24),
        "load_unit_tokens": st.sampled_from([1, 16, 1 << 20]),
        "executor": st.sampled_from(["bulk", "layered"]),
        "objective": st.sampled_from(["ttft", "device_time", "blend"]),
        "ttft_slo_s": st.floats(0, 1e6),
        "reserve": st.booleans(),
        "prefix_id": st.sampled_from(["p", "q"]),
        "request_id": st.text(max_size=3),
        "candidates": st.lists(
            st.fixed_dictionaries({"instance": st.text(max_size=2)}, optional={"hits": hits}), max_size=3
        ),
        "state": st.fixed_dictionaries(
            {},
            optional={
                "device_busy_s": st.floats(),
                "queued_prefill_tokens": st.integers(0, 1 << 24),
                "links": st.dictionaries(
                    st.sampled_from(["pcie5-x16", "nvme-4", "no"]),
                    st.fixed_dictionaries({"queued_bytes": st.floats()}),
                ),
            },
        ),
    },
)


def refusal_or_answer(call: Callable[[bytes], bytes | Awaitable[bytes]], body: bytes) -> None:
    """Anything else that is raised would be a 500."""

    async def whole() -> bytes:
        answer = call(body)
        return answer if isinstance(answer, bytes) else await answer

    try:
        answer, status = asyncio.run(whole()), 200
    except ProblemError as problem:
        answer, status = problem.body(), problem.status
    assert status < 500
    json.loads(answer, parse_constant=lambda word: pytest.fail(f"{word} in the answer"))


@settings(max_examples=400)
@given(
    body=st.binary(max_size=200) | st.dictionaries(names, json_values).map(lambda v: json.dumps(v).encode())
)
def test_no_body_makes_decide_fail(endpoint: Endpoint, body: bytes) -> None:
    refusal_or_answer(endpoint._on_decide, body)


@settings(max_examples=400)
@given(fields=nearly)
def test_no_nearly_good_body_makes_decide_fail(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    refusal_or_answer(endpoint._on_decide, json.dumps(fields).encode())


observations = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["transfer", "prefill", "request", "other"]),
        "observation_id": st.text(max_size=5),
    },
    optional={
        "link": st.sampled_from(["pcie5-x16", "no"]),
        "bytes": st.integers(0, 1 << 54),
        "copies": st.integers(0, 1 << 54),
        "start_s": st.floats(),
        "end_s": st.floats(),
        "resident_tokens": st.integers(0, 1 << 24),
        "new_tokens": st.integers(0, 1 << 24),
        "seconds": st.floats(),
        "decision_id": st.text(max_size=5),
        "path_taken": st.sampled_from(["load", "split", "x"]),
        "loaded_tokens": st.integers(0, 5),
        "ttft_s": st.floats(),
        "tier": st.text(max_size=5),
    },
)


@settings(max_examples=400)
@given(records=st.lists(observations, max_size=4) | json_values)
def test_no_body_makes_observe_fail(endpoint: Endpoint, records: Any) -> None:
    refusal_or_answer(endpoint._on_observe, json.dumps(records).encode())


def test_finding_the_field_of_a_large_body_costs_about_what_decoding_it_does() -> None:
    links: dict[str, Any] = {f"link {number}": {"queued_bytes": 1} for number in range(50)}
    links["a/b"] = {"queued_bytes": -1}
    candidates: list[Any] = [{"instance": "a"}] * 50_000
    raw = json.dumps({"prompt_tokens": 1, "candidates": [*candidates, {"state": {"links": links}}]}).encode()
    begun = perf_counter()
    msgspec.json.decode(raw)
    decoding_s = perf_counter() - begun
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(raw, type=DecideRequest)
    begun = perf_counter()
    problem = problems.of_decode_error(refused.value, raw, DecideRequest)
    assert (
        perf_counter() - begun < 15 * decoding_s
    )  # each key tried on all of it would be about a hundred times
    assert problem.pointer == "/candidates/50000/state/links/a~1b/queued_bytes"
