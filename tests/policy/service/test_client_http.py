"""The clients against a real `kvlane serve`."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from kvlane.policy.client import Answer, AsyncClient, Client

# Nothing here is about being late.
PATIENT_MS = 30_000
ASKED = {"prompt_tokens": 12_370, "hits": [{"tier": "host", "tokens": 12_368}]}


def test_both_clients_hear_what_plain_http_does(server: Any) -> None:
    plain = server.decide(**ASKED)

    async def run() -> Answer:
        async with AsyncClient(url, deadline_ms=PATIENT_MS) as client:
            return await client.decide(ASKED)

    url = f"http://127.0.0.1:{server.port}"
    with Client(url, deadline_ms=PATIENT_MS) as client:
        for answer in (client.decide(ASKED), asyncio.run(run())):
            assert answer.failure is None, answer.detail
            assert (answer.path, answer.load_tokens) == (plain["path"], plain["load_tokens"])
            assert answer.kv_transfer_params == plain.get("kv_transfer_params")
            assert answer.body.keys() == plain.keys()
            assert answer.body["estimates"] == plain["estimates"]
        assert client.counts["answered"] == 1


def test_a_decision_s_whole_life(server: Any) -> None:
    with Client(f"http://127.0.0.1:{server.port}", deadline_ms=PATIENT_MS) as client:
        made = client.decide({**ASKED, "reserve": True, "instance": "life"})
        assert made.body["expires_in_s"] >= 5
        behind = client.decide({**ASKED, "instance": "life"})
        assert behind.ttft_s is not None
        assert made.ttft_s is not None
        assert behind.ttft_s > made.ttft_s
        assert made.decision_id is not None
        assert client.release(made.decision_id)
        assert not client.release("never-made")
        after = client.decide({**ASKED, "instance": "life"})
        assert after.ttft_s is not None
        assert after.ttft_s < behind.ttft_s
        taken = {
            "type": "request",
            "observation_id": "o-1",
            "decision_id": after.decision_id,
            "path_taken": after.path,
            "loaded_tokens": after.load_tokens,
            "ttft_s": after.ttft_s,
        }
        unknown = {**taken, "observation_id": "o-2", "decision_id": "never-made"}
        told = client.observe([taken, unknown])
        assert (told.accepted, told.failure) == (1, None)
        assert [(each["index"], each["field"]) for each in told.refused] == [(1, "decision_id")]


def test_columns_are_decided_as_their_rows_are(server: Any) -> None:
    with Client(f"http://127.0.0.1:{server.port}", deadline_ms=PATIENT_MS) as client:
        prompts = [100, 5_000, 12_370, 30_000]
        columns = client.decide_batch(
            {"prompt_tokens": prompts, "hits": {"host": [prompt - 2 for prompt in prompts]}}
        )
        rows = [
            client.decide({"prompt_tokens": prompt, "hits": [{"tier": "host", "tokens": prompt - 2}]})
            for prompt in prompts
        ]
        assert columns.path == [row.path for row in rows]
        assert columns.load_tokens == [row.load_tokens for row in rows]


def test_a_refusal_says_where(server: Any) -> None:
    with Client(f"http://127.0.0.1:{server.port}", deadline_ms=PATIENT_MS) as client:
        answer = client.decide({"prompt_tokens": -1})
        assert answer.failure == "refused"
        assert answer.detail.startswith("422 ")
        assert "/prompt_tokens" in answer.detail
        assert client.counts["refused"] == 1


def test_a_token_opens_and_its_lack_is_counted(serve: Any) -> None:
    served = serve({}, environment={"KVLANE_TOKEN": "secret", "KVLANE_OBSERVE_TOKEN": "other"})
    url = f"http://127.0.0.1:{served.port}"
    with Client(url, deadline_ms=PATIENT_MS, token="") as client:
        assert client.decide(ASKED).failure == "refused"
    with Client(url, deadline_ms=PATIENT_MS, token="secret", observe_token="other") as client:
        assert client.decide(ASKED).failure is None
        assert client.observe([]).failure is None


def test_a_service_that_stops_and_comes_back(serve: Any) -> None:
    first = serve({})
    with Client(f"http://127.0.0.1:{first.port}", deadline_ms=PATIENT_MS) as client:
        assert client.decide(ASKED).failure is None
        first.stop(signal.SIGKILL)
        assert client.decide(ASKED).failure == "unreachable"
        serve({"listen": f"127.0.0.1:{first.port}"})
        assert client.decide(ASKED).failure is None
        assert client.counts["answered"] == 2
