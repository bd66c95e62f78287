"""A sweep in words: a table per link, and the loads over plain memory."""

from __future__ import annotations

from typing import Any

from kvlane.bench.claims import BUSY_BELOW, render_claims
from kvlane.bench.sweep import Overlapped, Rung, Sweep
from kvlane.bench.sweep_claims import error_of, judge, quartiles
from kvlane.bench.table import render_table
from kvlane.policy.units import show_bytes, show_rate, show_seconds

_HEADER = ("path", "loaded", "predicted", "median", "middle half", "error", "to best", "overlap")
_MEMCPY_HEADER = ("loaded", "computed", "a layer", "median", "middle half", "bound", "overlap")


def render(sweep: Sweep, host: dict[str, Any]) -> str:
    """The whole sweep as text."""
    parts = [_heading(sweep, host), *(_rung(rung) for rung in sweep.rungs)]
    if sweep.overlapped:
        parts.append(_memcpy(sweep.overlapped))
    parts += [_answers(sweep), render_claims(judge(sweep))]
    return "\n\n".join(parts)


def _heading(sweep: Sweep, host: dict[str, Any]) -> str:
    options = sweep.options
    return "\n".join(
        (
            f"date     {host['date']}",
            f"model    {options.shape}; {options.shape.kv_bytes_per_token:,} bytes of KV per token",
            f"device   {host['processor']}, {host['cores']} cores, one of them computing;"
            f" torch {host['torch']}, transformers {host['transformers']}, Python {host['python']}",
            f"protocol a prompt of {options.tokens:,} tokens, all of it stored; one request at a time,"
            f" {options.reps} measurements of each path,",
            "         interleaved; calibrated on other lengths and prefixes, anew before each link",
            "ratio    what copying everything usable takes at the link's pace, over what recomputing is predicted to"
            " take",
            "overlap  the best TTFT that copies and compute, each measured alone, allow, over the measured one",
        )
    )


def _rung(rung: Rung) -> str:
    title = (
        f"ratio {rung.ratio:g} ({rung.measured_ratio:.2f} as measured): a link paced at"
        f" {show_rate(rung.link_bytes_per_s)}{_busy(rung.core_share)}"
    )
    rows = [_HEADER]
    for outcome in rung.outcomes:
        condition, efficiency = outcome.condition, outcome.median_efficiency
        rows.append(
            (
                condition.name if condition.name != "choice" else f"choice: {rung.chosen}",
                f"{condition.start:,} to {condition.end:,}" if condition.load_tokens else "-",
                show_seconds(condition.predicted_s),
                show_seconds(outcome.median_s),
                _between(*quartiles(outcome)),
                f"{error_of(outcome):+.1%}",
                f"{outcome.median_s / rung.best.median_s - 1:+.1%}",
                "-" if efficiency is None else f"{efficiency:.2f}",
            )
        )
    return "\n".join((title, render_table(rows, left=1), f"chosen: {rung.plan.reason}"))


def _memcpy(overlapped: list[Overlapped]) -> str:
    rows = [_MEMCPY_HEADER]
    for each in overlapped:
        outcome = each.outcome
        efficiency = outcome.median_efficiency
        assert efficiency is not None
        rows.append(
            (
                f"{each.overlap.loaded:,}",
                f"{each.overlap.new:,}",
                show_bytes(each.layer_bytes),
                show_seconds(outcome.median_s),
                _between(*quartiles(outcome)),
                show_seconds(efficiency * outcome.median_s),
                f"{efficiency:.2f}",
            )
        )
    busy = _busy(min(each.core_share for each in overlapped))
    return "\n".join((f"plain memory: loads by layer, tokens{busy}", render_table(rows, left=0)))


def _between(low: float, high: float) -> str:
    return f"{show_seconds(low)} - {show_seconds(high)}"


def _busy(core_share: float) -> str:
    return "" if core_share >= BUSY_BELOW else f"; BUSY, a core for only {core_share:.0%} of the time"


def _answers(sweep: Sweep) -> str:
    outcomes = [outcome for rung in sweep.rungs for outcome in rung.outcomes]
    outcomes += [each.outcome for each in sweep.overlapped]
    count = sum(len(outcome.answers) for outcome in outcomes)
    largest = max(difference for outcome in outcomes for difference in outcome.logit_differences)
    return (
        f"answers  all {count} gave the first token that computing without a store gives; largest logit difference"
        f" {largest:.2g}; bytes loaded equal the plan's every time"
    )
