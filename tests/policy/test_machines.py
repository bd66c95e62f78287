"""Machine profiles: every number sourced, every fitted constant on three rows or more, nothing above its ceiling."""

import json
import math

import pytest

from kvlane.policy.catalog import load_machine, machine_aliases, machine_names
from kvlane.policy.cli import app, run_app
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link, Machine
from kvlane.policy.machine_text import shared_links

WANTED = {
    "h100-sxm h100-pcie h200-sxm h20 a100-sxm-40gb a100-sxm-80gb a100-pcie-40gb a100-pcie-80gb l40s l4 a10g rtx-3090"
    " rtx-4090 rtx-5090 rtx-pro-6000 mi300x b200-sxm gh200 gb200 gaudi3 ascend-910b rngd gb10 rtx-a6000 rtx-6000-ada"
    " v100s-pcie a800-sxm-80gb mi210 mi355x l20"
}
LINKS = {
    "pcie3-x16 pcie4-x16 pcie5-x16 nvlink-c2c cxl nvme-1 nvme-4 net-25 net-100 net-200 net-400",
}
FEWEST_ROWS = 3

MINIMAL = """
name = "mine"
[device]
name = "a device"
memory = "80 GB"
memory_rate = "2 TB/s"
[device.peak]
bf16 = "300 TFLOP/s"
[[prefill]]
engine = "vllm"
dtype = "bf16"
efficiency = 0.5
[tiers.host]
link = "pcie4-x16"
"""


def machines() -> list[Machine]:
    return [load_machine(name) for name in machine_names()]


class TestProfiles:
    def test_all_wanted_devices_and_links_are_there(self):
        assert set(" ".join(WANTED).split()) <= set(machine_names())
        assert set(" ".join(LINKS).split()) <= set(shared_links())

    @pytest.mark.parametrize("name", machine_names())
    def test_every_group_of_numbers_has_an_address(self, name):
        device = load_machine(name).device
        for group, source in device.sources.items():
            assert "https://" in source, f"{name}: {group}"

    @pytest.mark.parametrize("name", machine_names())
    def test_a_fitted_constant_stands_on_three_rows_or_is_an_assumption(self, name):
        machine = load_machine(name)
        for row in machine.prefill:
            assert row.source == "assumption" or row.rows >= FEWEST_ROWS
            assert row.origin
        for link in machine.links.values():
            assert link.source == "assumption" or link.rows >= FEWEST_ROWS
            assert link.origin

    @pytest.mark.parametrize("link", shared_links().values(), ids=lambda link: link.name)
    def test_no_copy_of_any_size_is_faster_than_its_wire(self, link):
        ceiling = link.ceiling_bytes_per_s or math.inf
        for exponent in range(6, 36):
            assert 0 < link.achieved(2.0**exponent) <= ceiling
            assert link.achieved(2.0**exponent) <= link.achieved(2.0 ** (exponent + 1)) * (1 + 1e-9)

    def test_every_machine_reaches_host_memory_and_what_lies_beyond(self):
        for machine in machines():
            assert "host" in machine.tiers
            assert len(machine.tiers) >= 2
            assert all(tier.link in machine.links for tier in machine.tiers.values())

    def test_dense_peaks_fall_with_width(self):
        for machine in machines():
            peaks = machine.device.peak_flops
            for narrow, wide in (("fp4", "fp8"), ("fp8", "bf16"), ("bf16", "fp32")):
                if narrow in peaks and wide in peaks:
                    assert peaks[narrow] >= peaks[wide]


class TestNames:
    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("H100", "h100-sxm"),
            ("h200_sxm", "h200-sxm"),
            ("A100-SXM4-40GB", "a100-sxm-40gb"),
            ("910B2", "ascend-910b"),
        ],
    )
    def test_a_device_goes_by_other_names(self, text, name):
        assert load_machine(text).name == name

    def test_no_name_means_two_machines(self):
        names = [alias for name in machine_names() for alias in (name, *machine_aliases(name))]
        assert len(names) == len(set(names))

    def test_an_unknown_name_suggests_the_nearest(self):
        with pytest.raises(InputError, match="h100-sxm"):
            load_machine("h100-smx")


