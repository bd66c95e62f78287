"""A real, tiny sweep: every path on every link, the definition of the ratio, and what is written of it."""

from __future__ import annotations

import re
import statistics
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from kvlane.bench import sweep_plot
from kvlane.bench.host import machine
from kvlane.bench.sweep import Options, Overlap
from kvlane.bench.sweep_plot import DPI, SIZE_INCHES, draw_sweep
from kvlane.bench.sweep_report import render
from kvlane.bench.sweep_results import write
from kvlane.policy.errors import InputError
from kvlane.policy.units import show_seconds

PATHS = ["recompute", "bulk load", "layered load", "prefix split", "two-ended"]


class TestOptions:
    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"tokens": 255}, "tokens"),
            ({"reps": 0}, "reps"),
            ({"alone_reps": 0}, "alone_reps"),
            ({"overlap_reps": 0}, "overlap_reps"),
            ({"ratios": (1.0, 0.0)}, "--ratios"),
            ({"ratios": (-1.0,)}, "--ratios"),
            ({"ratios": (float("nan"),)}, "--ratios"),
            ({"ratios": ()}, "--ratios"),
        ],
    )
    def test_what_measures_nothing_is_refused(self, change, field):
        with pytest.raises(InputError) as caught:
            Options(**change)
        assert caught.value.field == field

    def test_the_usual_ones_are_what_is_claimed(self):
        options = Options()
        assert options.ratios == (0.25, 0.5, 1.0, 2.0, 4.0)
        assert options.reps >= 7
        layer = options.shape.kv_bytes_per_token // options.shape.layers
        assert all(each.loaded * layer >= 4 << 20 for each in options.overlaps)
        assert options.overlap_reps >= 7

    def test_usable_is_whole_units_before_the_last_token(self):
        assert [Options(tokens=tokens).usable for tokens in (256, 257, 272, 273)] == [240, 256, 256, 272]
        assert Overlap(64, 16).tokens == 80


class TestRun:
    def test_measures_every_path_on_every_link(self, swept):
        assert [rung["ratio"] for rung in swept.results["rungs"]] == list(swept.ratios)
        for rung in swept.results["rungs"]:
            assert [condition["name"] for condition in rung["conditions"]] == [*PATHS, "choice"]
            for condition in rung["conditions"]:
                assert len(condition["measured_s"]) == swept.reps
                assert condition["median_s"] == statistics.median(condition["measured_s"])

    def test_the_ratio_is_what_it_says(self, swept):
        per_token = swept.results["model"]["kv_bytes_per_token"]
        for rung in swept.results["rungs"]:
            recompute = rung["conditions"][0]
            copy_s = swept.results["protocol"]["usable_tokens"] * per_token / rung["link_bytes_per_s"]
            assert copy_s / recompute["predicted_s"] == pytest.approx(rung["ratio"])

    def test_answers_are_alike_and_bytes_the_plans(self, swept):
        per_token = swept.results["model"]["kv_bytes_per_token"]
        tokens = {
            token for rung in swept.results["rungs"] for c in rung["conditions"] for token in c["first_token"]
        }
        assert len(tokens) == 1
        for rung in swept.results["rungs"]:
            for condition in rung["conditions"]:
                loaded = condition["load_end"] - condition["load_start"]
                assert set(condition["loaded_bytes"]) == {loaded * per_token}
                assert condition["max_logit_difference"] <= 1e-4
            assert rung["conditions"][-1]["loaded_bytes"][0] == rung["plan"]["load_bytes"]

    def test_paths_are_interleaved_and_take_turns_at_the_start(self, swept):
        names = [*PATHS, "choice"]
        for ratio in swept.ratios:
            said = [line for line in swept.err.splitlines() if line.startswith(f"ratio {ratio:g}: ")]
            assert said == [
                f"ratio {ratio:g}: {name}, {rep + 1} of {swept.reps}"
                for rep in range(swept.reps)
                for name in names[rep % 6 :] + names[: rep % 6]
            ]

    def test_the_policy_is_calibrated_before_each_link(self, swept):
        steps = swept.err.splitlines()
        first = [next(at for at, s in enumerate(steps) if s.startswith(f"ratio {r:g}")) for r in swept.ratios]
        between = steps[first[0] : first[1]]
        for part in (steps[: first[0]], between):
            assert sum(bool(re.match(r"calibrating on [\d,]+ tokens$", step)) for step in part) >= 5
            assert sum("calibrating the link" in step for step in part) >= 1

    def test_parts_are_measured_alone_for_what_loads(self, swept):
        for rung in swept.sweep.rungs:
            recompute, *loads = rung.paths
            assert recompute.alone == []
            for outcome in loads:
                assert len(outcome.alone) == swept.sweep.options.alone_reps
                assert outcome.median_efficiency is not None
            fronts = [alone.front_s for alone in loads[-1].alone]
            assert min(fronts) > 0
            assert rung.measured_ratio > 0

    def test_plain_memory_is_measured_too(self, swept):
        (each,) = swept.results["memcpy"]
        assert (each["loaded_tokens"], each["new_tokens"]) == (1024, 16)
        assert each["layer_bytes"] == 1 << 20
        assert each["overlap_efficiency"] > 0
        assert each["bound_s"] > 0

    def test_holds_no_path_of_the_machine(self, swept):
        for suffix in ("json", "txt"):
            text = swept.file(suffix).read_text(encoding="utf-8")
            assert str(swept.folder) not in text
            assert "/home" not in text
            assert "/tmp" not in text

    def test_names_the_day_the_machine_and_the_versions(self, swept):
        host = swept.results["machine"]
        assert swept.file("json").name == f"{host['date'][:10]}-cpu-sweep.json"
        text = swept.file("txt").read_text(encoding="utf-8")
        for name in ("date", "processor", "torch", "transformers", "python"):
            assert str(host[name]) in text


