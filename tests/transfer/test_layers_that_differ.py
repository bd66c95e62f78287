"""Layers that differ: windows, states, nothing at all; how they lie, what of them moves, and where a hit may end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.transfer.host import HostStore
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout, KvRegion, total_bytes
from kvlane.transfer.shapes import LayerShape
from kvlane.transfer.store import ChecksumError

FULL = LayerShape(2, 4, 3, 2)
WINDOW = LayerShape(2, 4, 3, 2, window=6)
STATE = LayerShape(state_bytes=10)
BOTH = LayerShape(1, 2, 2, 2, state_bytes=6)
NOTHING = LayerShape()
UNIT = 4

WINDOWED = KvLayout.of([FULL, WINDOW, NOTHING])
HYBRID = KvLayout.of([STATE, FULL, BOTH, NOTHING])


def identity(layout):
    return KvIdentity("model", "r1", None, "float16", layout.name, 0, 1, "rope", "numerics")


def rows_of(ids, layout, layer):
    """A layer's keys and values [tokens, bytes] that only these ids have."""
    seeds = np.cumsum(np.asarray(ids, np.int64) * 7 + 1)[:, None]
    shape = layout.shapes[layer]
    widths = (shape.k_bytes_per_token, shape.v_bytes_per_token)
    return [
        ((seeds * (3 + part) + layer + np.arange(w)) % 251).astype(np.uint8) for part, w in enumerate(widths)
    ]


def state_of(ids, layout, layer, tokens):
    size = layout.shapes[layer].state_bytes
    return ((sum(map(int, ids[:tokens])) * 5 + tokens + layer + np.arange(size)) % 249).astype(np.uint8)


def kv_of(ids, layout, checkpoints=()):
    for layer, shape in enumerate(layout.shapes):
        keys, values = (rows.ravel() for rows in rows_of(ids, layout, layer))
        states = [state_of(ids, layout, layer, at) for at in checkpoints] if shape.state_bytes else []
        yield (keys, values, np.concatenate(states)) if states else (keys, values)


def put(store, ids, layout, checkpoints=()):
    return store.put(identity(layout), ids, layout, kv_of(ids, layout, checkpoints), checkpoints)


def find(store, ids, layout):
    return store.lookup(identity(layout), ids)


def copied(run, capacity=32):
    """A region as the run's copies leave it, and a mask of the bytes they wrote."""
    region = KvRegion(run.layout, capacity)
    to, written = np.zeros(region.nbytes, np.uint8), np.zeros(region.nbytes, bool)
    for layer in range(run.layout.layers):
        copies = run.copies(layer, region)
        assert total_bytes(copies) == run.layer_nbytes(layer)
        for c in copies:
            assert not written[c.destination : c.destination + c.nbytes].any()
            to[c.destination : c.destination + c.nbytes] = run.memory[c.source : c.source + c.nbytes]
            written[c.destination : c.destination + c.nbytes] = True
    assert written.sum() == run.nbytes
    return region, to, written


def tokens_written(region, written, layer):
    """The tokens of a layer whose rows were written, keys and values alike."""
    shape = region.layout.shapes[layer]
    found = []
    for offset, width in (
        (region.key_offset, shape.k_bytes_per_token),
        (region.value_offset, shape.v_bytes_per_token),
    ):
        found.append([t for t in range(region.capacity_tokens) if width and written[offset(layer, t)]])
    assert found[0] == found[1]
    return found[0]


shapes = st.sampled_from([FULL, WINDOW, STATE, BOTH, NOTHING, LayerShape(1, 5, 0, 1)])


