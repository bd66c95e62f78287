"""Plans of several parts on the command line, and the costs they rest on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlane.policy import Machine, Request, decide, load_machine, load_model

Kvlane = Callable[..., "subprocess.CompletedProcess[str]"]
ASKED = ["decide", "--model", "llama-3.1-8b", "--machine", "h100-sxm", "--prompt-tokens", "12370"]
PROFILE = """
name = "events"

[device]
name = "Some GPU"
memory = "24 GB"
memory_rate = "936 GB/s"

[device.peak]
bf16 = "142 TFLOP/s"

[[prefill]]
engine = "vllm"
dtype = "bf16"
efficiency = 0.6

[links.pcie]
rate = "5 GB/s"
per_event = "10 ms"
first_use = "0.4 s"
source = "made up"

[tiers.host]
link = "pcie"
"""


def test_the_front_is_said_to_be_computed_beside_the_load(kvlane: Kvlane) -> None:
    options = [*ASKED, "--hit", "host=12368", "--executor", "two_ended", "--link", "5 GB/s"]
    run = kvlane(*options)
    assert (run.returncode, run.stderr) == (0, "")
    plan = decide(
        load_model("llama-3.1-8b"),
        load_machine("h100-sxm").with_link_rate(5e9),
        Request(12370, {"host": 12368}),
        executor="two_ended",
    )
    (segment,) = plan.load
    assert segment.start > 0
    assert run.stdout.startswith(plan.reason)
    assert f"beside the {segment.start} tokens before it computed in" in plan.reason
    assert f"{segment.start:,} to 12,368 from host" in run.stdout
    assert (
        f"recompute       {segment.start + 2:,} tokens, {segment.start:,} of them beside the load"
        in run.stdout
    )
    printed = json.loads(kvlane(*options, "--json").stdout)
    assert printed == plan.to_dict()
    assert printed["load"] == [{"tier": "host", "start": segment.start, "end": 12368, "bytes": segment.bytes}]
    assert printed["estimates"]["split"]["front_s"] > 0


def test_two_hits_are_loaded_at_once(kvlane: Kvlane) -> None:
    options = [*ASKED, "--hit", "host=8192", "--hit", "cxl=12368", "--link", "5 GB/s"]
    run = kvlane(*options)
    assert (run.returncode, run.stderr) == (0, "")
    printed = json.loads(kvlane(*options, "--json").stdout)
    first, second = printed["load"]
    assert (first["tier"], first["start"], second["tier"], second["end"]) == ("host", 0, "cxl", 12368)
    assert first["end"] == second["start"]
    assert f"0 to {first['end']:,} from host and {first['end']:,} to 12,368 from cxl" in run.stdout
    assert f"from host ({first['end']}) and cxl ({12368 - first['end']})" in run.stdout.splitlines()[0]
    assert "link.pcie5-x16" in run.stdout
    assert "link.cxl" in run.stdout


def test_groups_of_layers_follow_from_the_price_of_an_event(
    kvlane: Kvlane, tmp_path: Path, shared: Path
) -> None:
    profile = tmp_path / "events.toml"
    profile.write_text(PROFILE)
    options = [*ASKED[:3], "--machine", profile, "--prompt-tokens", "8192", "--hit", "host=8176"]
    run = kvlane(*options, "--executor", "layered", "--json")
    assert run.stderr == ""
    printed = json.loads(run.stdout)
    assert printed["group_layers"] > 1
    words = kvlane(*options, "--executor", "layered").stdout
    assert f"an event for {printed['group_layers']} layers" in words
    assert f"in groups of {printed['group_layers']} layers" in words.splitlines()[0]
    assert json.loads(kvlane(*options, "--json").stdout)["group_layers"] == 1

    shown = kvlane("machines", profile).stdout
    assert "10.0 ms a group of layers" in shown
    assert "400.0 ms more for the first from a peer" in shown
    link = json.loads(kvlane("machines", profile, "--json").stdout)["links"]["pcie"]
    assert (link["per_event_s"], link["first_use_s"]) == (1e-2, 0.4)


@pytest.mark.parametrize("executor", ["bulk", "layered", "two_ended"])
def test_every_executor_is_offered(kvlane: Kvlane, executor: str) -> None:
    run = kvlane(*ASKED, "--hit", "host=12368", "--executor", executor)
    assert run.returncode == 0
    assert f"({executor} executor)" in run.stdout
    assert executor in kvlane("decide", "--help").stdout


def test_the_built_in_machines_state_no_price_of_an_event() -> None:
    # What nobody measured is not made up: until then a layer has an event of its own.
    assert Machine.from_text(PROFILE, "x").links["pcie"].per_event_s == 1e-2
    assert {link.per_event_s for link in load_machine("h100-sxm").links.values()} == {0.0}
