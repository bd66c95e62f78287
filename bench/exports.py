"""What a reproduction leaves behind beside its numbers: the trace, the picture, and observations to calibrate on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlane.bench.host import fingerprint
from kvlane.bench.measuring import Outcome
from kvlane.bench.observations import Observation, Observations, encode, observed
from kvlane.bench.reproduce import Report, Reproduction
from kvlane.bench.timeline import Timeline, timeline_of
from kvlane.bench.trace import trace_json
from kvlane.bench.tuning import link_name
from kvlane.policy.calibration_record import TierRecord

# By scenario: waiting for all layers, for each, and computing the front meanwhile.
_PICTURED = (("B", "bulk load"), ("B", "layered load"), ("C", "two-ended"))


def write_exports(reproduction: Reproduction, host: dict[str, Any], out: Path) -> str:
    """Writes `trace.json`, `observations.json` and `timeline.png` into a folder; returns what to say of them."""
    said = [f"written  results.json, report.txt and what follows, in {out}/"]
    (out / "trace.json").write_bytes(trace_json(_timelines(reproduction), _about(reproduction, host)))
    said.append(
        "  trace.json         every layer's copies and compute, for ui.perfetto.dev or chrome://tracing"
    )
    (out / "observations.json").write_bytes(encode(_observations(reproduction, host)))
    said.append("  observations.json  for kvlane-bench calibrate --observations")
    try:
        from kvlane.bench.timeline_plot import draw_timelines
    except ImportError:
        said.append("  (timeline.png needs matplotlib: pip install 'kvlane[plot]')")
    else:
        draw_timelines(_pictured(reproduction), out / "timeline.png")
        said.append("  timeline.png       the layers of B in bulk, of B by layer, and of C two-ended")
    return "\n".join(said)


def _timelines(reproduction: Reproduction) -> list[Timeline]:
    """Each condition's median answer."""
    return [_timeline(report, outcome) for report in reproduction.reports for outcome in report.outcomes]


def _timeline(report: Report, outcome: Outcome) -> Timeline:
    title = f"{report.scenario.key}, {outcome.condition.name}"
    return timeline_of(title, outcome.median_answer.result)


def _pictured(reproduction: Reproduction) -> list[Timeline]:
    return [
        _timeline(report, outcome)
        for report in reproduction.reports
        for outcome in report.outcomes
        if (report.scenario.key, outcome.condition.name) in _PICTURED
    ]


def _about(reproduction: Reproduction, host: dict[str, Any]) -> dict[str, str]:
    return {
        "what": "kvlane-bench reproduce, the median answer of each condition",
        "model": str(reproduction.options.shape),
        **{name: str(value) for name, value in host.items()},
    }


def _observations(reproduction: Reproduction, host: dict[str, Any]) -> Observations:
    spec, first = reproduction.spec, reproduction.reports[0]
    tier = first.planner.machine.tiers["host"]
    return Observations(
        format="kvlane-observations/1",
        date=host["date"],
        fingerprint=fingerprint(host, reproduction.options.shape.name, spec.weight_dtype),
        model_config=reproduction.config,
        layers=len(spec.layers),
        head_s=first.planner.prefill.head_s,
        rectangle=first.planner.prefill.extend.rectangle,
        tiers={
            "host": TierRecord(
                link_name(first.paced_bytes_per_s), tier.layout, tier.run_tokens, tier.runs_per_layer
            )
        },
        observations=[*reproduction.observed, *_of_answers(reproduction)],
    )


def _of_answers(reproduction: Reproduction) -> Iterator[Observation]:
    for report in reproduction.reports:
        links = {"host": link_name(report.paced_bytes_per_s)}
        for outcome in report.outcomes:
            for answer in outcome.answers:
                yield from observed(timeline_of(outcome.condition.name, answer.result), links)
