"""Timelines as a picture: each layer's copies above its compute, and what stood still in between shaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvlane.bench.timeline import Timeline, busy
from kvlane.policy.units import show_bytes, show_seconds
from kvlane.streams.timing import PassKind

DPI = 120
COLUMN_INCHES, HEIGHT_INCHES = 6.4, 7.2

# Told apart without colour vision, too (Okabe and Ito's palette).
_COPY = ("#0072B2", "#56B4E9", "#CC79A7")
_COMPUTE: dict[PassKind, str] = {
    "forward": "#009E73",
    "front": "#E69F00",
    "tail": "#009E73",
    "recompute": "#F0E442",
}
_EXPOSED = "#D55E00"
_HEAD = "0.75"
_SHADE = 0.13
# Bars of more layers than this overlap, rather than get too thin to be seen.
_VISIBLE_ROWS = 48


def draw_timelines(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes a PNG with a column for each answer, all on one scale of time.

    A column is `COLUMN_INCHES` wide and the picture `HEIGHT_INCHES` high, at `DPI` dots per inch.
    """
    figure = Figure(figsize=(COLUMN_INCHES * len(timelines), HEIGHT_INCHES), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(timelines), sharex=True, squeeze=False)
    longest_s = max(each.total_s for each in timelines)
    scale, unit = (1.0, "s") if longest_s >= 1 else (1e3, "ms")
    for timeline, (upper, lower) in zip(timelines, panels.T, strict=True):
        upper.set_title(f"{timeline.title}: first token after {show_seconds(timeline.total_s)}", loc="left")
        _copies(upper, timeline, scale)
        _compute(lower, timeline, scale)
        for axes in (upper, lower):
            _frame(axes, timeline, scale, longest_s)
        upper.set_ylabel("layer (copies)")
        lower.set_ylabel("layer (compute)")
        lower.set_xlabel(f"time after the submission ({unit})")
    figure.savefig(path, format="png")


def _copies(axes: Any, timeline: Timeline, scale: float) -> None:
    marks = []
    for part, color in zip(timeline.parts, _COPY, strict=False):
        spans = [(row.layer, row.start_s, row.arrive_s) for row in part.layers]
        _bars(axes, timeline, scale, spans, color)
        marks.append(Patch(color=color, label=f"copies from {part.tier}, {show_bytes(part.bytes)}"))
    if marks:
        axes.legend(handles=marks, loc="upper right", fontsize="small")
    else:
        axes.text(0.5, 0.5, "nothing is loaded", transform=axes.transAxes, ha="center", color="0.4")


def _compute(axes: Any, timeline: Timeline, scale: float) -> None:
    marks = []
    for each in timeline.passes:
        color = _COMPUTE[each.kind]
        spans = [(row.layer, *span) for row in each.layers for span in busy(row)]
        _bars(axes, timeline, scale, spans, color)
        marks.append(Patch(color=color, label=f"{each.kind}, {each.end - each.start:,} tokens"))
    head = (timeline.total_s - timeline.head_s) * scale
    axes.axvspan(head, timeline.total_s * scale, color=_HEAD, linewidth=0)
    marks.append(Patch(color=_HEAD, label="LM head"))
    if timeline.parts:
        _bars(axes, timeline, scale, timeline.waits, _EXPOSED)
        exposed = show_seconds(timeline.exposed_s)
        marks.append(Patch(color=_EXPOSED, label=f"waiting for KV, {exposed} exposed"))
    axes.legend(handles=marks, loc="upper right", fontsize="small")


def _bars(
    axes: Any, timeline: Timeline, scale: float, spans: Sequence[tuple[int, float, float]], color: str
) -> None:
    """A rectangle for each span (layer, begin, end), of many layers as high as can be seen."""
    half = max(0.84, timeline.layers / _VISIBLE_ROWS) / 2
    boxes = [
        [(x * scale, layer + y) for x, y in ((begin, -half), (end, -half), (end, half), (begin, half))]
        for layer, begin, end in spans
    ]
    axes.add_collection(PolyCollection(boxes, facecolors=color, linewidths=0))


def _frame(axes: Any, timeline: Timeline, scale: float, longest_s: float) -> None:
    """Axes alike on both panels, with the exposed time shaded through all layers."""
    shades = [(begin * scale, (end - begin) * scale) for _, begin, end in timeline.waits]
    axes.broken_barh(
        shades, (-0.5, timeline.layers), facecolors=_EXPOSED, alpha=_SHADE, linewidth=0, zorder=0
    )
    axes.set_xlim(0, longest_s * scale)
    # Layer 0 on top, as the forward goes; whole numbers whatever the depth.
    axes.set_ylim(timeline.layers - 0.5, -0.5)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
