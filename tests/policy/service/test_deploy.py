"""What ships in deploy/: it parses, and asks for nothing that the endpoint does not tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from kvlane.policy.service import config, deployments
from kvlane.policy.service.metrics import Cells, registry
from kvlane.policy.service.service import Service

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
ONE = {"name": "d", "model": "llama-3.1-8b", "machine": "h100-sxm"}


def told() -> set[str]:
    """Every name a scrape may have, those of things that did not happen yet among them."""
    service = Service(config.from_fields({"deployments": [ONE]}))
    names: set[str] = set()
    for family in registry(service.cells, service.gauges).collect():
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + end for end in ends}
    return names


def asked(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:kvlane|process)_\w+", expression))


def labels(expression: str) -> set[str]:
    by = ",".join(re.findall(r"\b(?:by|on) \(([^)]*)\)", expression))
    return {name.strip() for name in by.split(",")} - {""}


KNOWN_LABELS = {
    "deployment",
    "path",
    "tier",
    "le",
    "type",
    "reason",
    "link",
    "scope",
    "code",
    "instance",
    "job",
}


def test_the_alert_rules_ask_for_what_is_told() -> None:
    names = told()
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "kvlane-alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for rule in group["rules"]}
    assert alerts >= {
        "KvlanePredictionErrorDrift",
        "KvlaneCalibrationStale",
        "KvlaneObservationsRefused",
        "KvlaneFallbacks",
    }
    for rule in group["rules"]:
        assert asked(rule["expr"]) <= names, rule["alert"]
        assert labels(rule["expr"]) <= KNOWN_LABELS
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_dashboard_asks_for_what_is_told() -> None:
    names = told()
    dashboard: Any = json.loads((DEPLOY / "grafana" / "kvlane.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            assert asked(target["expr"]) <= names, panel["title"]
            assert asked(target["expr"])
            assert labels(target["expr"]) <= KNOWN_LABELS
            assert target["expr"].count("(") == target["expr"].count(")")
    shown = set().union(*(asked(target["expr"]) for panel in panels for target in panel["targets"]))
    missing = {
        name
        for name in names
        if name.startswith("kvlane") and not name.endswith(("_bucket", "_count", "_sum"))
    }
    # A failing journal is an alert's business.
    assert missing - shown == {"kvlane_journal_failures_total"}


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
