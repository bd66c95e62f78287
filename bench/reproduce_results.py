"""`results.json`: everything measured, and on what."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kvlane.bench.claims import judge
from kvlane.bench.exports import write_exports
from kvlane.bench.host import machine
from kvlane.bench.lab import AloneTimes, timeline_rows
from kvlane.bench.measuring import Outcome
from kvlane.bench.report import render
from kvlane.bench.reproduce import Report, Reproduction


def write(reproduction: Reproduction, out: Path) -> str:
    """Writes `results.json`, `report.txt` and the exports into a folder; returns the report and what was written."""
    host = machine()
    text = render(reproduction, host)
    (out / "results.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(to_dict(reproduction, host)), indent=2)
    )
    (out / "report.txt").write_text(text + "\n", encoding="utf-8")
    return f"{text}\n\n{write_exports(reproduction, host, out)}"


def to_dict(reproduction: Reproduction, host: dict[str, Any]) -> dict[str, Any]:
    """JSON-ready values; times in seconds, sizes in bytes."""
    options, spec = reproduction.options, reproduction.spec
    return {
        "machine": host,
        "model": {
            "class": "LlamaForCausalLM",
            **asdict(options.shape),
            "dtype": "float32",
            "weights": "random, fixed seed",
            "kv_bytes_per_token": spec.kv_bytes_per_token("fp32"),
            "prefill_flop": spec.prefill_flop(0, options.tokens),
        },
        "protocol": {
            "tokens": options.tokens,
            "repetitions": options.reps,
            "one_request_at_a_time": True,
            "top2_logit_gap": reproduction.top2_gap,
            "core_share": reproduction.core_share,
        },
        "memcpy": [
            {**asdict(sample), "rate_bytes_per_s": sample.rate_bytes_per_s} for sample in reproduction.memcpy
        ],
        "claims": [asdict(claim) for claim in judge(reproduction)],
        "scenarios": [_scenario(report) for report in reproduction.reports],
    }


def _scenario(report: Report) -> dict[str, Any]:
    scenario, planner = report.scenario, report.planner
    link = planner.transfer("host", 1).link
    plan = scenario.plan(planner)
    return {
        "name": scenario.key,
        "title": scenario.title,
        "prompt_tokens": scenario.tokens,
        "stored_tokens": scenario.stored_tokens,
        "link": "memcpy" if report.paced_bytes_per_s is None else "paced",
        "link_bytes_per_s": report.paced_bytes_per_s or link.rate_bytes_per_s,
        "calibration": {
            "link_bytes_per_s": link.rate_bytes_per_s,
            "link_per_copy_s": link.per_copy_s,
            "lookup_s": link.latency_s,
            "fresh": asdict(planner.prefill.fresh),
            "extend": asdict(planner.prefill.extend),
            "head_s": planner.prefill.head_s,
        },
        "plan": plan.to_dict(),
        "conditions": [_condition(outcome) for outcome in report.outcomes],
    }


def _condition(outcome: Outcome) -> dict[str, Any]:
    condition = outcome.condition
    results = [answer.result for answer in outcome.answers]
    efficiencies = outcome.overlap_efficiencies
    return {
        "name": condition.name,
        "path": condition.path,
        "executor": condition.executor,
        "predicted_s": condition.predicted_s,
        "measured_s": outcome.measured_s,
        "load_start": condition.start,
        "load_tokens": results[0].loaded_tokens,
        "loaded_bytes": [answer.moved_bytes for answer in outcome.answers],
        "first_token": [result.first_token for result in results],
        "max_logit_difference": max(outcome.logit_differences),
        "overlap_efficiency": outcome.median_efficiency,
        "overlap_efficiencies": efficiencies,
        "bound_s": AloneTimes.fastest(outcome.alone).bound_s if outcome.alone else None,
        "bounds_s": [alone.bound_s for alone in outcome.alone],
        "timeline": timeline_rows(outcome.median_answer.result),
    }
