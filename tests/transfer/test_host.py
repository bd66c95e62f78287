"""The host store: what is found, what is pinned, what is counted."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.transfer.host import HostStore, touched_bytes
from kvlane.transfer.identity import KvIdentity
from kvlane.transfer.layout import KvLayout, KvRegion, total_bytes
from kvlane.transfer.store import ChecksumError, KvSafetyError, StaleHitError, StoreFullError

LAYOUT = KvLayout(layers=3, kv_heads=2, k_width=4, v_width=3, itemsize=2)
IDENTITY = KvIdentity("model", "r1", None, "float16", LAYOUT.name, 0, 2, "rope", "numerics")
UNIT = 4


def kv_of(ids, layout=LAYOUT):
    """KV bytes that only these ids have: token t's rows depend on every id up to t, as real KV does."""
    seeds = np.cumsum(np.asarray(ids, np.int64) * 7 + 1)
    for layer in range(layout.layers):
        rows = []
        for width, salt in ((layout.k_bytes_per_token, 3), (layout.v_bytes_per_token, 5)):
            rows.append(((seeds[:, None] * salt + layer + np.arange(width)) % 251).astype(np.uint8).ravel())
        yield rows[0], rows[1]


def put(store, ids, identity=IDENTITY):
    return store.put(identity, ids, LAYOUT, kv_of(ids))


def loaded(run, capacity=64):
    """The run's bytes as a device would have them after the copies, and how many were copied."""
    region = KvRegion(LAYOUT, capacity)
    to = np.zeros(region.nbytes, np.uint8)
    moved = 0
    for layer in range(LAYOUT.layers):
        for copy in run.copies(layer, region):
            source = run.memory[copy.source : copy.source + copy.nbytes]
            to[copy.destination : copy.destination + copy.nbytes] = source
            moved += copy.nbytes
    layers = []
    for layer in range(LAYOUT.layers):
        keys = to[region.key_offset(layer, run.start) : region.key_offset(layer, run.end)]
        values = to[region.value_offset(layer, run.start) : region.value_offset(layer, run.end)]
        layers.append((keys, values))
    return layers, moved


class TestLookup:
    @given(
        st.lists(st.lists(st.integers(0, 1), max_size=20), max_size=4),
        st.lists(st.integers(0, 1), max_size=20),
    )
    def test_finds_the_longest_common_prefix_in_whole_units(self, stored, asked):
        store = HostStore(UNIT)
        for prompt in stored:
            assert put(store, prompt) == len(prompt) // UNIT * UNIT

        def common(prompt):
            usable = min(len(prompt), len(asked)) // UNIT
            return max(n for n in range(usable + 1) if prompt[: n * UNIT] == asked[: n * UNIT]) * UNIT

        hit = store.lookup(IDENTITY, asked)
        assert hit.tokens == max(map(common, stored), default=0)
        assert hit.state == ("hit" if hit.tokens else "miss")
        if hit.tokens:
            with store.open(hit, 0, hit.tokens) as run:
                layers, _ = loaded(run)
            for got, expected in zip(layers, kv_of(asked[: hit.tokens]), strict=True):
                np.testing.assert_array_equal(got[0], expected[0])
                np.testing.assert_array_equal(got[1], expected[1])

    @pytest.mark.parametrize("at", [0, 5, 15])
    def test_a_changed_token_ends_the_hit_before_its_unit(self, at):
        store = HostStore(UNIT)
        put(store, range(16))
        asked = np.arange(16)
        asked[at] = 99
        assert store.lookup(IDENTITY, asked).tokens == at // UNIT * UNIT


