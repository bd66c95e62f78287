"""Stopping and starting: SIGTERM drains, SIGHUP reloads, and kill -9 loses nothing that was acknowledged in time."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LONG = {"prompt_tokens": 12370, "hits": [{"tier": "host", "tokens": 12368}]}
# The default interval. A disk that is busy with others may hold a write up for some tenths of a second.
FLUSH_S = 1.0

# 20 times in a test run; the script of the soak sets more.
KILLS = int(os.environ.get("KVLANE_KILLS", "20"))


def prefill(observation_id: str) -> dict[str, Any]:
    return {
        "type": "prefill",
        "observation_id": observation_id,
        "resident_tokens": 0,
        "new_tokens": 1000,
        "seconds": 0.1,
    }


def test_a_reservation_and_what_was_learnt_outlive_a_restart(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    state = {"state_dir": tmp_path / "state"}
    served = serve(state)
    long = {"prompt_tokens": 1 << 20, "instance": "a"}
    booked = served.decide(**long, reserve=True)
    busy = served.decide(prompt_tokens=100, instance="a")["device_busy_s"]
    assert served.observe(prefill("x"))["duplicates"] == 0
    assert served.stop() == 0
    again = serve(state)
    assert 0 < again.decide(prompt_tokens=100, instance="a")["device_busy_s"] < busy
    assert again.observe(prefill("x"))["duplicates"] == 1
    assert again.ask("GET", "/v1/calibration").body["calibrations"][0]["observations"] == 1
    assert again.ask("DELETE", f"/v1/decisions/{booked['decision_id']}").status == 204
    assert again.decide(prompt_tokens=100, instance="a")["device_busy_s"] == 0


def test_what_was_learnt_is_decided_by_after_a_restart(serve: Callable[..., Any], tmp_path: Path) -> None:
    state = {"state_dir": tmp_path / "state", "snapshot_s": 1}
    served = serve(state)
    for number in range(40):
        new = 100 * (number + 1)
        served.observe({**prefill(f"p{number}"), "new_tokens": new, "seconds": 1e-3 * new})
    served.wait_for_log('"calibrated"', 20)
    before = served.decide(prompt_tokens=5000)
    assert before["calibrated"] is True
    assert served.stop() == 0
    again = serve(state)
    after = again.decide(prompt_tokens=5000)
    assert after["calibrated"] is True
    assert after["ttft_s"] == pytest.approx(before["ttft_s"], rel=1e-6)


def test_what_was_learnt_of_another_model_under_the_same_name_is_not_used(
    serve: Callable[..., Any], write_toml: Callable[..., None], tmp_path: Path
) -> None:
    state = {"state_dir": str(tmp_path / "state")}
    other = {"deployments": [{"name": "chat", "model": "llama-3.1-70b", "machine": "h100-sxm"}], **state}
    served = serve(state)
    for number in range(40):
        served.observe(
            {**prefill(f"p{number}"), "new_tokens": 100 * (number + 1), "seconds": 0.1 * (number + 1)}
        )
    served.wait_for_log('"calibrated"', 20)
    write_toml(tmp_path / "serve.toml", other)
    served.process.send_signal(signal.SIGHUP)
    served.wait_for_log("of another model")
    assert served.ask("GET", "/v1/calibration").body["calibrations"][0]["observations"] == 0
    served.stop(signal.SIGKILL)  # so that journals of both are there
    again = serve(other)
    assert again.decide(prompt_tokens=1000)["calibrated"] is False
    assert again.ask("GET", "/v1/calibration").body["calibrations"][0]["observations"] == 0


def test_torn_state_is_set_aside_with_a_warning(serve: Callable[..., Any], tmp_path: Path) -> None:
    state = tmp_path / "state"
    served = serve({"state_dir": state})
    served.observe(prefill("x"))
    assert served.stop() == 0
    snapshot = state / "snapshot.json"
    snapshot.write_bytes(snapshot.read_bytes()[:-20])
    again = serve({"state_dir": state})
    assert again.ask("GET", "/readyz").status == 200
    assert "torn" in again.wait_for_log('"warning"')
    assert (state / "snapshot.json.torn-0").exists()


def keeps(state: Path, *words: str) -> None:
    """Waits until the snapshot on disk holds these words."""
    file = state / "snapshot.json"
    for _ in range(500):
        if file.exists() and all(word.encode() in file.read_bytes() for word in words):
            return
        time.sleep(0.02)
    raise AssertionError(f"{words} are not kept")


def outcome(decision: Any, observation_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "type": "request",
        "observation_id": observation_id,
        "decision_id": decision["decision_id"],
        "path_taken": decision["path"],
        "loaded_tokens": decision["load_tokens"],
        "ttft_s": 2 * decision["ttft_s"],
        **changes,
    }


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_promised_and_decided_is_known_after_a_restart(
    serve: Callable[..., Any], tmp_path: Path, how: signal.Signals
) -> None:
    state = {"state_dir": tmp_path / "state", "snapshot_s": 0.2}
    served = serve(state)
    # A million tokens take a while, and a promise lasts ten times as long.
    asked = {"prompt_tokens": 1 << 20, "hits": LONG["hits"], "request_id": "r", "reserve": True}
    first = served.ask("POST", "/v1/decide", asked)
    many = {
        "prompt_tokens": 1 << 20,
        "request_id": "many",
        "candidates": [{"instance": "a"}, {"instance": "b"}],
    }
    ranked = served.ask("POST", "/v1/decide", many)
    followed = served.decide(**LONG, instance="x")
    settled = served.decide(**LONG, instance="y")
    keeps(tmp_path / "state", '"r"', '"many"', followed["decision_id"], settled["decision_id"])
    served.observe(outcome(settled, "before"))
    time.sleep(2 * FLUSH_S)
    served.stop(how)
    again = serve(state)
    assert again.ask("POST", "/v1/decide", asked).raw == first.raw
    assert again.ask("POST", "/v1/decide", many).raw == ranked.raw
    assert again.metric("kvlane_reservations") == 1
    conflict = again.ask("POST", "/v1/decide", {**asked, "prompt_tokens": 1000})
    assert (conflict.status, conflict.body["pointer"]) == (409, "/request_id")
    # One that was decided before the restart is scored, once; one that was settled before is settled.
    assert again.observe(outcome(followed, "after"))["accepted"] == 1
    assert again.metric("kvlane_prediction_error_ratio_count") == 1
    for decision, observation_id in ((followed, "twice"), (settled, "late")):
        (refused,) = again.observe(outcome(decision, observation_id))["refused"]
        assert refused["field"] == "decision_id"
    # And what it booked is released by its outcome, whose tier is checked; the id is free again after a release.
    booked = first.body
    wrong = outcome(booked, "wrong", outcome="load_failed", tier="tape")
    assert again.observe(wrong)["refused"][0]["field"] == "tier"
    assert again.ask("DELETE", f"/v1/decisions/{booked['decision_id']}").status == 204
    assert again.metric("kvlane_reservations") == 0
    assert again.ask("POST", "/v1/decide", {**asked, "prompt_tokens": 1 << 19}).status == 200


def test_an_older_snapshot_and_one_with_a_torn_part_are_read_as_far_as_they_go(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    served = serve({"state_dir": state})
    asked = {"prompt_tokens": 1 << 20, "request_id": "r", "reserve": True}
    first = served.ask("POST", "/v1/decide", asked)
    served.observe(prefill("x"))
    assert served.stop() == 0
    whole = (state / "snapshot.json").read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 3  # the snapshot, decisions, promises
    torn = lines[2].replace(b"recompute", b"recompote", 1)
    for content, promised, known in (
        (lines[0], False, False),
        (lines[0] + lines[1] + torn, False, True),
        (lines[0] + lines[1][:40], False, False),
        (lines[0] + b"\xff" * 100 + b"\n" + lines[2], True, False),
        (whole, True, True),
    ):
        (state / "snapshot.json").write_bytes(content)
        again = serve({"state_dir": state})
        assert again.metric("kvlane_reservations") == 1
        assert again.observe(prefill("x"))["duplicates"] == 1
        assert (again.ask("POST", "/v1/decide", asked).raw == first.raw) is promised
        scored = outcome(first.body, f"o{len(content)}")
        assert again.observe(scored)["accepted"] == 1  # what it booked is known from the ledger
        assert again.metric("kvlane_prediction_error_ratio_count") == known
        again.stop(signal.SIGKILL)
        for journal in state.glob("journal-*"):
            journal.unlink()


def test_two_services_do_not_share_a_ledger(serve: Callable[..., Any], tmp_path: Path) -> None:
    config = {"state_dir": tmp_path / "state"}
    serve(config)
    with pytest.raises(AssertionError, match="in use by another process"):
        serve(config)


class Load:
    """Threads that observe and decide as fast as they are answered, noting when each id was acknowledged."""

    def __init__(self, served: Any, run: int, threads: int = 2) -> None:
        self.acknowledged: dict[str, float] = {}
        self.errors: list[str] = []
        self._served, self._run = served, run
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(each,)) for each in range(threads)]
        for thread in self._threads:
            thread.start()

    def _work(self, worker: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._served.port, timeout=10)
        headers = {"Content-Type": "application/json"}
        number = 0
        try:
            while not self._stop.is_set():
                ids = [f"{self._run}-{worker}-{number}-{each}" for each in range(5)]
                body = json.dumps([prefill(each) for each in ids])
                connection.request("POST", "/v1/observe", body, headers)
                answer = connection.getresponse()
                answered = json.loads(answer.read())
                if answer.status != 202 or answered["accepted"] != 5:
                    self.errors.append(str(answered))
                now = time.monotonic()
                self.acknowledged.update(dict.fromkeys(ids, now))
                decide = json.dumps({**LONG, "reserve": True})
                connection.request("POST", "/v1/decide", decide, headers)
                connection.getresponse().read()
                number += 1
        except (OSError, http.client.HTTPException):
            pass  # it was killed
        finally:
            connection.close()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_killed_under_load_it_starts_clean_and_has_lost_nothing_older_than_one_flush(
    start_server: Callable[..., Any], write_toml: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    config = {
        "state_dir": str(tmp_path / "state"),
        "flush_s": FLUSH_S,
        "snapshot_s": 0.3,
        "limits": {"remembered": 1_000_000},
    }
    write_toml(file, config)
    must_be_known: list[str] = []
    checked = 0
    for run in range(KILLS):
        served = start_server("--config", str(file))
        # All that must have lasted is known: sent again, it is a duplicate.
        for first in range(0, len(must_be_known), 1000):
            ids = must_be_known[first : first + 1000]
            answer = served.observe(*map(prefill, ids))
            assert answer["duplicates"] == len(ids), f"lost after kill {run}"
        load = Load(served, run)
        time.sleep(FLUSH_S + 0.05 * (run % 5))
        killed_at = time.monotonic()
        served.stop(signal.SIGKILL)
        load.end()
        assert load.errors == []
        must_be_known = [each for each, at in load.acknowledged.items() if at < killed_at - FLUSH_S]
        checked += len(must_be_known)
    assert checked > 0


def test_what_was_not_flushed_is_lost_when_it_is_killed(
    start_server: Callable[..., Any], write_toml: Callable[..., None], tmp_path: Path
) -> None:
    """The control of the test above: it is the flush that makes an acknowledgement last."""
    file = tmp_path / "serve.toml"
    write_toml(file, {"state_dir": str(tmp_path / "state"), "flush_s": 60})
    served = start_server("--config", str(file))
    assert served.observe(prefill("x"))["accepted"] == 1
    served.stop(signal.SIGKILL)
    again = start_server("--config", str(file))
    assert again.observe(prefill("x"))["duplicates"] == 0
    again.stop(signal.SIGKILL)


def test_a_stop_answers_what_was_asked_before_it(serve: Callable[..., Any]) -> None:
    served = serve({})
    body = json.dumps(LONG).encode()
    head = (
        f"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as slow:
        slow.sendall(head + body[:10])
        time.sleep(0.3)
        served.process.send_signal(signal.SIGTERM)
        served.wait_for_log("draining")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port), timeout=5).close()
        slow.sendall(body[10:])
        answer = b""
        while part := slow.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\nConnection: close\r\n" in answer
    assert served.process.wait(timeout=20) == 0


def test_an_open_connection_is_told_that_it_was_the_last_answer(serve: Callable[..., Any]) -> None:
    served = serve({})
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("GET", "/readyz")
    first = connection.getresponse()
    assert first.read() == b'{"status":"ready"}'
    assert first.getheader("Connection") is None
    served.process.send_signal(signal.SIGTERM)
    served.wait_for_log("draining")
    connection.request("GET", "/readyz")
    last = connection.getresponse()
    assert (last.status, json.loads(last.read())["code"]) == (503, "not_ready")
    assert last.getheader("Connection") == "close"
    assert served.process.wait(timeout=20) == 0


def test_a_reload_takes_new_deployments_and_keeps_the_ledger_and_what_was_learnt(
    serve: Callable[..., Any], write_toml: Callable[..., None], tmp_path: Path
) -> None:
    served = serve({})
    served.decide(prompt_tokens=1 << 20, instance="a", reserve=True)  # minutes, however long a reload takes
    served.observe(prefill("x"))
    more = [
        {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm", "executor": "layered"},
        {"name": "more", "model": "llama-3.1-70b", "machine": "h100-sxm", "tensor_parallel_size": 8},
    ]
    write_toml(tmp_path / "serve.toml", {"deployments": more})
    served.process.send_signal(signal.SIGHUP)
    served.wait_for_log('"reloaded"')
    assert served.decide(**LONG, deployment="more")["deployment"] == "more"
    chat = served.decide(**LONG, deployment="chat", instance="a")
    assert chat["executor"] == "layered"
    assert chat["device_busy_s"] > 0
    observations = {
        each["deployment"]: each["observations"]
        for each in served.ask("GET", "/v1/calibration").body["calibrations"]
    }
    assert observations == {"chat": 1, "more": 0}


@pytest.mark.parametrize(
    "bad",
    [
        "deployments = 5\n",
        "[[deployments\n",
        '[[deployments]]\nname = "chat"\nmodel = "llama-9"\nmachine = "h100-sxm"\n',
        '[[deployments]]\nname = "chat"\nmodel = "llama-3.1-8b"\nmachine = "h100-sxm"\ncolour = "red"\n',
        None,
    ],
)
def test_a_bad_file_is_refused_and_all_stays_as_it_was(
    serve: Callable[..., Any], tmp_path: Path, bad: str | None
) -> None:
    served = serve({})
    before = served.decide(**LONG)
    file = tmp_path / "serve.toml"
    if bad is None:
        file.unlink()
    else:
        file.write_text(bad)
    served.process.send_signal(signal.SIGHUP)
    line = json.loads(served.wait_for_log("not reloaded"))
    assert line["level"] == "error"
    after = served.decide(**LONG)
    assert after["ttft_s"] == before["ttft_s"]
    assert served.ask("GET", "/readyz").status == 200


def test_a_calibration_file_is_read_again_at_a_reload_and_one_of_something_else_refused(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    from kvlane.policy import calibration_record
    from kvlane.policy.calibration import PrefillCalibrator, PrefillSample
    from kvlane.policy.calibration_build import build_record
    from kvlane.policy.calibration_record import Fingerprint

    def record(token_s: float, device: str = "NVIDIA H100 SXM") -> Any:
        passes = PrefillCalibrator(32, half_life=None)
        for resident in (0, 0, 0, 0, 500, 500, 500):
            for new in (100, 400, 900, 1600):
                passes.add(PrefillSample(resident, new, 1e-3 + token_s * new))
        mark = Fingerprint("llama-3.1-8b", device, "vllm", "bf16", "bf16", 1)
        return build_record(mark, time.time(), prefill=(passes.estimate(), passes.cost()))

    from kvlane.policy import load_machine

    device = load_machine("h100-sxm").device.name
    file = tmp_path / "chat.json"
    calibration_record.write(record(1e-3, device), file)
    one = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm", "calibration": "chat.json"}
    served = serve({"deployments": [one]})
    assert served.decide(prompt_tokens=1000)["ttft_s"] == pytest.approx(1.001, rel=0.01)
    calibration_record.write(record(2e-3, device), file)
    served.process.send_signal(signal.SIGHUP)
    served.wait_for_log('"reloaded"')
    assert served.decide(prompt_tokens=1000)["ttft_s"] == pytest.approx(2.001, rel=0.01)
    calibration_record.write(record(3e-3, "another device"), file)
    served.process.send_signal(signal.SIGHUP)
    served.wait_for_log("not reloaded")
    assert served.decide(prompt_tokens=1000)["ttft_s"] == pytest.approx(2.001, rel=0.01)
