"""What the reproduction claims, each judged against what was just measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlane.bench.measuring import Outcome
from kvlane.bench.paths import UNIT_TOKENS
from kvlane.bench.reproduce import Report, Reproduction

# The compute thread must have had a core for this share of its time, or nothing measured at two moments compares.
BUSY_BELOW = 0.9

_OVERLAP_AT_LEAST = 0.85
_LAYERED_BEATS_BULK = 1.5
_PREDICTED_WITHIN, _BARE_SUFFIX_WITHIN, _PREDICTED_WITHIN_S = 0.15, 0.20, 0.005


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, whether it held (None: not judged, the machine was busy), and the numbers."""

    text: str
    held: bool | None
    numbers: str


def judge(reproduction: Reproduction) -> list[Claim]:
    """Every claim of the reproduction against its measurements; on a busy machine none is judged."""
    claims = [
        *(_fastest(report) for report in reproduction.reports),
        *(_predicted(report) for report in reproduction.reports),
        _overlaps(reproduction.reports[1]),
        _beats_bulk(reproduction.reports[1]),
    ]
    claims += _splits_beat_both(reproduction.reports[2])
    if reproduction.core_share >= BUSY_BELOW:
        return claims
    return [Claim(claim.text, None, claim.numbers) for claim in claims]


def render_claims(claims: Sequence[Claim]) -> str:
    """A line for each claim, with what came of it."""
    words = {True: "held", False: "DID NOT HOLD", None: "not judged, BUSY"}
    width = max((len(words[claim.held]) for claim in claims), default=0)
    lines = [f"   {words[claim.held]:{width}}  {claim.text}: {claim.numbers}" for claim in claims]
    return "\n".join(("claims", *lines))


def _named(report: Report, name: str) -> Outcome | None:
    return next((outcome for outcome in report.outcomes if outcome.condition.name == name), None)


def _fastest(report: Report) -> Claim:
    """The choice is the fastest measured path, or overlaps it from least to most."""
    choice = _named(report, "choice")
    assert choice is not None
    best = min(report.outcomes, key=lambda outcome: outcome.median_s)
    held = choice is best or min(choice.measured_s) <= max(best.measured_s)
    return Claim(
        f"{report.scenario.key}: the policy's choice is the fastest path measured, or overlaps it",
        held,
        f"choice {choice.median_s:.3f} s, fastest {best.condition.name} {best.median_s:.3f} s",
    )


def _predicted(report: Report) -> Claim:
    """Predictions within 15 % or 5 ms of the medians, 20 % where a bare suffix is all that is computed."""
    worst, beyond = 0.0, False
    for outcome in report.outcomes:
        off = abs(outcome.condition.predicted_s - outcome.median_s)
        bare = outcome.condition.path == "load" and report.scenario.suffix_tokens <= UNIT_TOKENS
        allowed = _BARE_SUFFIX_WITHIN if bare else _PREDICTED_WITHIN
        beyond = beyond or off > max(allowed * outcome.median_s, _PREDICTED_WITHIN_S)
        worst = max(worst, off / outcome.median_s)
    return Claim(
        f"{report.scenario.key}: predictions within {_PREDICTED_WITHIN:.0%} or {_PREDICTED_WITHIN_S * 1e3:.0f} ms"
        f" ({_BARE_SUFFIX_WITHIN:.0%} with a bare suffix)",
        not beyond,
        f"the worst is {worst:.1%} off",
    )


def _overlaps(report: Report) -> Claim:
    layered = _named(report, "layered load")
    assert layered is not None
    efficiency = layered.median_efficiency
    assert efficiency is not None
    return Claim(
        f"{report.scenario.key}: layered loading reaches {_OVERLAP_AT_LEAST:.2f} of the bound",
        efficiency >= _OVERLAP_AT_LEAST,
        f"{efficiency:.2f}",
    )


def _beats_bulk(report: Report) -> Claim:
    layered, bulk = _named(report, "layered load"), _named(report, "bulk load")
    assert layered is not None
    assert bulk is not None
    ratio = bulk.median_s / layered.median_s
    return Claim(
        f"{report.scenario.key}: layered loading beats bulk by {_LAYERED_BEATS_BULK:.1f}x",
        ratio >= _LAYERED_BEATS_BULK,
        f"{ratio:.2f}x",
    )


def _splits_beat_both(report: Report) -> list[Claim]:
    load, recompute = _named(report, "layered load"), _named(report, "recompute")
    assert load is not None
    assert recompute is not None
    splits = [split for name in ("prefix split", "two-ended") if (split := _named(report, name)) is not None]
    return [
        Claim(
            f"{report.scenario.key}: {split.condition.name} beats loading everything and recomputing everything",
            split.median_s < min(load.median_s, recompute.median_s),
            f"{split.median_s:.3f} s against {load.median_s:.3f} s and {recompute.median_s:.3f} s",
        )
        for split in splits
    ]
