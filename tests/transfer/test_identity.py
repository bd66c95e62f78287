"""The key: every part of it changed alone is another key."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity, encode_token_ids, token_chain
from kvlane.transfer.layout import KvLayout

BASE = KvIdentity(
    model="meta/llama",
    weights_revision="r1",
    adapter=None,
    kv_dtype="float32",
    layout="layer_major/l2/h2/k8/v8/b4",
    tp_rank=0,
    tp_size=2,
    positional='{"rope_theta": 10000.0}',
    numerics="sha256:1",
)

# One case for every field: a field that is added without one fails the first test.
CHANGED: dict[str, Any] = {
    "model": "meta/llama2",
    "weights_revision": "r2",
    "adapter": "",
    "kv_dtype": "bfloat16",
    "layout": "layer_major/l2/h2/k8/v8/b2",
    "tp_rank": 1,
    "tp_size": 4,
    "positional": '{"rope_theta": 500000.0}',
    "numerics": "sha256:2",
}


def changed(field: str) -> KvIdentity:
    return replace(BASE, **{field: CHANGED[field]})


def test_every_part_of_the_key_has_a_case():
    assert set(CHANGED) == {field.name for field in fields(KvIdentity)}


@pytest.mark.parametrize("field", CHANGED)
def test_a_part_changed_alone_changes_every_digest(field):
    ids = np.arange(64)
    ours, other = token_chain(BASE, ids, 16), token_chain(changed(field), ids, 16)
    assert len(ours) == len(other) == 4
    assert not set(ours) & set(other)


@pytest.mark.parametrize("field", CHANGED)
def test_a_part_changed_alone_is_a_miss_in_a_store(field):
    layout, ids = KvLayout(2, 2, 8, 8, 4), np.arange(32)
    rows = [(np.zeros(ids.size * layout.k_bytes_per_token, np.uint8),) * 2] * layout.layers
    store, others = HostStore(16), HostStore(16)
    assert store.put(BASE, ids, layout, rows) == ids.size
    assert store.lookup(BASE, ids).tokens == ids.size
    assert store.lookup(changed(field), ids).state == "miss"
    if field != "layout":  # bytes of another layout would be other bytes
        assert others.put(changed(field), ids, layout, rows) == ids.size
        assert others.lookup(BASE, ids).state == "miss"


text = st.text(alphabet="ab/|\x00:n", min_size=1, max_size=4)
identities = st.builds(
    KvIdentity,
    model=text,
    weights_revision=text,
    adapter=st.none() | text,
    kv_dtype=text,
    layout=text,
    tp_rank=st.just(0),
    tp_size=st.integers(1, 3),
    positional=text,
    numerics=text,
)


@given(identities, identities)
def test_two_identities_are_encoded_alike_only_if_they_are_equal(one, other):
    assert (one.encoded() == other.encoded()) == (one == other)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60), st.integers(1, 7), st.data())
def test_a_changed_token_changes_its_unit_and_all_later_ones(ids, unit, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids]
    other[at] = (other[at] + 1) % 2**32
    one, two = token_chain(BASE, ids, unit), token_chain(BASE, other, unit)
    assert len(one) == len(ids) // unit
    assert [a == b for a, b in zip(one, two, strict=True)] == [i < at // unit for i in range(len(one))]


def test_the_unit_is_part_of_the_chain():
    ids = list(range(32))
    assert not set(token_chain(BASE, ids, 8)) & set(token_chain(BASE, ids, 16))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.dtype(">i4")])
def test_the_chain_depends_on_the_ids_and_not_on_how_they_are_held(dtype):
    ids = [5, 0, 2047, 7]
    assert token_chain(BASE, np.array(ids, dtype), 2) == token_chain(BASE, ids, 2)
    assert token_chain(BASE, np.array([5, 9, 0, 9, 2047, 9, 7, 9], dtype)[::2], 2) == token_chain(
        BASE, ids, 2
    )


@pytest.mark.parametrize(
    "ids",
    [
        [1, -1],
        [1.0, 2.0],
        ["a"],
        [[1, 2]],
        3,
        [2**32],
        np.array([True]),
        np.array([2**63], np.uint64),
        [None],
    ],
)
def test_unusable_token_ids_are_refused(ids):
    with pytest.raises(InputError, match="token_ids"):
        encode_token_ids(ids)


def test_no_tokens_make_an_empty_chain():
    assert token_chain(BASE, [], 16) == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "identity.model"),
        ({"numerics": ""}, "identity.numerics"),
        ({"tp_size": 0}, "identity.tp_size"),
        ({"tp_rank": 2}, "identity.tp_rank"),
        ({"tp_rank": -1}, "identity.tp_rank"),
    ],
)
def test_an_impossible_identity_is_refused(change, field):
    with pytest.raises(InputError) as caught:
        replace(BASE, **change)
    assert caught.value.field == field


def test_a_unit_below_one_token_is_refused():
    with pytest.raises(InputError, match="unit_tokens"):
        token_chain(BASE, [1], 0)