class TestLayout:
    @given(st.lists(shapes, min_size=1, max_size=6), st.lists(shapes, min_size=1, max_size=6))
    def test_two_layouts_have_one_name_only_if_they_are_equal(self, one, other):
        assert (KvLayout.of(one).name == KvLayout.of(other).name) == (one == other)

    @pytest.mark.parametrize(
        "other",
        [
            LayerShape(1, 4, 3, 2, 6),
            LayerShape(2, 5, 3, 2, 6),
            LayerShape(2, 4, 4, 2, 6),
            LayerShape(2, 4, 3, 4, 6),
            LayerShape(2, 4, 3, 2, 7),
            LayerShape(2, 4, 3, 2),
            LayerShape(2, 4, 3, 2, 6, state_bytes=1),
            LayerShape(),
        ],
    )
    def test_one_layer_changed_alone_is_another_name_and_a_miss(self, other):
        changed = KvLayout.of([FULL, other, NOTHING])
        store = HostStore(UNIT)
        put(store, range(8), WINDOWED)
        assert changed != WINDOWED
        assert find(store, range(8), WINDOWED).tokens == 8
        assert find(store, range(8), changed).state == "miss"

    @given(st.lists(shapes, min_size=2, max_size=4), st.randoms())
    def test_the_order_of_the_layers_is_in_the_name(self, layers, random):
        other = random.sample(layers, len(layers))
        assert (KvLayout.of(layers).name == KvLayout.of(other).name) == (layers == other)

    def test_layers_that_are_alike_are_those_of_the_constructor(self):
        assert KvLayout.of([FULL] * 3) == KvLayout(3, 2, 4, 3, 2)
        assert KvLayout.of([FULL] * 3).name == "layer_major/l3/h2/k4/v3/b2"

    def test_a_layer_without_rows_or_state_is_never_awaited(self):
        assert [HYBRID.holds(layer) for layer in range(4)] == [True, True, True, False]
        with pytest.raises(InputError, match="layer"):
            HYBRID.holds(4)

    def test_what_layers_do_not_agree_in_is_asked_for_layer_by_layer(self):
        with pytest.raises(InputError, match="kv_heads"):
            _ = HYBRID.kv_heads
        # A window changes nothing about the rows.
        assert KvLayout.of([FULL, WINDOW]).layer_bytes_per_token == FULL.bytes_per_token

    @pytest.mark.parametrize(
        ("sizes", "field"),
        [
            ({"kv_heads": 2}, "k_width"),
            ({"k_width": 2}, "kv_heads"),
            ({"window": 3}, "kv_heads"),
            ({"kv_heads": 1, "k_width": 2, "itemsize": 2, "window": 0}, "window"),
            ({"state_bytes": -1}, "state_bytes"),
        ],
    )
    def test_an_impossible_layer_is_refused(self, sizes, field):
        with pytest.raises(InputError) as caught:
            LayerShape(**sizes)
        assert caught.value.field == f"layout.{field}"

    def test_a_layout_of_no_layers_is_refused(self):
        with pytest.raises(InputError, match="layers"):
            KvLayout.of([])

    @given(st.lists(shapes, min_size=1, max_size=5), st.integers(1, 9), st.data())
    def test_rows_and_states_tile_their_region(self, layers, capacity, data):
        layout = KvLayout.of(layers)
        points = tuple(sorted(data.draw(st.sets(st.integers(1, capacity)))))
        region = KvRegion(layout, capacity, points)
        taken = np.zeros(region.nbytes, np.uint8)
        for layer, shape in enumerate(layers):
            for token in range(capacity):
                taken[region.key_offset(layer, token) :][: shape.k_bytes_per_token] += 1
                taken[region.value_offset(layer, token) :][: shape.v_bytes_per_token] += 1
            for tokens in points or (capacity,):
                taken[region.state_offset(layer, tokens) :][: shape.state_bytes] += 1
        assert (taken == 1).all()

    @pytest.mark.parametrize("points", [(0,), (4, 4), (8, 4), (9,)])
    def test_impossible_checkpoints_are_refused(self, points):
        with pytest.raises(InputError, match="checkpoints"):
            KvRegion(HYBRID, 8, points)


