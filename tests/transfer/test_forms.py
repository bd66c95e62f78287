"""A store that keeps its prompts in an engine's form of blocks: the same bytes, in fewer copies."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout, KvRegion, Region, total_bytes
from kvlane.transfer.paged import BlockForm, First, Kv, Order, PagedRegion
from kvlane.transfer.shapes import LayerShape
from kvlane.transfer.store import ChecksumError

UNIT, TOKENS = 8, 40
LAYOUT = KvLayout.of(
    [LayerShape(2, 4, 3, 2), LayerShape(), LayerShape(3, 5, 0, 2), LayerShape(2, 4, 3, 2, window=10)]
)
IDENTITY = KvIdentity("model", "r1", None, "float16", LAYOUT.name, 0, 1, "rope", "numerics")

FORMS = [
    BlockForm(4, first, order, kv)
    for first, order, kv in product(get_args(First), get_args(Order), get_args(Kv))
    if (first, kv) != ("block", "apart")
]
forms = st.builds(replace, st.sampled_from(FORMS), tokens=st.sampled_from([1, 2, 4, 8]))


def kv():
    """Keys and values of every layer, [tokens, heads, bytes of a row] each."""
    random = np.random.default_rng(0)

    def rows(shape, width):
        return random.integers(1, 256, (TOKENS, shape.kv_heads, width), np.uint8)

    return [(rows(shape, shape.k_row_bytes), rows(shape, shape.v_row_bytes)) for shape in LAYOUT.shapes]


def stored(form, **options):
    store = HostStore(UNIT, form=form, **options)
    layers = [(keys.ravel(), values.ravel()) for keys, values in kv()]
    assert store.put(IDENTITY, range(TOKENS), LAYOUT, layers) == TOKENS
    assert store.used_bytes == TOKENS * LAYOUT.bytes_per_token
    return store


def opened(store, start, end):
    return store.open(store.lookup(IDENTITY, range(TOKENS)), start, end)


@given(st.none() | forms, st.none() | forms, st.integers(0, TOKENS - 1), st.randoms())
def test_what_is_put_comes_out_again_whatever_the_forms(form, to_form, start, random):
    region: Region = KvRegion(LAYOUT, TOKENS)
    if to_form is not None:
        blocks = TOKENS // to_form.tokens
        region = PagedRegion(LAYOUT, to_form, blocks + 2, random.sample(range(blocks + 2), blocks))
    to = np.zeros(region.nbytes, np.uint8)
    with opened(stored(form), start, TOKENS) as run:
        for layer in range(LAYOUT.layers):
            copies = run.copies(layer, region)
            assert total_bytes(copies) == run.layer_nbytes(layer)
            for c in copies:
                to[c.destination : c.destination + c.nbytes] = run.memory[c.source : c.source + c.nbytes]
    for layer, parts in enumerate(kv()):
        first = max(start, TOKENS - 10) if LAYOUT.shapes[layer].window else start
        for rows, part in zip(region.rows(layer), parts, strict=True):
            for token, head in product(range(TOKENS), range(part.shape[1])):
                at = region.layer_offset(layer) + rows.at(token) + head * rows.head_stride
                expected = part[token, head] if token >= first else 0
                np.testing.assert_array_equal(to[at : at + rows.nbytes], expected)


@pytest.mark.parametrize("form", [form for form in FORMS if form.kv != "apart"])
def test_blocks_of_the_engines_own_form_take_a_copy_each(form):
    region = PagedRegion(LAYOUT, replace(form, first="layer"), 20, range(0, 20, 2))
    with opened(stored(form), 0, TOKENS) as run:
        assert len(run.copies(0, region)) == 10
    with opened(stored(None), 0, TOKENS) as run:
        assert len(run.copies(0, region)) >= 20


@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("form", [None, *FORMS], ids=str)
def test_one_flipped_bit_is_named_by_layer_and_unit(form, layer):
    with opened(stored(form, checksums=True), 8, TOKENS) as run:
        region = run.region
        for part, rows in enumerate(region.rows(layer)):
            for token, head in product((0, 7, 30, 33, 39), range(LAYOUT.shapes[layer].kv_heads)):
                if not rows.nbytes:
                    continue
                at = region.layer_offset(layer) + rows.at(token) + head * rows.head_stride
                run.memory[at + part] ^= 4
                if token < (24 if layer == 3 else 8):  # before the run, or before its window and its unit
                    run.verify(layer)
                else:
                    with pytest.raises(ChecksumError, match=f"layer {layer}") as caught:
                        run.verify(layer)
                    assert (caught.value.start, caught.value.end) == (
                        token // UNIT * UNIT,
                        token // UNIT * UNIT + UNIT,
                    )
                run.memory[at + part] ^= 4
        for other in range(LAYOUT.layers):
            run.verify(other)


def test_a_unit_of_no_whole_number_of_blocks_is_refused():
    with pytest.raises(InputError) as caught:
        HostStore(UNIT, form=BlockForm(16))
    assert caught.value.field == "form.tokens"


def test_states_are_kept_layer_major_only():
    layout = KvLayout.of([LayerShape(state_bytes=4)])
    store = HostStore(UNIT, form=BlockForm(4))
    layers = [(np.empty(0, np.uint8), np.empty(0, np.uint8), np.zeros(4, np.uint8))]
    with pytest.raises(InputError, match="states"):
        store.put(replace(IDENTITY, layout=layout.name), range(8), layout, layers, (8,))
    assert store.used_bytes == 0
