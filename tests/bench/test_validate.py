"""`kvlane-bench validate` on the published measurements: its goals, its shape, and other people's CSVs."""

import csv
import json
import math

import pytest

from kvlane.bench import validate_text as text
from kvlane.bench.cli import app
from kvlane.bench.validate import Scored, fitted, summary, validate
from kvlane.bench.validate_models import model_of
from kvlane.bench.validate_predict import Profiles, predict, task_of
from kvlane.bench.validate_profiles import cells
from kvlane.bench.validate_report import in_words, plain
from kvlane.bench.validate_rows import packaged, read
from kvlane.bench.validate_setup import compute_setup, machine_of, transfer_setup
from kvlane.bench.validate_text import UnpredictableError
from kvlane.policy.calibration_cost import TransferSample, fit_link
from kvlane.policy.catalog import load_machine, machine_names
from kvlane.policy.cli import run_app
from kvlane.policy.machine_text import shared_links


@pytest.fixture(scope="module")
def validation():
    return validate(packaged(), within=True, leave_out=True)


@pytest.fixture(scope="module")
def report(validation):
    return plain(validation)


def cells_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path, rows, columns=None):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def a_row(**changes):
    row = dict.fromkeys(cells_of(packaged())[0], "")
    return {
        **row,
        "id": "mine-1",
        "kind": "B",
        "source_url": "https://example.org/mine",
        "model": "Llama-3.1-8B-Instruct",
        "gpu": "NVIDIA H100 80GB HBM3",
        "n_gpus_tp": "1",
        "weight_dtype": "BF16",
        "engine": "vLLM 0.11.0",
        "prompt_tokens": "20000",
        "cached_tokens": "0",
        "batch_or_concurrency": "1",
        "method": "recompute",
        "ttft_ms": "640",
        "notes": "U1; mine",
        **changes,
    }


def only(tmp_path, **changes):
    return read(write(tmp_path / "mine.csv", [a_row(**changes)]))[0]


class TestGoals:
    def test_nearly_every_usable_row_is_predicted_and_the_rest_has_a_reason(self, validation):
        predicted, usable = validation.coverage()
        assert usable == 302
        assert predicted >= 0.95 * usable
        assert all(reason for _, reason in validation.left_out)

    @pytest.mark.parametrize(
        ("method", "median", "p90"), [("recompute", 0.10, 0.30), ("load", 0.15, math.inf)]
    )
    def test_errors_by_method(self, report, method, median, p90):
        errors = report["groups"]["method"][method]
        assert errors["median_abs_error"] <= median
        assert errors["p90_abs_error"] <= p90

    def test_copies_of_a_stated_size(self, report):
        assert report["sized_transfers"]["n"] == 57
        assert report["sized_transfers"]["median_abs_error"] <= 0.15

    def test_the_right_path_in_every_pair(self, report):
        assert report["pairs"]["n"] >= 20
        assert report["pairs"]["wrong"] == []

    def test_each_source_from_the_others(self, report):
        errors = report["leave_source_out"]["groups"]["method"]["recompute"]
        assert errors["n"] == report["groups"]["method"]["recompute"]["n"]
        assert errors["median_abs_error"] <= 0.20

    @pytest.mark.parametrize(
        ("split", "method", "median"),
        [
            ("every_other", "recompute", 0.015),
            ("every_other", "load", 0.06),
            ("short_half", "recompute", 0.05),
            ("short_half", "load", 0.05),
        ],
    )
    def test_a_source_from_its_own_rows(self, report, split, method, median):
        errors = report["within_source"]["groups"][split][method]
        assert errors["n"] >= 20
        assert errors["median_abs_error"] <= median

    def test_no_prediction_beats_physics(self, validation):
        for row in validation.scored:
            task = row.task
            if task.unit == "GB/s":
                ceiling = task.transfer.link.ceiling_bytes_per_s
                assert ceiling is None or row.predicted <= ceiling / 1e9
            else:
                setup = task.compute
                peak = max(setup.machine.device.peak_flops.values()) * setup.tp * setup.stages
                assert row.predicted / 1e3 >= task.work.flop / peak
                if task.transfer is not None and task.transfer.link.ceiling_bytes_per_s:
                    assert row.predicted / 1e3 >= task.moved_bytes / task.transfer.link.ceiling_bytes_per_s


