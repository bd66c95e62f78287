"""The decision the project is about: 12,370 tokens of Llama-3.1-8B on one H100, everything stored on the host.

Asked on the command line, of the installed command, and of the Python API: the same answer in the same words.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlane.policy import Estimate, Plan, Request, decide, load_machine, load_model
from kvlane.policy.plan import Path as PlanPath

Kvlane = Callable[..., "subprocess.CompletedProcess[str]"]
USABLE = 12368


@pytest.fixture
def config(shared: Path) -> Path:
    return shared / "models" / "Meta-Llama-3.1-8B.json"


def asked(model: str | Path, rate: str | None = None, executor: str | None = None) -> list[str | Path]:
    command: list[str | Path] = ["decide", "--model", model, "--machine", "h100-sxm"]
    command += ["--prompt-tokens", "12370", "--hit", "host=12368"]
    command += ["--link", rate] if rate else []
    return command + (["--executor", executor] if executor else [])


def plan_at(model: str | Path, bytes_per_s: float, executor: str) -> Plan:
    machine = load_machine("h100-sxm").with_link_rate(bytes_per_s)
    request = Request(prompt_tokens=12370, hits={"host": 12368})
    return decide(load_model(model), machine, request, executor=executor)


def estimate_of(plan: Plan, path: PlanPath) -> Estimate:
    estimate = plan.estimates[path]
    assert estimate is not None
    return estimate


def test_it_prints_what_a_token_weighs_and_what_is_moved(config: Path, kvlane: Kvlane) -> None:
    run = kvlane(*asked(config))
    assert (run.returncode, run.stderr) == (0, "")
    assert "131,072 bytes of KV per token" in run.stdout
    assert "1.62 GB" in run.stdout
    assert "12,368 tokens" in run.stdout
    # The sentence that decides comes first.
    assert run.stdout.startswith("load of 12368 tokens (1.62 GB) from host ")


def test_the_installed_command_prints_the_same(config: Path, kvlane: Kvlane) -> None:
    command = Path(sys.executable).with_name("kvlane")
    if not command.exists():
        pytest.skip("the kvlane command is not installed beside this interpreter")
    real = subprocess.run(
        [command, *asked(config)], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    here = kvlane(*asked(config))
    assert (real.returncode, real.stdout, real.stderr) == (here.returncode, here.stdout, here.stderr)


@pytest.mark.parametrize("executor", [None, "bulk"])
def test_bulk_loads_on_a_fast_link_and_recomputes_on_a_slow_one(
    config: Path, kvlane: Kvlane, executor: str | None
) -> None:
    fast = json.loads(kvlane(*asked(config, "50 GB/s", executor), "--json").stdout)
    slow = json.loads(kvlane(*asked(config, "1 GB/s", executor), "--json").stdout)
    assert (fast["executor"], fast["path"], fast["load_tokens"]) == ("bulk", "load", USABLE)
    assert (slow["executor"], slow["path"], slow["load_tokens"]) == ("bulk", "recompute", 0)
    assert fast["load_bytes"] == USABLE * 131_072
    assert fast["break_even_bytes_per_s"] > 1e9
    assert fast["break_even_bytes_per_s"] < 50e9


def test_layered_loads_nearly_everything_at_50_gb_per_s(config: Path) -> None:
    plan = plan_at(config, 50e9, "layered")
    assert plan.path in ("load", "split")
    assert plan.load_tokens >= 0.85 * USABLE


def test_layered_splits_at_5_gb_per_s_and_beats_both_pure_paths_by_far(config: Path) -> None:
    plan = plan_at(config, 5e9, "layered")
    assert plan.path == "split"
    pure_paths: tuple[PlanPath, ...] = ("load", "recompute")
    for pure in pure_paths:
        assert plan.ttft_s <= (1 - 0.23) * estimate_of(plan, pure).ttft_s
    # A split of the same prefix gains nothing where the copy is waited for.
    bulk = plan_at(config, 5e9, "bulk")
    assert bulk.path != "split"


def test_layered_recomputes_below_break_even_over_layers(config: Path) -> None:
    plan = plan_at(config, 10e6, "layered")
    assert (plan.path, plan.load) == ("recompute", ())
    # The exposed first layer of even the shortest load costs more than its tokens save.
    assert plan.break_even_bytes_per_s is not None
    assert plan.link_bytes_per_s is not None
    assert plan.link_bytes_per_s < plan.break_even_bytes_per_s / 32
    split = estimate_of(plan, "split")
    assert split.ttft_s > plan.ttft_s


@pytest.mark.parametrize("executor", ["bulk", "layered"])
@pytest.mark.parametrize(("rate", "bytes_per_s"), [("50 GB/s", 50e9), ("400 Gb/s", 50e9), ("10 MB/s", 10e6)])
def test_the_python_api_gives_the_same_answer_in_the_same_words(
    config: Path, kvlane: Kvlane, executor: str, rate: str, bytes_per_s: float
) -> None:
    printed = json.loads(kvlane(*asked(config, rate, executor), "--json").stdout)
    plan = plan_at(config, bytes_per_s, executor)
    assert printed == plan.to_dict()
    words = kvlane(*asked(config, rate, executor)).stdout
    assert words.splitlines()[0] == plan.reason == printed["reason"]
    for key in ("path", "load_tokens", "ttft_s", "kv_bytes_per_token", "load_bytes", "reason"):
        assert printed[key] == getattr(plan, key)
    paths: tuple[PlanPath, ...] = ("load", "recompute", "split")
    for path in paths:
        assert printed["estimates"][path]["ttft_s"] == estimate_of(plan, path).ttft_s


def test_every_option_reaches_the_planner(config: Path, kvlane: Kvlane) -> None:
    run = kvlane(
        *asked(config, "host=5 GB/s", "layered"),
        *("--resident", "160", "--load-unit", "32", "--prefill-chunk", "2048"),
        *("--tp", "2", "--kv-dtype", "fp8", "--engine", "sglang", "--json"),
    )
    assert run.stderr == ""
    plan = decide(
        load_model(config),
        load_machine("h100-sxm").with_link_rate(5e9, "host"),
        Request(
            prompt_tokens=12370,
            hits={"host": 12368},
            resident_tokens=160,
            load_unit_tokens=32,
            prefill_chunk_tokens=2048,
        ),
        executor="layered",
        tp=2,
        kv_dtype="fp8",
        engine="sglang",
    )
    assert json.loads(run.stdout) == plan.to_dict()
    # Half the heads of half the width on each rank.
    assert plan.kv_bytes_per_token == 131_072 / 4


def test_hits_given_per_rank_count_by_the_smallest(config: Path, kvlane: Kvlane) -> None:
    options = ["decide", "--model", config, "--machine", "h100-sxm", "--prompt-tokens", "12370", "--tp", "2"]
    by_rank = kvlane(*options, "--hit", "host=12368,6400", "--json")
    assert by_rank.stdout == kvlane(*options, "--hit", "host=6400", "--json").stdout
    assert json.loads(by_rank.stdout)["usable_tokens"] == 6400


@pytest.mark.parametrize("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B", "LLAMA-3.1-8B"])
def test_a_built_in_name_answers_as_the_file_does(config: Path, kvlane: Kvlane, name: str) -> None:
    named = json.loads(kvlane(*asked(name), "--json").stdout)
    read = json.loads(kvlane(*asked(config), "--json").stdout)
    assert (named.pop("model"), read.pop("model")) == ("llama-3.1-8b", "Meta-Llama-3.1-8B")
    assert named == read
