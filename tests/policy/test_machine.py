"""A machine profile: read with its units, or refused in one line that names the field."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvlane.policy import InputError, Machine, load_machine, machine_names

GOOD = """
name = "workstation"

[device]
name = "Some GPU"
memory = "24 GB"
memory_rate = "936 GB/s"
memory_efficiency = 0.75
source = "its data sheet"

[device.peak]
bf16 = "142 TFLOP/s"
fp8 = "284 TFLOP/s"

[device.interconnect]
rate = "400 Gb/s"
latency = "5 us"

[[prefill]]
engine = "vllm"
dtype = "bf16"
efficiency = 0.6
attention_efficiency = 0.5
pass_overhead = "1.5 ms"
basis = "assumption"

[[prefill]]
engine = "transformers"
dtype = "bf16"
efficiency = 0.3

[links.pcie]
rate = "25 GB/s"
per_copy = "4 us"
latency = "20 us"
per_event = "6 us"
first_use = "0.4 s"
ceiling = "32 GB/s"
basis = "calibration"
source = "a probe"

[links.network]
rate_table = [["64 KiB", "0.5 GB/s"], ["1 MiB", "5 GB/s"], ["16 MiB", "10 GB/s"]]
latency = "1 ms"
ceiling = "12.5 GB/s"

[tiers.host]
link = "pcie"
run = "load_unit"
runs_per_layer = 2
per_token = "0.25 us"

[tiers.remote]
link = "network"
layout = "chunk_major"
run = 256

