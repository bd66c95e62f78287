"""KV in blocks: copies carry the rows they should and nothing else, as few as there can be, and are counted right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link, Tier
from kvlane.policy.transfer_cost import TransferCost
from kvlane.transfer.copies import KnownCopies, layer_copies
from kvlane.transfer.layout import KvLayout, KvRegion, total_bytes
from kvlane.transfer.paged import BlockForm, First, Kv, Order, PagedRegion
from kvlane.transfer.pattern import copy_pattern
from kvlane.transfer.shapes import LayerShape, TpShard


def element(region, layer, part, token, head):
    """Byte of a row in the tensors an engine would have, worked out index by index.

    One layer's is `[blocks, 2, tokens, heads, width]`, `[blocks, heads, tokens, 2 * width]` and so on; nothing here is
    shared with the code under test.
    """
    widths = [(s.k_width * s.itemsize, s.v_width * s.itemsize) for s in region.layout.shapes]
    per_token = [s.kv_heads * sum(w) for s, w in zip(region.layout.shapes, widths, strict=True)]
    heads, width = region.layout.shapes[layer].kv_heads, widths[layer][part]
    if isinstance(region, KvRegion):
        tokens = region.capacity_tokens
        keys = tokens * heads * widths[layer][0]
        return tokens * sum(per_token[:layer]) + part * keys + (token * heads + head) * width
    form = region.form
    block, slot = region.table[token // form.tokens], token % form.tokens
    row = slot * heads + head if form.order == "token" else head * form.tokens + slot
    keys = form.tokens * heads * widths[layer][0]  # of a block
    before = form.tokens * sum(per_token[:layer])
    if form.kv == "apart":
        plane = part * region.blocks * keys + block * form.tokens * heads * width
        return region.blocks * before + plane + row * width
    packed = row * sum(widths[layer]) + part * widths[layer][0]
    inside = packed if form.kv == "packed" else part * keys + row * width
    if form.first == "layer":
        return region.blocks * before + block * form.tokens * per_token[layer] + inside
    return block * form.tokens * sum(per_token) + before + inside


def moved(region_from, region_to, layer, start, end, heads):
    """Every byte that should move, `destination -> source`, row by row."""
    shape = region_to.layout.shapes[layer]
    bytes_of = {}
    for token in range(start, end):
        for head_to, head_from in enumerate(heads):
            for part, width in enumerate((shape.k_width, shape.v_width)):
                source = element(region_from, layer, part, token, head_from)
                destination = element(region_to, layer, part, token, head_to)
                for byte in range(width * shape.itemsize):
                    assert destination + byte not in bytes_of
                    bytes_of[destination + byte] = source + byte
    return bytes_of


FORMS = [
    BlockForm(16, first, order, kv)
    for first, order, kv in product(get_args(First), get_args(Order), get_args(Kv))
    if (first, kv) != ("block", "apart")
]
forms = st.builds(replace, st.sampled_from(FORMS), tokens=st.integers(1, 6))

shapes = st.builds(
    LayerShape,
    kv_heads=st.sampled_from([1, 2, 4]),
    k_width=st.integers(1, 3),
    v_width=st.integers(0, 3),
    itemsize=st.integers(1, 2),
    window=st.none() | st.integers(1, 9),
)


@st.composite
def layouts(draw):
    kinds = draw(st.lists(shapes, min_size=1, max_size=2))
    return KvLayout.of(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)))


@st.composite
def regions(draw, layout, tokens):
    """Memory for at least so many tokens: one run, or blocks in any order, often with neighbours in it."""
    if draw(st.booleans()):
        return KvRegion(layout, tokens + draw(st.integers(0, 3)))
    form = draw(forms)
    needed = -(-tokens // form.tokens)
    blocks = needed + draw(st.integers(0, 3))
    table = draw(st.permutations(range(blocks)) | st.just(range(blocks)))[:needed]
    return PagedRegion(layout, form, blocks, tuple(table))


@st.composite
def cases(draw):
    """Two regions, the layer, the tokens and the rank's share that is copied."""
    layout = draw(layouts())
    size = draw(st.sampled_from([1, 1, 2, 4]))
    shard = TpShard(size, draw(st.integers(0, size - 1)))
    tokens = draw(st.integers(1, 16))
    source = draw(regions(layout, tokens))
    destination = draw(regions(layout.shard(shard), tokens))
    start = draw(st.integers(0, tokens - 1))
    end = draw(st.integers(start + 1, tokens))
    layer = draw(st.integers(0, layout.layers - 1))
    return source, destination, layer, start, end, draw(st.integers(end, tokens + 5)), shard


