"""`POST /v1/observe`: what is taken, what is refused, what becomes of decisions, and what it teaches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvlane.policy import Planner, load_machine, load_model

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
PREFILL = {
    "type": "prefill",
    "observation_id": "p",
    "resident_tokens": 0,
    "new_tokens": 1000,
    "seconds": 0.1,
}


def test_good_records_are_taken_and_bad_ones_refused_each_for_itself(serve: Callable[..., Any]) -> None:
    served = serve({})
    answer = served.observe(
        TRANSFER,
        {**TRANSFER, "observation_id": "unknown", "link": "token-ring"},
        {**TRANSFER, "observation_id": "fast", "end_s": 10.001},
        {**TRANSFER, "observation_id": "back", "end_s": 9.0},
        PREFILL,
        {**PREFILL, "observation_id": "fast", "seconds": 1e-5},
        {**PREFILL, "observation_id": "shared", "batch_tokens": 1500},
        {**PREFILL, "observation_id": "alone", "batch_tokens": 1000},
        {**PREFILL, "observation_id": "torn", "batch_tokens": 10},
        {**PREFILL, "observation_id": "lost", "deployment": "other"},
    )
    assert answer["accepted"] == 3
    assert [(each["index"], each["field"]) for each in answer["refused"]] == [
        (1, "link"),
        (2, "end_s"),
        (3, "end_s"),
        (5, "seconds"),
        (6, "batch_tokens"),
        (8, "batch_tokens"),
        (9, "deployment"),
    ]
    assert all(each["reason"] for each in answer["refused"])
    refused = {"above_ceiling": 1, "above_peak": 1, "not_a_measurement": 2, "not_alone": 1, "unknown_link": 1}
    for reason, number in refused.items():
        assert served.metric("kvlane_observations_refused_total", reason=reason) == number, reason
    assert served.metric("kvlane_observations_total", type="prefill") == 2
    assert b"token-ring" not in served.ask("GET", "/metrics").raw


def test_an_observation_counts_once_however_often_it_is_sent(serve: Callable[..., Any]) -> None:
    served = serve({})
    assert served.observe(TRANSFER, TRANSFER) == {"accepted": 2, "duplicates": 1, "refused": []}
    assert served.observe(TRANSFER)["duplicates"] == 1
    # What was refused may be sent again, and right.
    wrong = {**TRANSFER, "observation_id": "u", "end_s": 1.0}
    assert served.observe(wrong)["accepted"] == 0
    assert served.observe({**wrong, "end_s": 11.0}) == {"accepted": 1, "duplicates": 0, "refused": []}
    assert served.ask("GET", "/v1/calibration").body["calibrations"][0]["observations"] == 2


def outcome(decision: Any, number: int = 0, **changes: Any) -> dict[str, Any]:
    """What an engine says that did as decided, some of it changed."""
    return {
        "type": "request",
        "observation_id": f"o-{decision['decision_id']}-{number}",
        "decision_id": decision["decision_id"],
        "path_taken": decision["path"],
        "loaded_tokens": decision["load_tokens"],
        "ttft_s": 2 * decision["ttft_s"],
        **changes,
    }


def test_a_decision_that_was_followed_is_scored(serve: Callable[..., Any]) -> None:
    served = serve({})
    decision = served.decide(**LONG)
    assert served.observe(outcome(decision))["accepted"] == 1
    scored = {"deployment": "chat", "path": decision["path"]}
    assert served.metric("kvlane_actual_ttft_seconds_count", **scored) == 1
    assert served.metric("kvlane_actual_ttft_seconds_sum", **scored) == pytest.approx(2 * decision["ttft_s"])
    assert served.metric("kvlane_prediction_error_ratio_sum", **scored) == pytest.approx(0.5)
    assert served.metric("kvlane_scored_predicted_ttft_seconds_total", **scored) == pytest.approx(
        decision["ttft_s"]
    )
    # Once: the decision is settled.
    refused = served.observe(outcome(decision, 1))["refused"]
    assert [each["field"] for each in refused] == ["decision_id"]


@pytest.mark.parametrize(
    "changes",
    [
        {"path_taken": "recompute", "loaded_tokens": 0},
        {"loaded_tokens": 1600},
        {"outcome": "cancelled"},
        {"outcome": "load_failed"},
        {"ttft_s": None},
    ],
)
def test_one_that_was_not_followed_is_never_scored_but_ends_its_reservation(
    serve: Callable[..., Any], changes: dict[str, Any]
) -> None:
    served = serve({})
    # Seconds of work, however slow the machine that tests is.
    huge = {"prompt_tokens": 1 << 20, "hits": [{"tier": "host", "tokens": 1 << 19}]}
    decision = served.decide(**huge, reserve=True)
    assert decision["path"] != "recompute"
    assert served.decide(prompt_tokens=100)["device_busy_s"] > 0
    assert served.observe(outcome(decision, **changes))["accepted"] == 1
    assert served.decide(prompt_tokens=100)["device_busy_s"] == 0
    assert served.metric("kvlane_reservations") == 0
    assert served.metric("kvlane_actual_ttft_seconds_count") == 0
    assert served.metric("kvlane_prediction_error_ratio_count") == 0


def test_a_link_whose_loads_keep_failing_is_left_alone_and_one_that_arrives_brings_it_back(
    serve: Callable[..., Any],
) -> None:
    served = serve({})
    for number in range(3):
        decision = served.decide(**LONG, instance="a")
        assert decision["path"] == "load"
        served.observe(outcome(decision, number, outcome="load_failed"))
    broken = served.decide(**LONG, instance="a")
    assert broken["path"] == "recompute"
    assert broken["kv_transfer_params"] == {"max_load_tokens": 0}
    assert any("keep failing" in note for note in broken["notes"])
    assert served.metric("kvlane_fallbacks_total", reason="load_failed") == 3
    assert served.metric("kvlane_fallbacks_total", reason="link_left_alone") == 1
    assert served.metric("kvlane_links_left_alone", link="pcie5-x16") == 1
    # It is this instance's link: another's is another, and so is another tier's.
    assert served.decide(**LONG, instance="b")["path"] == "load"
    other = {"prompt_tokens": 12370, "hits": [{"tier": "cxl", "tokens": 12368}]}
    assert served.decide(**other, instance="a")["load_tokens"] > 0


def test_observations_become_the_calibration_that_decides(serve: Callable[..., Any]) -> None:
    """A link five times as slow as its profile, and passes twice as slow, are found out and answered by."""
    served = serve({})
    before = served.decide(**LONG)
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"))
    link = load_machine("h100-sxm").links["pcie5-x16"]
    random.seed(1)
    records = []
    for number in range(60):
        size, new = random.randrange(1 << 20, 1 << 30), random.randrange(64, 8000)
        copies = random.randrange(1, 1000)
        seconds = 5 * (size / link.rate_bytes_per_s + copies * link.per_copy_s)
        records.append(
            {
                **TRANSFER,
                "observation_id": f"t{number}",
                "bytes": size,
                "copies": copies,
                "end_s": 10 + seconds,
            }
        )
        resident = random.choice([0, random.randrange(16, 8000)])
        records.append(
            {
                **PREFILL,
                "observation_id": f"p{number}",
                "resident_tokens": resident,
                "new_tokens": new,
                "seconds": 2 * planner.prefill.pass_s(resident, new),
            }
        )
    assert served.observe(*records)["accepted"] == 120
    served.wait_for_log('"calibrated"', 20)
    after = served.decide(**LONG)
    assert after["calibrated"] is True
    assert after["parameters_from"]["prefill"]["source"] == "calibration"
    for path, factor in (("recompute", 2), ("load", 5)):
        part = "compute_s" if path == "recompute" else "transfer_s"
        ratio = after["estimates"][path][part] / before["estimates"][path][part]
        assert ratio == pytest.approx(factor, rel=0.1)
    told = served.ask("GET", "/v1/calibration").body["calibrations"][0]
    assert told["source"] == "observations"
    assert told["observations"] == 120
    assert told["age_s"] < 60
    assert told["record"]["links"]["pcie5-x16"]["samples"] == 59  # the first is a cold one
    assert served.metric("kvlane_calibration_age_seconds", deployment="chat") < 60


def test_a_rate_that_was_stated_goes_before_what_was_observed(serve: Callable[..., Any]) -> None:
    stated = {"pcie5-x16": {"rate": "50 GB/s"}}
    served = serve(
        {"deployments": [{"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm", "links": stated}]}
    )
    before = served.decide(**LONG)
    served.observe(
        *({**TRANSFER, "observation_id": f"t{n}", "bytes": (n + 1) << 20, "end_s": 10.2} for n in range(40))
    )
    served.wait_for_log('"calibrated"', 20)
    after = served.decide(**LONG)
    assert after["parameters_from"]["link.pcie5-x16"]["source"] == "explicit"
    assert after["ttft_s"] == before["ttft_s"]
