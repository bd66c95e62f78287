"""`POST /v1/what-if`: the same answer as a decision's, other link rates supposed, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

LONG = {"prompt_tokens": 12370, "hits": [{"tier": "host", "tokens": 12368}]}
TWO = {
    "prompt_tokens": 30_000,
    "hits": [{"tier": "host", "tokens": 12_000}, {"tier": "remote", "tokens": 24_000}],
    "executor": "layered",
}
BUSY = {
    **LONG,
    "executor": "two_ended",
    "state": {"device_busy_s": 0.02, "links": {"pcie5-x16": {"queued_bytes": 1e9}}},
}
AIMED = {**LONG, "objective": "device_time", "ttft_slo_s": 5.0, "load_unit_tokens": 256}
OWN_ONLY = ("decision_id", "expires_in_s")


def what_if(served: Any, **fields: Any) -> Any:
    answer = served.ask("POST", "/v1/what-if", fields)
    assert answer.status == 200, answer.raw
    return answer.body


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


@pytest.mark.parametrize("asked", [{"prompt_tokens": 7}, LONG, TWO, BUSY, AIMED], ids=str)
def test_it_answers_what_a_decision_would(server: Any, asked: dict[str, Any]) -> None:
    told = what_if(server, **asked)
    assert without(told, "timeline") == without(server.decide(**asked), *OWN_ONLY)
    # Asked again where decisions keep their answers, it is the same.
    assert what_if(server, **asked) == told


@pytest.mark.parametrize("asked", [{"prompt_tokens": 7}, LONG, TWO, BUSY, AIMED], ids=str)
def test_the_timeline_ends_when_the_first_token_is_there(server: Any, asked: dict[str, Any]) -> None:
    told = what_if(server, **asked)
    line = told["timeline"]
    assert line["ttft_s"] == told["ttft_s"]
    assert line["computes"][-1]["end_s"] == pytest.approx(told["ttft_s"], rel=1e-9)
    assert line["device_busy_s"] == told["device_busy_s"]
    exposed_s = sum(span["end_s"] - span["start_s"] for span in line["exposed"])
    assert line["device_busy_s"] + exposed_s == pytest.approx(told["exposed_s"], rel=1e-9, abs=1e-12)
    assert {copy["tier"] for copy in line["copies"]} == {segment["tier"] for segment in told["load"]}
    for name in ("copies", "computes", "exposed"):
        starts = [each["start_s"] for each in line[name]]
        assert starts == sorted(starts)


def test_a_link_supposed_slower_changes_the_answer(server: Any) -> None:
    fast = what_if(server, **LONG)
    assert fast["path"] == "load"
    slow = what_if(server, **LONG, link_bytes_per_s={"pcie5-x16": 1e9})
    assert slow["path"] == "recompute"
    assert slow["estimates"]["load"]["ttft_s"] > fast["estimates"]["load"]["ttft_s"]
    assert slow["parameters_from"]["link.pcie5-x16"] == {"source": "explicit", "text": slow_text(slow)}
    # The next decision knows nothing of it.
    assert server.decide(**LONG)["path"] == "load"


def slow_text(told: Any) -> str:
    text: str = told["parameters_from"]["link.pcie5-x16"]["text"]
    assert "1 GB/s" in text
    assert "supposed" in text
    return text


def test_a_link_supposed_at_the_break_even_rate_ties(server: Any) -> None:
    told = what_if(server, **LONG)
    rate = told["break_even_bytes_per_s"]
    tied = what_if(server, **LONG, link_bytes_per_s={"pcie5-x16": rate})["estimates"]
    assert tied["load"]["ttft_s"] == pytest.approx(tied["recompute"]["ttft_s"], rel=1e-6)


def test_queued_bytes_take_as_long_as_the_supposed_rate_says(server: Any) -> None:
    state = {"links": {"pcie5-x16": {"queued_bytes": 1e9}}}
    queues = [
        what_if(server, **LONG, state=state, link_bytes_per_s={"pcie5-x16": rate}, objective="ttft")
        for rate in (1e9, 2e9)
    ]
    one, two = (told["estimates"]["load"]["transfer_s"] for told in queues)
    none = [
        what_if(server, **LONG, link_bytes_per_s={"pcie5-x16": rate})["estimates"]["load"]["transfer_s"]
        for rate in (1e9, 2e9)
    ]
    assert one - none[0] == pytest.approx(1.0, rel=0.2)
    assert two - none[1] == pytest.approx(0.5, rel=0.2)


def test_nothing_is_counted_booked_or_remembered(serve: Callable[..., Any]) -> None:
    served = serve({})

    def counted() -> list[str]:
        lines = served.ask("GET", "/metrics").raw.decode().splitlines()
        return [line for line in lines if not line.startswith(("#", "process_", "kvlane_problems"))]

    served.decide(**LONG)
    before = counted()
    for asked in (LONG, TWO, BUSY, AIMED, {**LONG, "prefix_id": "p"}):
        what_if(served, **asked, link_bytes_per_s={"pcie5-x16": 2e9})
    assert counted() == before
    assert served.metric("kvlane_reservations") == 0


def test_a_link_that_is_left_alone_is_so_here_too_and_is_not_tried_by_asking(
    serve: Callable[..., Any],
) -> None:
    served = serve({})
    for number in range(3):
        decision = served.decide(**LONG)
        served.observe(
            {
                "type": "request",
                "observation_id": str(number),
                "decision_id": decision["decision_id"],
                "path_taken": "load",
                "loaded_tokens": decision["load_tokens"],
                "outcome": "load_failed",
            }
        )
    before = served.metric("kvlane_fallbacks_total")
    told = what_if(served, **LONG)
    assert told["path"] == "recompute"
    assert any("left alone" in note for note in told["notes"])
    assert served.metric("kvlane_fallbacks_total") == before


def test_what_is_booked_is_waited_for_and_a_load_in_flight_joined(serve: Callable[..., Any]) -> None:
    served = serve({"deployments": [{**ONE, "links": {"pcie5-x16": {"rate": "4 GB/s"}}}]})
    huge = {"prompt_tokens": 1 << 19, "hits": [{"tier": "host", "tokens": 1 << 19}], "instance": "i"}
    assert served.decide(**huge, prefix_id="p", reserve=True)["path"] == "load"
    behind = what_if(served, **huge)
    assert behind["timeline"]["link_queue_s"] > 1
    told = what_if(served, **huge, prefix_id="p")
    assert told["joined"] is True
    (copy,) = told["timeline"]["copies"]
    assert (copy["start_s"], copy["layers"]) == (0, 32)
    assert copy["end_s"] == pytest.approx(told["estimates"]["load"]["transfer_s"])
    assert served.metric("kvlane_reservations") == 1


def test_what_was_learnt_is_kept_under_a_supposed_rate(serve: Callable[..., Any]) -> None:
    # A rate of the deployment's own stands for everything; the profile's has what each copy costs beside it.
    own = {**ONE, "links": {"pcie5-x16": {"rate": "10 GB/s"}}}
    served = serve({"deployments": [own, {**ONE, "name": "profile"}]})
    supposed = {"link_bytes_per_s": {"pcie5-x16": 10e9}}
    flat, with_copies = (
        what_if(served, **LONG, deployment=name, **supposed)["estimates"]["load"]["transfer_s"]
        for name in ("chat", "profile")
    )
    known = served.decide(**LONG, deployment="chat")["estimates"]["load"]["transfer_s"]
    assert flat == pytest.approx(known, rel=1e-12)
    assert with_copies > flat


def test_several_links_may_be_supposed(server: Any) -> None:
    told = what_if(server, **TWO, link_bytes_per_s={"pcie5-x16": 1e8, "net-400": 40e9})
    assert {segment["tier"] for segment in told["load"]} <= {"remote", "host"}
    sources = {name: each["source"] for name, each in told["parameters_from"].items() if "link" in name}
    assert set(sources.values()) == {"explicit"}


BAD: list[tuple[dict[str, Any], str, int]] = [
    ({"prompt_tokens": 0}, "/prompt_tokens", 422),
    ({"prompt_tokens": 1 << 25}, "/prompt_tokens", 422),
    ({"resident_tokens": 12370}, "/resident_tokens", 422),
    ({"hits": [{"tier": "tape", "tokens": 1}]}, "/hits/0/tier", 422),
    ({"hits": [{"tier": "host", "tokens": 12371}]}, "/hits/0/tokens", 422),
    ({"link_bytes_per_s": {"token-ring": 1e9}}, "/link_bytes_per_s/token-ring", 422),
    ({"link_bytes_per_s": {"a.b/c~d": 1e9}}, "/link_bytes_per_s/a.b~1c~0d", 422),
    ({"link_bytes_per_s": {"pcie5-x16": 0}}, "/link_bytes_per_s/pcie5-x16", 422),
    ({"link_bytes_per_s": {"pcie5-x16": -1}}, "/link_bytes_per_s/pcie5-x16", 422),
    ({"link_bytes_per_s": {"pcie5-x16": 1e308}}, "/link_bytes_per_s/pcie5-x16", 422),
    ({"link_bytes_per_s": {"pcie5-x16": 1e-300}}, "/link_bytes_per_s/pcie5-x16", 422),
    ({"link_bytes_per_s": {"pcie5-x16": "1 GB/s"}}, "/link_bytes_per_s/pcie5-x16", 422),
    ({"link_bytes_per_s": {str(number): 1e9 for number in range(65)}}, "/link_bytes_per_s", 422),
    ({"state": {"links": {"token-ring": {"queued_bytes": 1}}}}, "/state/links/token-ring", 422),
    ({"deployment": "other"}, "/deployment", 404),
    ({"request_id": "x"}, "/request_id", 422),
    ({"reserve": True}, "/reserve", 422),
    ({"candidates": []}, "/candidates", 422),
]


@pytest.mark.parametrize(("changes", "pointer", "status"), BAD, ids=str)
def test_what_cannot_be_answered_names_the_field(
    server: Any, changes: dict[str, Any], pointer: str, status: int
) -> None:
    answer = server.ask("POST", "/v1/what-if", {**LONG, **changes})
    assert (answer.status, answer.body.get("pointer")) == (status, pointer)


@pytest.mark.parametrize(
    "raw", [b'{"prompt_tokens": 1e999}', b"[" * 5000, b'{"prompt_tokens": NaN}', b"\xff"]
)
def test_what_is_no_json_is_refused(server: Any, raw: bytes) -> None:
    assert server.ask("POST", "/v1/what-if", raw).status in (400, 422)


@pytest.mark.parametrize("rate", [1, 1e15])
def test_rates_at_the_bounds_give_finite_numbers(server: Any, rate: float) -> None:
    prompt = 1 << 24
    told = what_if(
        server,
        prompt_tokens=prompt,
        hits=[{"tier": "host", "tokens": prompt}, {"tier": "remote", "tokens": prompt}],
        executor="two_ended",
        state={"device_busy_s": 1e6, "links": {"pcie5-x16": {"queued_bytes": 1e18}}},
        link_bytes_per_s={"pcie5-x16": rate, "net-400": rate},
    )
    assert told["timeline"]["computes"][-1]["end_s"] == pytest.approx(told["ttft_s"], rel=1e-9)


def test_the_answer_is_what_the_document_says(server: Any) -> None:
    whole = server.ask("GET", "/openapi.json").body
    schema = {"$ref": "#/components/schemas/WhatIf", "components": whole["components"]}
    for asked in (LONG, TWO, BUSY):
        jsonschema_rs.validate(schema, what_if(server, **asked))


def test_it_takes_the_token(serve: Callable[..., Any]) -> None:
    served = serve({}, environment={"KVLANE_TOKEN": "s3cret"})
    assert served.ask("POST", "/v1/what-if", LONG).status == 401
    assert served.ask("POST", "/v1/what-if", LONG, {"Authorization": "Bearer s3cret"}).status == 200


ONE = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