class TestPut:
    def test_is_not_visible_before_its_last_byte(self):
        store = HostStore(UNIT)
        seen = []

        def watched():
            for layer in kv_of(range(16)):
                seen.append(store.lookup(IDENTITY, range(16)).tokens)
                yield layer
            seen.append(store.lookup(IDENTITY, range(16)).tokens)

        assert store.put(IDENTITY, range(16), LAYOUT, watched()) == 16
        assert seen == [0] * (LAYOUT.layers + 1)
        assert store.lookup(IDENTITY, range(16)).tokens == 16

    def test_that_fails_half_way_leaves_nothing(self):
        store = HostStore(UNIT, capacity_bytes=16 * LAYOUT.bytes_per_token)

        def broken():
            yield next(kv_of(range(16)))
            raise OSError("source gone")

        with pytest.raises(OSError, match="source gone"):
            store.put(IDENTITY, range(16), LAYOUT, broken())
        assert store.used_bytes == 0
        assert store.lookup(IDENTITY, range(16)).state == "miss"
        assert put(store, range(16)) == 16

    def test_that_fails_in_its_first_layer_has_dropped_nothing(self):
        store = HostStore(UNIT, capacity_bytes=16 * LAYOUT.bytes_per_token)
        put(store, range(16))

        def changed():
            raise OSError("source changed")
            yield

        with pytest.raises(OSError, match="source changed"):
            store.put(IDENTITY, range(100, 116), LAYOUT, changed())
        for rows in ([], list(kv_of(range(8)))):
            with pytest.raises(InputError, match="layers"):
                store.put(IDENTITY, range(100, 116), LAYOUT, rows)
        assert store.lookup(IDENTITY, range(16)).tokens == 16

    def test_of_a_prompt_that_is_being_put_reads_and_stores_nothing(self):
        store = HostStore(UNIT)
        second: list[int] = []

        def unread():
            raise AssertionError("it was read")
            yield

        def rows():
            for layer in kv_of(range(16)):
                thread = threading.Thread(target=again)
                thread.start()
                thread.join()
                yield layer

        def again():
            # Also where the prompts differ after their last whole unit.
            second.append(store.put(IDENTITY, range(18), LAYOUT, unread()))
            second.append(store.used_bytes)

        assert store.put(IDENTITY, range(16), LAYOUT, rows()) == 16
        one = 16 * LAYOUT.bytes_per_token
        assert second == [0, 0, 0, one, 0, one]
        assert store.used_bytes == one
        assert put(store, range(16)) == 16

    def test_again_after_one_that_failed_stores(self):
        store = HostStore(UNIT)
        for rows in ([], list(kv_of(range(16)))[:2]):
            with pytest.raises(InputError):
                store.put(IDENTITY, range(16), LAYOUT, rows)
        assert put(store, range(16)) == 16

    def test_below_one_unit_stores_nothing(self):
        store = HostStore(UNIT)
        assert put(store, range(UNIT - 1)) == 0
        assert store.used_bytes == 0

    def test_stores_whole_units_only(self):
        store = HostStore(UNIT)
        assert put(store, range(11)) == 8
        assert store.used_bytes == 8 * LAYOUT.bytes_per_token

    def test_again_takes_no_more_memory(self):
        store = HostStore(UNIT)
        put(store, range(16))
        assert put(store, range(16)) == put(store, range(18)) == 16
        assert store.used_bytes == 16 * LAYOUT.bytes_per_token

    @pytest.mark.parametrize(
        "layers",
        [
            list(kv_of(range(16)))[:2],
            [*kv_of(range(16)), next(kv_of(range(16)))],
            list(kv_of(range(8))),
            [(k.reshape(2, -1), v) for k, v in kv_of(range(16))],
            [(k.view(np.int8), v) for k, v in kv_of(range(16))],
        ],
        ids=["too few layers", "too many layers", "too few bytes", "not flat", "not bytes"],
    )
    def test_of_the_wrong_shape_is_refused(self, layers):
        store = HostStore(UNIT)
        with pytest.raises(InputError, match="layers"):
            store.put(IDENTITY, range(16), LAYOUT, layers)
        assert store.used_bytes == 0

    def test_under_another_layout_is_refused(self):
        with pytest.raises(InputError, match="layout"):
            HostStore(UNIT).put(replace(IDENTITY, layout="other"), range(16), LAYOUT, kv_of(range(16)))


