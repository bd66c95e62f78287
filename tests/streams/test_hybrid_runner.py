"""A model with states from a prompt to its answer, on every executor: what is planned can be run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from kvlane.policy import LayerSpec, ModelSpec
from kvlane.policy.machine import Device, Link, Machine, Tier
from kvlane.policy.model_layer import State
from kvlane.policy.plan import EXECUTORS
from kvlane.policy.planner import Calibration, Planner
from kvlane.policy.prefill_cost import PassCost, PrefillCost
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.runner import PlanRunner
from kvlane.transfer.host import HostStore

TOKENS = 83
CHECKPOINTS = (16, 40, 64, 80)
HIDDEN, KERNEL = 64, 3


def make_model():
    torch.manual_seed(0)
    config = Lfm2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=160,
        initializer_range=0.2,
        tie_word_embeddings=False,
        block_multiple_of=16,
        conv_L_cache=KERNEL,
        layer_types=["conv", "full_attention"] * 2,
    )
    return Lfm2ForCausalLM(config).eval()


def planner_for(executor, rate):
    """1 ms a token to compute."""
    state = State(1, HIDDEN * KERNEL, 4, 1, 0, 0, 1, 1e5)
    layers = (LayerSpec(0, 0, 0, 0, 1, "linear_attention", state=state), LayerSpec(4, 2, 16, 16, 1)) * 2
    machine = Machine(
        "declared", Device("one CPU core"), {"host": Link("host", rate)}, {"host": Tier("host", "host")}, ()
    )
    cost = PassCost(1e-4, 1e-3, 0.0)
    calibration = Calibration(PrefillCost(4, cost, cost), 0.1, "declared")
    return Planner(
        ModelSpec("hybrid", layers, HIDDEN, 160, "fp32", "fp32"),
        machine,
        executor=executor,
        calibration=calibration,
    )


def save(engine, store, ids):
    """Store a prompt with its states at all checkpoints."""
    states, held = [], 0
    for end in CHECKPOINTS:
        engine.prefill(ids[:end], held)
        held = end
        rows = [tuple(np.array(part) for part in layer) for layer in engine.layer_bytes(0, end)]
        states.append([layer[2:] for layer in rows])
    layers = [
        (*layer[:2], *([np.concatenate([each[at][0] for each in states])] if layer[2:] else []))
        for at, layer in enumerate(rows)
    ]
    assert store.put(engine.identity, ids[:held], engine.layout, layers, CHECKPOINTS) == held


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("rate", [1e5, 3e5, 1e6, 1e8])
def test_every_plan_is_run(kit, executor, rate):
    model, ids = make_model(), kit.ids(TOKENS)
    with CpuBackend() as backend:
        engine, store = kit.engine(model, backend), HostStore(kit.unit, checksums=True)
        full = engine.prefill(ids)
        save(engine, store, ids)
        engine.poison()
        answer = PlanRunner(engine, planner_for(executor, rate), [store]).run(ids)
        assert not answer.result.fell_back
        assert [(part.start, part.end) for part in answer.result.parts] == [
            (segment.start, segment.end) for segment in answer.plan.load
        ]
        assert answer.result.loaded_bytes == answer.plan.load_bytes
        assert answer.plan.load or rate < 1e6
        assert answer.result.first_token == full.first_token
        np.testing.assert_allclose(answer.result.logits, full.logits, rtol=0, atol=1e-4)


class DiskStore(HostStore):
    tier = "disk"


@pytest.mark.parametrize("kind", ["window", "states"])
def test_a_run_that_arrived_is_no_prefix_where_it_lacks_what_the_failed_one_was_to_bring(kit, kind):
    """The first brings no state, and of a window only what the whole load's end sees."""
    model = make_model() if kind == "states" else kit.model("mistral", sliding_window=16)
    ids = kit.ids(TOKENS)
    with CpuBackend() as backend:
        engine = kit.engine(model, backend)
        host, disk = (store(kit.unit, checksums=True) for store in (HostStore, DiskStore))
        engine.prefill(ids[:80])
        for store in (host, disk):
            engine.save(store, ids, 80)
        full = engine.prefill(ids)
        engine.poison()
        faulty = kit.FaultyStore(disk, "standing still", 3)
        runs = [
            store.open(store.lookup(engine.identity, ids), *ends, load_end=80)
            for store, ends in ((host, (0, 72)), (faulty, (72, 80)))
        ]
        try:
            result = engine.prefill(ids, 0, runs, deadline_s=0.5)
        finally:
            faulty.go.set()
            for run in runs:
                run.close()
        assert (result.failures[0].tier, [part.whole for part in result.parts]) == ("disk", [True, False])
        assert result.passes[-1].start == 0
        assert result.first_token == full.first_token
        np.testing.assert_allclose(result.logits, full.logits, rtol=0, atol=1e-4)
