"""`GET /v1/live`: what goes on, as one snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvlane.policy.service.recent import Recent

LONG = {"prompt_tokens": 12370, "hits": [{"tier": "host", "tokens": 12368}]}
TRANSFER = {
    "type": "transfer",
    "observation_id": "t",
    "link": "pcie5-x16",
    "bytes": 1 << 30,
    "copies": 100,
    "start_s": 10.0,
    "end_s": 10.1,
}


def live(served: Any) -> Any:
    """A snapshot of now: who asks soon after another is told the same."""
    now = time.time()
    while True:
        answer = served.ask("GET", "/v1/live")
        assert answer.status == 200, answer.raw
        if answer.body["at_s"] >= now:
            return answer.body
        time.sleep(0.02)


def outcome(decision: Any, ttft_s: float, number: int = 0) -> dict[str, Any]:
    return {
        "type": "request",
        "observation_id": f"o-{decision['decision_id']}-{number}",
        "decision_id": decision["decision_id"],
        "path_taken": decision["path"],
        "loaded_tokens": decision["load_tokens"],
        "ttft_s": ttft_s,
    }


def of_link(told: Any, name: str) -> Any:
    (found,) = [each for each in told["links"] if each["link"] == name]
    return found


def test_a_service_that_nobody_asked_yet(serve: Callable[..., Any]) -> None:
    before = time.time()
    served = serve({})
    told = live(served)
    assert before - 1 < told["started_s"] <= told["at_s"] < time.time() + 1
    assert told["deployments"] == [
        {
            "name": "chat",
            "decisions": {"load": 0, "recompute": 0, "split": 0},
            "calibration": {"source": "profile", "age_s": None, "observations": 0},
        }
    ]
    configured = served.ask("GET", "/v1/deployments").body["deployments"][0]["links"]
    assert {each["link"]: each["scope"] for each in told["links"]} == {
        name: link["scope"] for name, link in configured.items()
    }
    for each in told["links"]:
        assert (each["queued_bytes"], each["queued_s"], each["longest_s"]) == (0, 0, 0)
        assert each["left_alone"] is False
    assert (told["reservations"], told["requests"], told["refused"]) == (0, [], [])


def test_decisions_are_counted_by_path_and_queues_are_those_of_the_metrics(serve: Callable[..., Any]) -> None:
    served = serve({})
    served.decide(prompt_tokens=100)
    for instance in ("a", "a", "b"):
        served.decide(**LONG, instance=instance, reserve=True, executor="bulk", state={"links": {}})
    told = live(served)
    (deployment,) = told["deployments"]
    assert sum(deployment["decisions"].values()) == 4
    for path, number in deployment["decisions"].items():
        assert number == served.metric("kvlane_decisions_total", path=path)
    assert told["reservations"] == 3


def test_a_queue_is_told_with_its_longest(serve: Callable[..., Any]) -> None:
    served = serve({"deployments": [{**_one(), "links": {"pcie5-x16": {"rate": "1 GB/s"}}}]})
    prompt = 1 << 20
    huge = {"prompt_tokens": prompt, "hits": [{"tier": "host", "tokens": prompt}]}
    made = [served.decide(**huge, instance=instance, reserve=True) for instance in ("a", "b", "b")]
    assert {each["path"] for each in made} == {"load"}
    link = of_link(live(served), "pcie5-x16")
    moved = sum(each["load"][0]["bytes"] for each in made)
    assert 0 < link["queued_bytes"] <= moved
    assert link["queued_s"] / 2 < link["longest_s"] < link["queued_s"]
    for each in made:
        assert served.ask("DELETE", f"/v1/decisions/{each['decision_id']}").status == 204
    assert of_link(live(served), "pcie5-x16")["queued_s"] == 0


def test_outcomes_that_are_scored_are_told_oldest_first(serve: Callable[..., Any]) -> None:
    served = serve({})
    made = [served.decide(prompt_tokens=100 * (number + 1)) for number in range(3)]
    for each in made:
        served.observe(outcome(each, 2 * each["ttft_s"]))
    told = live(served)["requests"]
    assert [each["predicted_ttft_s"] for each in told] == [each["ttft_s"] for each in made]
    assert [each["ttft_s"] for each in told] == pytest.approx([2 * each["ttft_s"] for each in made])
    assert {(each["deployment"], each["path"]) for each in told} == {("chat", "recompute")}
    times = [each["at_s"] for each in told]
    assert times == sorted(times)


def test_one_that_was_not_followed_is_not_among_them(serve: Callable[..., Any]) -> None:
    served = serve({})
    decision = served.decide(prompt_tokens=100)
    served.observe({**outcome(decision, 1.0), "path_taken": "load", "loaded_tokens": 16})
    assert live(served)["requests"] == []


def test_refused_observations_are_told_as_they_were_answered(serve: Callable[..., Any]) -> None:
    served = serve({})
    answered = served.observe(
        TRANSFER,
        {**TRANSFER, "observation_id": "u", "end_s": 9.0},
        {**TRANSFER, "observation_id": "v", "deployment": "<b>other</b>"},
        {
            "type": "request",
            "observation_id": "w",
            "decision_id": "x",
            "path_taken": "load",
            "loaded_tokens": 0,
        },
    )["refused"]
    told = live(served)
    kept = [{key: each[key] for key in ("index", "field", "reason")} for each in told["refused"]]
    assert kept == answered
    assert [each["deployment"] for each in told["refused"]] == ["chat", None, None]
    assert told["deployments"][0]["calibration"]["observations"] == 1


def test_a_link_left_alone_says_so(serve: Callable[..., Any]) -> None:
    served = serve({})
    for _ in range(3):
        decision = served.decide(**LONG)
        assert decision["path"] == "load"
        served.observe({**outcome(decision, 1.0), "outcome": "load_failed"})
    told = live(served)
    assert of_link(told, "pcie5-x16")["left_alone"] is True
    assert [each["link"] for each in told["links"] if each["left_alone"]] == ["pcie5-x16"]


def test_it_takes_the_token(serve: Callable[..., Any]) -> None:
    served = serve({}, environment={"KVLANE_TOKEN": "s3cret"})
    assert served.ask("GET", "/v1/live").status == 401
    assert served.ask("GET", "/v1/live", headers={"Authorization": "Bearer s3cret"}).status == 200


def test_only_the_last_are_kept() -> None:
    recent = Recent()
    for number in range(500):
        recent.scored("chat", "load", 0.1, float(number + 1))
    assert [each.ttft_s for each in recent.requests] == [float(number + 1) for number in range(300, 500)]


def _one() -> dict[str, Any]:
    return {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