class TestCapacity:
    ROOM = 32 * LAYOUT.bytes_per_token

    def test_the_least_recently_used_goes_first(self):
        store = HostStore(UNIT, self.ROOM)
        one, two, three = range(16), range(100, 116), range(200, 216)
        put(store, one)
        put(store, two)
        store.open(store.lookup(IDENTITY, one), 0, 16).close()
        put(store, three)
        assert [store.lookup(IDENTITY, ids).tokens for ids in (one, two, three)] == [16, 0, 16]
        assert store.used_bytes == self.ROOM

    def test_a_pinned_entry_stays_and_the_next_one_goes(self):
        store = HostStore(UNIT, self.ROOM)
        one, two, three = range(16), range(100, 116), range(200, 216)
        put(store, one)
        put(store, two)
        with store.open(store.lookup(IDENTITY, one), 0, 16) as run:
            with store.open(store.lookup(IDENTITY, two), 0, 16), pytest.raises(StoreFullError):
                put(store, three)
            assert store.lookup(IDENTITY, two).tokens == 16
            before = run.memory.copy()
            put(store, three)
            assert store.lookup(IDENTITY, two).state == "miss"
            np.testing.assert_array_equal(run.memory, before)
            assert store.clear() == 1
        assert store.clear() == 0
        assert store.used_bytes == 0

    def test_a_retained_run_pins_on_its_own(self):
        store = HostStore(UNIT)
        put(store, range(16))
        with store.open(store.lookup(IDENTITY, range(16)), 0, 16) as run:
            second = run.retain()
        run.close()
        assert store.clear() == 1
        second.close()
        assert store.clear() == 0

    def test_a_prompt_larger_than_the_store_is_refused_and_evicts_nothing(self):
        store = HostStore(UNIT, self.ROOM)
        put(store, range(16))
        with pytest.raises(StoreFullError):
            put(store, range(100, 140))
        assert store.lookup(IDENTITY, range(16)).tokens == 16

    def test_a_hit_evicted_before_it_is_opened_is_stale(self):
        store = HostStore(UNIT)
        put(store, range(16))
        hit = store.lookup(IDENTITY, range(16))
        store.clear()
        with pytest.raises(StaleHitError):
            store.open(hit, 0, 16)


class TestRun:
    def test_bytes_count_when_their_copy_has_finished_and_not_when_planned(self):
        store = HostStore(UNIT)
        put(store, range(16))
        with store.open(store.lookup(IDENTITY, range(16)), 4, 12) as run:
            _, moved = loaded(run)
            assert moved == run.nbytes == 8 * LAYOUT.bytes_per_token
            assert run.bytes_moved == store.bytes_moved == 0
            for layer in range(LAYOUT.layers):
                run.count_moved(total_bytes(run.copies(layer, KvRegion(LAYOUT, 12))))
            assert run.bytes_moved == store.bytes_moved == run.nbytes

    def test_a_retained_run_counts_with_the_one_it_came_from(self):
        store = HostStore(UNIT)
        put(store, range(16))
        with store.open(store.lookup(IDENTITY, range(16)), 0, 16) as run, run.retain() as second:
            second.count_moved(5)
            assert run.bytes_moved == second.bytes_moved == store.bytes_moved == 5

    def test_a_closed_run_gives_no_memory_and_no_pin(self):
        store = HostStore(UNIT)
        put(store, range(16))
        run = store.open(store.lookup(IDENTITY, range(16)), 0, 16)
        run.close()
        with pytest.raises(KvSafetyError, match="closed"):
            _ = run.memory
        with pytest.raises(KvSafetyError, match="closed"):
            run.retain()
        assert store.clear() == 0

    @pytest.mark.parametrize(("start", "end"), [(0, 20), (-1, 8), (8, 8), (8, 4), (0, 6)])
    def test_a_range_outside_the_hit_or_ending_inside_a_unit_is_refused(self, start, end):
        store = HostStore(UNIT)
        put(store, range(16))
        with pytest.raises(InputError):
            store.open(store.lookup(IDENTITY, range(16)), start, end)

    def test_a_hit_of_another_store_is_refused(self):
        one, two = HostStore(UNIT), HostStore(UNIT)
        put(one, range(16))
        put(two, range(100, 116))
        hit = one.lookup(IDENTITY, range(16))
        assert hit.entry == two.lookup(IDENTITY, range(100, 116)).entry
        with pytest.raises(InputError, match="another store"):
            two.open(hit, 0, 16)
        assert two.clear() == 0

    def test_a_miss_cannot_be_opened(self):
        store = HostStore(UNIT)
        with pytest.raises(InputError, match="tokens"):
            store.open(store.lookup(IDENTITY, range(16)), 0, 4)


