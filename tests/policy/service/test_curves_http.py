"""`POST /v1/curves`: the paths against prefix length, the same numbers as decisions, worked out in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jsonschema_rs
import pytest

ONE = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
SLOW = {"link_bytes_per_s": 8e9}


def curves(served: Any, **fields: Any) -> Any:
    answer = served.ask("POST", "/v1/curves", fields)
    assert answer.status == 200, answer.raw
    return answer.body


def asked_alone(asked: dict[str, Any], told: dict[str, Any], prefix: int) -> dict[str, Any]:
    """The same settings as one question about one prefix."""
    state: dict[str, Any] = {
        "device_busy_s": asked.get("device_busy_s", 0.0),
        "links": {told["link"]: {"queued_bytes": asked.get("queued_bytes", 0.0)}},
    }
    fields = {
        "prompt_tokens": prefix + asked.get("suffix_tokens", 1),
        "hits": [{"tier": told["tier"], "tokens": prefix}],
        "resident_tokens": asked.get("resident_tokens", 0),
        "executor": told["executor"],
        "state": state,
    }
    if "load_unit_tokens" in asked:
        fields["load_unit_tokens"] = asked["load_unit_tokens"]
    if "link_bytes_per_s" in asked:
        fields["link_bytes_per_s"] = {told["link"]: asked["link_bytes_per_s"]}
    return fields


SETTINGS: list[dict[str, Any]] = [
    {},
    SLOW,
    {"executor": "layered", **SLOW},
    {"executor": "two_ended", "device_busy_s": 0.01, **SLOW},
    {"queued_bytes": 5e8, "device_busy_s": 0.002},
    {"resident_tokens": 1000, "suffix_tokens": 500, "load_unit_tokens": 256, **SLOW},
    {"tier": "remote", "longest_tokens": 20_000, "points": 8},
]


@pytest.mark.parametrize("asked", SETTINGS, ids=str)
def test_every_point_is_what_the_same_question_is_answered(server: Any, asked: dict[str, Any]) -> None:
    told = curves(server, **asked)
    count = len(told["tokens"])
    for place in {0, 1, count // 3, count // 2, count - 2, count - 1}:
        prefix = told["tokens"][place]
        body = server.ask("POST", "/v1/what-if", asked_alone(asked, told, prefix)).body
        estimates = body["estimates"]
        assert told["recompute_ttft_s"][place] == estimates["recompute"]["ttft_s"]
        assert told["load_ttft_s"][place] == estimates["load"]["ttft_s"]
        assert told["break_even_bytes_per_s"][place] == body["break_even_bytes_per_s"]
        best = min(estimates["recompute"]["ttft_s"], estimates["load"]["ttft_s"])
        split = estimates["split"]
        expected = None if split is None or split["ttft_s"] >= best else split["ttft_s"]
        assert told["split_ttft_s"][place] == expected


@pytest.mark.parametrize("asked", SETTINGS, ids=str)
def test_the_crossover_is_the_decisions(server: Any, asked: dict[str, Any]) -> None:
    told = curves(server, **asked)
    body = server.ask("POST", "/v1/what-if", asked_alone(asked, told, told["tokens"][-1])).body
    assert told["crossover_tokens"] == body["crossover_tokens"]
    assert told["crossover_note"] == body["crossover_note"]
    crossover = told["crossover_tokens"]
    for prefix, load, recompute in zip(
        told["tokens"], told["load_ttft_s"], told["recompute_ttft_s"], strict=True
    ):
        if crossover is not None:
            assert (load <= recompute) == (prefix >= crossover)


def test_without_a_rate_to_suppose_it_is_a_decision_with_the_same_suffix(server: Any) -> None:
    queue = {"device_busy_s": 0.0, "links": {"pcie5-x16": {"queued_bytes": 2e8}}}
    decision = server.decide(prompt_tokens=12_370, hits=[{"tier": "host", "tokens": 12_368}], state=queue)
    told = curves(server, suffix_tokens=2, queued_bytes=2e8)
    assert told["crossover_tokens"] == decision["crossover_tokens"] is not None


def test_lengths_rise_evenly_in_whole_load_units(server: Any) -> None:
    told = curves(server)
    assert (told["deployment"], told["tier"], told["link"]) == ("chat", "host", "pcie5-x16")
    assert len(told["tokens"]) == 48
    assert told["tokens"][-1] == 32768
    assert all(tokens % 16 == 0 for tokens in told["tokens"])
    gaps = {then - one for one, then in pairwise(told["tokens"])}
    assert max(gaps) - min(gaps) <= 16
    assert min(gaps) > 0
    for name in ("recompute_ttft_s", "load_ttft_s", "split_ttft_s", "break_even_bytes_per_s"):
        assert len(told[name]) == 48


def test_where_there_are_fewer_units_than_points_each_comes_once(server: Any) -> None:
    told = curves(server, longest_tokens=100, points=128, resident_tokens=17)
    assert told["tokens"] == [32, 48, 64, 80, 96]


def test_a_slower_link_and_a_queue_move_the_crossover_out(server: Any) -> None:
    at = [
        curves(server, link_bytes_per_s=8e9)["crossover_tokens"],
        curves(server, link_bytes_per_s=7e9, queued_bytes=1e8)["crossover_tokens"],
    ]
    assert at[0] is not None
    assert at[1] is None or at[1] > at[0]
    told = curves(server, link_bytes_per_s=8e9, queued_bytes=8e8)
    assert told["link_bytes_per_s"] == 8e9
    asked = {"link_bytes_per_s": 8e9, "queued_bytes": 8e8}
    line = server.ask("POST", "/v1/what-if", asked_alone(asked, told, 32768)).body["timeline"]
    assert told["queued_s"] == line["link_queue_s"] > 0.1


def test_what_is_booked_does_not_show(serve: Callable[..., Any]) -> None:
    served = serve({})
    before = curves(served)
    huge = {"prompt_tokens": 1 << 20, "hits": [{"tier": "host", "tokens": 1 << 20}]}
    served.decide(**huge, reserve=True)
    assert curves(served) == before
    assert served.metric("kvlane_decisions_total") == 1


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "gpt-oss-20b"])
def test_models_whose_layers_differ_have_curves(serve: Callable[..., Any], model: str) -> None:
    served = serve({"deployments": [{**ONE, "model": model, "prefill_chunk_tokens": 8192}]})
    told = curves(served, executor="two_ended", points=8)
    assert len(told["load_ttft_s"]) == 8
    if (
        model == "qwen3-next-80b-a3b"
    ):  # recurrent: a load ends where a state was stored, which is the prefix's end
        assert told["split_ttft_s"] == [None] * 8


BAD: list[tuple[dict[str, Any], str, int]] = [
    ({"points": 7}, "/points", 422),
    ({"points": 129}, "/points", 422),
    ({"points": 10**9}, "/points", 422),
    ({"points": 48.5}, "/points", 422),
    ({"longest_tokens": 0}, "/longest_tokens", 422),
    ({"longest_tokens": (1 << 20) + 1}, "/longest_tokens", 422),
    ({"longest_tokens": 1 << 20}, "/longest_tokens", 422),
    ({"longest_tokens": 10**300}, "/longest_tokens", 422),
    ({"longest_tokens": 15}, "/longest_tokens", 422),
    ({"load_unit_tokens": 1 << 24}, "/longest_tokens", 422),
    ({"load_unit_tokens": 0}, "/load_unit_tokens", 422),
    ({"resident_tokens": 32768}, "/longest_tokens", 422),
    ({"resident_tokens": -1}, "/resident_tokens", 422),
    ({"suffix_tokens": 0}, "/suffix_tokens", 422),
    ({"suffix_tokens": 1 << 24}, "/suffix_tokens", 422),
    ({"device_busy_s": 1e308}, "/device_busy_s", 422),
    ({"queued_bytes": 1e308}, "/queued_bytes", 422),
    ({"link_bytes_per_s": 1e308}, "/link_bytes_per_s", 422),
    ({"link_bytes_per_s": 0}, "/link_bytes_per_s", 422),
    ({"link_bytes_per_s": {"pcie5-x16": 1e9}}, "/link_bytes_per_s", 422),
    ({"tier": "tape"}, "/tier", 422),
    ({"executor": "psychic"}, "/executor", 422),
    ({"deployment": "other"}, "/deployment", 404),
    ({"hits": []}, "/hits", 422),
]


@pytest.mark.parametrize(("asked", "pointer", "status"), BAD, ids=str)
def test_what_cannot_be_answered_names_the_field(
    server: Any, asked: dict[str, Any], pointer: str, status: int
) -> None:
    answer = server.ask("POST", "/v1/curves", asked)
    assert (answer.status, answer.body.get("pointer")) == (status, pointer)


@pytest.mark.parametrize("rate", [1, 1e15])
def test_the_bounds_give_finite_numbers(server: Any, rate: float) -> None:
    told = curves(
        server,
        executor="two_ended",
        link_bytes_per_s=rate,
        longest_tokens=(1 << 20) - 1,
        points=128,
        load_unit_tokens=1,
        device_busy_s=1e6,
        queued_bytes=1e18,
    )
    assert len(told["tokens"]) == 128
    assert told["queued_s"] <= 1e6


def test_others_are_answered_while_curves_are_worked_out_and_too_many_are_told_to_come_again(
    serve: Callable[..., Any],
) -> None:
    served = serve({"deployments": [{**ONE, "model": "gemma-3-27b", "prefill_chunk_tokens": 2048}]})
    long = {"longest_tokens": 200_000, "points": 128}
    answers: list[Any] = []

    def ask() -> None:
        answers.append(served.ask("POST", "/v1/curves", long))

    asking = [threading.Thread(target=ask) for _ in range(24)]
    for each in asking:
        each.start()
    # A decision is taken between their points; were they worked out in one go, it would come after some of them.
    served.decide(prompt_tokens=100)
    done_before = [answer.status for answer in answers if answer.status == 200]
    for each in asking:
        each.join()
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) <= 10
    assert len(done_before) < statuses.count(200)
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.body["code"] == "too_many_requests"
    assert refused.headers["Retry-After"] == "1"
    # All alike, and the endpoint goes on.
    assert len({answer.raw for answer in answers if answer.status == 200}) == 1
    assert curves(served, points=8)["tokens"]


def test_the_answer_is_what_the_document_says(server: Any) -> None:
    whole = server.ask("GET", "/openapi.json").body
    schema = {"$ref": "#/components/schemas/Curves", "components": whole["components"]}
    for asked in SETTINGS:
        jsonschema_rs.validate(schema, curves(server, **asked))


def test_it_takes_the_token(serve: Callable[..., Any]) -> None:
    served = serve({}, environment={"KVLANE_TOKEN": "s3cret"})
    assert served.ask("POST", "/v1/curves", {}).status == 401
    assert served.ask("POST", "/v1/curves", {}, {"Authorization": "Bearer s3cret"}).status == 200
