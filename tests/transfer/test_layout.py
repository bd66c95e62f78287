"""Where KV lies, and that copies carry exactly it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.transfer.copies import layer_copies
from kvlane.transfer.layout import CopyDescriptor, KvLayout, KvRegion, coalesce, total_bytes

sizes = st.integers(1, 5)
layouts = st.builds(KvLayout, layers=sizes, kv_heads=sizes, k_width=sizes, v_width=sizes, itemsize=sizes)


def test_llama_8b_weighs_131072_bytes_per_token():
    layout = KvLayout(layers=32, kv_heads=8, k_width=128, v_width=128, itemsize=2)
    assert layout.bytes_per_token == 131_072
    assert layout.layer_bytes_per_token == 4096


@given(layouts, st.integers(1, 9))
def test_the_runs_of_a_region_tile_it(layout, capacity):
    region = KvRegion(layout, capacity)
    at = 0
    for layer in range(layout.layers):
        for token in range(capacity):
            assert region.key_offset(layer, token) == at
            at += layout.k_bytes_per_token
        for token in range(capacity):
            assert region.value_offset(layer, token) == at
            at += layout.v_bytes_per_token
    assert at == region.nbytes == capacity * layout.bytes_per_token


@given(layouts, st.integers(1, 9), st.integers(1, 9), st.data())
def test_copies_carry_the_run_and_nothing_else(layout, stored, capacity, data):
    source, destination = KvRegion(layout, stored), KvRegion(layout, capacity)
    end = data.draw(st.integers(0, min(stored, capacity)))
    start = data.draw(st.integers(0, end))
    random = np.random.default_rng(0)
    from_ = random.integers(0, 256, source.nbytes, np.uint8)
    before = random.integers(0, 256, destination.nbytes, np.uint8)
    to = before.copy()
    copies = [
        c for layer in range(layout.layers) for c in layer_copies(source, destination, layer, start, end)
    ]
    for copy in copies:
        to[copy.destination : copy.destination + copy.nbytes] = from_[copy.source : copy.source + copy.nbytes]

    assert total_bytes(copies) == (end - start) * layout.bytes_per_token
    expected = before.copy()
    for layer in range(layout.layers):
        for offset, other, width in (
            (source.key_offset, destination.key_offset, layout.k_bytes_per_token),
            (source.value_offset, destination.value_offset, layout.v_bytes_per_token),
        ):
            for token in range(start, end):
                row = from_[offset(layer, token) :][:width]
                expected[other(layer, token) :][:width] = row
    np.testing.assert_array_equal(to, expected)


def test_a_layer_takes_two_copies_and_one_where_it_fills_both_regions():
    layout = KvLayout(2, 2, 8, 8, 4)
    assert len(layer_copies(KvRegion(layout, 16), KvRegion(layout, 32), 0, 0, 16)) == 2
    assert len(layer_copies(KvRegion(layout, 16), KvRegion(layout, 16), 1, 0, 8)) == 2
    assert len(layer_copies(KvRegion(layout, 16), KvRegion(layout, 16), 1, 0, 16)) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=12
    )
)
def test_coalescing_keeps_every_byte_and_leaves_no_neighbours(steps):
    # Runs in the order they lie in, with gaps of 0 to 3 bytes on either side.
    copies: list[CopyDescriptor] = []
    source = destination = 0
    for layer_step, source_gap, destination_gap, nbytes in steps:
        source, destination = source + source_gap, destination + destination_gap
        layer = (copies[-1].layer if copies else 0) + layer_step
        copies.append(CopyDescriptor(layer, source, destination, nbytes))
        source, destination = source + nbytes, destination + nbytes

    def moves(of):
        return {(c.layer, c.source + i, c.destination + i) for c in of for i in range(c.nbytes)}

    merged = coalesce(copies)
    assert moves(merged) == moves(copies)
    assert total_bytes(merged) == total_bytes(copies)
    assert coalesce(merged) == merged
    assert all(c.nbytes for c in merged)
    for one, two in pairwise(merged):
        touching = one.source + one.nbytes == two.source and one.destination + one.nbytes == two.destination
        assert one.layer != two.layer or not touching


@pytest.mark.parametrize(
    ("layer", "start", "end"), [(-1, 0, 1), (2, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, 9), (0, 0, 17)]
)
def test_copies_outside_a_region_are_refused(layer, start, end):
    layout = KvLayout(2, 2, 8, 8, 4)
    with pytest.raises(InputError):
        layer_copies(KvRegion(layout, 16), KvRegion(layout, 8), layer, start, end)


def test_copies_between_layouts_are_refused():
    one, two = KvLayout(2, 2, 8, 8, 4), KvLayout(2, 2, 8, 8, 2)
    with pytest.raises(InputError, match="layout"):
        layer_copies(KvRegion(one, 8), KvRegion(two, 8), 0, 0, 8)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "k_width", "itemsize"])
def test_a_size_below_one_is_refused(field):
    good = {"layers": 1, "kv_heads": 1, "k_width": 1, "v_width": 1, "itemsize": 1}
    with pytest.raises(InputError, match=field):
        KvLayout(**{**good, field: 0})


def test_a_region_without_room_is_refused():
    with pytest.raises(InputError, match="capacity_tokens"):
        KvRegion(KvLayout(1, 1, 1, 1, 1), 0)
