"""What ships in deploy/: it parses, and asks for nothing that a served process does not tell.

With Prometheus at hand (`promtool` and `prometheus` on the PATH), the rules are tried by its own tool, and every query
by a Prometheus that reads a served process.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlane.policy.service import config, deployments
from kvlane.policy.service.metrics import Cells

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
DASHBOARD: Any = json.loads((DEPLOY / "grafana" / "kvlane.json").read_text())
RULES: Any = yaml.safe_load((DEPLOY / "prometheus" / "kvlane-alerts.yml").read_text())["groups"][0]["rules"]

QUERIES = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]
# What Prometheus itself says of every series.
TARGET = {"job", "instance"}
LONG = {"prompt_tokens": 12370, "hits": [{"tier": "host", "tokens": 12368}]}


class Traffic:
    """Everything that is counted, done once a turn."""

    def __init__(self, served: Any) -> None:
        self.served = served
        self.turn = 0

    def outcome(self, decision: Any, **changes: Any) -> dict[str, Any]:
        return {
            "type": "request",
            "observation_id": f"o {decision['decision_id']}",
            "decision_id": decision["decision_id"],
            "path_taken": decision["path"],
            "loaded_tokens": decision["load_tokens"],
            "ttft_s": 1.1 * decision["ttft_s"],
            **changes,
        }

    def once(self) -> None:
        served, self.turn = self.served, self.turn + 1
        for executor, tokens in (("bulk", 12368), ("layered", 8000), ("bulk", 0)):
            hits = [{"tier": "host", "tokens": tokens}]
            asked = {"prompt_tokens": 12370, "hits": hits, "executor": executor, "reserve": True}
            busy = {"links": {"pcie5-x16": {"queued_bytes": 0 if executor == "bulk" else 1e10}}}
            decision = served.decide(**asked, state={"device_busy_s": 0, **busy})
            served.observe(self.outcome(decision))
        served.decide(prompt_tokens=1 << 18, hits=[{"tier": "nvme", "tokens": 1 << 17}], reserve=True)
        broken = served.decide(**LONG, instance="broken")
        served.observe(self.outcome(broken, outcome="load_failed"))
        new = 100 * self.turn
        prefill = {"type": "prefill", "resident_tokens": 0, "new_tokens": new, "seconds": 1e-4 * new}
        served.observe({**prefill, "observation_id": f"p {self.turn}"})
        refused = {**prefill, "observation_id": f"x {self.turn}", "seconds": -1.0}
        assert served.observe(refused)["refused"]
        assert served.ask("POST", "/v1/decide", {"prompt_tokens": -1}).status == 422


@pytest.fixture(scope="module")
def traffic(start_server: Callable[..., Any], write_toml: Any, tmp_path_factory: Any) -> Iterator[Traffic]:
    """A served process of which everything that it can tell has happened."""
    file = tmp_path_factory.mktemp("deploy") / "serve.toml"
    write_toml(file, {"limits": {"request_s": 0.2}})
    served = start_server("--config", str(file))
    found = Traffic(served)
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.sendall(b"POST ")
        for _ in range(12):
            found.once()
        served.wait_for_log('"calibrated"', 20)
        while slow.recv(1000):
            pass
    yield found
    served.process.kill()


def samples(served: Any) -> dict[str, set[str]]:
    """Every name that is told, with its labels."""
    found: dict[str, set[str]] = {}
    for line in served.ask("GET", "/metrics").raw.decode().splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def wrong(expression: str, told: dict[str, set[str]]) -> list[str]:
    """What an expression asks for that is not told: names, labels chosen by, and labels gathered by."""
    found = []
    metric = r"\b(?:kvlane|process)_\w+|\bup\b"
    for name, chosen in re.findall(rf"({metric})(?:\{{([^}}]*)\}})?", expression):
        if name not in told:
            found.append(name)
            continue
        found += [
            f"{name}.{label}"
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen)
            if label not in told[name] | TARGET
        ]
    for gathered, name in re.findall(rf"\bby \(([^)]*)\)\s*\([^)]*?({metric})", expression):
        labels = told.get(name, set()) | TARGET
        found += [f"{name}.{each.strip()}" for each in gathered.split(",") if each.strip() not in labels]
    return found


def shown(expression: str, told: dict[str, set[str]]) -> set[str]:
    """The labels that an expression's result has."""
    gathered = re.findall(r"\bby \(([^)]*)\)", expression)
    if gathered:
        return {label.strip() for labels in gathered for label in labels.split(",")}
    if re.match(r"\s*(?:sum|max|min)\(", expression):
        return set()
    names = re.findall(r"\b(?:kvlane|process)_\w+|\bup\b", expression)
    return set().union(*(told[name] for name in names)) | TARGET