[tiers.pinned]
link = "pcie"
"""


def test_every_field_of_a_profile_is_read_in_plain_si(tmp_path: Path) -> None:
    path = tmp_path / "workstation.toml"
    path.write_text(GOOD)
    machine = Machine.from_toml(path)
    assert machine == load_machine(path) == load_machine(str(path))
    device = machine.device
    assert (machine.name, device.name, device.origin) == ("workstation", "Some GPU", "its data sheet")
    assert (device.memory_bytes, device.memory_bytes_per_s, device.memory_efficiency) == (24e9, 936e9, 0.75)
    assert device.peak_flops == {"bf16": 142e12, "fp8": 284e12}
    assert device.interconnect_bytes_per_s == 50e9
    assert device.interconnect_latency_s == pytest.approx(5e-6)
    pcie, network = machine.links["pcie"], machine.links["network"]
    assert (pcie.rate_bytes_per_s, pcie.ceiling_bytes_per_s) == (25e9, 32e9)
    assert (pcie.per_copy_s, pcie.latency_s) == pytest.approx((4e-6, 20e-6))
    assert (pcie.per_event_s, pcie.first_use_s) == pytest.approx((6e-6, 0.4))
    assert (pcie.source, pcie.origin) == ("calibration", "a probe")
    assert network.rate_table == ((65536, 0.5e9), (2**20, 5e9), (2**24, 10e9))
    assert (network.per_copy_s, network.source) == (0, "profile")
    assert (network.per_event_s, network.first_use_s) == (0, 0)
    host, remote, pinned = (machine.tier(name) for name in ("host", "remote", "pinned"))
    assert (host.run_tokens, host.runs_per_layer, host.layout) == (0, 2, "layer_major")
    assert (host.per_token_s, remote.per_token_s) == pytest.approx((0.25e-6, 0))
    assert (remote.run_tokens, remote.runs_per_layer, remote.layout) == (256, 1, "chunk_major")
    assert pinned.run_tokens is None
    vllm, transformers = machine.prefill
    assert (vllm.efficiency, vllm.attention_efficiency, vllm.source) == (0.6, 0.5, "assumption")
    assert vllm.pass_overhead_s == pytest.approx(1.5e-3)
    # One stated efficiency holds for attention as well.
    assert (transformers.efficiency, transformers.attention_efficiency) == (0.3, 0.3)


BROKEN = [
    # field that must be named, what is replaced, what stands there instead
    ("machine", "[device]", "[device"),
    ("name", 'name = "workstation"', ""),
    ("machine", 'name = "workstation"', "name = 5"),
    ("colour", 'name = "workstation"', 'name = "workstation"\ncolour = "red"'),
    ("machine.device", 'memory = "24 GB"', ""),
    ("memory_rate", 'memory_rate = "936 GB/s"', ""),
    ("machine.device.memory", 'memory = "24 GB"', "memory = 24"),
    ("clock", 'memory = "24 GB"', 'memory = "24 GB"\nclock = "1 GHz"'),
    ("device.memory", '"24 GB"', '"24"'),
    ("device.memory_rate", '"936 GB/s"', '"936 GB"'),
    ("device.memory_efficiency", "0.75", "1.2"),
    ("device.memory_efficiency", "0.75", "0.0"),
    ("device.memory_efficiency", "0.75", "nan"),
    ("machine.device.memory_efficiency", "0.75", "true"),
    ("device.peak.bf17", 'bf16 = "142', 'bf17 = "142'),
    ("device.peak.bf16", "142 TFLOP/s", "142 TB/s"),
    ("device.interconnect.rate", "400 Gb/s", "400"),
    ("device.interconnect.latency", '"5 us"', '"5"'),
    ("prefill[0].efficiency", "efficiency = 0.6", "efficiency = 1.2"),
    ("prefill[0].efficiency", "efficiency = 0.6", "efficiency = 0"),
    ("prefill[0].attention_efficiency", "attention_efficiency = 0.5", "attention_efficiency = -0.5"),
    ("prefill[1].efficiency", "efficiency = 0.3", "efficiency = inf"),
    ("prefill[0].dtype", 'dtype = "bf16"\nefficiency = 0.6', 'dtype = "bfloat16"\nefficiency = 0.6'),
    ("prefill[0].pass_overhead", '"1.5 ms"', '"1.5 GB"'),
    ("basis", 'basis = "assumption"', 'basis = "guess"'),
    ("engine", 'engine = "transformers"', ""),
    ("links.pcie.rate", 'rate = "25 GB/s"', 'rate = "25"'),
    ("links.pcie.rate", 'rate = "25 GB/s"', 'rate = "0 GB/s"'),
    ("links.pcie.rate", 'rate = "25 GB/s"', 'rate = "33 GB/s"'),
    ("links.pcie.rate", 'rate = "25 GB/s"\nper_copy = "4 us"\n', ""),
    ("links.pcie.rate", 'per_copy = "4 us"', 'rate_table = [["4 KiB", "1 GB/s"]]'),
    ("links.pcie.ceiling", '"32 GB/s"', '"32"'),
    ("links.pcie.per_copy", '"4 us"', '"4"'),
    ("links.pcie.per_copy", '"4 us"', '"-4 us"'),
    ("links.pcie.latency", '"20 us"', '"20 GB"'),
    ("links.pcie.per_event", '"6 us"', '"6"'),
    ("links.pcie.first_use", '"0.4 s"', '"-0.4 s"'),
    ("tiers.host.per_token", '"0.25 us"', '"0.25 B"'),
    ("links.network.per_copy", 'latency = "1 ms"', 'per_copy = "4 us"'),
    ("links.network.rate_table", '["1 MiB", "5 GB/s"]', '["16 KiB", "5 GB/s"]'),
    ("links.network.rate_table", '["1 MiB", "5 GB/s"]', '["64 KiB", "5 GB/s"]'),
    ("links.network.rate_table", '["1 MiB", "5 GB/s"]', '["1 MiB", "5"]'),
    ("links.network.rate_table", '["64 KiB", "0.5 GB/s"]', '["0 B", "0.5 GB/s"]'),
    ("machine.links[...].rate_table", '["1 MiB", "5 GB/s"]', '["1 MiB"]'),
    ("links.network.rate", "10 GB/s", "13 GB/s"),
    # Every row is a sample, and none may be above what the link can do.
    ("links.network.rate", '["1 MiB", "5 GB/s"]', '["1 MiB", "13 GB/s"]'),
    ("tiers.host.link", 'link = "pcie"\nrun = "load_unit"', 'link = "pci"\nrun = "load_unit"'),
    ("layout", '"chunk_major"', '"block_major"'),
    ("tiers.remote.run", "run = 256", "run = 0"),
    ("run", "run = 256", 'run = "paged"'),
    ("tiers.host.runs_per_layer", "runs_per_layer = 2", "runs_per_layer = 3"),
    ("link", '[tiers.pinned]\nlink = "pcie"', "[tiers.pinned]"),
]


@pytest.mark.parametrize(("field", "old", "new"), BROKEN)
def test_a_broken_profile_names_the_field_in_one_line(field: str, old: str, new: str) -> None:
    broken = GOOD.replace(old, new, 1)
    assert broken != GOOD
    with pytest.raises(InputError) as caught:
        Machine.from_text(broken, "profile.toml")
    error = caught.value
    assert "\n" not in str(error)
    if "." in field or field == "machine":
        assert error.field.startswith(field)
    else:
        # A key that is unknown or missing stands in the sentence, and the table it belongs to is the field.
        assert field in error.problem or error.field.endswith(f".{field}")
        assert error.field.startswith("machine")


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"\x7fELF", b"a = ", b"[[[[", b'{"json": 1}', b""])
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "profile.toml"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"profile\.toml") as caught:
        Machine.from_toml(path)
    assert caught.value.field == "machine"
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml"):
        load_machine(tmp_path / "nowhere.toml")
    with pytest.raises(InputError) as caught:
        Machine.from_toml(tmp_path)
    assert caught.value.field == "machine"


def test_an_unknown_tier_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="host, remote, pinned"):
        Machine.from_text(GOOD, "x").tier("cxl")


def test_a_stated_rate_replaces_all_that_was_known_of_the_links() -> None:
    machine = Machine.from_text(GOOD, "x")
    linked = machine.with_link_rate(7e9)
    for link in linked.links.values():
        assert (link.rate_bytes_per_s, link.source) == (7e9, "explicit")
        # A stated achieved rate holds the cost of its copies already.
        assert (link.per_copy_s, link.latency_s, link.rate_table) == (0, 0, ())
        assert (link.per_event_s, link.first_use_s) == (0, 0)
    assert machine.links["pcie"].rate_bytes_per_s == 25e9
    assert (linked.device, linked.prefill) == (machine.device, machine.prefill)
    for name, tier in machine.tiers.items():
        assert linked.tiers[name] == replace(tier, per_token_s=0.0)


def test_a_rate_stated_for_one_tier_leaves_the_other_links() -> None:
    machine = Machine.from_text(GOOD, "x")
    linked = machine.with_link_rate(7e9, "remote")
    assert linked.links["network"].rate_bytes_per_s == 7e9
    assert linked.links["pcie"] == machine.links["pcie"]
    assert linked.tiers["host"] == machine.tiers["host"]
    with pytest.raises(InputError, match="cxl"):
        machine.with_link_rate(7e9, "cxl")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_stated_rate_is_above_zero_and_finite(rate: float) -> None:
    with pytest.raises(InputError):
        Machine.from_text(GOOD, "x").with_link_rate(rate)


def test_an_engine_or_dtype_that_was_never_measured_is_an_assumption_and_says_so() -> None:
    machine = Machine.from_text(GOOD, "x")
    known = machine.efficiency_for("bf16", "transformers")
    assert (known.efficiency, known.source) == (0.3, "profile")
    other_engine = machine.efficiency_for("bf16", "sglang")
    assert (other_engine.efficiency, other_engine.source) == (0.6, "assumption")
    assert "vllm" in other_engine.origin
    assert "sglang" in other_engine.origin
    other_dtype = machine.efficiency_for("fp8", "transformers")
    assert other_dtype.source == "assumption"
    assert "fp8" in other_dtype.origin


def test_a_machine_without_any_efficiency_cannot_price_prefill() -> None:
    start, end = GOOD.index("[[prefill]]"), GOOD.index("[links.pcie]")
    # TOML has no empty array of tables; a plain empty array stands before the first table.
    bare = Machine.from_text("prefill = []\n" + GOOD[:start] + GOOD[end:], "x")
    with pytest.raises(InputError, match="prefill"):
        bare.efficiency_for("bf16", "vllm")


def test_every_built_in_machine_loads_by_any_spelling_of_its_name() -> None:
    assert "h100-sxm" in machine_names()
    for name in machine_names():
        machine = load_machine(name)
        assert machine.name == name
        assert machine == load_machine(name.upper())
        assert machine.tiers
        for tier in machine.tiers.values():
            link = machine.links[tier.link]
            assert link.origin, "a number stands beside the address it came from"
            if link.source != "assumption":
                assert link.ceiling_bytes_per_s is not None
            assert link.rate_bytes_per_s <= (link.ceiling_bytes_per_s or math.inf)
        assert all(row.origin for row in machine.prefill)
