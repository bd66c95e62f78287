"""The report's every number against `results.json`, and what it must say beside the numbers."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from typing import Any

import pytest

from kvlane.bench.host import machine
from kvlane.bench.report import render, show_copy_size
from kvlane.policy.units import show_bytes, show_rate, show_seconds

HEADER = ["condition", "path", "loaded", "predicted", "measured", "min - max", "error", "speed-up", "overlap"]


def section(report: str, start: str) -> list[str]:
    """The paragraph that starts so, by lines."""
    found = [part for part in report.split("\n\n") if part.lstrip().startswith(start)]
    assert len(found) == 1, f"{start!r} begins {len(found)} paragraphs"
    return found[0].splitlines()


def table(report: str, key: str) -> dict[str, dict[str, str]]:
    """A scenario's table: cells by column, by condition."""
    lines = section(report, f"{key}  ")
    header, rule, *rows = [re.split(r" {2,}", line.strip()) for line in lines if line.startswith("   ")]
    assert header == HEADER
    assert all(set(cell) == {"-"} for cell in rule)
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def recompute_s(reproduced: Any, key: str) -> float:
    # B asks A's prompt and does not recompute it once more.
    conditions = reproduced.scenario("A" if key == "B" else key)["conditions"]
    return next(statistics.median(c["measured_s"]) for c in conditions if c["path"] == "recompute")


@pytest.mark.parametrize("key", ["A", "B", "C"])
class TestTable:
    def test_has_a_row_for_each_condition(self, reproduced, key):
        names = [condition["name"] for condition in reproduced.scenario(key)["conditions"]]
        assert list(table(reproduced.report, key)) == names

    def test_shows_what_was_predicted_and_measured(self, reproduced, key):
        rows = table(reproduced.report, key)
        for condition in reproduced.scenario(key)["conditions"]:
            row, measured = rows[condition["name"]], condition["measured_s"]
            predicted, median = condition["predicted_s"], statistics.median(measured)
            assert row["predicted"] == show_seconds(predicted)
            assert row["measured"] == show_seconds(median)
            assert row["min - max"] == f"{show_seconds(min(measured))} - {show_seconds(max(measured))}"
            assert float(row["error"].rstrip("%")) == pytest.approx(
                100 * (predicted - median) / median, abs=0.051
            )

    def test_shows_path_bytes_and_overlap(self, reproduced, key):
        rows = table(reproduced.report, key)
        for condition in reproduced.scenario(key)["conditions"]:
            row = rows[condition["name"]]
            if condition["path"] == "recompute":
                assert (row["path"], row["loaded"], row["overlap"]) == ("recompute", "-", "-")
                continue
            assert row["path"] == f"{condition['path']}, {condition['executor']}"
            assert row["loaded"] == show_bytes(condition["loaded_bytes"][0])
            assert float(row["overlap"]) == pytest.approx(condition["overlap_efficiency"], abs=0.0051)

    def test_speed_up_is_against_recomputing_the_same_prompt(self, reproduced, key):
        base = recompute_s(reproduced, key)
        rows = table(reproduced.report, key)
        for condition in reproduced.scenario(key)["conditions"]:
            expected = base / statistics.median(condition["measured_s"])
            shown = float(rows[condition["name"]]["speed-up"].removesuffix("x"))
            assert shown == pytest.approx(expected, abs=0.51 if expected >= 10 else 0.0051)
        if key != "B":
            assert rows["recompute"]["speed-up"] == "1.00x"

    def test_says_prompt_link_and_why_the_choice_was_made(self, reproduced, key):
        scenario = reproduced.scenario(key)
        title, *_, last = section(reproduced.report, f"{key}  ")
        assert f"{scenario['prompt_tokens']:,} tokens" in title
        assert show_rate(scenario["link_bytes_per_s"]) in title
        assert ("plain memcpy" in title) == (key == "A")
        assert last == f"chosen: {scenario['plan']['reason']}"


