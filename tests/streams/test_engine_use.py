"""One engine, used wrongly: KV under another prompt's ids, and two threads at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.engines.transformers_forward import KvLayer
from kvlane.transfer.host import HostStore
from kvlane.transfer.store import KvSafetyError

TOKENS = 40


@pytest.fixture
def engine(kit):
    with CpuBackend() as backend:
        yield kit.engine(kit.model(), backend)


class Elsewhere:
    """Runs a call on another thread while this one stands inside the engine; what it raised or returned."""

    def __init__(self, call):
        self.call = call
        self.error = None

    def __call__(self):
        thread = threading.Thread(target=self._run)
        thread.start()
        thread.join()

    def _run(self):
        try:
            self.call()
        except Exception as error:  # noqa: BLE001  what it was is what the test asks
            self.error = error


def at_layer(layer, then, rows):
    """The rows, with something happening after one layer was read."""
    for at, row in enumerate(rows):
        yield row
        if at == layer:
            then()


class TestSave:
    def test_stores_what_the_prompt_loads_again(self, kit, engine):
        ids, store = kit.ids(TOKENS), HostStore(kit.unit)
        full = engine.prefill(ids)
        assert engine.save(store, ids, 36) == 32
        engine.poison()
        with store.open(store.lookup(engine.identity, ids), 0, 32) as run:
            assert engine.prefill(ids, load=run).first_token == full.first_token

    def test_of_another_prompt_or_of_more_than_is_held_is_refused(self, kit, engine):
        ids, store = kit.ids(TOKENS), HostStore(kit.unit)
        engine.prefill(ids)
        other = ids.copy()
        other[20] = (other[20] + 1) % 160
        for bad, tokens in ((other, TOKENS), (ids, TOKENS + 1), (ids[:30], 32), (ids, -1)):
            with pytest.raises(InputError, match="not held"):
                engine.save(store, bad, tokens)
        assert store.used_bytes == 0
        assert engine.save(store, other, 20) == 16

    def test_keeps_the_ids_the_kv_was_computed_from(self, kit, engine):
        ids, store = kit.ids(TOKENS), HostStore(kit.unit)
        given = ids.astype(np.uint32)
        engine.prefill(given)
        given[:] = 0
        assert engine.save(store, ids, TOKENS) == TOKENS
        assert store.lookup(engine.identity, given).state == "miss"

    def test_a_prompt_changed_while_it_is_computed_is_held_as_it_was(self, kit, engine, monkeypatch):
        given = kit.ids(TOKENS).astype(np.uint32)
        before = given.copy()
        monkeypatch.setattr(engine.model.lm_head, "forward", self.changing(engine, given))
        engine.prefill(given)
        assert engine.holds(before, TOKENS)

    @staticmethod
    def changing(engine, given):
        forward = engine.model.lm_head.forward

        def changed(hidden):
            given[:] = 0
            return forward(hidden)

        return changed


@pytest.mark.parametrize("change", ["prefill", "poison"])
class TestKvThatChanges:
    """`put` given the rows of one prompt while the block comes to hold another's."""

    def change(self, kit, engine, how):
        if how == "prefill":
            engine.prefill(kit.ids(TOKENS, seed=2))
        else:
            engine.poison()

    def test_before_it_is_read_is_not_stored(self, kit, engine, change):
        ids, earlier = kit.ids(TOKENS), kit.ids(TOKENS, seed=3)
        room = TOKENS * engine.layout.bytes_per_token
        store = HostStore(kit.unit, room)
        engine.prefill(earlier)
        engine.save(store, earlier, TOKENS)
        engine.prefill(ids)
        rows = engine.layer_bytes(0, TOKENS)
        self.change(kit, engine, change)
        with pytest.raises(KvSafetyError, match="changed"):
            store.put(engine.identity, ids, engine.layout, rows)
        assert store.lookup(engine.identity, ids).state == "miss"
        # Noticed before anything had to make room for it.
        assert store.lookup(engine.identity, earlier).tokens == TOKENS
        assert store.used_bytes == room

    @pytest.mark.parametrize("layer", range(4))
    def test_while_a_layer_is_read_is_not_stored(self, kit, engine, change, layer):
        ids, store = kit.ids(TOKENS), HostStore(kit.unit)
        engine.prefill(ids)
        rows = at_layer(layer, lambda: self.change(kit, engine, change), engine.layer_bytes(0, TOKENS))
        with pytest.raises(KvSafetyError, match="changed"):
            store.put(engine.identity, ids, engine.layout, rows)
        assert store.lookup(engine.identity, ids).state == "miss"
        assert store.used_bytes == 0

    def test_is_refused_while_it_is_saved(self, kit, engine, change):
        ids, store = kit.ids(TOKENS), HostStore(kit.unit)
        engine.prefill(ids)
        other = Elsewhere(lambda: self.change(kit, engine, change))

        class Slow:
            def put(self, identity, ids, layout, rows, checkpoints):
                return store.put(identity, ids, layout, at_layer(1, other, rows))

        assert engine.save(Slow(), ids, TOKENS) == TOKENS
        assert isinstance(other.error, KvSafetyError)
        assert store.lookup(engine.identity, ids).tokens == TOKENS


