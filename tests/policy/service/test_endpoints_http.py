"""What the endpoint tells about itself, and who may ask."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlane.policy import InputError, machine_names, model_names
from kvlane.policy.service.auth import gate
from kvlane.policy.service.config import from_fields

GOOD = {"prompt_tokens": 1000, "hits": [{"tier": "host", "tokens": 992}]}
PREFILL = {
    "type": "prefill",
    "observation_id": "p",
    "resident_tokens": 0,
    "new_tokens": 1000,
    "seconds": 0.1,
}


def test_health_and_readiness(server: Any) -> None:
    assert server.ask("GET", "/healthz").body == {"status": "ok"}
    assert server.ask("GET", "/readyz").body == {"status": "ready"}


def test_what_is_served_is_told(server: Any) -> None:
    (deployment,) = server.ask("GET", "/v1/deployments").body["deployments"]
    assert deployment["name"] == "chat"
    assert deployment["model"] == "llama-3.1-8b"
    assert deployment["tiers"]["host"] == "pcie5-x16"
    assert deployment["links"]["pcie5-x16"]["scope"] == "device"
    models = server.ask("GET", "/v1/models").body
    assert [each["model"] for each in models["models"]] == ["llama-3.1-8b"]
    assert models["models"][0]["bytes_per_token"] == 131_072
    assert models["built_in"] == model_names()
    machines = server.ask("GET", "/v1/machines").body
    assert [each["name"] for each in machines["machines"]] == ["h100-sxm"]
    assert machines["built_in"] == machine_names()
    (calibration,) = server.ask("GET", "/v1/calibration").body["calibrations"]
    assert (calibration["source"], calibration["record"], calibration["age_s"]) == ("profile", None, None)


def test_metrics_are_what_prometheus_reads(server: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    decision = server.decide(**GOOD)
    answer = server.ask("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.raw.decode())}
    for name in (
        "kvlane_decisions",
        "kvlane_decision_duration_seconds",
        "kvlane_predicted_ttft_seconds",
        "kvlane_rejected_ttft_seconds",
        "kvlane_actual_ttft_seconds",
        "kvlane_prediction_error_ratio",
        "kvlane_link_queue_bytes",
        "kvlane_link_queue_seconds",
        "kvlane_observations_refused",
        "kvlane_calibration_age_seconds",
        "kvlane_fallbacks",
        "process_resident_memory_bytes",
    ):
        assert name in families, name
        assert families[name].documentation
    assert server.metric("kvlane_decisions_total", path=decision["path"]) >= 1
    buckets = [
        float(sample.labels["le"])
        for sample in families["kvlane_predicted_ttft_seconds"].samples
        if sample.name.endswith("_bucket") and sample.labels["path"] == "load"
    ]
    assert (buckets[0], buckets[-2]) == (0.001, 60)


def test_labels_are_never_text_of_a_request(server: Any) -> None:
    names = {"instance": "instance-nobody-configured", "prefix_id": "prefix-x", "request_id": "request-x"}
    server.decide(**GOOD, **names, reserve=True)
    unknown = {"links": {"link-nobody-configured": {"queued_bytes": 1}}}
    assert server.ask("POST", "/v1/decide", {**GOOD, "state": unknown}).status == 422
    metrics = server.ask("GET", "/metrics").raw.decode()
    for text in (*names.values(), "link-nobody-configured"):
        assert text not in metrics


def test_queues_are_told_in_bytes_and_seconds(server: Any) -> None:
    long = {"prompt_tokens": 1 << 20, "hits": [{"tier": "host", "tokens": 1 << 20}]}
    decision = server.decide(**long, instance="gauge", reserve=True)
    assert decision["path"] == "load"
    assert server.metric("kvlane_link_queue_bytes", link="pcie5-x16") > 1e10
    assert server.metric("kvlane_link_queue_seconds", link="pcie5-x16") > 1
    assert server.metric("kvlane_reservations") >= 1
    server.ask("DELETE", f"/v1/decisions/{decision['decision_id']}")
    assert server.metric("kvlane_link_queue_seconds", link="pcie5-x16") < 1


def test_a_trace_is_logged_with_its_ids_and_given_back(serve: Callable[..., Any]) -> None:
    served = serve({})
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = served.ask("POST", "/v1/decide", GOOD, {"traceparent": trace})
    assert answer.headers["traceparent"] == trace
    line = json.loads(served.wait_for_log("0af7651916cd43dd8448eb211c80319c"))
    assert line["decision_id"] == answer.body["decision_id"]
    assert line["parent_id"] == "b7ad6b7169203331"
    for bad in ("00-xyz-b7ad6b7169203331-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "x\tx"):
        answer = served.ask("POST", "/v1/decide", GOOD, {"traceparent": bad})
        assert answer.status == 200
        assert "traceparent" not in answer.headers


def test_there_is_no_access_log_and_every_line_is_json(serve: Callable[..., Any]) -> None:
    served = serve({})
    for _ in range(20):
        served.decide(**GOOD)
    served.ask("POST", "/v1/decide", {})
    assert served.stop() == 0
    assert len(served.log) < 5
    for line in served.log[1:]:
        assert set(json.loads(line)) >= {"time", "level", "logger", "message"}


def test_only_its_own_names_are_answered(serve: Callable[..., Any]) -> None:
    served = serve({"hosts": ["router.example"]})
    own = ["127.0.0.1:80", "localhost", "[::1]:8780", "10.1.2.3", "router.example", "ROUTER.example:8780"]
    others = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8780", ""]
    for host in own + others:
        for path in ("/healthz", "/v1/deployments"):
            answer = served.ask("GET", path, headers={"Host": host})
            assert answer.status == (200 if host in own else 421), host
            if host in others:
                assert answer.body["code"] == "misdirected_host"


def test_no_page_of_another_origin_is_told_anything(server: Any) -> None:
    for method in ("OPTIONS", "GET"):
        answer = server.ask(
            method,
            "/v1/deployments",
            headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
        )
        assert not any(name.lower().startswith("access-control") for name in answer.headers)


def test_with_a_token_only_health_is_open(serve: Callable[..., Any]) -> None:
    served = serve({}, environment={"KVLANE_TOKEN": "s3cret"})
    for path in ("/healthz", "/readyz"):
        assert served.ask("GET", path).status == 200
    for method, path, body in (
        ("POST", "/v1/decide", GOOD),
        ("DELETE", "/v1/decisions/x", None),
        ("GET", "/v1/deployments", None),
        ("GET", "/metrics", None),
        ("GET", "/openapi.json", None),
        ("POST", "/v1/observe", [PREFILL]),
    ):
        for given in (None, "Bearer wrong", "Bearer s3cre", "Bearer s3cretx", "s3cret", "Basic s3cret"):
            headers = {} if given is None else {"Authorization": given}
            answer = served.ask(method, path, body, headers)
            assert (answer.status, answer.body["code"]) == (401, "unauthorized")
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert served.ask(method, path, body, {"Authorization": "Bearer s3cret"}).status < 300 or (
            method == "DELETE"
        )
    assert (
        "token"
        in served.ask("GET", "/openapi.json", headers={"Authorization": "Bearer s3cret"}).body["components"][
            "securitySchemes"
        ]
    )


def test_the_observe_token_is_one_of_its_own(serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("ask\n")
    (tmp_path / "observe").write_text("tell\n")
    served = serve({"token_file": "token", "observe_token_file": "observe"})
    decide = served.ask("POST", "/v1/decide", GOOD, {"Authorization": "Bearer ask"})
    assert decide.status == 200
    assert served.ask("POST", "/v1/decide", GOOD, {"Authorization": "bearer ask"}).status == 200
    assert served.ask("POST", "/v1/decide", GOOD, {"Authorization": "Bearer tell"}).status == 401
    assert served.ask("POST", "/v1/observe", [PREFILL], {"Authorization": "Bearer ask"}).status == 401
    assert served.ask("POST", "/v1/observe", [PREFILL], {"Authorization": "Bearer tell"}).status == 202


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
def test_without_an_observe_token_only_this_machine_observes(server: Any, header: str) -> None:
    assert server.ask("POST", "/v1/observe", [PREFILL]).status == 202
    answer = server.ask("POST", "/v1/observe", [PREFILL], {header: "203.0.113.7"})
    assert (answer.status, answer.body["code"]) == (403, "forbidden")


def serving(**fields: Any) -> Any:
    one = {"name": "d", "model": "llama-3.1-8b", "machine": "h100-sxm"}
    return from_fields({"deployments": [one], **fields})


@pytest.mark.parametrize("listen", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "router.example:80", ":80"])
def test_an_address_that_others_reach_takes_a_token_or_a_word(listen: str) -> None:
    with pytest.raises(InputError, match="KVLANE_TOKEN") as caught:
        gate(serving(listen=listen), {})
    assert caught.value.field == "listen"
    assert gate(serving(listen=listen), {"KVLANE_TOKEN": "x"}).needs_token
    assert not gate(serving(listen=listen, insecure=True), {}).needs_token


@pytest.mark.parametrize("listen", ["127.0.0.1:80", "[::1]:80", "localhost:80", "127.8.8.8:80"])
def test_loopback_takes_none(listen: str) -> None:
    assert not gate(serving(listen=listen), {}).needs_token


@pytest.mark.parametrize("text", ["", "\n", "two words", "a\nb", "x" * 5000, "\x00"])
def test_a_token_that_is_none_is_refused_and_not_taken_for_no_token(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        gate(serving(token_file=str(file)), {})
    assert caught.value.field == "token_file"
    with pytest.raises(InputError):
        gate(serving(), {"KVLANE_TOKEN": text})


def test_a_token_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        gate(serving(token_file=str(tmp_path / "nowhere")), {})


def test_a_path_cannot_smuggle_anything(server: Any) -> None:
    strange = urllib.parse.quote("/v1/decisions/a\r\nX: y", safe="/")
    answer = server.ask("DELETE", strange)
    assert answer.status == 404
    assert "X" not in answer.headers
