"""Copies as arrays: checked against the bytes they move, without a device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.cuda_runs import by_source, cut, cut_at, runs_of, stages
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import KvSafetyError

ROOM = 4096


@st.composite
def copies(draw, align=1):
    """Copies into places that do not overlap, out of any places."""
    sizes = draw(st.lists(st.integers(1, 96), min_size=1, max_size=24))
    places = draw(st.permutations(range(len(sizes))))
    made, to = [], draw(st.integers(0, 64))
    at = {}
    for place in places:
        at[place] = to
        to += align * sizes[place] + align * draw(st.integers(0, 3))
    together = draw(st.booleans())
    from_ = draw(st.integers(0, 64))
    for number, size in enumerate(sizes):
        if not together:
            from_ = draw(st.integers(0, 64))
        made.append(CopyDescriptor(0, align * from_, align * at[number], align * size))
        from_ += size
    return made


def moved(runs, source, room):
    destination = np.zeros(room, np.uint8)
    for from_, to, nbytes in np.asarray(runs).tolist():
        destination[to : to + nbytes] = source[from_ : from_ + nbytes]
    return destination


def as_runs(made):
    room = 1 << 20
    return runs_of(made, room, room)


SOURCE = np.random.default_rng(0).integers(1, 256, 1 << 16).astype(np.uint8)


class TestRunsOf:
    def test_holds_source_destination_and_bytes_of_every_copy(self):
        runs = runs_of([CopyDescriptor(7, 3, 40, 5), CopyDescriptor(7, 60, 0, 4)], 64, 64)
        assert runs.tolist() == [[3, 40, 5], [60, 0, 4]]

    def test_no_copies_are_no_runs(self):
        assert runs_of([], 64, 64).shape == (0, 3)

    @pytest.mark.parametrize(
        "copy", [(0, 60, 0, 5), (0, 0, 60, 5), (0, -1, 0, 4), (0, 0, -1, 4), (0, 0, 0, -4)]
    )
    def test_a_copy_that_reaches_outside_a_block_is_refused(self, copy):
        with pytest.raises(KvSafetyError, match="outside"):
            runs_of([CopyDescriptor(*copy)], 64, 64)

    def test_a_copy_up_to_the_last_byte_is_not(self):
        assert runs_of([CopyDescriptor(0, 60, 60, 4)], 64, 64).tolist() == [[60, 60, 4]]


class TestCut:
    @given(copies(), st.integers(1, 64))
    def test_moves_the_same_bytes_in_pieces_no_longer_than_allowed(self, made, piece):
        runs = as_runs(made)
        pieces = cut(runs, piece)
        assert pieces[:, 2].max() <= piece
        assert pieces[:, 2].min() >= 1
        assert np.array_equal(moved(pieces, SOURCE, 1 << 16), moved(runs, SOURCE, 1 << 16))

    @given(copies(), st.lists(st.integers(0, 4096), max_size=4))
    def test_no_piece_has_a_boundary_of_the_source_inside(self, made, boundaries):
        runs = as_runs(made)
        pieces = cut_at(runs, sorted(boundaries))
        for at in boundaries:
            assert not ((pieces[:, 0] < at) & (pieces[:, 0] + pieces[:, 2] > at)).any()
        assert np.array_equal(moved(pieces, SOURCE, 1 << 16), moved(runs, SOURCE, 1 << 16))

    def test_what_is_short_enough_stays_as_it_is(self):
        runs = as_runs([CopyDescriptor(0, 0, 0, 8), CopyDescriptor(0, 8, 16, 8)])
        assert cut(runs, 8) is runs
        assert cut_at(runs, [8, 16]).tolist() == runs.tolist()


class TestBySource:
    def test_numbers_the_stretches_of_the_source(self):
        runs = as_runs([CopyDescriptor(0, *c) for c in ((32, 0, 8), (0, 8, 16), (16, 24, 8), (40, 64, 8))])
        ordered, stretch = by_source(runs)
        assert ordered[:, 0].tolist() == [0, 16, 32, 40]
        assert stretch.tolist() == [0, 0, 1, 1]

    def test_of_no_runs_is_nothing(self):
        ordered, stretch = by_source(runs_of([], 8, 8))
        assert len(ordered) == len(stretch) == 0


class TestStages:
    @given(copies(), st.integers(160, 4096))
    def test_by_way_of_the_buffer_the_same_bytes_arrive(self, made, room):
        runs = as_runs(made)
        destination = np.zeros(1 << 16, np.uint8)
        carried = 0
        for into, onward in stages(*by_source(runs), room):
            assert (into[:, 1] + into[:, 2]).max() <= room
            buffer = moved(into, SOURCE, room)
            for from_, to, nbytes in onward.tolist():
                destination[to : to + nbytes] = buffer[from_ : from_ + nbytes]
            carried += int(onward[:, 2].sum())
        assert carried == runs[:, 2].sum()
        assert np.array_equal(destination, moved(runs, SOURCE, 1 << 16))

    @given(copies(align=16), st.integers(1600 * 2, 8192))
    def test_what_was_aligned_stays_aligned(self, made, room):
        for into, onward in stages(*by_source(as_runs(made)), room):
            assert not (into % 16).any()
            assert not (onward % 16).any()

    def test_a_stretch_that_fits_goes_in_as_one_copy(self):
        runs = as_runs([CopyDescriptor(0, at, 1000 - at, 10) for at in range(0, 100, 10)])
        ((into, onward),) = stages(*by_source(runs), 256)
        assert into.tolist() == [[0, 0, 100]]
        assert len(onward) == 10