class TestProfiles:
    def test_the_profiles_state_what_the_measurements_give(self):
        fits = fitted(packaged())
        for name in machine_names():
            machine = load_machine(name)
            share = fits.device(machine.device).interconnect_efficiency
            if machine.device.interconnect_bytes_per_s:
                assert machine.device.interconnect_efficiency == pytest.approx(share, abs=0.01)
            for engine, dtype in cells(machine):
                stated, fit = machine.efficiency_for(dtype, engine), fits.efficiency(machine, dtype, engine)
                assert stated.efficiency == pytest.approx(fit.efficiency, rel=0.02, abs=0.002), name
                assert stated.attention_efficiency == pytest.approx(
                    fit.attention_efficiency, rel=0.02, abs=0.002
                )
                assert stated.expert_efficiency == pytest.approx(fit.expert_efficiency, rel=0.02, abs=0.002)
                assert stated.layer_overhead_s == pytest.approx(fit.layer_overhead_s, abs=3e-6)
                assert (stated.source, stated.rows) == (fit.source, fit.rows)


class TestJson:
    def test_one_flat_list_of_rows(self, report):
        published = {row["id"]: row for row in cells_of(packaged())}
        assert len({row["id"] for row in report["rows"]}) == len(report["rows"])
        for row in report["rows"]:
            assert row["kind"] == published[row["id"]]["kind"]
            assert row["unit"] == ("GB/s" if row["kind"] == "C" else "ms")
            assert row["predicted"] > 0
            measured = published[row["id"]]["rate_gb_per_s" if row["kind"] == "C" else "ttft_ms"]
            assert row["measured"] == float(measured)

    def test_context_rows_are_never_scored(self, report):
        context = {row["id"] for row in cells_of(packaged()) if row["notes"].startswith("U3")}
        assert not context & {row["id"] for row in report["rows"]}
        assert not context & {row["id"] for row in report["left_out"]}

    def test_groups_by_kind_device_and_engine(self, report):
        for name in ("kind", "device", "engine", "method"):
            groups = report["groups"][name]
            assert sum(group["n"] for group in groups.values()) == len(report["rows"])
            assert all({"n", "median_abs_error", "p90_abs_error"} <= set(group) for group in groups.values())
        assert set(report["groups"]["kind"]) == {"A", "B", "C"}
        assert {"vllm", "tensorrt_llm", "sglang", "llama_cpp"} <= set(report["groups"]["engine"])

    def test_the_command_prints_it(self, capsys):
        assert run_app(app, "kvlane-bench", ["validate", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert len(shown["rows"]) > 350
        assert "within_source" not in shown


class TestText:
    def test_says_all_of_it(self, validation):
        shown = in_words(validation)
        for part in (
            "error by kind",
            "error by device",
            "error by engine",
            "TensorRT-LLM",
            "llama.cpp",
            "right path",
        ):
            assert part in shown
        assert "SambaNova" in shown  # left out, with the reason

    def test_draws_a_picture(self, tmp_path):
        out = tmp_path / "p.png"
        assert run_app(app, "kvlane-bench", ["validate", "--plot", str(out)]) == 0
        assert out.read_bytes().startswith(b"\x89PNG")

    def test_a_picture_that_cannot_be_written_is_one_line(self, tmp_path, capsys):
        assert run_app(app, "kvlane-bench", ["validate", "--plot", str(tmp_path / "no" / "p.png")]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_prints_the_tables_that_profiles_hold(self, capsys):
        assert run_app(app, "kvlane-bench", ["validate", "--fit"]) == 0
        shown = capsys.readouterr().out
        assert "# h100-sxm" in shown
        assert "[[prefill]]" in shown


class TestWhatTextsSay:
    @pytest.mark.parametrize(
        ("gpu", "machine"),
        [
            ("H100 80GB HBM3", "h100-sxm"),
            ("h200_sxm", "h200-sxm"),
            ("Nvidia GH200 GPU", "gh200"),
            ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
            ("A100 PCIe 80GB", "a100-pcie-80gb"),
            ("A100 (PCIe Gen4)", "a100-sxm-80gb"),
            ("2x RTX 3090 (PCIe x8, 350 W)", "rtx-3090"),
            ("Huawei Ascend 910B2", "ascend-910b"),
            ("4x RTX PRO 6000 (PCIe Gen5)", "rtx-pro-6000"),
            ("L40S 48GB", "l40s"),
            ("L4", "l4"),
            ("Tesla V100S-PCIE-32GB", "v100s-pcie"),
        ],
    )
    def test_devices(self, gpu, machine):
        assert text.look_up(text.DEVICES, gpu) == machine

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            ("Meta-Llama-3.1-405B-Instruct-FP8", "llama-3.1-405b"),
            ("openai/gpt-oss-120b", "gpt-oss-120b"),
            ("LLaMA v2 70B", "llama-2-70b"),
            ("Qwen3-VL-30B-A3B-Instruct-NVFP4", "qwen3-30b-a3b"),
            ("GLM-5.3-Flash EXL3", "glm-5.3-flash"),
            ("Qwen3-32B", "qwen3-32b"),
        ],
    )
    def test_models(self, words, name):
        model = model_of(words)
        assert model is not None
        assert model.name == name

    def test_models_that_no_config_describes_have_the_sizes_their_makers_state(self):
        for words, total, active in (("GLM-5.3-Flash", 320e9, 18e9), ("DeepSeek-V4-Flash", 284e9, 13e9)):
            model = model_of(words)
            assert model is not None
            assert sum(layer.all_weights for layer in model.layers) == pytest.approx(total, rel=0.05)
            assert sum(layer.active_weights for layer in model.layers) == pytest.approx(active, rel=0.1)

    @pytest.mark.parametrize("name", sorted({name for _, name in text.DEVICES}))
    def test_every_device_named_is_described(self, name):
        assert load_machine(name).name == name

    @pytest.mark.parametrize(
        ("engine", "family"),
        [
            ("vLLM + LMCache 0.5.4", "vllm"),
            ("vllm-ascend 0.18.0rc1", "vllm"),
            ("TensorRT-LLM v0.9.0", "tensorrt_llm"),
            ("trtllm", "tensorrt_llm"),
            ("sglang 0.5.6.post2", "sglang"),
            ("llama.cpp llama-bench (CUDA, 2024)", "llama_cpp"),
            ("Atlas", "atlas"),
            ("", "not_stated"),
        ],
    )
    def test_engines(self, engine, family):
        assert text.engine_family(engine) == family

    @pytest.mark.parametrize(
        ("gpu", "stated", "cards"),
        [
            ("H100", "2", (2, 1)),
            ("2x GB10 (DGX Spark)", "TP2", (2, 1)),
            ("4x GB10", "TP4 + DCP4", (4, 1)),
            ("RTX 3090", "6 (layer split, not TP)", (1, 6)),
            ("4x RTX PRO 6000", "", (4, 1)),
            ("L4", "", (1, 1)),
        ],
    )
    def test_cards(self, gpu, stated, cards):
        assert text.cards(gpu, stated) == cards

    def test_prompts_in_one_batch_are_not_clients_at_once(self):
        assert text.prompts_at_once("batch 16") == 16
        assert text.prompts_at_once("4") == text.prompts_at_once("1 (serial)") == 1

    @pytest.mark.parametrize(
        ("words", "count"),
        [
            ("3FS: 2 storage nodes x 2 NVMe over network", 4),
            ("8 NVMe RAID0", 8),
            ("4x NVMe Gen4 RAID0", 4),
            ("SSD", 1),
        ],
    )
    def test_drives(self, words, count):
        assert text.drives(words) == count

    def test_network_rates_and_blocks(self):
        assert text.line_rate("over 2x400Gb/s") == 100e9
        assert text.line_rate("8x400G NICs per node") == 400e9
        assert text.block_bytes("0.5 MB blocks") == 512 * 1024

    def test_dtypes_by_what_is_stored(self, tmp_path):
        def stored(**changes):
            return compute_setup(only(tmp_path, **changes)).weight_dtype

        assert stored(weight_dtype="NVFP4") == "fp4"
        assert stored(weight_dtype="", model="Qwen3-235B-A22B-FP8") == "fp8"
        assert stored(weight_dtype="INT4 AutoRound") == "int4"
        assert stored(weight_dtype="not stated (checkpoint default BF16)") == "bf16"
        assert stored(gpu="Tesla V100S", weight_dtype="FP16") == "fp16"

    def test_a_stated_power_limit_slows_the_device(self, tmp_path):
        free = machine_of(only(tmp_path, gpu="RTX 3090"))
        held = machine_of(only(tmp_path, gpu="RTX 3090 (245 W)"))
        assert held.device.peak("bf16") < free.device.peak("bf16")

    @pytest.mark.parametrize(
        ("changes", "link"),
        [
            ({"tier": "host DRAM (pinned)"}, "pcie5-x16"),
            ({"tier": "host DRAM", "notes": "U1; custom SM kernel H2D"}, "pcie5-x16-kernel"),
            ({"tier": "host DRAM", "engine": "cuMemcpyBatchAsync"}, "pcie5-x16-batch"),
            ({"tier": "host DRAM", "method": "store"}, "pcie5-x16-store"),
            ({"tier": "CXL shared memory"}, "cxl"),
            ({"tier": "NVMe SSD", "notes": "U2; 2 SSD"}, "nvme-2"),
            ({"tier": "remote host DRAM via RDMA", "notes": "U2; 1x400 Gb/s NIC"}, "network"),
        ],
    )
    def test_links_by_tier_and_method(self, tmp_path, changes, link):
        assert transfer_setup(only(tmp_path, **changes)).link.name == link

    def test_a_stated_link_rate_counts(self, tmp_path):
        found = transfer_setup(
            only(tmp_path, tier="host DRAM", **{"link_bandwidth_gbps_stated(GB/s)": "~24 (text)"})
        )
        assert found.link.rate_bytes_per_s == 24e9

    def test_what_is_not_described_says_what(self, tmp_path):
        with pytest.raises(UnpredictableError, match="Mystery-9B"):
            task_of(only(tmp_path, model="Mystery-9B"))
        with pytest.raises(UnpredictableError, match="network"):
            task_of(only(tmp_path, kind="C", tier="remote object store", rate_gb_per_s="5"))


class TestPredictions:
    def test_a_load_is_faster_than_recomputing_and_slower_than_its_bytes(self, tmp_path):
        load = task_of(only(tmp_path, kind="A", method="load", cached_tokens="19000", tier="host DRAM"))
        computed = task_of(only(tmp_path))
        seconds = predict(load, Profiles()) / 1e3
        assert load.moved_bytes / 63e9 < seconds < predict(computed, Profiles()) / 1e3

    def test_ranks_that_share_a_link_wait_for_each_other(self, tmp_path):
        def seconds(tier):
            row = only(tmp_path, kind="A", method="load", cached_tokens="19000", tier=tier, n_gpus_tp="2")
            return predict(task_of(row), Profiles())

        assert seconds("CXL shared memory") > seconds("host DRAM")

    def test_a_summary_counts_signs_and_tails(self):
        errors = summary([-0.1, 0.2, 0.3, 0.0])
        assert (errors.n, errors.worst_abs_error) == (4, 0.3)
        assert errors.median_abs_error == pytest.approx(0.15)
        assert errors.p90_abs_error == pytest.approx(0.27)
        assert errors.bias == pytest.approx(0.1)

    def test_an_error_is_relative_to_what_was_measured(self, tmp_path):
        assert Scored(task_of(only(tmp_path, ttft_ms="100")), 110.0).error == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("pcie5-x16", "DMA H2D"),
        ("pcie5-x16-store", "DMA D2H"),
        ("pcie5-x16-kernel", "SM kernel H2D"),
        ("pcie5-x16-batch", "small-copy path"),
    ],
)
def test_links_state_what_the_copies_by_size_give(link, words):
    shared = shared_links()[link]
    sizes = [
        (int(row.copy_bytes or 0), 1e9 * (row.rate_gb_per_s or 0))
        for row in read(packaged())
        if words in row.notes
    ]
    assert len(sizes) == shared.rows
    errors = [shared.achieved(size) / rate - 1 for size, rate in sizes]
    assert summary(errors).median_abs_error <= 0.05
    if not shared.rate_table:
        samples = [TransferSample(1000 * size, 1000, 1000 * size / rate) for size, rate in sizes]
        refit = fit_link(link, samples, "here").link
        assert shared.rate_bytes_per_s == pytest.approx(refit.rate_bytes_per_s, rel=0.01)
        assert shared.per_copy_s == pytest.approx(refit.per_copy_s, rel=0.02)
