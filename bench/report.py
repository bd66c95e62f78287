"""The reproduction in words: a table per scenario, the layer timeline, and the published pair beside it."""

from __future__ import annotations

from typing import Any

from kvlane.bench.claims import BUSY_BELOW, judge, render_claims
from kvlane.bench.measuring import Outcome
from kvlane.bench.reproduce import Report, Reproduction
from kvlane.bench.table import render_table
from kvlane.bench.timeline import timeline_of
from kvlane.bench.timeline_text import render_timeline
from kvlane.policy.catalog import load_model
from kvlane.policy.units import show_bytes, show_rate, show_seconds

_HEADER = (
    "condition",
    "path",
    "loaded",
    "predicted",
    "measured",
    "min - max",
    "error",
    "speed-up",
    "overlap",
)

# The published result this reproduces the protocol of: one request of 12,370 tokens, three measurements.
PUBLISHED_TOKENS, PUBLISHED_LOAD_S, PUBLISHED_RECOMPUTE_S = 12_370, 0.092, 0.900
# Dense peaks: NVIDIA A100 data sheet (bf16), FuriosaAI RNGD data sheet (FP8).
_A100_BF16_FLOPS, _RNGD_FP8_FLOPS = 312e12, 512e12


def render(reproduction: Reproduction, host: dict[str, Any]) -> str:
    """The whole report as text."""
    parts = [_heading(reproduction, host)]
    if reproduction.core_share < BUSY_BELOW:
        parts.append(
            f"BUSY     the compute thread had a core for only {reproduction.core_share:.0%} of its time: something else"
            " ran here, and what was measured before and after it cannot agree"
        )
    parts += [_scenario(reproduction, report) for report in reproduction.reports]
    parts += [_timeline(reproduction.reports[1]), _answers(reproduction)]
    parts += [render_claims(judge(reproduction)), _published(reproduction)]
    return "\n\n".join(parts)


def _heading(reproduction: Reproduction, host: dict[str, Any]) -> str:
    per_token = reproduction.spec.kv_bytes_per_token("fp32")
    return "\n".join(
        (
            f"model    {reproduction.options.shape}; {per_token:,.0f} bytes of KV per token",
            f"device   {host['processor']}, {host['cores']} cores, one of them computing;"
            f" torch {host['torch']}, transformers {host['transformers']}, Python {host['python']}",
            f"protocol one request at a time, {reproduction.options.reps} measurements per condition, interleaved;"
            " calibrated on other lengths and prefixes",
            _memcpy(reproduction),
        )
    )


def _memcpy(reproduction: Reproduction) -> str:
    rates = (
        f"{show_copy_size(sample.copy_bytes)} {show_rate(sample.rate_bytes_per_s)}"
        for sample in reproduction.memcpy
    )
    return f"memcpy   by copy size: {', '.join(rates)}"


