"""The timeline of an answer: where compute stood still, and the same as text in every mode."""

from __future__ import annotations

import re

import pytest

from kvlane.bench.timeline import busy, resumed_s, timeline_of, wait_of, waits_inside
from kvlane.bench.timeline_text import COLUMNS, MOST_LAYERS, render_timeline
from kvlane.policy.units import show_seconds

MODES = ("bulk", "layered", "two_ended", "recompute", "failed")


class TestTimeline:
    @pytest.mark.parametrize("mode", MODES)
    def test_busy_and_waiting_make_up_each_layer(self, made_timeline, mode):
        timeline = made_timeline(mode, copy_s=0.05)
        for each in timeline.passes:
            for row in each.layers:
                computed = sum(end - begin for begin, end in busy(row))
                inside = row.exposed_s if waits_inside(row) else 0.0
                assert computed + inside == pytest.approx(row.compute_end_s - row.compute_begin_s)
                assert all(end > begin for begin, end in busy(row))

    def test_in_bulk_the_first_layer_waits_once_and_before_it_begins(self, made_timeline):
        timeline = made_timeline("bulk", layers=5)
        (wait,) = timeline.waits
        first = timeline.passes[0].layers[0]
        assert wait.layer == 0
        assert not waits_inside(first)
        assert wait.end_s == pytest.approx(first.compute_begin_s)
        assert wait.end_s == pytest.approx(max(row.arrive_s for row in timeline.parts[0].layers))
        assert timeline.exposed_s == pytest.approx(wait.end_s - wait.begin_s)

    def test_by_layer_a_wait_ends_when_the_layer_has_arrived(self, made_timeline):
        timeline = made_timeline("layered", copy_s=0.05, compute_s=0.01)
        assert [wait.layer for wait in timeline.waits] == [0, 1, 2, 3]
        for wait, row in zip(timeline.waits, timeline.parts[0].layers, strict=True):
            assert wait.end_s == pytest.approx(row.arrive_s)

    def test_what_waits_for_nothing_has_no_wait(self, made_timeline):
        front, tail = made_timeline("two_ended", copy_s=0.05).passes
        assert [wait_of(row) for row in front.layers] == [None] * 4
        assert [resumed_s(row) for row in front.layers] == [row.compute_begin_s for row in front.layers]
        assert all(wait_of(row) is not None for row in tail.layers)
        assert made_timeline("recompute").exposed_s == 0

    def test_bytes_are_those_of_all_tiers(self, made_timeline):
        assert made_timeline("recompute").bytes == 0
        assert made_timeline("layered", layers=3).bytes == 3 << 20
        assert made_timeline("layered", layers=3, tiers=("host", "disk")).bytes == 6 << 20

    def test_of_a_real_answer_is_what_the_engine_reported(self, kit, small):
        result = small.lab.load(small.store, small.ids, kit.usable, "layered").result
        timeline = timeline_of("mine", result)
        assert (timeline.title, timeline.total_s, timeline.head_s) == ("mine", result.total_s, result.head_s)
        assert (timeline.parts, timeline.passes) == (result.parts, result.passes)
        assert timeline.layers == kit.shape.layers
        assert timeline.bytes == result.loaded_bytes == kit.usable * small.bytes_per_token
        assert 0 < timeline.exposed_s < timeline.total_s


def lines_of(timeline):
    """The lines of each kind as bars, by layer, and the title."""
    title, *lines = render_timeline(timeline).splitlines()
    bars: dict[str, dict[int, str]] = {}
    layer = -1
    for line in lines:
        found = re.fullmatch(r"   ( *\d*) +([a-z ]+?) *\|(.*)", line)
        assert found, line
        number, name, bar = found.groups()
        layer = int(number) if number.strip() else layer
        bars.setdefault(name, {})[layer] = bar
    return title, bars


class TestText:
    @pytest.mark.parametrize("mode", MODES)
    def test_bars_lie_where_copies_and_compute_were(self, made_timeline, mode):
        timeline = made_timeline(mode, layers=6, copy_s=0.03)
        _, bars = lines_of(timeline)

        def lies(bar, begin_s, end_s):
            assert len(bar) <= COLUMNS
            assert len(bar) - len(bar.lstrip()) == pytest.approx(COLUMNS * begin_s / timeline.total_s, abs=1)
            assert len(bar) == pytest.approx(COLUMNS * end_s / timeline.total_s, abs=1)

        for layer in range(6):
            rows = [each.layers[layer] for each in timeline.passes]
            begin_s = rows[0].compute_begin_s
            if mode == "bulk" and layer == 0:
                begin_s = rows[0].reached_s
            lies(bars["compute"][layer], begin_s, rows[-1].compute_end_s)
        for part in timeline.parts:
            for row in part.layers:
                lies(bars["copy"][row.layer], row.start_s, row.arrive_s)
        assert ("copy" in bars) == (mode != "recompute")

    def test_waiting_is_marked_for_as_long_as_it_took(self, made_timeline):
        timeline = made_timeline("layered", layers=5, copy_s=0.05, compute_s=0.02)
        _, bars = lines_of(timeline)
        for wait in timeline.waits:
            cells = COLUMNS * (wait.end_s - wait.begin_s) / timeline.total_s
            assert bars["compute"][wait.layer].count(".") == pytest.approx(cells, abs=1)

    def test_both_passes_of_a_two_ended_answer_can_be_told_apart(self, made_timeline):
        timeline = made_timeline("two_ended", layers=4)
        title, bars = lines_of(timeline)
        assert "front +" in title
        assert "tail #" in title
        for bar in bars["compute"].values():
            assert re.fullmatch(r" *\++ +[#.]+", bar)

    def test_each_of_several_tiers_has_a_line_of_its_own(self, made_timeline):
        timeline = made_timeline("layered", layers=4, tiers=("host", "disk"))
        _, bars = lines_of(timeline)
        assert set(bars) == {"copy host", "copy disk", "compute"}
        assert all(len(bars["copy disk"][layer]) > len(bars["copy host"][layer]) for layer in range(4))

    def test_a_load_that_was_given_up_is_shown_as_far_as_it_came(self, made_timeline):
        title, bars = lines_of(made_timeline("failed", layers=6))
        assert "recompute @" in title
        assert [bool(bar) for bar in bars["copy"].values()] == [True] * 3 + [False] * 3
        assert all("@" in bar for bar in bars["compute"].values())

    @pytest.mark.parametrize(
        ("layers", "shown"),
        [(1, 1), (MOST_LAYERS, MOST_LAYERS), (MOST_LAYERS + 1, 17), (61, 31), (64, 32), (128, 32)],
    )
    def test_many_layers_are_thinned_evenly_and_it_says_so(self, made_timeline, layers, shown):
        timeline = made_timeline("layered", layers=layers)
        title, bars = lines_of(timeline)
        found = list(bars["compute"])
        assert len(found) == shown <= MOST_LAYERS
        step = -(-layers // MOST_LAYERS)
        assert found == list(range(0, layers, step))
        assert (f"one layer of {step}" in title) == (step > 1)

    def test_the_title_says_what_and_how_long(self, made_timeline):
        timeline = made_timeline("layered")
        title, _ = lines_of(timeline)
        assert title.startswith(f"layers of a made layered answer ({show_seconds(timeline.total_s)};")
        assert "waiting" not in lines_of(made_timeline("recompute"))[0]