class TestWindow:
    def load(self, start, end, **options):
        store = HostStore(UNIT)
        put(store, range(24), WINDOWED)
        with store.open(find(store, range(24), WINDOWED), start, end, **options) as run:
            return copied(run)

    def tokens(self, layer, start, end, **options):
        region, _, written = self.load(start, end, **options)
        return tokens_written(region, written, layer)

    @pytest.mark.parametrize(("start", "end"), [(0, 24), (0, 8), (0, 4), (13, 20), (17, 20)])
    def test_the_last_tokens_before_the_end_move_and_no_others(self, start, end):
        region, to, written = self.load(start, end)
        assert tokens_written(region, written, 0) == list(range(start, end))
        assert tokens_written(region, written, 1) == list(range(max(start, end - 6), end))
        for layer in (0, 1):
            keys, values = rows_of(range(24), WINDOWED, layer)
            for token in tokens_written(region, written, layer):
                at, to_values = region.key_offset(layer, token), region.value_offset(layer, token)
                np.testing.assert_array_equal(to[at : at + keys.shape[1]], keys[token])
                np.testing.assert_array_equal(to[to_values : to_values + values.shape[1]], values[token])

    def test_a_part_moves_what_the_end_of_the_whole_load_leaves_of_the_window(self):
        assert self.tokens(1, 0, 12, load_end=16) == [10, 11]
        assert self.tokens(1, 0, 8, load_end=16) == []
        assert self.tokens(0, 0, 8, load_end=16) == list(range(8))

    @pytest.mark.parametrize("cuts", [(8,), (4, 16), (12, 16, 20)])
    def test_parts_write_together_what_one_load_writes(self, cuts):
        _, whole, written = self.load(0, 24)
        parts = [self.load(a, b, load_end=24) for a, b in zip((0, *cuts), (*cuts, 24), strict=True)]
        assert (sum(part[2].astype(int) for part in parts) == written).all()
        np.testing.assert_array_equal(np.sum([part[1] for part in parts], axis=0, dtype=np.uint8), whole)


