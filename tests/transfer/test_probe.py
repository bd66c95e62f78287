"""The copy probe, on a clock of its own; the machine's rates are not asserted."""

from __future__ import annotations

import numpy as np
import pytest

from kvlane.policy.errors import InputError
from kvlane.transfer.probe import MIB, CopySample, probe_memcpy, probe_series


class FakeLink:
    """Copies at 1 GB/s with 1 us per copy; the first series of each size is ten times slower."""

    def __init__(self):
        self.now = 0.0
        self.series = []

    def clock(self):
        return self.now

    def measure(self, copy_bytes, copies, first):
        cold = copy_bytes not in [size for size, _, _ in self.series]
        self.series.append((copy_bytes, copies, first))
        seconds = copies * (1e-6 + copy_bytes / 1e9) * (10 if cold else 1)
        self.now += seconds
        return seconds


def test_samples_are_medians_without_the_first_series():
    link = FakeLink()
    samples = probe_series(link.measure, (1000, 4 * MIB), series_bytes=MIB, reps=3, clock=link.clock)
    assert [(s.copy_bytes, s.copies, s.series) for s in samples] == [(1000, MIB // 1000, 3), (4 * MIB, 1, 3)]
    for sample in samples:
        expected = sample.copy_bytes / (1e-6 + sample.copy_bytes / 1e9)
        assert sample.rate_bytes_per_s == pytest.approx(expected)
    assert len(link.series) == 2 * (1 + 3)


def test_series_walk_on_and_never_begin_where_the_last_one_did():
    link = FakeLink()
    probe_series(link.measure, (MIB // 2,), reps=3, clock=link.clock)
    assert [first for _, _, first in link.series] == [0, 2, 4, 6]


def test_a_spent_budget_leaves_one_counted_series_per_size():
    link = FakeLink()
    samples = probe_series(link.measure, (MIB, 64 * MIB), reps=5, budget_s=0.0, clock=link.clock)
    assert [s.series for s in samples] == [1, 1]


def test_memcpy_copies_through_the_function_given():
    seen = []

    def copy(destination, source):
        seen.append((destination.nbytes, source.nbytes))
        np.copyto(destination, source)

    samples = probe_memcpy((4096, 65536), copy=copy, working_set_bytes=MIB, reps=2, budget_s=0.2)
    assert [s.copy_bytes for s in samples] == [4096, 65536]
    assert all(isinstance(s, CopySample) and s.rate_bytes_per_s > 0 for s in samples)
    assert set(seen) == {(4096, 4096), (65536, 65536)}


@pytest.mark.parametrize(("sizes", "reps"), [((0,), 3), ((4096,), 0)])
def test_impossible_probes_are_refused(sizes, reps):
    link = FakeLink()
    with pytest.raises(InputError):
        probe_series(link.measure, sizes, reps=reps, clock=link.clock)


def test_a_clock_that_stands_still_is_refused():
    with pytest.raises(InputError, match="measure"):
        probe_series(lambda size, copies, first: 0.0, (4096,))
