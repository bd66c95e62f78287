"""The choice among ways to copy follows what was measured, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.streams.cuda_methods import METHODS, MethodTable

KIB, MIB = 1024, 1024**2
# A device whose kernel wins below 64 KiB and whose engine wins above.
MEASURED = MethodTable(
    {
        "engine": {4 * KIB: 1e9, 64 * KIB: 20e9, MIB: 50e9},
        "batch": {4 * KIB: 3e9, 64 * KIB: 45e9, MIB: 49e9},
        "mapped": {4 * KIB: 30e9, 64 * KIB: 40e9, MIB: 40e9},
        "staged": {4 * KIB: 42e9, 64 * KIB: 44e9, MIB: 46e9},
    }
)


class TestChoose:
    @pytest.mark.parametrize(
        ("size", "method"),
        [
            (4 * KIB, "staged"),
            (60 * KIB, "staged"),
            (64 * KIB, "batch"),
            (MIB, "engine"),
            (64 * MIB, "engine"),
        ],
    )
    def test_takes_the_fastest_for_the_size(self, size, method):
        assert MEASURED.choose(size, 64 * MIB) == method

    def test_below_the_smallest_measured_size_that_one_counts(self):
        assert MEASURED.choose(256, 64 * MIB) == "staged"

    def test_a_source_in_pieces_is_not_staged_faster_than_the_engine_gathers_them(self):
        assert MEASURED.choose(4 * KIB, 4 * KIB) == "mapped"
        assert MEASURED.choose(4 * KIB, 64 * KIB) == "staged"

    @pytest.mark.parametrize(("gain", "method"), [(1.03, "engine"), (1.2, "mapped")])
    def test_a_kernel_takes_no_large_copy_from_the_engine_by_noise(self, gain, method):
        table = MethodTable({"engine": {16 * MIB: 50e9}, "mapped": {16 * MIB: gain * 50e9}})
        assert table.choose(16 * MIB, 16 * MIB) == method

    def test_what_cannot_be_used_is_not_chosen(self):
        assert MEASURED.choose(4 * KIB, 64 * MIB, ("engine", "batch")) == "batch"

    @given(st.floats(1, 1e12), st.floats(1, 1e12))
    def test_without_measurements_it_is_the_engine(self, size, stretch):
        assert MethodTable().choose(size, stretch) == "engine"

    @pytest.mark.parametrize("method", METHODS)
    @given(size=st.floats(1, 1e12), stretch=st.floats(1, 1e12))
    def test_a_table_of_one_chooses_that_one(self, method, size, stretch):
        assert MethodTable.only(method).choose(size, stretch) == method

    @given(
        st.dictionaries(
            st.sampled_from(METHODS),
            st.dictionaries(st.integers(1, 1 << 30), st.floats(1.0, 1e12), min_size=1),
            min_size=1,
        )
    )
    def test_at_every_measured_size_the_threshold_s_method_is_the_fastest(self, rates):
        table = MethodTable(rates)
        steps = table.thresholds()
        for size in {size for each in rates.values() for size in each}:
            method = [m for at, m in steps if at <= size][-1]
            assert method == table.choose(size, float("inf"))
        assert all(one[1] != two[1] for one, two in pairwise(steps))


class TestThresholds:
    def test_are_the_sizes_at_which_the_choice_changes(self):
        assert MEASURED.thresholds() == ((4 * KIB, "staged"), (64 * KIB, "batch"), (MIB, "engine"))

    def test_of_nothing_measured_are_none(self):
        assert MethodTable().thresholds() == ()


@pytest.mark.parametrize(
    "rates", [{"magic": {1: 1.0}}, {"engine": {0: 1.0}}, {"engine": {1: 0.0}}, {"engine": {1: float("inf")}}]
)
def test_what_cannot_be_a_measurement_is_refused(rates):
    with pytest.raises(InputError, match="methods"):
        MethodTable(rates)
