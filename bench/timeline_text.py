"""A timeline as text: a bar of characters for each layer's copies and for its compute."""

from __future__ import annotations

from collections.abc import Iterable

from kvlane.bench.timeline import Timeline, busy, wait_of
from kvlane.policy.units import show_seconds
from kvlane.streams.timing import PassKind

COLUMNS = 72
MOST_LAYERS = 32

_COPY, _WAITING = "=", "."
_COMPUTE: dict[PassKind, str] = {"forward": "#", "front": "+", "tail": "#", "recompute": "@"}
_NAMES: dict[PassKind, str] = {"forward": "compute"}

_Span = tuple[float, float, str]


def render_timeline(timeline: Timeline) -> str:
    """A title with the legend, then a line of copies per tier and one of compute for each layer.

    Of more than `MOST_LAYERS` layers every second, third and so on is shown, evenly.
    """
    step = -(-timeline.layers // MOST_LAYERS)
    shown = range(0, timeline.layers, step)
    lines = [_title(timeline, step)]
    width = max(len(name) for name, _ in _bars(timeline, 0))
    for layer in shown:
        for line, (name, spans) in enumerate(_bars(timeline, layer)):
            label = "" if line else str(layer)
            lines.append(f"   {label:>3} {name:{width}} |{_draw(spans, timeline.total_s)}")
    return "\n".join(lines)


def _title(timeline: Timeline, step: int) -> str:
    legend = [f"copy {_COPY}"] if timeline.parts else []
    legend += [f"{_NAMES.get(each.kind, each.kind)} {_COMPUTE[each.kind]}" for each in timeline.passes]
    legend += [f"compute waiting {_WAITING}"] if timeline.parts else []
    every = f", one layer of {step}" if step > 1 else ""
    return f"layers of {timeline.title} ({show_seconds(timeline.total_s)}{every}; {', '.join(legend)})"


def _bars(timeline: Timeline, layer: int) -> list[tuple[str, list[_Span]]]:
    """What is on a layer's lines."""
    bars = []
    for part in timeline.parts:
        # Copies are named by their tier only where there are several.
        name = f"copy {part.tier}" if len(timeline.parts) > 1 else "copy"
        bars.append((name, [(r.start_s, r.arrive_s, _COPY) for r in part.layers if r.layer == layer]))
    bars.append(("compute", _compute(timeline, layer)))
    return bars


def _compute(timeline: Timeline, layer: int) -> list[_Span]:
    spans = []
    for each in timeline.passes:
        row = each.layers[layer]
        spans += [(begin, end, _COMPUTE[each.kind]) for begin, end in busy(row)]
        wait = wait_of(row)
        # One too short to be seen would hide compute under the one mark that it gets.
        if wait is not None and row.exposed_s > timeline.total_s / COLUMNS / 2:
            spans.append((wait.begin_s, wait.end_s, _WAITING))
    return spans


def _draw(spans: Iterable[_Span], total_s: float) -> str:
    """Spans in seconds as marks over `COLUMNS` columns; each has at least one."""

    def column(seconds: float) -> int:
        return min(COLUMNS, max(0, round(seconds / total_s * COLUMNS)))

    cells = [" "] * COLUMNS
    for start, end, mark in spans:
        first = min(column(start), COLUMNS - 1)
        for at in range(first, max(column(end), first + 1)):
            cells[at] = mark
    return "".join(cells).rstrip()
