"""One real reproduction, as small as it gets: what it measures, and what `results.json` says of it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

SCENARIOS = {
    "A": ["recompute", "bulk load", "layered load", "choice"],
    "B": ["bulk load", "layered load", "choice"],
    "C": ["recompute", "layered load", "prefix split", "two-ended", "choice"],
}
PATHS = {
    "recompute": "recompute",
    "bulk load": "load",
    "layered load": "load",
    "prefix split": "split",
    "two-ended": "split",
}
SPEEDS = {
    "recompute": None,
    "bulk load": "bulk",
    "layered load": "layered",
    "prefix split": "layered",
    "two-ended": "layered",
}


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def test_ends_well_with_its_files_and_the_report_on_stdout(reproduced):
    files = sorted(path.name for path in reproduced.folder.iterdir())
    assert files == ["observations.json", "report.txt", "results.json", "timeline.png", "trace.json"]
    report, written = reproduced.out.removesuffix("\n").rsplit("\n\n", 1)
    assert report + "\n" == reproduced.report
    assert all(name in written for name in files)
    assert str(reproduced.folder) in written


def test_says_every_step_on_stderr(reproduced):
    steps = reproduced.err.splitlines()
    for key, names in SCENARIOS.items():
        for name in names:
            for rep in range(reproduced.reps):
                assert steps.count(f"scenario {key}: {name}, {rep + 1} of {reproduced.reps}") == 1
    assert sum(step.startswith("calibrating") for step in steps) > 10


def test_calibrates_and_then_measures_scenario_by_scenario(reproduced):
    steps = reproduced.err.splitlines()
    for key in SCENARIOS:
        own = [at for at, step in enumerate(steps) if step.startswith(f"scenario {key}:")]
        assert own == list(range(own[0], own[0] + len(own)))
        last = "calibrating on loads" if key == "A" else "calibrating the link"
        assert steps[own[0] - 1].startswith(last)


def test_each_repetition_begins_with_another_condition(reproduced):
    steps = [step for step in reproduced.err.splitlines() if step.startswith("scenario B:")]
    orders = [
        [step.removeprefix("scenario B: ").partition(",")[0] for step in steps if f", {rep} of" in step]
        for rep in (1, 2)
    ]
    assert orders == [SCENARIOS["B"], SCENARIOS["B"][1:] + SCENARIOS["B"][:1]]


def absent(value: object, key: str = "") -> set[str]:
    """The keys under which a null stands, at any depth."""
    if isinstance(value, dict):
        return set().union(*(absent(part, name) for name, part in value.items()))
    if isinstance(value, list):
        return set().union(*(absent(part, key) for part in value))
    return {key} if value is None else set()


class TestShape:
    """The documented keys, whole and with numbers that mean something."""

    def test_no_number_is_infinite_or_none(self, reproduced):
        def refuse(name: str) -> None:
            raise AssertionError(f"{name} in results.json")

        text = (reproduced.folder / "results.json").read_text(encoding="utf-8")
        results = json.loads(text, parse_constant=refuse)
        assert all(math.isfinite(number) for number in numbers(results))
        # An infinity or a NaN is written as null: it may stand only where there can be nothing to say.
        assert absent(results) <= {
            *(
                "executor",
                "bound_s",
                "overlap_efficiency",
                "enqueue_s",
                "start_s",
                "arrive_s",
                "tier",
                "held",
            ),
            *("crossover_tokens", "break_even_bytes_per_s", "split", "state_checkpoints"),
        }

    def test_says_on_what_it_ran(self, reproduced):
        machine = reproduced.results["machine"]
        assert {"processor", "cores", "compute_threads", "system", "python", "torch", "transformers"} <= set(
            machine
        )
        assert all(machine.values())
        assert machine["compute_threads"] == 1

    def test_says_how_much_of_a_core_the_compute_thread_had(self, reproduced):
        # A share of the time that passed; a little of what follows the first token may be in it, too.
        assert 0 < reproduced.results["protocol"]["core_share"] < 1.05

    def test_says_what_ran(self, reproduced):
        model = reproduced.results["model"]
        assert model["class"] == "LlamaForCausalLM"
        sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocab": 2048}
        assert {name: model[name] for name in sizes} == sizes
        assert model["layers"] == reproduced.layers
        # Keys and values of every layer, 2 KV heads of 64 wide in four bytes each.
        assert model["kv_bytes_per_token"] == 2 * reproduced.layers * 2 * 64 * 4
        assert model["dtype"] == "float32"
        assert reproduced.results["protocol"]["tokens"] == reproduced.tokens
        assert reproduced.results["protocol"]["repetitions"] == reproduced.reps

    def test_every_scenario_has_its_conditions_in_order(self, reproduced):
        found = {s["name"]: [c["name"] for c in s["conditions"]] for s in reproduced.results["scenarios"]}
        assert found == SCENARIOS

    def test_every_scenario_says_its_link(self, reproduced):
        kinds = {s["name"]: s["link"] for s in reproduced.results["scenarios"]}
        assert kinds == {"A": "memcpy", "B": "paced", "C": "paced"}
        for scenario in reproduced.results["scenarios"]:
            assert scenario["link_bytes_per_s"] > 0
            assert scenario["calibration"]["link_bytes_per_s"] > 0
        memcpy = reproduced.results["memcpy"]
        assert [row["copy_bytes"] for row in memcpy] == [4096 * 4**at for at in range(8)]
        for row in memcpy:
            assert row["rate_bytes_per_s"] * row["seconds"] == pytest.approx(
                row["copy_bytes"] * row["copies"]
            )

    def test_every_condition_has_the_documented_keys(self, reproduced):
        documented = {
            "name",
            "path",
            "predicted_s",
            "measured_s",
            "loaded_bytes",
            "first_token",
            "max_logit_difference",
            "overlap_efficiency",
        }
        for _, condition in reproduced.conditions():
            assert documented <= set(condition)
            for each in ("measured_s", "loaded_bytes", "first_token"):
                assert len(condition[each]) == reproduced.reps
            assert min(condition["measured_s"]) > 0
            if condition["name"] != "choice":
                assert condition["path"] == PATHS[condition["name"]]
                assert condition["executor"] == SPEEDS[condition["name"]]


class TestAnswers:
    def test_every_path_gives_the_token_that_recomputing_gives(self, reproduced):
        tokens: dict[str, set[int]] = {name: set() for name in SCENARIOS}
        for scenario, condition in reproduced.conditions():
            tokens[scenario["name"]].update(condition["first_token"])
            assert 0 <= condition["max_logit_difference"] <= 1e-4
        assert all(len(found) == 1 for found in tokens.values())
        # B asks A's prompt.
        assert tokens["A"] == tokens["B"]

    def test_the_differences_lie_far_below_the_gap_to_the_runner_up(self, reproduced):
        gap = reproduced.results["protocol"]["top2_logit_gap"]
        assert gap > 10 * max(c["max_logit_difference"] for _, c in reproduced.conditions())

    def test_what_was_loaded_is_what_was_planned_to_the_byte(self, reproduced):
        per_token = reproduced.results["model"]["kv_bytes_per_token"]
        for scenario, condition in reproduced.conditions():
            assert set(condition["loaded_bytes"]) == {condition["load_tokens"] * per_token}
            assert sum(row["bytes"] for row in condition["timeline"]) == condition["loaded_bytes"][0]
            if condition["name"] == "choice":
                assert condition["load_tokens"] == scenario["plan"]["load_tokens"]
                assert condition["loaded_bytes"][0] == scenario["plan"]["load_bytes"]
            elif condition["path"] == "load":
                assert condition["load_tokens"] == scenario["plan"]["usable_tokens"]
            elif condition["path"] == "split":
                # A prefix, or what follows a front up to the last usable token.
                end = condition["load_start"] + condition["load_tokens"]
                assert 0 < condition["load_tokens"] < scenario["plan"]["usable_tokens"]
                two_ended = condition["name"] == "two-ended"
                assert (
                    (end == scenario["plan"]["usable_tokens"]) == (condition["load_start"] > 0) == two_ended
                )
            else:
                assert condition["load_tokens"] == 0

    def test_stored_and_usable_tokens_are_each_scenarios_own(self, reproduced):
        counts = {
            s["name"]: (s["prompt_tokens"], s["stored_tokens"], s["plan"]["usable_tokens"])
            for s in reproduced.results["scenarios"]
        }
        assert counts == {"A": (1024, 1024, 1008), "B": (1024, 960, 960), "C": (339, 339, 336)}


class TestPredictions:
    def test_rest_on_calibration_alone(self, reproduced):
        for scenario in reproduced.results["scenarios"]:
            plan = scenario["plan"]
            assert plan["calibrated"] is True
            assert {name.partition(".")[0] for name in plan["parameters_from"]} == {"prefill", "link"}
            assert {p["source"] for p in plan["parameters_from"].values()} == {"calibration"}

    def test_are_what_the_plan_says(self, reproduced):
        for scenario, condition in reproduced.conditions():
            plan, predicted = scenario["plan"], condition["predicted_s"]
            assert predicted > 0
            if condition["name"] == "choice":
                assert (condition["path"], predicted) == (plan["path"], plan["ttft_s"])
            elif condition["executor"] == "bulk":
                load = plan["estimates"]["load"]
                assert predicted == pytest.approx(load["transfer_s"] + load["compute_s"])
            elif condition["path"] == "split":
                # The plan has the better of both kinds.
                assert predicted >= plan["estimates"]["split"]["ttft_s"] * (1 - 1e-9)
            else:
                assert predicted == pytest.approx(plan["estimates"][condition["path"]]["ttft_s"], rel=1e-9)

    def test_none_is_out_of_this_world(self, reproduced):
        """No more than the order of magnitude: how close they come only a quiet machine can tell."""
        for _, condition in reproduced.conditions():
            ratio = condition["predicted_s"] / min(condition["measured_s"])
            assert 0.01 < ratio < 100, condition["name"]


class TestOverlap:
    def test_is_told_exactly_of_what_loads(self, reproduced):
        for _, condition in reproduced.conditions():
            loads = condition["path"] != "recompute"
            assert (condition["overlap_efficiency"] is not None) == loads
            assert len(condition["bounds_s"]) == (reproduced.reps if loads else 0)

    def test_is_the_bound_of_copies_and_compute_apart_over_the_measured_time(self, reproduced):
        for _, condition in reproduced.conditions():
            if condition["path"] == "recompute":
                continue
            assert 0 < condition["bound_s"] <= min(condition["bounds_s"])
            shares = [condition["bound_s"] / seconds for seconds in condition["measured_s"]]
            assert condition["overlap_efficiency"] == pytest.approx(statistics.median(shares))


class TestTimeline:
    def test_has_every_layer_of_the_median_answer_in_order(self, reproduced):
        for _, condition in reproduced.conditions():
            rows = condition["timeline"]
            passes = ["front", "tail"] if condition["load_start"] else ["forward"]
            assert [(row["pass"], row["layer"]) for row in rows] == [
                (kind, layer) for kind in passes for layer in range(reproduced.layers)
            ]
            ends = [row["compute_end_s"] for row in rows]
            assert ends == sorted(ends)
            # Of two repetitions the faster one counts as the median answer.
            assert 0 < rows[0]["compute_begin_s"] < ends[-1] < min(condition["measured_s"])

    def test_a_load_takes_two_copies_a_layer_and_other_paths_none(self, reproduced):
        for _, condition in reproduced.conditions():
            for row in condition["timeline"]:
                if condition["path"] == "recompute" or row["pass"] == "front":
                    assert (row["copies"], row["arrive_s"]) == (0, None)
                else:
                    assert row["copies"] == 2
                    assert 0 < row["enqueue_s"] <= row["start_s"] < row["arrive_s"]

    def test_a_paced_link_delivers_no_faster_than_its_rate(self, reproduced):
        for scenario, condition in reproduced.conditions():
            if scenario["link"] == "paced" and condition["path"] != "recompute":
                first, *_, last = [row for row in condition["timeline"] if row["bytes"]]
                took = last["arrive_s"] - first["enqueue_s"]
                assert took >= condition["loaded_bytes"][0] / scenario["link_bytes_per_s"] * 0.999
