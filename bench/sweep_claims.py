"""What a sweep claims, each judged against what was just measured."""

from __future__ import annotations

import statistics

from kvlane.bench.claims import BUSY_BELOW, Claim
from kvlane.bench.measuring import Outcome
from kvlane.bench.sweep import Overlapped, Rung, Sweep

CHOICE_WITHIN = 0.05
PREDICTED_WITHIN = 0.10
PACED_OVERLAP, MEMCPY_OVERLAP = 0.93, 0.80
# A layer's copies are large enough to say something of memory, and not of the interpreter, from here on.
LAYER_BYTES = 4 << 20


def judge(sweep: Sweep) -> list[Claim]:
    """Every claim; none is judged that was measured on a busy machine."""
    paced = [
        _unless_busy(claim(rung), rung.core_share)
        for rung in sweep.rungs
        for claim in (_chosen, _predicted, _overlaps)
    ]
    memcpy = [
        _unless_busy(_overlaps_memcpy(each), each.core_share)
        for each in sweep.overlapped
        if each.layer_bytes >= LAYER_BYTES
    ]
    return paced + memcpy


def quartiles(outcome: Outcome) -> tuple[float, float]:
    """Between them lies the middle half of the measured times."""
    measured = outcome.measured_s
    if len(measured) < 2:
        return measured[0], measured[0]
    low, _, high = statistics.quantiles(measured, n=4, method="inclusive")
    return low, high


def within_reach(rung: Rung) -> bool:
    """Whether the choice is near enough to the best path, or overlaps it from quartile to quartile."""
    choice, best = quartiles(rung.choice), quartiles(rung.best)
    return rung.regret <= CHOICE_WITHIN or choice[0] <= best[1]


def error_of(outcome: Outcome) -> float:
    """Predicted over measured, minus one."""
    return outcome.condition.predicted_s / outcome.median_s - 1


def _unless_busy(claim: Claim, core_share: float) -> Claim:
    return claim if core_share >= BUSY_BELOW else Claim(claim.text, None, claim.numbers)


def _chosen(rung: Rung) -> Claim:
    return Claim(
        f"ratio {rung.ratio:g}: the policy's choice is within {CHOICE_WITHIN:.0%} of the best path, or their"
        " interquartile ranges overlap",
        within_reach(rung),
        f"{rung.chosen} took {rung.choice.median_s:.3f} s, {rung.best.condition.name} {rung.best.median_s:.3f} s"
        f" ({rung.regret:+.1%})",
    )


def _predicted(rung: Rung) -> Claim:
    worst = max(rung.outcomes, key=lambda outcome: abs(error_of(outcome)))
    return Claim(
        f"ratio {rung.ratio:g}: each prediction is within {PREDICTED_WITHIN:.0%}",
        abs(error_of(worst)) <= PREDICTED_WITHIN,
        f"{worst.condition.name} is {error_of(worst):+.1%} off",
    )


def _overlaps(rung: Rung) -> Claim:
    """Of paths that copy and compute at the same time: in bulk nothing overlaps, by intention."""
    efficiencies = {
        outcome.condition.name: efficiency
        for outcome in rung.paths
        if outcome.condition.executor == "layered" and (efficiency := outcome.median_efficiency) is not None
    }
    least = min(efficiencies, key=efficiencies.__getitem__)
    return Claim(
        f"ratio {rung.ratio:g}: each path that loads by layer reaches {PACED_OVERLAP:.2f} of its bound",
        efficiencies[least] >= PACED_OVERLAP,
        f"{least} {efficiencies[least]:.2f}",
    )


def _overlaps_memcpy(overlapped: Overlapped) -> Claim:
    overlap, efficiency = overlapped.overlap, overlapped.outcome.median_efficiency
    assert efficiency is not None
    return Claim(
        f"memcpy: a load of {overlap.loaded:,} tokens by layer, {overlap.new:,} computed, reaches"
        f" {MEMCPY_OVERLAP:.2f} of its bound",
        efficiency >= MEMCPY_OVERLAP,
        f"{efficiency:.2f}",
    )