class TestHeading:
    def test_names_model_device_and_protocol(self, reproduced):
        text = "\n".join(section(reproduced.report, "model "))
        machine = reproduced.results["machine"]
        for word in (
            "LlamaForCausalLM",
            "4 layers",
            "hidden 256",
            "fp32",
            "4,096 bytes of KV per token",
            machine["processor"],
            machine["torch"],
            machine["transformers"],
            "one request at a time",
            f"{reproduced.reps} measurements",
        ):
            assert word in text

    @pytest.mark.parametrize(("share", "said"), [(0.5, True), (0.95, False)])
    def test_says_when_something_else_ran_beside_it(self, reproduced, share, said):
        report = render(replace(reproduced.reproduction, core_share=share), machine())
        busy = [part for part in report.split("\n\n") if part.startswith("BUSY")]
        assert len(busy) == said
        assert all("50%" in part for part in busy)

    def test_shows_memcpy_by_copy_size(self, reproduced):
        line = next(line for line in reproduced.report.splitlines() if line.startswith("memcpy"))
        for row in reproduced.results["memcpy"]:
            shown = f"{show_copy_size(row['copy_bytes'])} {show_rate(row['rate_bytes_per_s'])}"
            assert shown in line

    @pytest.mark.parametrize(
        ("count", "text"), [(4096, "4 KiB"), (1 << 18, "256 KiB"), (1 << 20, "1 MiB"), (1 << 26, "64 MiB")]
    )
    def test_copy_sizes_are_in_binary_units(self, count, text):
        assert show_copy_size(count) == text


class TestTimeline:
    def test_has_a_copy_and_a_compute_line_for_each_layer(self, reproduced):
        title, *lines = section(reproduced.report, "layers of ")
        assert "B's layered load" in title
        copies, computes = lines[::2], lines[1::2]
        assert [int(line.split()[0]) for line in copies] == list(range(reproduced.layers))
        assert all(re.fullmatch(r" +\d+ copy +\| *=+", line) for line in copies)
        assert all(re.fullmatch(r" +compute +\| *[#.][#. ]*#", line) for line in computes)

    def test_the_bars_lie_where_the_layers_were(self, reproduced):
        title, *lines = section(reproduced.report, "layers of ")
        condition = next(c for c in reproduced.scenario("B")["conditions"] if c["name"] == "layered load")
        total = min(condition["measured_s"])
        assert f"({show_seconds(total)};" in title
        bars = [line.partition("|")[2] for line in lines]
        for row, copy, compute in zip(condition["timeline"], bars[::2], bars[1::2], strict=True):
            for bar, begin, end in (
                (copy, row["start_s"], row["arrive_s"]),
                (compute, row["compute_begin_s"], row["compute_end_s"]),
            ):
                assert len(bar) <= 72
                assert len(bar) - len(bar.lstrip()) == pytest.approx(72 * begin / total, abs=1)
                assert len(bar) == pytest.approx(72 * end / total, abs=1.5)

    def test_marks_where_compute_stood_still(self, reproduced):
        condition = next(c for c in reproduced.scenario("B")["conditions"] if c["name"] == "layered load")
        computes = section(reproduced.report, "layers of ")[2::2]
        for row, line in zip(condition["timeline"], computes, strict=True):
            cells = 72 * row["exposed_s"] / min(condition["measured_s"])
            assert line.count(".") == pytest.approx(cells, abs=1.5)


class TestComparison:
    def test_says_that_every_answer_was_compared(self, reproduced):
        line = "\n".join(section(reproduced.report, "answers "))
        count = sum(len(condition["measured_s"]) for _, condition in reproduced.conditions())
        largest = max(condition["max_logit_difference"] for _, condition in reproduced.conditions())
        assert f"all {count} gave the first token" in line
        assert f"largest logit difference {largest:.2g}" in line
        assert f"{reproduced.results['protocol']['top2_logit_gap']:.2g} apart" in line

    def test_shows_the_published_pair_and_what_fits_it(self, reproduced):
        text = " ".join(section(reproduced.report, "published "))
        for word in ("12,370 tokens", "load 92.0 ms", "recompute 900", "9.8x", "1.62 GB", "17.6 GB/s"):
            assert word in text
        assert "what fits" in text
        for card in ("RNGD", "A100"):
            assert card in text
        # 46 % of the RNGD's FP8 peak is the design's own figure for the published pair.
        assert "46% of the FP8 peak of one RNGD card" in text

    def test_shows_this_runs_pair_and_that_it_is_not_comparable(self, reproduced):
        text = " ".join(section(reproduced.report, "published "))
        by_name = {c["name"]: c for c in reproduced.scenario("A")["conditions"]}
        recompute, load = (
            statistics.median(by_name[name]["measured_s"]) for name in ("recompute", "bulk load")
        )
        moved, flop = by_name["bulk load"]["loaded_bytes"][0], reproduced.results["model"]["prefill_flop"]
        for word in (
            f"this run   {reproduced.tokens:,} tokens: load {show_seconds(load)}",
            f"recompute {show_seconds(recompute)}, {recompute / load:.0f}x",
            f"{show_bytes(moved)} in {show_seconds(load)} = {show_rate(moved / load)}",
            f"{flop / recompute / 1e9:.0f} GFLOP/s",
        ):
            assert word in text
        assert "not comparable" in text