class TestReport:
    def test_stdout_is_the_text_and_what_was_written(self, swept):
        text = swept.file("txt").read_text(encoding="utf-8")
        report, written = swept.out.removesuffix("\n").rsplit("\n\n", 1)
        assert report + "\n" == text
        assert all(swept.file(suffix).name in written for suffix in ("json", "txt", "png"))

    def test_shows_every_number_of_every_path(self, swept):
        parts = swept.file("txt").read_text(encoding="utf-8").split("\n\n")
        for rung in swept.results["rungs"]:
            (part,) = [part for part in parts if part.startswith(f"ratio {rung['ratio']:g} (")]
            lines = part.splitlines()
            best = min(c["median_s"] for c in rung["conditions"][:-1])
            for condition, line in zip(rung["conditions"], lines[3:], strict=False):
                name, loaded, predicted, median, middle, error, to_best, overlap = re.split(
                    r" {2,}", line.strip()
                )
                assert name == condition["name"] or name == f"choice: {rung['chosen']}"
                assert (loaded == "-") == (condition["load_end"] == 0)
                assert predicted == show_seconds(condition["predicted_s"])
                assert median == show_seconds(condition["median_s"])
                assert middle == " - ".join(map(show_seconds, condition["quartiles_s"]))
                assert float(error.rstrip("%")) == pytest.approx(100 * condition["error"], abs=0.051)
                off = 100 * (condition["median_s"] / best - 1)
                assert float(to_best.rstrip("%")) == pytest.approx(off, abs=0.051)
                if overlap != "-":
                    assert float(overlap) == pytest.approx(condition["overlap_efficiency"], abs=0.0051)
            assert lines[-1] == f"chosen: {rung['plan']['reason']}"

    def test_says_which_links_were_measured_beside_something_else(self, swept):
        rungs = [
            replace(rung, core_share=share)
            for rung, share in zip(swept.sweep.rungs, (0.95, 0.5), strict=True)
        ]
        overlapped = [replace(each, core_share=0.95) for each in swept.sweep.overlapped]
        text = render(replace(swept.sweep, rungs=rungs, overlapped=overlapped), machine())
        (busy,) = [line for line in text.splitlines() if "; BUSY" in line]
        assert busy.startswith("ratio 2 ")
        assert "50%" in busy

    def test_without_matplotlib_the_picture_is_left_out_and_it_says_so(self, swept, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "kvlane.bench.sweep_plot", None)
        said = write(swept.sweep, tmp_path)
        assert "pip install 'kvlane[plot]'" in said
        assert not list(tmp_path.glob("*.png"))


class TestPicture:
    def test_is_a_picture_of_the_stated_size(self, swept):
        picture = imread(swept.file("png"))
        assert picture.shape[:2] == (round(SIZE_INCHES[1] * DPI), round(SIZE_INCHES[0] * DPI))

    @pytest.mark.parametrize("name", PATHS)
    def test_every_path_is_drawn(self, swept, name):
        picture = imread(swept.file("png"))[:, :, :3]
        color = np.array(to_rgb(sweep_plot._STYLES[name][0]))
        third = picture.shape[1] // 3
        found = np.all(np.abs(picture[:, : 2 * third] - color) < 0.02, axis=2)
        assert found[:, :third].sum() > 100
        assert found[:, third:].sum() > 100

    def test_one_link_and_no_memory_can_be_drawn(self, swept, tmp_path):
        one = replace(swept.sweep, rungs=swept.sweep.rungs[:1], overlapped=[])
        draw_sweep(one, tmp_path / "one.png")
        assert imread(tmp_path / "one.png").std() > 0.01


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--tokens", 255), ("tokens", "255")),
            (("--reps", 0), ("reps",)),
            (("--ratios", "fast"), ("--ratios", "fast")),
            (("--ratios", "1,,2"), ("--ratios",)),
            (("--ratios", ""), ("--ratios",)),
            (("--ratios", "0"), ("--ratios",)),
            (("--nonsense",), ("--nonsense",)),
        ],
        ids=lambda value: " ".join(map(str, value)),
    )
    def test_bad_input_is_one_line_that_names_it(self, kvlane_bench, tmp_path, arguments, words):
        done = kvlane_bench("sweep", "--quick", "--out", tmp_path / "made", *arguments)
        assert done.returncode == 2, done.stderr
        assert re.fullmatch(r"kvlane-bench: [^\n]+\n", done.stderr)
        assert all(word in done.stderr for word in words)
        assert not (tmp_path / "made").exists()

    def test_a_file_is_no_folder(self, kvlane_bench, tmp_path):
        file = tmp_path / "file"
        file.write_text("kept")
        done = kvlane_bench("sweep", "--quick", "--out", file)
        assert (done.returncode, file.read_text()) == (2, "kept")
        assert "--out" in done.stderr
