"""A trace holds to the format's rules in every mode, and its times are the rows'."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.bench.timeline import Timeline, resumed_s, waits_inside
from kvlane.bench.trace import trace_json

Event = dict[str, Any]
MODES = ("bulk", "layered", "two_ended", "recompute", "failed")
# A nanosecond, in the microseconds that a trace is in: what times are rounded to.
TICK = 0.001


def decoded(timelines: list[Timeline], about: dict[str, str] | None = None) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(trace_json(timelines, about or {}))
    return document


def tracks(document: dict[str, Any]) -> dict[tuple[int, int], list[Event]]:
    """Events but names by process and thread, in the order of the file."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] != "M":
            found[event["pid"], event["tid"]].append(event)
    return found


def thread_names(document: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


def track(document: dict[str, Any], pid: int, name: str) -> list[Event]:
    (key,) = [key for key, found in thread_names(document).items() if key[0] == pid and found == name]
    return tracks(document)[key]


def slices(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def check_rules(document: dict[str, Any]) -> None:
    """What the format asks for, and what Perfetto's importer does without saying so where it is not met."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in document["otherData"].values())
    names = thread_names(document)
    processes = {
        event["pid"]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name" and event["args"]["name"]
    }
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X", "i", "s", "f")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    for key, events in tracks(document).items():
        assert names[key]
        assert key[0] in processes
        times = [event["ts"] for event in events]
        assert times == sorted(times)
        check_nesting(slices(events))
    check_arrows(document)


def check_nesting(events: list[Event]) -> None:
    """Slices of one track lie apart or inside one another; one that begins with another and is shorter comes after."""
    open_until: list[float] = []
    for event in events:
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + TICK / 2:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + TICK / 2
        open_until.append(end)


def check_arrows(document: dict[str, Any]) -> None:
    """Each has one beginning and one end, in this order, both inside a slice that stands before them."""
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    for events in tracks(document).values():
        open_slices: list[Event] = []
        for event in events:
            if event["ph"] == "X":
                open_slices.append(event)
            if event["ph"] in "sf":
                assert isinstance(event["id"], int)
                assert event["ph"] not in ends[event["id"]]
                ends[event["id"]][event["ph"]] = event
                around = open_slices[-1]
                assert around["ts"] <= event["ts"] <= around["ts"] + around["dur"] + TICK / 2
                assert event["ph"] == "s" or event["bp"] == "e"
    for pair in ends.values():
        assert set(pair) == {"s", "f"}
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert (pair["s"]["cat"], pair["s"]["name"]) == (pair["f"]["cat"], pair["f"]["name"])
        assert pair["s"]["pid"] == pair["f"]["pid"]


@pytest.mark.parametrize("mode", MODES)
def test_holds_to_the_rules_in_every_mode(made_timeline, mode):
    check_rules(decoded([made_timeline(mode)]))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_holds_to_the_rules_whatever_the_sizes(made_timeline, data):
    many = data.draw(st.lists(st.sampled_from(MODES), min_size=1, max_size=4))
    positive = st.floats(1e-6, 10)
    timelines = [
        made_timeline(
            mode,
            layers=data.draw(st.integers(2, 40)),
            copy_s=data.draw(positive),
            compute_s=data.draw(positive),
            tiers=data.draw(st.sampled_from([("host",), ("host", "disk")])),
            group=data.draw(st.integers(1, 9)) if mode in ("layered", "two_ended") else 1,
        )
        for mode in many
    ]
    document = decoded(timelines)
    check_rules(document)
    assert len({event["pid"] for event in document["traceEvents"]}) == len(timelines)


class TestRulesAreRules:
    """The checks above see what is wrong."""

    @pytest.mark.parametrize(
        ("where", "change"),
        [
            (lambda e: e["ph"] == "X", {"dur": -1}),
            (lambda e: e["ph"] == "X" and e["name"] == "layer 1", {"ts": -1}),
            (lambda e: e["ph"] == "X" and e["name"] == "with KV", {"dur": 1e9}),
            (lambda e: e["ph"] == "M" and e["name"] == "process_name", {"name": "process"}),
            (lambda e: e["ph"] == "M" and e["name"] == "thread_name", {"tid": 77}),
            (lambda e: e["ph"] == "s", {"id": 1 << 50}),
            (lambda e: e["ph"] == "f", {"id": "1.0.3"}),
            (lambda e: e["ph"] == "f", {"ts": 1e9}),
            (lambda e: e["ph"] == "i", {"s": "x"}),
        ],
    )
    def test_a_broken_trace_is_seen(self, made_timeline, where, change):
        document = decoded([made_timeline("layered")])
        check_rules(document)
        next(event for event in document["traceEvents"] if where(event)).update(change)
        with pytest.raises((AssertionError, KeyError)):
            check_rules(document)


class TestTimes:
    @pytest.mark.parametrize("mode", ["bulk", "layered", "two_ended", "failed"])
    def test_copies_are_where_they_were(self, made_timeline, mode):
        timeline = made_timeline(mode, layers=6, tiers=("host", "disk"))
        document = decoded([timeline])
        for part in timeline.parts:
            drawn = slices(track(document, 1, f"copy from {part.tier}"))
            for event, row in zip(drawn, part.layers, strict=True):
                assert event["name"] == f"layer {row.layer}"
                assert event["ts"] == pytest.approx(row.start_s * 1e6, abs=TICK)
                assert event["ts"] + event["dur"] == pytest.approx(row.arrive_s * 1e6, abs=TICK)
                assert event["args"] == {"bytes": row.bytes, "copies": 2, "tokens": 1000, "tier": part.tier}

    @pytest.mark.parametrize("mode", MODES)
    def test_compute_is_where_it_was(self, made_timeline, mode):
        timeline = made_timeline(mode, layers=6, copy_s=0.05)
        drawn = slices(track(decoded([timeline]), 1, "compute"))
        rows = [(each, row) for each in timeline.passes for row in each.layers]
        of_layers = [event for event in drawn if "layer " in event["name"]]
        for event, (each, row) in zip(of_layers, rows, strict=True):
            named = f"layer {row.layer}"
            assert event["name"] == (named if each.kind == "forward" else f"{each.kind}, {named}")
            assert event["ts"] == pytest.approx(row.compute_begin_s * 1e6, abs=TICK)
            assert event["ts"] + event["dur"] == pytest.approx(row.compute_end_s * 1e6, abs=TICK)
            assert event["args"]["tokens"] == each.end - each.start
            assert event["args"]["exposed_us"] == pytest.approx(row.exposed_s * 1e6, abs=TICK)
        waits = [event for event in drawn if event["name"] == "wait for KV"]
        for event, wait in zip(waits, timeline.waits, strict=True):
            assert event["args"] == {"layer": wait.layer}
            assert event["ts"] == pytest.approx(wait.begin_s * 1e6, abs=TICK)
            assert event["dur"] == pytest.approx((wait.end_s - wait.begin_s) * 1e6, abs=2 * TICK)
        head = drawn[-1]
        assert head["name"] == "LM head"
        assert head["ts"] + head["dur"] == pytest.approx(timeline.total_s * 1e6, abs=TICK)

    def test_every_copy_is_marked_where_it_was_enqueued(self, made_timeline):
        timeline = made_timeline("layered")
        marks = track(decoded([timeline]), 1, "enqueue")
        assert [mark["ts"] for mark in marks] == pytest.approx(
            [row.enqueue_s * 1e6 for row in timeline.parts[0].layers]
        )

    def test_the_request_has_the_sums(self, made_timeline):
        timeline = made_timeline("two_ended", copy_s=0.05)
        (request,) = track(decoded([timeline]), 1, "request")
        assert (request["ts"], request["dur"]) == (0, pytest.approx(timeline.total_s * 1e6, abs=TICK))
        assert request["args"] == {
            "bytes": timeline.bytes,
            "loaded_tokens": 1000,
            "computed_tokens": 700,
            "exposed_us": pytest.approx(timeline.exposed_s * 1e6, abs=TICK),
        }

    def test_layers_that_share_an_event_are_one_slice(self, made_timeline):
        timeline = made_timeline("layered", layers=7, group=3)
        drawn = slices(track(decoded([timeline]), 1, "copy from host"))
        assert [event["name"] for event in drawn] == ["layers 0 to 2", "layers 3 to 5", "layer 6"]
        assert [event["args"]["bytes"] for event in drawn] == [3 << 20, 3 << 20, 1 << 20]
        assert [event["args"]["copies"] for event in drawn] == [6, 6, 2]


class TestArrows:
    def arrows(self, document):
        ends: dict[int, dict[str, Event]] = defaultdict(dict)
        for event in document["traceEvents"]:
            if event["ph"] in "sf":
                ends[event["id"]][event["ph"]] = event
        return list(ends.values())

    @pytest.mark.parametrize(("mode", "group"), [("layered", 1), ("layered", 3), ("two_ended", 1)])
    def test_lead_from_each_copy_to_the_compute_that_needed_it(self, made_timeline, mode, group):
        timeline = made_timeline(mode, layers=6, copy_s=0.03, group=group)
        arrows = self.arrows(decoded([timeline]))
        assert len(arrows) == 6
        for arrow, row in zip(arrows, timeline.parts[0].layers, strict=True):
            waited = timeline.passes[-1].layers[row.group]
            assert waits_inside(waited)
            assert arrow["s"]["ts"] == pytest.approx(row.start_s * 1e6, abs=TICK)
            assert arrow["f"]["ts"] == pytest.approx(resumed_s(waited) * 1e6, abs=TICK)
            assert arrow["f"]["ts"] >= row.arrive_s * 1e6 - TICK

    def test_in_bulk_all_lead_to_the_first_layer(self, made_timeline):
        timeline = made_timeline("bulk", layers=5)
        begin = timeline.passes[0].layers[0].compute_begin_s
        arrows = self.arrows(decoded([timeline]))
        assert [arrow["f"]["ts"] for arrow in arrows] == pytest.approx([begin * 1e6] * 5, abs=TICK)

    @pytest.mark.parametrize("mode", ["recompute", "failed"])
    def test_none_where_nothing_was_waited_for(self, made_timeline, mode):
        assert self.arrows(decoded([made_timeline(mode)])) == []


def test_says_what_it_is_of(made_timeline):
    assert decoded([made_timeline()], {"machine": "this one"})["otherData"] == {"machine": "this one"}


class TestReproduction:
    """`trace.json` beside `results.json`."""

    @pytest.fixture
    def document(self, reproduced):
        found: dict[str, Any] = json.loads((reproduced.folder / "trace.json").read_text(encoding="utf-8"))
        return found

    def test_holds_to_the_rules(self, document):
        check_rules(document)

    def test_has_a_process_for_every_condition(self, document, reproduced):
        names = [
            event["args"]["name"]
            for event in document["traceEvents"]
            if event["ph"] == "M" and event["name"] == "process_name"
        ]
        assert names == [f"{scenario['name']}, {c['name']}" for scenario, c in reproduced.conditions()]

    def test_has_the_times_of_the_results(self, document, reproduced):
        for pid, (_, condition) in enumerate(reproduced.conditions(), 1):
            drawn = [event for event in slices(track(document, pid, "compute")) if "layer " in event["name"]]
            for event, row in zip(drawn, condition["timeline"], strict=True):
                named = f"layer {row['layer']}"
                assert event["name"] == (named if row["pass"] == "forward" else f"{row['pass']}, {named}")
                assert event["ts"] == pytest.approx(row["compute_begin_s"] * 1e6, abs=TICK)
                assert event["ts"] + event["dur"] == pytest.approx(row["compute_end_s"] * 1e6, abs=TICK)
            if condition["path"] == "recompute":
                continue
            loaded = [row for row in condition["timeline"] if row["bytes"]]
            for event, row in zip(slices(track(document, pid, "copy from host")), loaded, strict=True):
                assert event["ts"] == pytest.approx(row["start_s"] * 1e6, abs=TICK)
                assert event["args"]["bytes"] == row["bytes"]
