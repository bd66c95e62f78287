"""What a reproduction leaves behind, and what it says of it."""

from __future__ import annotations

import sys

from kvlane.bench.exports import write_exports
from kvlane.bench.host import machine


def test_every_file_it_writes_is_named(reproduced, tmp_path):
    said = write_exports(reproduced.reproduction, machine(), tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["observations.json", "timeline.png", "trace.json"]
    assert all(name in said for name in written)
    assert "matplotlib" not in said


def test_without_matplotlib_the_picture_is_left_out_and_it_says_so(reproduced, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvlane.bench.timeline_plot", None)
    said = write_exports(reproduced.reproduction, machine(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["observations.json", "trace.json"]
    assert "pip install 'kvlane[plot]'" in said
