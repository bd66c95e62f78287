"""A sweep on disk: every number as JSON, a table in words, and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kvlane.bench.host import machine
from kvlane.bench.lab import AloneTimes
from kvlane.bench.measuring import Outcome
from kvlane.bench.sweep import Overlapped, Rung, Sweep
from kvlane.bench.sweep_claims import error_of, judge, quartiles
from kvlane.bench.sweep_report import render

DEFINITION = "(bytes of all usable tokens / rate of the paced link) / (TTFT predicted for recomputing)"


def write(sweep: Sweep, out: Path) -> str:
    """Writes `DATE-cpu-sweep.json`, `.txt` and `.png` into a folder; returns the text and what was written."""
    host = machine()
    stem = f"{host['date'][:10]}-cpu-sweep"
    text = render(sweep, host)
    raw = msgspec.json.format(msgspec.json.encode(to_dict(sweep, host)), indent=2)
    (out / f"{stem}.json").write_bytes(raw + b"\n")
    (out / f"{stem}.txt").write_text(text + "\n", encoding="utf-8")
    said = f"written  {stem}.json and {stem}.txt"
    try:
        from kvlane.bench.sweep_plot import draw_sweep
    except ImportError:
        said += f"; {stem}.png needs matplotlib: pip install 'kvlane[plot]'"
    else:
        draw_sweep(sweep, out / f"{stem}.png")
        said = f"written  {stem}.json, {stem}.txt and {stem}.png"
    return f"{text}\n\n{said} in {out}/"


def to_dict(sweep: Sweep, host: dict[str, Any]) -> dict[str, Any]:
    """JSON-ready values; times in seconds, sizes in bytes."""
    options = sweep.options
    return {
        "machine": host,
        "model": {
            "class": "LlamaForCausalLM",
            **asdict(options.shape),
            "dtype": "float32",
            "weights": "random, fixed seed",
            "kv_bytes_per_token": options.shape.kv_bytes_per_token,
        },
        "protocol": {
            "tokens": options.tokens,
            "usable_tokens": options.usable,
            "repetitions": options.reps,
            "one_request_at_a_time": True,
            "interleaved": "within a repetition, each of which starts with another path",
            "parts_measured_alone_in": options.alone_reps,
            "ratio": DEFINITION,
        },
        "rungs": [_rung(rung) for rung in sweep.rungs],
        "memcpy": [_overlapped(overlapped) for overlapped in sweep.overlapped],
        "claims": [asdict(claim) for claim in judge(sweep)],
    }


def _rung(rung: Rung) -> dict[str, Any]:
    return {
        "ratio": rung.ratio,
        "measured_ratio": rung.measured_ratio,
        "link_bytes_per_s": rung.link_bytes_per_s,
        "core_share": rung.core_share,
        "chosen": rung.chosen,
        "best": rung.best.condition.name,
        "regret": rung.regret,
        "plan": rung.plan.to_dict(),
        "conditions": [
            {
                "path": outcome.condition.path,
                "executor": outcome.condition.executor,
                "predicted_s": outcome.condition.predicted_s,
                "error": error_of(outcome),
                **_outcome(outcome),
            }
            for outcome in rung.outcomes
        ],
    }


def _overlapped(overlapped: Overlapped) -> dict[str, Any]:
    return {
        "loaded_tokens": overlapped.overlap.loaded,
        "new_tokens": overlapped.overlap.new,
        "layer_bytes": overlapped.layer_bytes,
        "core_share": overlapped.core_share,
        **_outcome(overlapped.outcome),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    condition = outcome.condition
    return {
        "name": condition.name,
        "load_start": condition.start,
        "load_end": condition.end,
        "measured_s": outcome.measured_s,
        "median_s": outcome.median_s,
        "quartiles_s": quartiles(outcome),
        "loaded_bytes": [answer.moved_bytes for answer in outcome.answers],
        "exposed_s": [sum(r.exposed_s for p in a.result.passes for r in p.layers) for a in outcome.answers],
        "first_token": [answer.result.first_token for answer in outcome.answers],
        "max_logit_difference": max(outcome.logit_differences),
        "overlap_efficiency": outcome.median_efficiency,
        "overlap_efficiencies": outcome.overlap_efficiencies,
        "bound_s": AloneTimes.fastest(outcome.alone).bound_s if outcome.alone else None,
    }
