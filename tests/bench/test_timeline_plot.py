"""The picture of a timeline: a real PNG of the stated size, whose colours lie where the times say."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from kvlane.bench import timeline_plot
from kvlane.bench.timeline_plot import COLUMN_INCHES, DPI, HEIGHT_INCHES, draw_timelines

MODES = ("bulk", "layered", "two_ended", "recompute", "failed")


@pytest.fixture
def drawn(tmp_path):
    """Draws timelines and returns the picture, [height, width, 3] from 0 to 1."""

    def draw(*timelines):
        path = tmp_path / "timeline.png"
        draw_timelines(timelines, path)
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return imread(path)[:, :, :3]

    return draw


def where(picture, color):
    """The pixels of a colour, legend left out: the legends lie in the right half of the upper part of each panel."""
    found = np.all(np.abs(picture - np.array(to_rgb(color))) < 0.02, axis=2)
    height, width = found.shape
    for top in (0, height // 2):
        found[top : top + height // 6, width // 2 :] = False
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_has_the_stated_size(made_timeline, drawn, count):
    picture = drawn(*[made_timeline("layered")] * count)
    assert picture.shape[:2] == (round(HEIGHT_INCHES * DPI), round(COLUMN_INCHES * DPI * count))


@pytest.mark.parametrize("mode", MODES)
def test_is_not_blank_in_any_mode(made_timeline, drawn, mode):
    timeline = made_timeline(mode, copy_s=0.05)
    picture = drawn(timeline)
    half = picture.shape[0] // 2
    for each in timeline.passes:
        compute = where(picture, timeline_plot._COMPUTE[each.kind])
        assert compute[half:].sum() > 500
        assert compute[:half].sum() == 0
    copies = where(picture, timeline_plot._COPY[0])
    assert (copies[:half].sum() > 500) == (mode != "recompute")
    assert copies[half:].sum() == 0
    waiting = where(picture, timeline_plot._EXPOSED)
    assert (waiting.sum() > 500) == (mode in ("bulk", "layered", "two_ended"))


def test_a_bar_is_as_long_as_what_it_shows(made_timeline, drawn):
    # All on one scale: the second answer takes as long in all, and its copies half as long.
    slow, fast = (made_timeline("layered", layers=8, copy_s=copy_s, compute_s=0.1) for copy_s in (0.08, 0.04))
    areas = []
    for timeline in (slow, fast):
        scaled = where(drawn(timeline), timeline_plot._COPY[0]).sum() * timeline.total_s
        areas.append(scaled)
    assert areas[0] / areas[1] == pytest.approx(2, rel=0.05)


def test_exposed_time_is_shaded_through_both_panels(made_timeline, drawn):
    timeline = made_timeline("bulk", layers=4)
    picture = drawn(timeline)
    shade = 1 - timeline_plot._SHADE * (1 - np.array(to_rgb(timeline_plot._EXPOSED)))
    shaded = np.all(np.abs(picture - shade) < 0.02, axis=2)
    half = picture.shape[0] // 2
    share = (timeline.waits[0].end_s - timeline.waits[0].begin_s) / timeline.total_s
    for panel in (shaded[:half], shaded[half:]):
        columns = panel.sum(axis=0) > panel.shape[0] // 4
        assert columns.mean() == pytest.approx(share, abs=0.1)


def test_of_128_layers_each_can_still_be_seen(made_timeline, drawn):
    timeline = made_timeline("layered", layers=128, copy_s=0.02, compute_s=0.021)
    found = where(drawn(timeline), timeline_plot._COPY[0])
    columns = found[:, found.any(axis=0)].sum(axis=0)
    assert len(columns) > found.shape[1] // 4
    assert np.median(columns) >= 4


def test_layer_0_is_on_top(made_timeline, drawn):
    found = where(drawn(made_timeline("layered", layers=6)), timeline_plot._COPY[0])
    rows, columns = np.nonzero(found)
    early = rows[columns < np.quantile(columns, 0.1)].mean()
    late = rows[columns > np.quantile(columns, 0.9)].mean()
    assert early < late


def test_the_demo_draws_three_answers(reproduced):
    picture = imread(reproduced.folder / "timeline.png")[:, :, :3]
    assert picture.shape[:2] == (round(HEIGHT_INCHES * DPI), round(3 * COLUMN_INCHES * DPI))
    width = picture.shape[1] // 3
    bulk, layered, two_ended = (picture[:, at * width : (at + 1) * width] for at in range(3))
    for column in (bulk, layered, two_ended):
        assert where(column, timeline_plot._COPY[0]).any()
    # What is computed after the load is a few tokens only in the third: its bars may be too thin for their colour.
    for column in (bulk, layered):
        assert where(column, timeline_plot._COMPUTE["forward"]).any()
    fronts = [where(each, timeline_plot._COMPUTE["front"]).any() for each in (bulk, layered, two_ended)]
    assert fronts == [False, False, True]