class TestStates:
    def test_a_hit_ends_at_a_checkpoint(self):
        store = HostStore(UNIT)
        assert put(store, range(24), HYBRID, (8, 16)) == 16
        for asked, tokens, points in [(24, 16, (8, 16)), (15, 8, (8,)), (9, 8, (8,)), (7, 0, ())]:
            hit = find(store, range(asked), HYBRID)
            assert (hit.tokens, hit.checkpoints) == (tokens, points)
            assert hit.state == ("hit" if tokens else "miss")

    def test_without_a_checkpoint_nothing_is_stored(self):
        store = HostStore(UNIT)
        assert put(store, range(24), HYBRID) == 0
        assert put(store, range(6), HYBRID, (8,)) == 0
        assert store.used_bytes == 0

    @given(
        st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(1, 5))), max_size=4),
        st.integers(0, 22),
        st.integers(0, 5),
    )
    def test_the_longest_hit_of_all_prompts_that_can_serve_one(self, stored, asked, differs):
        """Prompts that agree up to a unit of their own; each holds states at some units' ends."""

        def ids(unit, tokens):
            return [token if token < unit * UNIT else 50 + unit for token in range(tokens)]

        store = HostStore(UNIT)
        for unit, points in stored:
            put(store, ids(unit, 20), HYBRID, tuple(at * UNIT for at in sorted(points)))
        prompt = ids(differs, asked)

        def serves(unit, at):
            return at * UNIT <= asked and prompt[: at * UNIT] == ids(unit, 20)[: at * UNIT]

        best = max((at * UNIT for unit, points in stored for at in points if serves(unit, at)), default=0)
        hit = find(store, prompt, HYBRID)
        assert hit.tokens == best
        if best:
            assert hit.checkpoints[-1] == best
            with store.open(hit, 0, best) as run:
                region, to, _ = copied(run)
            for layer in (0, 2):
                at = region.state_offset(layer, best)
                state = state_of(prompt, HYBRID, layer, best)
                np.testing.assert_array_equal(to[at : at + state.size], state)

    def test_one_state_moves_whole_with_the_rows(self):
        store = HostStore(UNIT)
        put(store, range(24), HYBRID, (8, 16, 24))
        hit = find(store, range(24), HYBRID)
        for start, end in [(0, 8), (5, 16), (16, 24)]:
            with store.open(hit, start, end) as run:
                region, to, written = copied(run)
                assert [run.layer_nbytes(layer) for layer in range(4)] == [
                    10,
                    (end - start) * FULL.bytes_per_token,
                    (end - start) * BOTH.bytes_per_token + 6,
                    0,
                ]
            assert tokens_written(region, written, 2) == list(range(start, end))
            for layer, size in ((0, 10), (2, 6)):
                at = region.state_offset(layer, end)
                np.testing.assert_array_equal(to[at : at + size], state_of(range(24), HYBRID, layer, end))

    def test_a_load_that_ends_elsewhere_is_refused_and_a_part_of_one_is_not(self):
        store = HostStore(UNIT)
        put(store, range(24), HYBRID, (8, 24))
        hit = find(store, range(24), HYBRID)
        with pytest.raises(InputError, match="no state"):
            store.open(hit, 0, 16)
        with store.open(hit, 0, 16, load_end=24) as run:
            _, _, written = copied(run)
            assert run.layer_nbytes(0) == 0
            assert written.sum() == 16 * HYBRID.bytes_per_token
        with pytest.raises(InputError, match="load_end"):
            store.open(hit, 0, 16, load_end=12)
        assert store.clear() == 0

    def test_a_longer_prompt_without_the_checkpoint_does_not_stand_in_for_a_put(self):
        store = HostStore(UNIT)
        put(store, range(24), HYBRID, (24,))
        assert find(store, range(16), HYBRID).state == "miss"
        assert put(store, range(16), HYBRID, (16,)) == 16
        assert find(store, range(16), HYBRID).tokens == 16

    def test_again_with_more_checkpoints_stores_and_with_fewer_does_not(self):
        store = HostStore(UNIT)
        put(store, range(24), HYBRID, (24,))
        one = store.used_bytes
        put(store, range(24), HYBRID, (8, 24))
        two = store.used_bytes
        assert two > one
        assert find(store, range(16), HYBRID).tokens == 8
        assert put(store, range(24), HYBRID, (8, 24)) == put(store, range(24), HYBRID, (24,)) == 24
        assert store.used_bytes == two

    @pytest.mark.parametrize("points", [(6,), (8, 8), (16, 8), (0, 8)])
    def test_impossible_checkpoints_are_refused(self, points):
        with pytest.raises(InputError, match="checkpoints"):
            put(HostStore(UNIT), range(24), HYBRID, points)

    def test_states_of_the_wrong_size_are_refused(self):
        store, layers = HostStore(UNIT), list(kv_of(range(8), HYBRID, (8,)))
        layers[0] = (*layers[0][:2], layers[0][2][:9])
        with pytest.raises(InputError, match="states of layer 0"):
            store.put(identity(HYBRID), range(8), HYBRID, layers, (8,))
        assert store.used_bytes == 0


class TestChecksums:
    def opened(self, layout, start, end, checkpoints=()):
        store = HostStore(UNIT, checksums=True)
        put(store, range(24), layout, checkpoints)
        return store.open(find(store, range(24), layout), start, end)

    @pytest.mark.parametrize("layer", [0, 2])
    def test_a_state_is_checked_at_the_checkpoint_that_moves(self, layer):
        with self.opened(HYBRID, 0, 16, (8, 16, 24)) as run:
            for other in (8, 24):
                run.memory[run.region.state_offset(layer, other)] ^= 1
            run.verify(layer)
            run.memory[run.region.state_offset(layer, 16) + 5] ^= 1
            with pytest.raises(ChecksumError) as caught:
                run.verify(layer)
            assert (caught.value.layer, caught.value.start, caught.value.end) == (layer, 0, 16)

    def test_tokens_before_a_window_are_not_read(self):
        with self.opened(WINDOWED, 0, 24) as run:
            run.memory[run.region.key_offset(1, 15)] ^= 1
            run.verify(1)
            run.memory[run.region.key_offset(1, 18)] ^= 1
            with pytest.raises(ChecksumError):
                run.verify(1)

    def test_a_layer_that_holds_nothing_has_nothing_to_check(self):
        with self.opened(WINDOWED, 0, 24) as run:
            run.memory[:] ^= 1
            run.verify(2)