def test_the_alert_rules_ask_for_what_is_told(traffic: Traffic) -> None:
    told = {**samples(traffic.served), "up": set[str]()}
    assert {rule["alert"] for rule in RULES} >= {
        "KvlanePredictionErrorDrift",
        "KvlaneCalibrationStale",
        "KvlaneObservationsRefused",
        "KvlaneFallbacks",
    }
    for rule in RULES:
        assert wrong(rule["expr"], told) == [], rule["alert"]
        assert rule["annotations"]["summary"]
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= shown(rule["expr"], told), rule["alert"]


def test_the_dashboard_asks_for_what_is_told_and_tells_all_of_it(traffic: Traffic) -> None:
    told = samples(traffic.served)
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["description"] for panel in panels)
    for title, target in QUERIES:
        expression = target["expr"]
        assert wrong(expression, told) == [], title
        legend = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
        assert legend <= shown(expression, told), title
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])[0]
            assert label in told[name]
    every = " ".join(target["expr"] for _, target in QUERIES)
    missing = {
        name
        for name in told
        if name.startswith("kvlane")
        and not name.endswith(("_bucket", "_count", "_sum"))
        and name not in every
    }
    # A failing journal is an alert's business.
    assert missing == {"kvlane_journal_failures_total"}


@pytest.mark.parametrize(
    "expression",
    [
        "kvlane_decision_total",
        'kvlane_decisions_total{deploymnt="chat"}',
        "sum by (scope) (rate(kvlane_decisions_total[5m]))",
        "sum by (le, tier) (rate(kvlane_predicted_ttft_seconds_bucket[5m]))",
        "kvlane_link_queue_seconds + on (link) sum by (path) (kvlane_link_queue_bytes)",
    ],
)
def test_a_name_or_label_that_nobody_tells_is_found(traffic: Traffic, expression: str) -> None:
    assert len(wrong(expression, samples(traffic.served))) == 1


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", DEPLOY / "prometheus" / "kvlane-alerts.yml"),
        ("check", "config", DEPLOY / "prometheus" / "prometheus.yml"),
        ("test", "rules", Path(__file__).with_name("kvlane-alerts.test.yml")),
    ],
)
def test_prometheus_own_tool_takes_it(command: tuple[Any, ...]) -> None:
    done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_metrics_are_as_prometheus_wants_them(traffic: Traffic) -> None:
    told = traffic.served.ask("GET", "/metrics").raw
    done = subprocess.run(["promtool", "check", "metrics"], input=told, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stdout + done.stderr


@needs_prometheus
def test_every_query_of_dashboard_and_alerts_finds_something(traffic: Traffic, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told: Any = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    told["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    told["rule_files"] = [str(DEPLOY / "prometheus" / "kvlane-alerts.yml")]
    told["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{traffic.served.port}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(told))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def found(expression: str) -> int:
        whole = expression.replace("$__rate_interval", "1m").replace("$deployment", ".*")
        return len(get("/api/v1/query?" + urllib.parse.urlencode({"query": whole}))["result"])

    try:
        scrapes, deadline = 0, time.monotonic() + 60
        while scrapes < 3 and time.monotonic() < deadline:
            traffic.once()
            time.sleep(0.3)
            try:
                result = get("/api/v1/query?query=" + urllib.parse.quote("count_over_time(up[1m])"))["result"]
                scrapes = int(result[0]["value"][1]) if result else 0
            except OSError:
                continue
        empty = [(title, target["expr"]) for title, target in QUERIES if not found(target["expr"])]
        assert empty == []
        rules = get("/api/v1/rules")["groups"][0]["rules"]
        assert {rule["name"]: rule["health"] for rule in rules} == {rule["alert"]: "ok" for rule in RULES}
    finally:
        process.kill()
        process.wait()


def test_the_example_configuration_is_one() -> None:
    found = deployments.build(config.read(DEPLOY / "serve.toml"))
    assert set(found) == {"chat", "meta-llama/Llama-3.1-8B-Instruct", "large"}
    assert found["large"].scopes["net-400"] == "fleet"


def test_cells_hold_no_lock_and_count_by_name() -> None:
    cells = Cells()
    assert cells.deployment("a") is cells.deployment("a")
    cells.deployment("a").paths["load"].predicted_s.observe(0.0015)
    rows = dict(cells.deployment("a").paths["load"].predicted_s.cumulative())
    assert (rows["0.001"], rows["0.002"], rows["+Inf"]) == (0, 1, 1)