class TestText:
    def test_a_tier_may_name_a_shared_link(self):
        machine = Machine.from_text(MINIMAL, "here")
        assert machine.links["pcie4-x16"] is shared_links()["pcie4-x16"]

    def test_a_link_of_its_own_goes_before_a_shared_one(self):
        own = Machine.from_text(MINIMAL + '[links.pcie4-x16]\nrate = "20 GB/s"\nsource = "me"\n', "here")
        assert own.links["pcie4-x16"].rate_bytes_per_s == 20e9

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (('"pcie4-x16"', '"pcie9"'), "tiers.host.link"),
            (("efficiency = 0.5", "efficiency = 1.5"), "efficiency"),
            (("efficiency = 0.5", "efficiency = 0.5\nexpert_efficiency = 0"), "expert_efficiency"),
            (('bf16 = "300 TFLOP/s"', 'bf17 = "300 TFLOP/s"'), "device.peak.bf17"),
            (('memory = "80 GB"', 'memory = "80"'), "device.memory"),
            (('name = "a device"', 'name = "a device"\npower = "700"'), "device.power"),
            (('name = "a device"', 'name = "a device"\ncolour = "red"'), "device"),
            (('link = "pcie4-x16"', 'link = "pcie4-x16"\nper_token = "3"'), "per_token"),
        ],
    )
    def test_what_is_amiss_is_named(self, change, field):
        with pytest.raises(InputError, match=field):
            Machine.from_text(MINIMAL.replace(*change), "here")

    def test_a_rate_above_its_ceiling_is_refused(self):
        text = MINIMAL + '[links.fast]\nrate = "70 GB/s"\nceiling = "63 GB/s"\n'
        with pytest.raises(InputError, match="ceiling"):
            Machine.from_text(text, "here")


class TestEfficiency:
    def test_sixteen_bit_formats_are_one(self):
        machine = load_machine("h100-sxm")
        assert machine.efficiency_for("fp16", "vllm") == machine.efficiency_for("bf16", "vllm")

    def test_an_engine_nobody_measured_is_assumed_to_be_like_another(self):
        row = load_machine("h100-sxm").efficiency_for("bf16", "somebody's")
        assert row.source == "assumption"
        assert row.rows == 0

    def test_a_power_limit_lowers_the_peak_by_its_cube_root(self):
        device = load_machine("rtx-3090").device
        held = device.limited_to(350 / 8)
        assert held.peak("bf16") == pytest.approx(device.peak("bf16") / 2)
        assert device.limited_to(1000) is device

    def test_narrow_weights_are_widened_where_the_device_multiplies_none(self):
        device = load_machine("a100-sxm-80gb").device
        assert device.peak("fp8") == device.peak("int4") == device.peak("bf16")


class TestLink:
    def test_many_small_copies_pay_for_each(self):
        link = Link("l", 55e9, per_copy_s=8e-6)
        assert link.achieved(4096) == pytest.approx(4096 / (8e-6 + 4096 / 55e9))

    def test_a_table_holds_the_cost_of_copies_already(self):
        link = Link("l", 50e9, rate_table=((4096, 1e9), (65536, 10e9)))
        assert link.achieved(65536) == pytest.approx(10e9)
        assert link.achieved(1024) == pytest.approx(0.25e9)


class TestCommand:
    def test_lists_every_machine(self, capsys):
        assert run_app(app, "kvlane", ["machines"]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == machine_names()

    def test_shows_one_with_its_sources(self, capsys):
        assert run_app(app, "kvlane", ["machines", "h100"]) == 0
        shown = capsys.readouterr().out
        assert "https://www.nvidia.com/en-us/data-center/h100/" in shown
        assert "989.4 TFLOP/s" in shown

    def test_as_json_with_the_sources_beside_the_numbers(self, capsys):
        assert run_app(app, "kvlane", ["machines", "rtx-5090", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["device"]["peak_flops"]["bf16"] == pytest.approx(209.5e12)
        assert shown["device"]["sources"]["peak"].startswith("https://")
        assert all(row["source"] for row in [*shown["prefill"], *shown["links"].values()])

    def test_an_unknown_one_is_one_line_and_status_2(self, capsys):
        assert run_app(app, "kvlane", ["machines", "h10"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "did you mean" in error