@given(cases())
def test_copies_carry_every_row_to_its_place_and_touch_no_other_byte(case):
    source, destination, layer, start, end, load_end, shard = case
    window = source.layout.shapes[layer].window
    first = start if window is None else max(start, min(end, load_end - window))
    heads = shard.heads(source.layout.shapes[layer].kv_heads)
    expected = moved(source, destination, layer, first, end, heads)

    copies = layer_copies(source, destination, layer, start, end, load_end=load_end, shard=shard)
    got = {}
    for copy in copies:
        assert copy.layer == layer
        assert copy.nbytes > 0
        assert 0 <= copy.source <= copy.source + copy.nbytes <= source.nbytes
        for byte in range(copy.nbytes):
            assert copy.destination + byte not in got, "a byte is written twice"
            got[copy.destination + byte] = copy.source + byte
    assert got == expected

    # The fewest: a copy has to begin at every byte that does not go on from the byte before it on both sides.
    begins = [to for to, from_ in expected.items() if expected.get(to - 1, -2) != from_ - 1]
    assert len(copies) == len(begins)
    assert all(one.destination + one.nbytes <= two.destination for one, two in pairwise(copies))


@given(st.lists(cases(), max_size=3))
def test_what_is_known_of_one_layer_is_right_for_another(some):
    known: KnownCopies = {}
    for source, destination, layer, start, end, load_end, shard in some * 2:
        options = {"load_end": load_end, "shard": shard}
        for which in (layer, *range(source.layout.layers)):
            fresh = layer_copies(source, destination, which, start, end, **options)
            assert layer_copies(source, destination, which, start, end, **options, known=known) == fresh


@given(cases())
def test_the_other_sequences_of_a_pool_keep_their_bytes(case):
    source, destination, layer, start, end, load_end, shard = case
    random = np.random.default_rng(0)
    from_ = random.integers(0, 256, source.nbytes, np.uint8)
    before = random.integers(0, 256, destination.nbytes, np.uint8)
    to = before.copy()
    for copy in layer_copies(source, destination, layer, start, end, load_end=load_end, shard=shard):
        to[copy.destination : copy.destination + copy.nbytes] = from_[copy.source : copy.source + copy.nbytes]
    if isinstance(destination, KvRegion):
        return
    free = [block for block in range(destination.blocks) if block not in destination.table]
    if not free:
        return
    others = replace(destination, table=free)
    for token in range(others.capacity_tokens):
        for which, shape in enumerate(others.layout.shapes):
            for part, width in enumerate((shape.k_row_bytes, shape.v_row_bytes)):
                for head in range(shape.kv_heads):
                    at = element(others, which, part, token, head)
                    np.testing.assert_array_equal(to[at : at + width], before[at : at + width])


@given(layouts(), st.data())
def test_the_rows_of_a_pool_tile_it(layout, data):
    form = data.draw(forms)
    region = PagedRegion(layout, form, 3, (2, 0, 1))
    taken = np.zeros(region.nbytes, np.uint8)
    for layer, shape in enumerate(layout.shapes):
        for part, rows in enumerate(region.rows(layer)):
            width = (shape.k_row_bytes, shape.v_row_bytes)[part]
            assert rows.nbytes == width
            for token in range(region.capacity_tokens):
                for head in range(shape.kv_heads):
                    at = region.layer_offset(layer) + rows.at(token) + head * rows.head_stride
                    assert not width or at == element(region, layer, part, token, head)
                    taken[at : at + width] += 1
    assert (taken == 1).all()


