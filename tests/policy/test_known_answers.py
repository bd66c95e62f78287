"""Right answers from public bug reports, through the public interface: bytes, usable tokens, gains, pairs, queues.

Those about other kinds of layers stand with `kvlane models`; units, small copies, fits and overlap in the tests of
those parts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlane.policy import (
    Calibration,
    Device,
    Link,
    Machine,
    ModelSpec,
    PassCost,
    Planner,
    PrefillCost,
    Request,
    Tier,
    decide,
    load_machine,
    load_model,
)
from kvlane.policy.model import attention_pairs, gain_tokens, usable_tokens
from kvlane.policy.pipeline import closed_form, with_enqueue


@pytest.fixture
def known(shared: Path) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((shared / "known_answers.json").read_text())
    return answers


@pytest.fixture
def kv_bytes(known: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case["id"]: case for case in known["kv_bytes"]}


def decoder(case: dict[str, Any], **changes: Any) -> ModelSpec:
    return ModelSpec.from_config(
        {
            "model_type": "qwen3",
            "num_hidden_layers": case["layers"],
            "hidden_size": case.get("hidden", 4096),
            "num_attention_heads": case.get("heads", 32),
            "num_key_value_heads": case["kv_heads"],
            "head_dim": case["head_dim"],
            "intermediate_size": 8192,
            "vocab_size": 1000,
            **changes,
        }
    )


def test_head_dim_is_a_field_and_not_hidden_over_heads(kv_bytes: dict[str, dict[str, Any]]) -> None:
    case = kv_bytes["explicit_head_dim"]
    model = decoder(case)
    assert model.kv_bytes_per_token() == case["bytes_per_token"]
    assert model.kv_bytes_per_token() * case["tokens"] == case["bytes"]
    assert load_model("qwen3-4b").kv_bytes_per_token() == case["bytes_per_token"]
    assert decoder(case, head_dim=None).kv_bytes_per_token() != case["bytes_per_token"]


def test_grouped_queries_are_a_quarter_of_multi_head(kv_bytes: dict[str, dict[str, Any]]) -> None:
    case = kv_bytes["mha_vs_gqa"]
    for kind, built_in in (("mha", "llama-2-7b"), ("gqa", "llama-3.1-8b")):
        assert decoder(case[kind]).kv_bytes_per_token() == case[kind]["bytes_per_token"]
        assert load_model(built_in).kv_bytes_per_token() == case[kind]["bytes_per_token"]
    # Left out, the field means multi-head attention.
    assert (
        decoder(case["gqa"], num_key_value_heads=None).kv_bytes_per_token() == case["mha"]["bytes_per_token"]
    )


@pytest.mark.parametrize("tp", [4, 8])
def test_fewer_kv_heads_than_ranks_are_replicated(kv_bytes: dict[str, dict[str, Any]], tp: int) -> None:
    case = kv_bytes["replicated_heads"]
    model = decoder(case)
    assert model.kv_bytes_per_token(tp=tp) == case[f"tp{tp}_per_rank"]
    assert model.kv_bytes_per_token(tp=tp) * tp == case[f"tp{tp}_sum"]


def test_usable_tokens(known: dict[str, Any]) -> None:
    model, machine = load_model("llama-3.1-8b"), load_machine("h100-sxm")
    for case in known["usable_tokens"]["cases"]:
        prompt, unit, tail = case["n"], case["g"], case["tail"]
        # "hit at least n": more stored than the prompt is long adds nothing.
        assert usable_tokens(prompt, prompt, unit, tail) == case["usable"]
        assert usable_tokens(prompt + 10_000, prompt, unit, tail) == case["usable"]
        plan = decide(
            model, machine, Request(prompt, {"host": prompt}, load_unit_tokens=unit, tail_tokens=tail)
        )
        assert plan.usable_tokens == case["usable"]


def test_gain_tokens(known: dict[str, Any]) -> None:
    model, machine = load_model("llama-3.1-8b"), load_machine("h100-sxm")
    for case in known["gain_tokens"]["cases"]:
        hits, resident = tuple(case["hits"]), case["resident"]
        assert gain_tokens(hits, resident) == case["gain"]
        request = Request(20_000, {"host": hits}, resident_tokens=resident, load_unit_tokens=1)
        load = decide(model, machine, request).estimates["load"]
        assert (load.load_tokens if load else 0) == case["gain"]


def test_an_extension_attends_over_its_cached_prefix(known: dict[str, Any]) -> None:
    case = known["attention_pairs"]
    assert attention_pairs(case["prefix"], case["new"]) == case["pairs"]
    # The same through the price of a pass, at one second a pair.
    per_pair = PassCost(overhead_s=0.0, token_s=0.0, pair_s=1.0)
    assert per_pair.work_s(case["prefix"], case["new"]) == case["pairs"]


def test_loads_queue_on_one_link_until_recomputing_is_sooner(known: dict[str, Any]) -> None:
    case = known["serial_queue"]
    model = load_model("llama-3.1-8b")
    stored = round(case["bytes_each"] / model.kv_bytes_per_token())
    link = Link("link", case["bytes_each"] / case["seconds_each"])
    assert link.rate_bytes_per_s == pytest.approx(case["rate_gb_per_s"] * 1e9, rel=1e-3)
    machine = Machine("devices", Device("one each"), {"link": link}, {"host": Tier("host", "link")}, ())
    per_token = PassCost(0.0, case["with_recompute_s"] / (stored + 1), 0.0)
    fit = Calibration(PrefillCost(32, per_token, per_token), 0.01, "given")
    planner = Planner(model, machine, calibration=fit, tie_margin=0.0)
    queued, loads, paths = 0.0, [], []
    for _ in range(case["requests"]):
        plan = planner.decide(Request(stored + 1, {"host": stored}, link_queue_s={"host": queued}))
        load = plan.estimates["load"]
        assert load is not None
        loads.append(load.ttft_s)
        paths.append(plan.path)
        queued += case["seconds_each"]
    assert loads[-1] == pytest.approx(case["last_s"], rel=1e-3)
    assert sum(loads) / len(loads) == pytest.approx(case["mean_s"], rel=1e-3)
    later = case["requests"] - case["load_first"]
    assert paths == ["load"] * case["load_first"] + ["recompute"] * later


def test_enqueueing_before_the_forward_is_exposed_whole(known: dict[str, Any]) -> None:
    case = known["enqueue_on_critical_thread"]
    layers, each_s = case["layers"], case["pools"] * case["ms_each"] / 1e3
    copies, computes = [0.0] * layers, [1e-3] * layers
    plain = closed_form(copies, computes)
    exposed = closed_form(*with_enqueue(copies, computes, each_s, "before")) - plain
    assert exposed * 1e3 == pytest.approx(case["exposed_ms"])
    # Spread over the compute thread it costs as much; on its own thread only the last layers wait.
    on_compute = closed_form(*with_enqueue(copies, computes, each_s, "compute_thread")) - plain
    assert on_compute == pytest.approx(exposed)
    assert closed_form(*with_enqueue(copies, computes, each_s, "own_thread")) < plain + exposed


def test_what_is_prefetched_is_the_next_layer_with_kv(known: dict[str, Any]) -> None:
    case = known["next_layer_with_kv"]
    attention = load_model("llama-3.1-8b").layers[0]
    mamba = next(layer for layer in load_model("nemotron-3-nano-30b-a3b").layers if layer.kind == "mamba")
    kinds = {"attention": attention, "mamba": mamba}
    model = replace(load_model("llama-3.1-8b"), layers=tuple(kinds[kind] for kind in case["layers"]))
    assert model.next_layer_with_kv(case["after"]) == case["prefetch"]
    assert model.next_layer_with_kv(case["prefetch"]) is None
