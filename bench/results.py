"""`results.json`: everything measured, and on what."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from kvlane.bench.claims import judge
from kvlane.bench.lab import AloneTimes, timeline_rows
from kvlane.bench.report import render
from kvlane.bench.reproduce import Report, Reproduction
from kvlane.bench.scenarios import Outcome


def write(reproduction: Reproduction, out: Path) -> str:
    """Writes `results.json` and `report.txt` into a folder; returns the report's text."""
    host = machine()
    text = render(reproduction, host)
    (out / "results.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(to_dict(reproduction, host)), indent=2)
    )
    (out / "report.txt").write_text(text + "\n", encoding="utf-8")
    return text


def machine() -> dict[str, Any]:
    """What this ran on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "compute_threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "kvlane": version("kvlane"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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
