"""`POST /v1/decide` over real HTTP: the answers, reservations, joins, candidates and request ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvlane.policy import Planner, Request, load_machine, load_model

HIT = [{"tier": "host", "tokens": 12368}]
LONG = {"prompt_tokens": 12370, "hits": HIT}
# Keeps link and device busy for seconds, however slow the machine that tests is.
HUGE = {"prompt_tokens": 1 << 20, "hits": [{"tier": "host", "tokens": 1 << 19}]}


def planned(**fields: Any) -> Any:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"))
    return planner.decide(Request(**fields)).to_dict()


def test_the_answer_is_the_planners_own(server: Any) -> None:
    answer = server.decide(**LONG)
    own = planned(prompt_tokens=12370, hits={"host": 12368})
    for name in ("path", "load_tokens", "recompute_tokens", "executor", "crossover_tokens", "reason"):
        assert answer[name] == own[name]
    for name in ("ttft_s", "exposed_s", "break_even_bytes_per_s"):
        assert answer[name] == pytest.approx(own[name])
    assert answer["estimates"]["split"]["high_s"] == pytest.approx(own["estimates"]["split"]["high_s"])
    assert answer["load"] == own["load"]
    assert answer["parameters_from"] == own["parameters_from"]
    assert answer["calibrated"] is False
    assert answer["expires_in_s"] is None


def test_only_the_prompt_is_required_and_what_is_not_there_is_null_with_a_reason(server: Any) -> None:
    answer = server.decide(prompt_tokens=100)
    assert (answer["path"], answer["load"], answer["recompute_tokens"]) == ("recompute", [], 100)
    assert answer["estimates"]["load"] is None
    assert answer["unavailable"]["load"]
    assert answer["crossover_tokens"] is None
    assert answer["crossover_note"]
    assert answer["break_even_bytes_per_s"] is None
    assert answer["break_even_note"]


@pytest.mark.parametrize(
    ("fields", "cap"),
    [
        ({"prompt_tokens": 12370}, None),  # nothing is stored, so that there is nothing to hold back
        (LONG, None),  # all that is stored is loaded
        ({"prompt_tokens": 12370, "hits": HIT, "state": {"links": {"pcie5-x16": {"queued_bytes": 1e12}}}}, 0),
        ({"prompt_tokens": 12370, "hits": [{"tier": "host", "tokens": 12368, "state": "pending"}]}, 0),
        ({"prompt_tokens": 40, "hits": [{"tier": "host", "tokens": 8}]}, None),  # no whole load unit
        (
            {**LONG, "executor": "layered", "state": {"links": {"pcie5-x16": {"queued_bytes": 2e9}}}},
            "split",
        ),
    ],
)
def test_kv_transfer_params_cap_what_vllm_may_load(server: Any, fields: Any, cap: int | str | None) -> None:
    answer = server.decide(**fields)
    if cap is None:
        assert "kv_transfer_params" not in answer
    elif cap == "split":
        assert answer["path"] == "split"
        assert answer["kv_transfer_params"] == {"max_load_tokens": answer["load_tokens"]}
    else:
        assert answer["kv_transfer_params"] == {"max_load_tokens": cap}


def test_a_pending_hit_is_not_loaded_and_the_answer_says_so(server: Any) -> None:
    answer = server.decide(prompt_tokens=12370, hits=[{"tier": "host", "tokens": 12368, "state": "pending"}])
    assert answer["path"] == "recompute"
    assert any("host: pending" in note for note in answer["notes"])


def test_the_smallest_of_the_ranks_counts(server: Any) -> None:
    ranks = server.decide(prompt_tokens=12370, hits=[{"tier": "host", "tokens": [12368, 6400]}])
    assert ranks["load_tokens"] == 6400


@pytest.mark.parametrize("executor", ["bulk", "layered"])
def test_the_executor_asked_for_is_echoed(server: Any, executor: str) -> None:
    answer = server.decide(**LONG, executor=executor)
    assert answer["executor"] == executor
    assert f"({executor} executor)" in answer["reason"]


def test_a_reservation_is_waited_for_until_it_is_released(server: Any) -> None:
    before = server.decide(**LONG, instance="a")
    booked = server.decide(**HUGE, instance="a", reserve=True)
    assert booked["expires_in_s"] == pytest.approx(max(10 * booked["ttft_s"], 5.0))
    behind = server.decide(**LONG, instance="a")
    assert behind["estimates"]["load"]["ttft_s"] > before["estimates"]["load"]["ttft_s"]
    assert behind["device_busy_s"] > 0
    # Another instance has its own device and its own links.
    assert server.decide(**LONG, instance="b")["ttft_s"] == pytest.approx(before["ttft_s"])
    released = server.ask("DELETE", f"/v1/decisions/{booked['decision_id']}")
    assert (released.status, released.raw) == (204, b"")
    assert not {"Content-Length", "Content-Type"} & set(released.headers)
    after = server.decide(**LONG, instance="a")
    assert after["ttft_s"] == pytest.approx(before["ttft_s"])


def test_nothing_is_booked_unless_asked_for(server: Any) -> None:
    first = server.decide(**LONG, instance="quiet")
    for _ in range(5):
        assert server.decide(**LONG, instance="quiet")["ttft_s"] == first["ttft_s"]


def test_a_state_in_the_request_takes_the_place_of_the_ledgers(server: Any) -> None:
    idle = server.decide(**LONG, instance="c")
    booked = [server.decide(**LONG, instance="c", reserve=True) for _ in range(3)]
    told = server.decide(
        **LONG, instance="c", state={"device_busy_s": 0.0, "links": {"pcie5-x16": {"queued_bytes": 0}}}
    )
    assert told["ttft_s"] == pytest.approx(idle["ttft_s"])
    more = server.decide(**LONG, instance="c", state={"device_busy_s": 2.0})
    assert more["device_busy_s"] == 2.0
    for each in booked:
        server.ask("DELETE", f"/v1/decisions/{each['decision_id']}")


def test_queued_prefill_tokens_stand_for_a_busy_device(server: Any) -> None:
    busy = server.decide(prompt_tokens=1000, state={"queued_prefill_tokens": 8000})
    alone = server.decide(prompt_tokens=1000)
    assert busy["device_busy_s"] > 0.1
    assert busy["ttft_s"] == pytest.approx(alone["ttft_s"] + busy["device_busy_s"])


def test_queued_bytes_are_waited_for_at_the_links_rate(server: Any) -> None:
    free = server.decide(**LONG)["estimates"]["load"]
    queued = server.decide(**LONG, state={"links": {"pcie5-x16": {"queued_bytes": free["load_bytes"]}}})
    # As many bytes ahead take about as long as the load itself.
    assert queued["estimates"]["load"]["transfer_s"] == pytest.approx(2 * free["transfer_s"], rel=0.01)


def test_only_the_same_prefix_on_the_same_instance_is_joined(server: Any) -> None:
    first = server.decide(**LONG, instance="d", prefix_id="p", reserve=True)
    same = server.decide(**LONG, instance="d", prefix_id="p")
    assert same["joined"] is True
    assert "joins" in same["reason"]
    for other in (
        {"instance": "d", "prefix_id": "q"},
        {"instance": "e", "prefix_id": "p"},
        {"instance": "d"},
    ):
        assert server.decide(**LONG, **other)["joined"] is False
    server.ask("DELETE", f"/v1/decisions/{first['decision_id']}")
    assert server.decide(**LONG, instance="d", prefix_id="p")["joined"] is False


def test_candidates_are_ranked_and_the_first_is_booked(server: Any) -> None:
    asked = {
        "prompt_tokens": 12370,
        "reserve": True,
        "candidates": [
            {"instance": "cold"},
            {"instance": "stored", "hits": HIT},
            {"instance": "resident", "resident_tokens": 12000},
            {"instance": "busy", "hits": HIT, "state": {"device_busy_s": 30}},
        ],
    }
    answer = server.decide(**asked)
    ranked = [each["instance"] for each in answer["candidates"]]
    assert ranked == ["resident", "stored", "cold", "busy"]
    ttfts = [each["ttft_s"] for each in answer["candidates"]]
    assert ttfts == sorted(ttfts)
    assert answer["instance"] == "resident"
    assert answer["ttft_s"] == ttfts[0]
    assert server.decide(prompt_tokens=100, instance="resident")["device_busy_s"] > 0
    assert server.decide(prompt_tokens=100, instance="stored")["device_busy_s"] == 0
    assert server.ask("DELETE", f"/v1/decisions/{answer['decision_id']}").status == 204


def test_a_request_id_gives_the_same_decision_once_more_and_books_it_once(server: Any) -> None:
    asked = {**LONG, "instance": "f", "reserve": True, "request_id": "r-1"}
    first = server.decide(**asked)
    again = server.decide(**asked)
    assert again == first
    other_order = dict(reversed(asked.items()))
    assert server.decide(**other_order)["decision_id"] == first["decision_id"]
    conflict = server.ask("POST", "/v1/decide", {**asked, "prompt_tokens": 12371})
    assert conflict.status == 409
    assert conflict.body["code"] == "request_id_conflict"
    assert conflict.body["pointer"] == "/request_id"
    assert server.ask("DELETE", f"/v1/decisions/{first['decision_id']}").status == 204
    # Released, it is no longer in force, and the id is free.
    assert server.decide(**asked)["decision_id"] != first["decision_id"]


def test_without_a_request_id_every_decision_is_its_own(server: Any) -> None:
    assert len({server.decide(**LONG)["decision_id"] for _ in range(10)}) == 10


def test_an_objective_and_a_ttft_objective_are_taken(server: Any) -> None:
    near = {**LONG, "state": {"num_requests_waiting": 1000, "links": {"pcie5-x16": {"queued_bytes": 4e9}}}}
    ttft = server.decide(**near)
    device = server.decide(**near, objective="device_time")
    assert ttft["path"] == "recompute"
    assert device["path"] == "load"  # its copies leave the device to others
    assert server.decide(**near, objective="blend")["path"] == "load"
    assert server.decide(**near, ttft_slo_s=1e-6)["meets_slo"] is False
    assert server.decide(**near, ttft_slo_s=1e3)["meets_slo"] is True
    assert ttft["meets_slo"] is None


def test_deployments_are_named_also_by_their_aliases(serve: Callable[..., Any]) -> None:
    served = serve(
        {
            "deployments": [
                {"name": "small", "model": "llama-3.1-8b", "machine": "h100-sxm", "aliases": ["org/small"]},
                {"name": "large", "model": "llama-3.1-70b", "machine": "h100-sxm", "tensor_parallel_size": 8},
            ]
        }
    )
    small = served.decide(prompt_tokens=1000, deployment="small")
    assert served.decide(prompt_tokens=1000, deployment="org/small")["deployment"] == "small"
    assert served.decide(prompt_tokens=1000, deployment="large")["ttft_s"] != small["ttft_s"]
    unnamed = served.ask("POST", "/v1/decide", {"prompt_tokens": 1000})
    assert (unnamed.status, unnamed.body["pointer"]) == (422, "/deployment")
    unknown = served.ask("POST", "/v1/decide", {"prompt_tokens": 1000, "deployment": "medium"})
    assert (unknown.status, unknown.body["code"]) == (404, "unknown_deployment")


@pytest.mark.parametrize(
    ("scope", "other", "shared"),
    [
        ("device", {"instance": "b", "node": "n"}, False),
        ("node", {"instance": "b", "node": "n"}, True),
        ("node", {"instance": "b", "node": "m"}, False),
        ("fleet", {"instance": "b", "node": "m"}, True),
    ],
)
def test_a_links_scope_says_who_waits_for_whom(
    serve: Callable[..., Any], scope: str, other: dict[str, str], shared: bool
) -> None:
    links = {"net-400": {"scope": scope, "rate": "20 GB/s"}}
    served = serve(
        {"deployments": [{"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm", "links": links}]}
    )
    asked = {"prompt_tokens": 12370, "hits": [{"tier": "remote", "tokens": 12368}]}
    alone = served.decide(**asked, **other)
    assert alone["parameters_from"]["link.net-400"]["source"] == "explicit"
    served.decide(**asked, instance="a", node="n", reserve=True)
    beside = served.decide(**asked, **other)
    waited = beside["estimates"]["load"]["transfer_s"] - alone["estimates"]["load"]["transfer_s"]
    assert (waited > 0.01) is shared


def test_no_number_is_infinite_at_the_far_ends(server: Any) -> None:
    most = 1 << 24

    def check(value: Any) -> None:
        if isinstance(value, dict):
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                check(each)
        elif isinstance(value, float):
            assert math.isfinite(value)

    for fields in (
        {"prompt_tokens": 1},
        {"prompt_tokens": most, "hits": [{"tier": "host", "tokens": most}]},
        {"prompt_tokens": most, "hits": [{"tier": "nvme", "tokens": most}], "load_unit_tokens": 1},
        {"prompt_tokens": 2, "hits": [{"tier": "host", "tokens": 1}], "load_unit_tokens": 1},
        {**LONG, "state": {"device_busy_s": 1e6, "links": {"pcie5-x16": {"queued_bytes": 1e18}}}},
    ):
        check(server.decide(**fields))