def show_copy_size(count: int) -> str:
    """A copy's size in the binary units sizes of copies come in."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _scenario(reproduction: Reproduction, report: Report) -> str:
    scenario = report.scenario
    stored = (
        "all of it stored"
        if scenario.stored_tokens >= scenario.tokens
        else f"{scenario.stored_tokens:,} of them stored"
    )
    link = report.planner.transfer("host", 1).link
    kind = "plain memcpy" if report.paced_bytes_per_s is None else "a link paced at this rate"
    rate = report.paced_bytes_per_s or link.rate_bytes_per_s
    title = (
        f"{scenario.key}  {scenario.title}: a prompt of {scenario.tokens:,} tokens, {stored};"
        f" {show_rate(rate)} ({kind})"
    )
    recompute = next((o for o in report.outcomes if o.condition.path == "recompute"), None)
    if recompute is not None:
        base = recompute.median_s
    else:
        # Scenario B has A's prompt, and so A's recompute.
        base = next(o for o in reproduction.reports[0].outcomes if o.condition.path == "recompute").median_s
    rows = [_HEADER, *(_row(outcome, base) for outcome in report.outcomes)]
    plan = next(
        outcome for outcome in report.outcomes if outcome.condition.name == "choice"
    ).median_answer.plan
    assert plan is not None
    return "\n".join((title, render_table(rows, left=2), f"chosen: {plan.reason}"))


def _row(outcome: Outcome, recompute_s: float) -> tuple[str, ...]:
    condition, measured = outcome.condition, outcome.measured_s
    median = outcome.median_s
    efficiency = outcome.median_efficiency
    return (
        condition.name,
        condition.path if condition.executor is None else f"{condition.path}, {condition.executor}",
        show_bytes(outcome.answers[0].moved_bytes) if condition.load_tokens else "-",
        show_seconds(condition.predicted_s),
        show_seconds(median),
        f"{show_seconds(min(measured))} - {show_seconds(max(measured))}",
        f"{condition.predicted_s / median - 1:+.1%}",
        f"{recompute_s / median:.2f}x" if recompute_s < 10 * median else f"{recompute_s / median:.0f}x",
        "-" if efficiency is None else f"{efficiency:.2f}",
    )


def _timeline(report: Report) -> str:
    outcome = next(outcome for outcome in report.outcomes if outcome.condition.name == "layered load")
    title = f"{report.scenario.key}'s layered load"
    return render_timeline(timeline_of(title, outcome.median_answer.result))


def _answers(reproduction: Reproduction) -> str:
    outcomes = [outcome for report in reproduction.reports for outcome in report.outcomes]
    largest = max(difference for outcome in outcomes for difference in outcome.logit_differences)
    count = sum(len(outcome.answers) for outcome in outcomes)
    return (
        f"answers  all {count} gave the first token that recomputing gives; largest logit difference {largest:.2g}, the"
        f" two largest logits of a prompt lie at least {reproduction.top2_gap:.2g} apart; bytes loaded equal the plan's"
        " every time"
    )


def _published(reproduction: Reproduction) -> str:
    """The published pair and what fits it, and why its ratio is not this machine's."""
    model = load_model("llama-3.1-8b")
    moved = PUBLISHED_TOKENS * model.kv_bytes_per_token()
    flop = model.prefill_flop(0, PUBLISHED_TOKENS)
    flops = flop / PUBLISHED_RECOMPUTE_S
    ours = {outcome.condition.name: outcome for outcome in reproduction.reports[0].outcomes}
    recompute, load = ours["recompute"].median_s, ours["bulk load"].median_s
    own_flop = reproduction.spec.prefill_flop(0, reproduction.options.tokens)
    moved_here = ours["bulk load"].answers[0].moved_bytes
    return "\n".join(
        (
            f"published  {PUBLISHED_TOKENS:,} tokens: load {show_seconds(PUBLISHED_LOAD_S)}, recompute"
            f" {show_seconds(PUBLISHED_RECOMPUTE_S)}, {PUBLISHED_RECOMPUTE_S / PUBLISHED_LOAD_S:.1f}x; model, dtype and"
            " card count are not named",
            f"  what fits: an 8B dense model with 16-bit KV, {show_bytes(moved)} in {show_seconds(PUBLISHED_LOAD_S)} ="
            f" {show_rate(moved / PUBLISHED_LOAD_S)}, and {flop:.3g} FLOP in {show_seconds(PUBLISHED_RECOMPUTE_S)} ="
            f" {flops / 1e12:.0f} TFLOP/s:",
            f"  {flops / _RNGD_FP8_FLOPS:.0%} of the FP8 peak of one RNGD card, or"
            f" {flops / _A100_BF16_FLOPS:.0%} of the bf16 peak of one A100 with PCIe 4",
            f"this run   {reproduction.options.tokens:,} tokens: load {show_seconds(load)}, recompute"
            f" {show_seconds(recompute)}, {recompute / load:.0f}x; {show_bytes(moved_here)} in {show_seconds(load)} ="
            f" {show_rate(moved_here / load)},",
            f"  and {own_flop:.3g} FLOP in {show_seconds(recompute)} = {own_flop / recompute / 1e9:.0f} GFLOP/s",
            "  this ratio is the balance of one CPU core and its link; it is not comparable with the published one",
        )
    )
