"""The transformers adapter against recompute and against transformers' own cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.engines import transformers as adapter
from kvlane.streams.engines.transformers_forward import KvLayer
from kvlane.streams.executor import LayerLoad, LoadError
from kvlane.transfer.host import HostStore
from kvlane.transfer.layout import KvLayout

TOKENS = 83  # not a whole number of units


def load(engine, store, ids, resident, end, **options):
    """Prefill with tokens `[resident, end)` loaded and everything after the resident ones poisoned before."""
    if resident:
        engine.prefill(ids[:resident])
    engine.poison(resident)
    with store.open(store.lookup(engine.identity, ids), resident, end) as run:
        result = engine.prefill(ids, resident, run, **options)
        assert result.loaded_bytes == run.nbytes == run.bytes_moved
        assert result.loaded_tokens == end - resident
        assert result.computed_tokens == len(ids) - end
    return result


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_supported_kind_loads_to_the_token_of_a_plain_forward(kit, kind, attention):
    model, ids = kit.model(kind, attention=attention), kit.ids(TOKENS)
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor(ids[None])).logits[0, -1].numpy()
    store, full = kit.stored(model, ids)
    np.testing.assert_allclose(full.logits, plain, rtol=0, atol=1e-4)
    with kit.SlowBackend() as backend:
        late = load(kit.engine(model, backend), store, ids, 0, 80)
    assert late.first_token == full.first_token == plain.argmax()
    np.testing.assert_allclose(late.logits, plain, rtol=0, atol=1e-4)
    # The comparison means something: the runner-up is further away than the tolerance.
    runner_up, best = np.sort(plain)[-2:]
    assert best - runner_up > 1e-3


def test_a_prompt_that_only_begins_like_the_stored_one(kit):
    model, ids = kit.model(), kit.ids(TOKENS)
    store, _ = kit.stored(model, ids)
    other = np.concatenate([ids[:43], kit.ids(30, seed=2)])
    with kit.SlowBackend() as backend:
        engine = kit.engine(model, backend)
        assert store.lookup(engine.identity, other).tokens == 40
        recomputed = engine.prefill(other)
        late = load(engine, store, other, 0, 40)
    assert late.first_token == recomputed.first_token
    np.testing.assert_allclose(late.logits, recomputed.logits, rtol=0, atol=1e-4)


def test_a_resident_prefix_needs_no_load(kit):
    model, ids = kit.model(), kit.ids(TOKENS)
    with CpuBackend() as backend:
        engine = kit.engine(model, backend)
        full = engine.prefill(ids)
        assert engine.held_tokens == TOKENS
        for resident in (1, 50, TOKENS - 1):
            engine.poison(TOKENS - 1)
            again = engine.prefill(ids, resident)
            assert (again.first_token, again.mode, again.loaded_bytes) == (full.first_token, None, 0)
            np.testing.assert_allclose(again.logits, full.logits, rtol=0, atol=1e-4)


def test_the_report_adds_up(kit):
    model, ids = kit.model(), kit.ids(TOKENS)
    store, _ = kit.stored(model, ids)
    with kit.SlowBackend() as backend:
        engine = kit.engine(model, backend)
        submitted = backend.now()
        result = load(engine, store, ids, 0, 80, submitted_s=submitted)
        assert 0 < result.head_s < result.total_s <= backend.now() - submitted
    rows = result.layers
    assert len(rows) == kit.layers
    assert rows[-1].compute_end_s + result.head_s == pytest.approx(result.total_s)
    assert sum(row.copies for row in rows) == 2 * kit.layers
    assert all(0 <= row.enqueue_s <= row.start_s <= row.arrive_s <= result.total_s for row in rows)
    assert all(row.exposed_s > 0 for row in rows)


class TestControls:
    """The comparisons above must fail once the thing they guard is taken away."""

    def test_a_prefix_length_reported_late_is_noticed(self, kit, monkeypatch):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, full = kit.stored(model, ids)
        length = KvLayer.get_seq_length

        def late(self):
            return length(self) if self._updates else 0

        with kit.SlowBackend() as backend:
            engine = kit.engine(model, backend)
            monkeypatch.setattr(KvLayer, "get_seq_length", late)
            wrong = load(engine, store, ids, 0, 80)
        assert np.abs(wrong.logits - full.logits).max() > 1e-2

    @pytest.mark.parametrize("mode", ["bulk", "layered"])
    def test_a_wait_left_out_is_noticed(self, kit, monkeypatch, mode):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, _ = kit.stored(model, ids)
        with kit.SlowBackend() as backend:
            engine = kit.engine(model, backend)
            monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)
            wrong = load(engine, store, ids, 0, 80, mode=mode)
        assert np.isnan(wrong.logits).all()

    @pytest.mark.parametrize("layer", range(4))
    def test_one_layers_wait_left_out_is_noticed(self, kit, monkeypatch, layer):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, _ = kit.stored(model, ids)
        hold = LayerLoad.hold
        monkeypatch.setattr(LayerLoad, "hold", lambda self, at: None if at == layer else hold(self, at))
        with kit.SlowBackend() as backend:
            backend.delay_s = 0.03  # no busy machine is as late as that
            wrong = load(kit.engine(model, backend), store, ids, 0, 80)
        assert np.isnan(wrong.logits).all()

    def test_kv_zeroed_is_noticed(self, kit):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, full = kit.stored(model, ids)
        with CpuBackend() as backend:
            engine = kit.engine(model, backend)
            with store.open(store.lookup(engine.identity, ids), 0, 80) as run:
                run.memory[:] = 0
            wrong = load(engine, store, ids, 0, 80)
        assert np.abs(wrong.logits - full.logits).max() > 1e-2

    def test_poison_reaches_the_logits(self, kit):
        model, ids = kit.model(), kit.ids(TOKENS)
        with CpuBackend() as backend:
            engine = kit.engine(model, backend)
            engine.prefill(ids)
            engine.kv.poison(70)
            assert np.isnan(engine.prefill(ids, 80).logits).all()


class TestFaults:
    """Failures one by one; many at random are in `test_faults`."""

    @pytest.mark.parametrize("mode", ["bulk", "layered"])
    @pytest.mark.parametrize("layer", range(4))
    def test_a_copy_that_raises_costs_a_recompute_and_nothing_else(self, kit, layer, mode):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, full = kit.stored(model, ids)
        with kit.FailingBackend(layer) as backend:
            engine = kit.engine(model, backend)
            engine.prefill(ids[:13])
            engine.poison(13)
            with store.open(store.lookup(engine.identity, ids), 13, 80) as run:
                result = engine.prefill(ids, 13, run, mode=mode)
            ((failure),) = result.failures
            assert (failure.layer, failure.tier, failure.reason) == (layer, "host", "copy failed: link down")
            assert result.fell_back
            assert (result.loaded_tokens, result.computed_tokens) == (0, TOKENS - 13)
            assert [(p.kind, p.start, p.end) for p in result.passes] == [("recompute", 13, TOKENS)]
            assert result.first_token == full.first_token
            np.testing.assert_allclose(result.logits, full.logits, rtol=0, atol=1e-4)
            assert engine.held_tokens == TOKENS
            # Nothing of the failed load is left: the same engine loads again, and the source is free.
            assert load(engine, store, ids, 0, 80, mode=mode).first_token == full.first_token
            assert kit.freed(store)
            assert engine.pool.quarantined == 0
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)

    def test_is_raised_for_those_who_want_it_and_the_resident_tokens_stay(self, kit):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, full = kit.stored(model, ids)
        with kit.FailingBackend(2) as backend:
            engine = kit.engine(model, backend)
            engine.prefill(ids[:13])
            with store.open(store.lookup(engine.identity, ids), 13, 80) as run:
                with pytest.raises(LoadError, match="link down") as caught:
                    engine.prefill(ids, 13, run, on_failure="raise")
                assert caught.value.layer == 2
            assert engine.held_tokens == 13
            with pytest.raises(InputError, match="not on the device"):
                engine.prefill(ids, 80)
            assert engine.prefill(ids, 13).first_token == full.first_token

    def test_a_late_copy_finds_its_block_in_quarantine_and_the_answer_in_another(self, kit):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, full = kit.stored(model, ids)
        with kit.StuckBackend(layer=1) as backend:

            def until_reached(*_):
                assert backend.reached.wait(10)

            engine = kit.engine(model, backend)
            engine.prefill(ids[:13])
            before = engine.kv
            with store.open(store.lookup(engine.identity, ids), 13, 80) as run:
                # However busy the machine, the copy stands still before anybody asks for it.
                hook = model.model.layers[0].register_forward_pre_hook(until_reached)
                result = engine.prefill(ids, 13, run, deadline_s=0.05)
                hook.remove()
            assert (result.failures[0].layer, result.passes[0].start) == (1, 13)
            assert result.first_token == full.first_token
            np.testing.assert_allclose(result.logits, full.logits, rtol=0, atol=1e-4)
            assert engine.kv is not before
            assert engine.pool.quarantined_bytes == before.region.nbytes
            assert store.clear() == 1
            # What the late copy then writes is not what the engine holds.
            backend.go.set()
            assert kit.freed(store)
            assert engine.pool.quarantined == 0
            again = engine.prefill(ids, TOKENS - 1)
            np.testing.assert_allclose(again.logits, full.logits, rtol=0, atol=1e-4)

    def test_an_error_of_the_model_itself_leaves_no_hook_and_no_pin(self, kit, monkeypatch):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, full = kit.stored(model, ids)

        def broken(*args, **kwargs):
            raise ArithmeticError("model broke")

        with kit.SlowBackend() as backend:
            engine = kit.engine(model, backend)
            with store.open(store.lookup(engine.identity, ids), 0, 80) as run, monkeypatch.context() as patch:
                patch.setattr(model.model.layers[1].mlp, "forward", broken)
                with pytest.raises(ArithmeticError, match="model broke"):
                    engine.prefill(ids, 0, run)
            assert engine.held_tokens == 0
            assert engine.prefill(ids).first_token == full.first_token
            assert kit.freed(store)
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "kind", "changes"),
        [
            ("layer_types", "qwen2", {"layer_types": ["full_attention", "chunked_attention"] * 2}),
            ("sliding_window", "qwen2", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}),
            ("use_bidirectional_attention", "llama", {"use_bidirectional_attention": True}),
            ("rope_parameters.rope_type", "llama", {"rope_parameters": {"rope_type": "dynamic"}}),
            (
                "rope_parameters.rope_type",
                "llama",
                {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            ),
            ("rope_parameters.rope_type", "llama", {"rope_parameters": None}),
        ],
    )
    def test_a_kind_it_does_not_run_is_refused_by_its_field(self, kit, field, kind, changes):
        model = kit.model(kind)
        for name, value in changes.items():
            setattr(model.config, name, value)
        with pytest.raises(InputError) as caught:
            adapter.layout_of(model)
        assert caught.value.field == field

    def test_an_unknown_kind_is_refused(self, kit):
        model = kit.model()
        model.config.model_type = "mamba"
        with pytest.raises(InputError) as caught:
            adapter.layout_of(model)
        assert caught.value.field == "model_type"

    def test_a_model_in_training_mode_is_refused(self, kit):
        with CpuBackend() as backend, pytest.raises(InputError, match="eval"):
            kit.engine(kit.model().train(), backend)

    @pytest.mark.parametrize(
        ("field", "ids", "resident"),
        [
            ("token_ids", [], 0),
            ("token_ids", [1] * 129, 0),
            ("token_ids", [-1], 0),
            ("token_ids", [[1, 2], [3, 4]], 0),
            ("resident", [1, 2, 3], 3),
            ("resident", [1, 2, 3], -1),
            ("resident", [1, 2, 3], 2),
        ],
    )
    def test_a_bad_request_is_refused(self, kit, field, ids, resident):
        with CpuBackend() as backend, pytest.raises(InputError) as caught:
            kit.engine(kit.model(), backend).prefill(ids, resident)
        assert caught.value.field == field

    def test_a_run_that_is_not_the_prompts_is_refused(self, kit):
        model, ids = kit.model(), kit.ids(TOKENS)
        store, _ = kit.stored(model, ids)
        with CpuBackend() as backend:
            engine = kit.engine(model, backend)
            other = adapter.TransformersEngine(model, backend, 128, name="tiny", weights_revision="seed-1")
            hit = store.lookup(engine.identity, ids)
            with store.open(hit, 0, 80) as run:
                for bad in (ids[::-1].copy(), ids[:80], ids[:60]):
                    with pytest.raises(InputError, match="load"):
                        engine.prefill(bad, 0, run)
                with pytest.raises(InputError, match="identity"):
                    other.prefill(ids, 0, run)
            with store.open(hit, 8, 80) as run, store.open(hit, 0, 16) as other:
                engine.prefill(ids[:16])
                for resident, runs in ((9, run), (0, [run, other]), (0, [other, run])):
                    with pytest.raises(InputError, match="load"):
                        engine.prefill(ids, resident, runs)
        assert store.clear() == 0

    def test_only_kv_that_is_held_can_be_stored(self, kit):
        with CpuBackend() as backend:
            engine = kit.engine(kit.model(), backend)
            engine.prefill(kit.ids(20))
            with pytest.raises(InputError, match="held"):
                engine.layer_bytes(0, 21)
            engine.poison(10)
            with pytest.raises(InputError, match="held"):
                engine.layer_bytes(0, 11)


class TestIdentity:
    def test_says_what_the_kv_is(self, kit):
        identity = adapter.identity_of(kit.model("qwen3", torch.bfloat16), "tiny", "r1", "lora-a")
        assert identity.layout == KvLayout(4, 2, 24, 24, 2).name
        assert (identity.kv_dtype, identity.adapter, identity.tp_size) == ("bfloat16", "lora-a", 1)

    def test_follows_the_rotary_settings(self, kit):
        identities = {
            adapter.identity_of(kit.model(rope_parameters=rope), "tiny", "r1").positional
            for rope in (
                {"rope_type": "default", "rope_theta": 1e4},
                {"rope_type": "default", "rope_theta": 5e5},
                {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
                {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            )
        }
        assert len(identities) == 4

    @pytest.mark.parametrize(
        "change",
        [
            {"rms_norm_eps": 1e-5},
            {"hidden_act": "gelu"},
            {"attention_bias": True},
            {"mlp_bias": True},
            {"intermediate_size": 128},
            {"hidden_size": 96, "head_dim": 16},
            {"vocab_size": 200},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_follows_what_numbers_depend_on(self, kit, change):
        ids = kit.ids(TOKENS)
        store, _ = kit.stored(kit.model(head_dim=16), ids)
        same = adapter.identity_of(kit.model(head_dim=16), "tiny", "seed-0")
        other = adapter.identity_of(kit.model(**{"head_dim": 16, **change}), "tiny", "seed-0")
        assert store.lookup(same, ids).tokens == 80
        assert store.lookup(other, ids).state == "miss"
        assert other.layout == same.layout
        assert other.positional == same.positional

    def test_does_not_follow_names_versions_and_kernels(self, kit):
        plain, other = kit.model(), kit.model(attention="eager", use_cache=False, id2label={0: "a"})
        other.config._name_or_path = "somewhere/else"
        other.config.transformers_version = "0.0"
        other.config.architectures = ["Renamed"]
        assert adapter.identity_of(plain, "tiny", "r1") == adapter.identity_of(other, "tiny", "r1")


def test_layered_hides_copies_that_bulk_exposes():
    """On a link that takes about as long per layer as the compute, bulk takes nearly twice as long."""
    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=352,
        vocab_size=256,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 256, (1536,)).numpy()
    store, end = HostStore(16), 1280
    with CpuBackend() as backend:
        engine = adapter.TransformersEngine(model, backend, 1536, name="m", weights_revision="0")
        engine.prefill(ids)
        store.put(engine.identity, ids, engine.layout, engine.layer_bytes(0, 1536))
        suffix_s = min(engine.prefill(ids, end).total_s for _ in range(3))
    with CpuBackend(end * engine.layout.bytes_per_token / suffix_s) as backend:
        engine = adapter.TransformersEngine(model, backend, 1536, name="m", weights_revision="0")
        seconds: dict[str, list[float]] = {"bulk": [], "layered": []}
        for _ in range(16):  # more of them where others keep the machine busy
            for mode, taken in seconds.items():
                taken.append(load(engine, store, ids, 0, end, mode=mode).total_s)
            if len(taken) >= 4 and min(seconds["bulk"]) > 1.5 * min(seconds["layered"]):
                break
    assert min(seconds["bulk"]) > 1.3 * min(seconds["layered"])
