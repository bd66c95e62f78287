"""A sweep as a picture: what every path takes on each link, how well it was predicted, and how close loads come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvlane.bench.sweep import Sweep
from kvlane.bench.sweep_claims import (
    MEMCPY_OVERLAP,
    PACED_OVERLAP,
    PREDICTED_WITHIN,
    error_of,
    quartiles,
)

DPI = 120
SIZE_INCHES = (16.0, 5.2)

# Okabe and Ito's palette: told apart without colour vision, too.
_STYLES = {
    "recompute": ("#000000", "s"),
    "bulk load": ("#CC79A7", "v"),
    "layered load": ("#0072B2", "o"),
    "prefix split": ("#009E73", "^"),
    "two-ended": ("#E69F00", "D"),
}
_CHOICE = "#D55E00"


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Writes a PNG of `SIZE_INCHES` at `DPI` dots per inch."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    times, errors, overlaps = figure.subplots(1, 3)
    _times(times, sweep)
    _errors(errors, sweep)
    _overlaps(overlaps, sweep)
    for axes in (times, errors, overlaps):
        axes.set_xscale("log", base=2)
        ticks = {rung.ratio: f"{rung.ratio:g}" for rung in sweep.rungs}
        if axes is overlaps and sweep.overlapped:
            ticks[_right_of(sweep)] = "memory"
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlabel("time to copy everything / time to recompute everything")
        axes.grid(color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(fontsize="small")
    figure.savefig(path, format="png")


def _times(axes: Any, sweep: Sweep) -> None:
    axes.set_title("Time to first token", loc="left")
    for name, (color, marker) in _STYLES.items():
        found = [(rung.ratio, outcome) for rung in sweep.rungs if (outcome := rung.named(name)) is not None]
        ratios = [ratio for ratio, _ in found]
        medians = [outcome.median_s for _, outcome in found]
        spans = [quartiles(outcome) for _, outcome in found]
        below = [median - low for median, (low, _) in zip(medians, spans, strict=True)]
        above = [high - median for median, (_, high) in zip(medians, spans, strict=True)]
        axes.errorbar(
            ratios,
            medians,
            yerr=(below, above),
            color=color,
            marker=marker,
            markersize=5,
            capsize=3,
            label=name,
        )
        predicted = [outcome.condition.predicted_s for _, outcome in found]
        axes.plot(ratios, predicted, color=color, linestyle=":", linewidth=1)
    axes.plot([], [], color="0.4", linestyle=":", linewidth=1, label="predicted")
    axes.plot(
        [rung.ratio for rung in sweep.rungs],
        [rung.choice.median_s for rung in sweep.rungs],
        linestyle="none",
        marker="o",
        markersize=13,
        markerfacecolor="none",
        color=_CHOICE,
        label="the policy's choice",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("median, bars: middle half (s)")


def _errors(axes: Any, sweep: Sweep) -> None:
    axes.set_title("Prediction", loc="left")
    axes.axhspan(-100 * PREDICTED_WITHIN, 100 * PREDICTED_WITHIN, color="0.94", label="allowed")
    axes.axhline(0, color="0.6", linewidth=0.8)
    for name, (color, marker) in _STYLES.items():
        found = [(rung.ratio, outcome) for rung in sweep.rungs if (outcome := rung.named(name)) is not None]
        errors = [100 * error_of(outcome) for _, outcome in found]
        axes.plot([ratio for ratio, _ in found], errors, color=color, marker=marker, markersize=5, label=name)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -15), max(high, 15))
    axes.set_ylabel("predicted over measured, minus one (%)")


def _overlaps(axes: Any, sweep: Sweep) -> None:
    axes.set_title("Overlap efficiency: bound over measured", loc="left")
    axes.axhline(PACED_OVERLAP, color="0.6", linewidth=0.8, label=f"paced: at least {PACED_OVERLAP:g}")
    for name in ("layered load", "prefix split", "two-ended"):
        color, marker = _STYLES[name]
        found = [
            (rung.ratio, outcome.median_efficiency)
            for rung in sweep.rungs
            if (outcome := rung.named(name)) is not None
        ]
        axes.plot(*zip(*found, strict=True), color=color, marker=marker, markersize=5, label=name)
    if sweep.overlapped:
        efficiencies = [each.outcome.median_efficiency for each in sweep.overlapped]
        axes.plot(
            [_right_of(sweep)] * len(efficiencies), efficiencies, "k*", markersize=8, label="plain memory"
        )
        least = f"memory: at least {MEMCPY_OVERLAP:g}"
        axes.axhline(MEMCPY_OVERLAP, color="0.6", linestyle="--", linewidth=0.8, label=least)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.7, low), max(1.05, high))
    axes.set_ylabel("overlap efficiency")


def _right_of(sweep: Sweep) -> float:
    """Where plain memory stands: it is none of the paced links."""
    return 2 * max(rung.ratio for rung in sweep.rungs)
