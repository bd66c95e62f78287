"""Timelines as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process for each answer, all of them beginning at 0, and in it one track for the request, the enqueuing thread,
each copy stream and compute. An arrow leads from a layer's copies to the compute that needed them. Times are
microseconds, to the nanosecond. Format: "Trace Event Format", the object form (docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from kvlane.bench.timeline import Timeline, resumed_s, wait_of, waits_inside

_REQUEST, _ENQUEUE, _FIRST_COPY, _COMPUTE = 1, 2, 3, 1000

Event = dict[str, Any]


def trace_json(timelines: Sequence[Timeline], about: Mapping[str, str]) -> bytes:
    """The trace of these answers as JSON text; `about` goes into its `otherData`."""
    events = [event for pid, each in enumerate(timelines, 1) for event in _process(pid, each)]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}
    return msgspec.json.encode(document) + b"\n"


def _process(pid: int, timeline: Timeline) -> list[Event]:
    """One answer's events: names first, then everything in the order of time, a slice before those inside it."""
    tracks = {_REQUEST: "request", _COMPUTE: "compute"}
    tracks |= {_ENQUEUE: "enqueue"} if timeline.parts else {}
    tracks |= {_FIRST_COPY + at: f"copy from {part.tier}" for at, part in enumerate(timeline.parts)}
    names = [_meta(pid, _REQUEST, "process_name", {"name": timeline.title})]
    names.append(_meta(pid, _REQUEST, "process_sort_index", {"sort_index": pid}))
    for tid in sorted(tracks):
        names.append(_meta(pid, tid, "thread_name", {"name": tracks[tid]}))
        names.append(_meta(pid, tid, "thread_sort_index", {"sort_index": tid}))
    events = [_request(timeline), *_copies(timeline), *_compute(timeline), *_arrows(pid, timeline)]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return names + [{"pid": pid, **event} for event in events]


def _meta(pid: int, tid: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _slice(tid: int, name: str, begin_s: float, end_s: float, args: Event) -> Event:
    begin = _us(begin_s)
    dur = round(max(0.0, _us(end_s) - begin), 3)
    return {"ph": "X", "cat": "load", "tid": tid, "ts": begin, "dur": dur, "name": name, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _request(timeline: Timeline) -> Event:
    args = {
        "bytes": timeline.bytes,
        "loaded_tokens": sum(part.end - part.start for part in timeline.parts),
        "computed_tokens": sum(each.end - each.start for each in timeline.passes),
        "exposed_us": _us(timeline.exposed_s),
    }
    return _slice(_REQUEST, "to the first token", 0.0, timeline.total_s, args)


def _copies(timeline: Timeline) -> Iterator[Event]:
    """A slice for each group of layers that share an event, and a mark where it was enqueued."""
    for at, part in enumerate(timeline.parts):
        for _, group in groupby(part.layers, key=lambda row: row.group):
            rows = list(group)
            first, last = rows[0], rows[-1]
            name = f"layer {first.layer}" if first is last else f"layers {first.layer} to {last.layer}"
            args: Event = {
                "bytes": sum(row.bytes for row in rows),
                "copies": sum(row.copies for row in rows),
                "tokens": part.end - part.start,
                "tier": part.tier,
            }
            mark = {
                "ph": "i",
                "s": "t",
                "cat": "load",
                "tid": _ENQUEUE,
                "ts": _us(first.enqueue_s),
                "name": name,
            }
            yield {**mark, "args": args}
            yield _slice(_FIRST_COPY + at, name, first.start_s, first.arrive_s, args)


def _compute(timeline: Timeline) -> Iterator[Event]:
    for each in timeline.passes:
        # A pass is named where it is not the only one.
        of = "" if each.kind == "forward" else f"{each.kind}, "
        for row in each.layers:
            args = {"tokens": each.end - each.start, "exposed_us": _us(row.exposed_s)}
            yield _slice(_COMPUTE, f"{of}layer {row.layer}", row.compute_begin_s, row.compute_end_s, args)
            wait = wait_of(row)
            if wait is not None:
                yield _slice(_COMPUTE, "wait for KV", wait.begin_s, wait.end_s, {"layer": row.layer})
            if waits_inside(row):
                yield _slice(_COMPUTE, "with KV", resumed_s(row), row.compute_end_s, {"layer": row.layer})
    yield _slice(_COMPUTE, "LM head", timeline.total_s - timeline.head_s, timeline.total_s, {"tokens": 1})


def _arrows(pid: int, timeline: Timeline) -> Iterator[Event]:
    """From each layer's copies to the compute that needed them: in bulk all lead to the first layer's."""
    begins = {
        row.layer: resumed_s(row) if waits_inside(row) else row.compute_begin_s
        for each in timeline.passes
        for row in each.layers
        if row.reached_s is not None
    }
    for at, part in enumerate(timeline.parts):
        for copied in part.layers:
            # One of a group waits for all of it.
            begin = begins.get(copied.layer, begins.get(copied.group, begins.get(0)))
            if begin is not None:
                # Perfetto takes whole numbers only, and one name space for all of the file.
                number = ((pid << 8) + at << 16) + copied.layer
                arrow = {"cat": "load", "name": "KV", "id": number}
                # An arrow's ends belong to the slices around them, which stand before them in the file.
                yield {**arrow, "ph": "s", "tid": _FIRST_COPY + at, "ts": _us(copied.start_s)}
                yield {**arrow, "ph": "f", "bp": "e", "tid": _COMPUTE, "ts": _us(begin)}