@pytest.mark.parametrize("call", ["prefill", "poison", "save"])
def test_a_second_thread_is_refused_and_the_first_goes_on(kit, engine, call, monkeypatch):
    ids, store = kit.ids(TOKENS), HostStore(kit.unit)
    expected = engine.prefill(ids)
    calls = {
        "prefill": lambda: engine.prefill(kit.ids(TOKENS, seed=2)),
        "poison": engine.poison,
        "save": lambda: engine.save(store, ids, 8),
    }
    second = Elsewhere(calls[call])
    attention = engine.model.model.layers[2].self_attn
    forward = attention.forward

    def interrupted(*args, **kwargs):
        second()
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(attention, "forward", interrupted)
        first = engine.prefill(ids)
    assert isinstance(second.error, KvSafetyError)
    assert isinstance(second.error, RuntimeError)
    assert "in use" in str(second.error)
    np.testing.assert_array_equal(first.logits, expected.logits)
    assert engine.holds(ids, TOKENS)
    # Whoever was refused may ask again.
    calls["save"]()
    calls[call]()


def test_a_pass_in_which_a_layer_takes_its_kv_twice_or_not_whole_gives_no_token(kit, engine, monkeypatch):
    ids = kit.ids(TOKENS)
    update = KvLayer.update

    def twice(self, keys, values, *args, **kwargs):
        update(self, keys, values)
        return update(self, keys, values, *args, **kwargs)

    def a_token_short(self, keys, values, *args, **kwargs):
        return update(self, keys[:, :, 1:], values[:, :, 1:], *args, **kwargs)

    for wrong, match in ((twice, "2 times"), (a_token_short, f"{TOKENS - 1} of {TOKENS}")):
        monkeypatch.setattr(KvLayer, "update", wrong)
        with pytest.raises(KvSafetyError, match=match):
            engine.prefill(ids)
        assert engine.held_tokens == 0


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("inf"), float("nan")])
def test_a_deadline_that_cannot_be_waited_for_is_refused(kit, engine, deadline_s):
    with pytest.raises(InputError, match="deadline_s"):
        engine.prefill(kit.ids(TOKENS), deadline_s=deadline_s)


def test_a_closed_engine_has_no_thread_and_loads_nothing(kit):
    ids, store, before = kit.ids(TOKENS), HostStore(kit.unit), set(threading.enumerate())
    with CpuBackend() as backend:
        engine = kit.engine(kit.model(), backend)
        engine.prefill(ids)
        engine.save(store, ids, TOKENS)
        engine.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        assert set(threading.enumerate()) == before
        hit = store.lookup(engine.identity, ids)
        with store.open(hit, 0, 32) as run, pytest.raises(KvSafetyError, match="closed"):
            engine.prefill(ids, load=run)
        assert store.clear() == 0


class TestModelState:
    """What the identity says of the model has to hold at every prefill, not only at the first."""

    @pytest.mark.parametrize("part", ["model", "one layer"])
    def test_back_in_training_mode_is_refused(self, kit, engine, part):
        ids = kit.ids(TOKENS)
        engine.prefill(ids)
        module = engine.model if part == "model" else engine.model.model.layers[1].self_attn
        module.train()
        with pytest.raises(InputError, match="training"):
            engine.prefill(ids)
        assert engine.holds(ids, TOKENS)
        module.eval()
        engine.prefill(ids)

    def test_under_autocast_is_refused(self, kit, engine):
        ids = kit.ids(TOKENS)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="autocast"):
            engine.prefill(ids)
        assert engine.held_tokens == 0
        engine.prefill(ids)

    def test_of_another_type_since_is_refused(self, kit, engine):
        engine.model.to(torch.bfloat16)
        with pytest.raises(KvSafetyError, match="bfloat16"):
            engine.prefill(kit.ids(TOKENS))
        assert engine.held_tokens == 0