HEADS, WIDTH = 4, 8
LAYOUT = KvLayout(layers=3, kv_heads=HEADS, k_width=WIDTH, v_width=WIDTH, itemsize=2)
SCATTERED = (9, 2, 7, 0, 4)  # no two neighbours


def paged(form, table=SCATTERED, layout=LAYOUT):
    return PagedRegion(layout, form, 10, table)


# Copies of one block of 16 tokens by form, out of a contiguous prefix `[token][head]`.
FROM_CONTIGUOUS = {
    ("token", "apart"): 2,
    ("token", "in_block"): 2,
    ("token", "packed"): 16 * HEADS * 2,
    ("head", "apart"): 16 * HEADS * 2,
    ("head", "in_block"): 16 * HEADS * 2,
    ("head", "packed"): 16 * HEADS * 2,
}


@pytest.mark.parametrize(("order", "kv"), FROM_CONTIGUOUS)
@pytest.mark.parametrize("size", [16, 64, 256])
def test_copies_of_a_block_by_form(order, kv, size):
    to = paged(BlockForm(size, order=order, kv=kv))
    copies = layer_copies(KvRegion(LAYOUT, 4 * size), to, 1, 0, 4 * size)
    per_block = FROM_CONTIGUOUS[order, kv]
    assert len(copies) == 4 * (per_block if per_block == 2 else per_block * size // 16)
    assert total_bytes(copies) == 4 * size * LAYOUT.layer_bytes_per_token


@pytest.mark.parametrize("form", [form for form in FORMS if form.kv != "apart"])
def test_blocks_of_the_same_form_take_one_copy_each(form):
    # A chunk-major store's chunks hold all layers.
    chunks = replace(form, first="block")
    assert len(layer_copies(paged(chunks, (1, 3, 5, 7, 9)), paged(form), 2, 0, 80)) == 5


def test_neighbours_on_both_sides_become_one_copy():
    form = BlockForm(16, kv="packed")
    one_run = layer_copies(paged(form, range(5)), paged(form, range(3, 8)), 0, 0, 80)
    assert [copy.nbytes for copy in one_run] == [80 * LAYOUT.layer_bytes_per_token]
    # Backwards they are neighbours, too, but not in the order they must lie in.
    assert len(layer_copies(paged(form, range(5)), paged(form, (7, 6, 5, 4, 3)), 0, 0, 80)) == 5
    assert len(layer_copies(paged(form, range(5)), paged(form, (3, 4, 8, 6, 7)), 0, 0, 80)) == 3


def test_a_part_of_a_block_is_copied_alone():
    to = paged(BlockForm(16))
    copies = layer_copies(KvRegion(LAYOUT, 80), to, 0, 13, 35)
    k = LAYOUT.k_bytes_per_token
    by_block = {
        block: [c.nbytes // k for c in copies if c.destination // (32 * k) == block] for block in (9, 2, 7)
    }
    assert by_block == {9: [3, 3], 2: [16, 16], 7: [3, 3]}
    assert len(copies) == 6


class TestTensorParallel:
    def test_a_rank_takes_its_heads(self):
        assert [list(TpShard(2, rank).heads(4)) for rank in (0, 1)] == [[0, 1], [2, 3]]
        # More ranks than heads: neighbours hold the same head.
        assert [list(TpShard(4, rank).heads(2)) for rank in range(4)] == [[0], [0], [1], [1]]

    def test_the_ranks_of_a_group_take_every_byte_once(self):
        source, seen = KvRegion(LAYOUT, 32), list[int]()
        for rank in range(2):
            to = PagedRegion(LAYOUT.shard(TpShard(2, rank)), BlockForm(16), 10, (8, 3))
            for copy in layer_copies(source, to, 1, 0, 32, shard=TpShard(2, rank)):
                seen.extend(range(copy.source, copy.source + copy.nbytes))
        assert sorted(seen) == list(range(source.key_offset(1), source.key_offset(2)))

    @pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
    def test_an_impossible_rank_is_refused(self, size, rank):
        with pytest.raises(InputError, match="shard"):
            TpShard(size, rank)

    def test_heads_that_cannot_be_divided_are_refused(self):
        with pytest.raises(InputError, match="ranks cannot share"):
            LAYOUT.shard(TpShard(3, 0))

    def test_a_state_is_not_divided(self):
        with pytest.raises(InputError, match="state"):
            KvLayout.of([LayerShape(state_bytes=8)]).shard(TpShard(2, 0))

    def test_a_destination_of_all_heads_is_refused(self):
        with pytest.raises(InputError, match="layout"):
            layer_copies(KvRegion(LAYOUT, 32), paged(BlockForm(16)), 0, 0, 32, shard=TpShard(2, 0))


def counted(pattern, tokens):
    """Copies of one layer as the cost model counts them."""
    tier = pattern.of(Tier("host", "pcie"))
    cost = TransferCost.of_tier(tier, Link("pcie", 1e9), LAYOUT.layers, LAYOUT.layer_bytes_per_token, 16)
    return cost.copies(tokens)


class TestPattern:
    """The cost model's count against the copies there are."""

    @pytest.mark.parametrize("size", [16, 64, 256])
    @pytest.mark.parametrize("order", ["token", "head"])
    @pytest.mark.parametrize("kv", ["apart", "in_block", "packed"])
    @pytest.mark.parametrize("tokens", [1, 2, 5])
    def test_whole_blocks_of_a_contiguous_prefix_are_counted_exactly(self, size, order, kv, tokens):
        source, to = KvRegion(LAYOUT, 5 * size), paged(BlockForm(size, order=order, kv=kv))
        pattern = copy_pattern(source, to, unit_tokens=size)
        assert counted(pattern, tokens * size) == len(layer_copies(source, to, 0, 0, tokens * size))

    @pytest.mark.parametrize("order", ["token", "head"])
    @pytest.mark.parametrize("kv", ["in_block", "packed"])
    @pytest.mark.parametrize(("chunk", "size"), [(16, 16), (64, 16), (16, 64), (32, 48), (48, 80)])
    def test_whole_chunks_of_a_chunk_major_store_are_counted_exactly(self, chunk, size, order, kv):
        # Chunks that lie apart: between neighbours there would be copies saved.
        tokens = 960
        source = PagedRegion(LAYOUT, BlockForm(chunk, "block", order, kv), 120, range(1, 120, 2))
        to = PagedRegion(LAYOUT, BlockForm(size, "layer", order, kv), 120, range(0, 120, 2))
        pattern = copy_pattern(source, to, unit_tokens=max(chunk, size))
        exact = len(layer_copies(source, to, 0, 0, tokens))
        assert counted(pattern, tokens) >= exact
        if max(chunk, size) % min(chunk, size) == 0:
            assert counted(pattern, tokens) == exact

    def test_a_contiguous_pair_is_one_run(self):
        pattern = copy_pattern(KvRegion(LAYOUT, 64), KvRegion(LAYOUT, 80))
        assert (pattern.run_tokens, pattern.runs_per_layer) == (None, 2)
        assert counted(pattern, 48) == len(layer_copies(KvRegion(LAYOUT, 64), KvRegion(LAYOUT, 80), 0, 0, 48))

    def test_one_heads_rows_of_many_are_a_run_each(self):
        shard = TpShard(2, 1)
        source, to = KvRegion(LAYOUT, 64), KvRegion(LAYOUT.shard(shard), 64)
        pattern = copy_pattern(source, to, shard=shard)
        for tokens in (1, 7, 64):
            assert counted(pattern, tokens) == len(layer_copies(source, to, 0, 0, tokens, shard=shard))

    @settings(max_examples=300)
    @given(cases(), st.integers(1, 6))
    def test_never_fewer_than_there_are(self, case, unit):
        source, destination, layer, start, end, load_end, shard = case
        shape = source.layout.shapes[layer]
        if shape.window is not None:
            unit = 1  # its window begins anywhere
        end = end // unit * unit
        start, load_end = min(end, -(-start // unit) * unit), max(load_end, end)
        first, last = shape.moved(start, end, load_end)
        pattern = copy_pattern(source, destination, layer, unit_tokens=unit, shard=shard)
        copies = layer_copies(source, destination, layer, start, end, load_end=load_end, shard=shard)
        assert len(copies) <= (counted(pattern, pattern.priced_tokens(first, last)) if first < last else 0)

    def test_a_start_inside_a_block_is_priced_from_its_beginning(self):
        source, to = KvRegion(LAYOUT, 80), paged(BlockForm(16))
        pattern = copy_pattern(source, to)
        for start, end in [(15, 17), (15, 32), (1, 80), (16, 31)]:
            exact = len(layer_copies(source, to, 0, start, end))
            assert counted(pattern, pattern.priced_tokens(start, end)) == exact
        # Counted from the start itself, the first of these would be one block short.
        assert counted(pattern, 2) < len(layer_copies(source, to, 0, 15, 17))


class TestRefusals:
    @pytest.mark.parametrize(
        ("table", "words"),
        [
            ((), "empty"),
            ((1, 2, 1), "block 1 twice"),
            ((0, 10), "block 10"),
            ((-1,), "block -1"),
            ((0.5,), "list"),
            (3, "list"),
        ],
    )
    def test_an_impossible_table_is_refused(self, table, words):
        with pytest.raises(InputError, match=words) as caught:
            paged(BlockForm(16), table)
        assert caught.value.field == "table"

    def test_a_table_of_numpy_numbers_is_as_good(self):
        assert paged(BlockForm(16), np.array([3, 1])) == paged(BlockForm(16), (3, 1))

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"tokens": 0}, "form.tokens"),
            ({"first": "token"}, "form.first"),
            ({"order": "nhd"}, "form.order"),
            ({"kv": "split"}, "form.kv"),
            ({"first": "block", "kv": "apart"}, "form.kv"),
        ],
    )
    def test_an_impossible_form_is_refused(self, change, field):
        with pytest.raises(InputError) as caught:
            replace(BlockForm(16), **change)
        assert caught.value.field == field

    @pytest.mark.parametrize(("start", "end"), [(-1, 4), (0, 81), (5, 4)])
    def test_tokens_outside_the_table_are_refused(self, start, end):
        with pytest.raises(InputError, match="tokens"):
            layer_copies(KvRegion(LAYOUT, 200), paged(BlockForm(16)), 0, start, end)

    @pytest.mark.parametrize("slot", [-1, 2])
    def test_a_slot_that_is_not_there_is_refused(self, slot):
        with pytest.raises(InputError, match="state_slot"):
            PagedRegion(LAYOUT, BlockForm(16), 10, (0,), state_slots=2, state_slot=slot)


def test_states_lie_behind_the_blocks_in_slots_of_their_own():
    layout = KvLayout.of([LayerShape(2, 4, 4, 2), LayerShape(state_bytes=24), LayerShape(state_bytes=8)])
    source = KvRegion(layout, 32, checkpoints=(16, 32))
    taken: list[int] = []
    for slot in range(3):
        to = PagedRegion(layout, BlockForm(16), 4, (2, 0), state_slots=3, state_slot=slot)
        assert not layer_copies(source, to, 1, 0, 16, load_end=32)
        for layer, nbytes in ((1, 24), (2, 8)):
            (copy,) = layer_copies(source, to, layer, 0, 16)
            assert (copy.source, copy.nbytes) == (source.state_offset(layer, 16), nbytes)
            taken.extend(range(copy.destination, copy.destination + nbytes))
    rows = 4 * 16 * layout.bytes_per_token
    assert sorted(taken) == list(range(rows, to.nbytes))
    with pytest.raises(InputError, match="no state"):
        layer_copies(source, to, 1, 0, 24)
