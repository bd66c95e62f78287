"""`POST /v1/decide/batch`: columns in, columns out, the same decisions as one by one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest


def batch(server: Any, **fields: Any) -> Any:
    answer = server.ask("POST", "/v1/decide/batch", fields)
    assert answer.status == 200, answer.raw
    return answer.body


@pytest.mark.parametrize("executor", ["bulk", "layered", "two_ended"])
def test_each_row_is_what_it_would_be_alone(server: Any, executor: str) -> None:
    random.seed(5)
    prompts = [random.randrange(2, 20_000) for _ in range(40)]
    host = [random.randrange(0, prompt + 1) for prompt in prompts]
    nvme = [random.randrange(0, prompt + 1) for prompt in prompts]
    resident = [random.choice([0, random.randrange(0, prompt)]) for prompt in prompts]
    answer = batch(
        server,
        prompt_tokens=prompts,
        resident_tokens=resident,
        hits={"host": host, "nvme": nvme},
        executor=executor,
    )
    for row, prompt in enumerate(prompts):
        one = server.decide(
            prompt_tokens=prompt,
            resident_tokens=resident[row],
            hits=[{"tier": "host", "tokens": host[row]}, {"tier": "nvme", "tokens": nvme[row]}],
            executor=executor,
        )
        assert answer["ttft_s"][row] == pytest.approx(one["ttft_s"])
        assert answer["path"][row] == one["path"]
        assert answer["load_tokens"][row] == one["load_tokens"]
        assert answer["recompute_tokens"][row] == one["recompute_tokens"]
        assert answer["tier"][row] == (one["load"][0]["tier"] if one["load"] else None)


def test_only_the_prompts_are_required(server: Any) -> None:
    answer = batch(server, prompt_tokens=[1, 10, 100])
    assert answer["path"] == ["recompute"] * 3
    assert answer["load_tokens"] == [0, 0, 0]
    assert answer["recompute_tokens"] == [1, 10, 100]
    assert answer["tier"] == [None] * 3
    assert (answer["deployment"], answer["executor"]) == ("chat", "bulk")


def test_nothing_is_booked_and_no_queue_is_waited_for(server: Any) -> None:
    columns = {"prompt_tokens": [12370], "hits": {"host": [12368]}}
    before = batch(server, **columns)
    long = {"prompt_tokens": 1 << 18, "hits": [{"tier": "host", "tokens": 1 << 18}]}
    booked = server.decide(**long, reserve=True)
    assert batch(server, **columns) == before
    server.ask("DELETE", f"/v1/decisions/{booked['decision_id']}")


@pytest.mark.parametrize(
    ("fields", "status", "code", "pointer"),
    [
        ({}, 422, "invalid_value", "/prompt_tokens"),
        ({"prompt_tokens": []}, 422, "invalid_value", "/prompt_tokens"),
        ({"prompt_tokens": [5, 0]}, 422, "invalid_value", "/prompt_tokens/1"),
        ({"prompt_tokens": [5, "a"]}, 422, "invalid_value", "/prompt_tokens/1"),
        ({"prompt_tokens": [5, 6], "resident_tokens": [0, 6]}, 422, "invalid_value", "/resident_tokens/1"),
        ({"prompt_tokens": [5, 6], "resident_tokens": [0]}, 422, "invalid_value", "/resident_tokens"),
        ({"prompt_tokens": [5], "hits": {"host": [6]}}, 422, "invalid_value", "/hits/host/0"),
        ({"prompt_tokens": [5], "hits": {"host": [1, 2]}}, 422, "invalid_value", "/hits/host"),
        ({"prompt_tokens": [5], "hits": {"host": [-1]}}, 422, "invalid_value", "/hits/host/0"),
        ({"prompt_tokens": [5], "hits": {"a": [1], "b": ["x"]}}, 422, "invalid_value", "/hits/b/0"),
        ({"prompt_tokens": [5], "hits": {"tape": [1]}}, 422, "invalid_value", "/hits"),
        ({"prompt_tokens": [5], "reserve": True}, 422, "unknown_field", "/reserve"),
        ({"prompt_tokens": [5], "deployment": "x"}, 404, "unknown_deployment", "/deployment"),
        ({"prompt_tokens": [5] * 10_001}, 422, "invalid_value", "/prompt_tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_cell_is_pointed_at(server: Any, fields: Any, status: int, code: str, pointer: str) -> None:
    answer = server.ask("POST", "/v1/decide/batch", fields)
    assert (answer.status, answer.body["code"], answer.body["pointer"]) == (status, code, pointer)


def two_tiers(rows: int) -> dict[str, Any]:
    """Columns that have to be decided row by row."""
    return {
        "prompt_tokens": [16_100 + row for row in range(rows)],
        "hits": {"host": [8_000] * rows, "remote": [16_000] * rows},
        "executor": "layered",
    }


def test_a_long_batch_holds_nobody_up_and_is_not_cut_off_as_slow(serve: Callable[..., Any]) -> None:
    served = serve({"limits": {"request_s": 0.5}})
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(served.ask("POST", "/v1/decide/batch", two_tiers(4_000)))
    )
    asking.start()
    meanwhile = 0
    while asking.is_alive():
        served.decide(prompt_tokens=1_000)
        meanwhile += 1
    asking.join()
    assert meanwhile > 20
    assert answers[0].status == 200
    assert len(answers[0].body["path"]) == 4_000


def test_more_long_batches_than_may_wait_are_told_to_come_back(serve: Callable[..., Any]) -> None:
    served = serve({})
    answers: list[Any] = []
    asking = [
        threading.Thread(
            target=lambda: answers.append(served.ask("POST", "/v1/decide/batch", two_tiers(300)))
        )
        for _ in range(16)
    ]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    refused = [answer for answer in answers if answer.status != 200]
    assert 0 < len(refused) <= 8
    assert {answer.body["code"] for answer in refused} == {"too_many_requests"}
    assert all(answer.headers["Retry-After"] == "1" for answer in refused)
    # Their places are free again.
    assert served.ask("POST", "/v1/decide/batch", two_tiers(300)).status == 200