class TestChecksums:
    def opened(self, start, end, **options):
        store = HostStore(UNIT, **options)
        put(store, range(16))
        return store.open(store.lookup(IDENTITY, range(16)), start, end)

    def test_bytes_as_they_were_put_pass(self):
        with self.opened(0, 16, checksums=True) as run:
            for layer in range(LAYOUT.layers):
                run.verify(layer)

    @pytest.mark.parametrize("layer", range(LAYOUT.layers))
    @pytest.mark.parametrize("token", [0, 5, 15])
    @pytest.mark.parametrize("part", ["keys", "values"])
    @pytest.mark.parametrize("bit", [0, 7])
    def test_one_flipped_bit_is_named_by_layer_and_unit(self, layer, token, part, bit):
        with self.opened(0, 16, checksums=True) as run:
            offset = run.region.key_offset if part == "keys" else run.region.value_offset
            run.memory[offset(layer, token)] ^= 1 << bit
            for other in range(LAYOUT.layers):
                if other != layer:
                    run.verify(other)
            with pytest.raises(ChecksumError, match=f"layer {layer}") as caught:
                run.verify(layer)
            unit = token // UNIT * UNIT
            assert (caught.value.layer, caught.value.start, caught.value.end) == (layer, unit, unit + UNIT)

    def test_units_outside_the_run_are_not_read(self):
        with self.opened(5, 12, checksums=True) as run:
            for token in (3, 12):
                run.memory[run.region.key_offset(1, token)] ^= 1
            run.verify(1)
            run.memory[run.region.key_offset(1, 11)] ^= 1
            with pytest.raises(ChecksumError):
                run.verify(1)

    def test_a_store_without_them_checks_nothing(self):
        with self.opened(0, 16) as run:
            run.memory[:] ^= 1
            run.verify(0)

    def test_a_closed_run_is_not_read(self):
        run = self.opened(0, 16, checksums=True)
        run.close()
        with pytest.raises(KvSafetyError):
            run.verify(0)


def test_the_bytes_of_a_layer_are_those_its_copies_carry():
    store = HostStore(UNIT)
    put(store, range(16))
    with store.open(store.lookup(IDENTITY, range(16)), 3, 12) as run:
        assert run.layout == LAYOUT
        for layer in range(LAYOUT.layers):
            assert run.layer_nbytes(layer) == total_bytes(run.copies(layer, KvRegion(LAYOUT, 12)))
        assert sum(map(run.layer_nbytes, range(LAYOUT.layers))) == run.nbytes
        with pytest.raises(InputError, match="layer"):
            run.layer_nbytes(LAYOUT.layers)


def test_many_threads_never_see_a_wrong_byte():
    store = HostStore(UNIT, capacity_bytes=40 * LAYOUT.bytes_per_token)
    prompts = [np.arange(16) + 100 * n for n in range(4)]
    wrong: list[object] = []

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(60):
            ids = prompts[random.integers(len(prompts))]
            try:
                put(store, ids)
                with store.open(store.lookup(IDENTITY, ids), 0, 16) as run:
                    layers, moved = loaded(run)
                    run.count_moved(moved)
            except (StaleHitError, StoreFullError):
                continue
            except InputError as error:  # evicted before the lookup: a miss cannot be opened
                if error.field != "tokens":
                    wrong.append(error)
                continue
            for got, expected in zip(layers, kv_of(ids), strict=True):
                if not (np.array_equal(got[0], expected[0]) and np.array_equal(got[1], expected[1])):
                    wrong.append(ids)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.clear() == 0
    assert store.used_bytes == 0


def test_memory_is_page_aligned():
    assert touched_bytes(10_000).ctypes.data % 4096 == 0
    assert touched_bytes(10_000).size == 10_000


@pytest.mark.parametrize(("unit", "capacity"), [(0, None), (-1, None), (1, 0)])
def test_an_impossible_store_is_refused(unit, capacity):
    with pytest.raises(InputError):
        HostStore(unit, capacity)
