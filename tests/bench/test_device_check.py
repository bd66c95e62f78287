"""The device check's own work: its parts on a CPU that is taken for a device, and a run whose parts fail or hang."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvlane.bench import device_check, device_parts
from kvlane.bench.device_calibrate import DeviceLab
from kvlane.bench.device_copies import beside_copies, check_arrived, load_rate, random_bytes, regions
from kvlane.bench.device_ordering import ordering
from kvlane.bench.lab import Lab
from kvlane.bench.shape import Shape, build_model
from kvlane.bench.subject import demo_subject
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.cuda_methods import MethodTable
from kvlane.streams.load import LayerLoad
from kvlane.transfer.layout import CopyDescriptor, KvLayout, total_bytes
from kvlane.transfer.paged import BlockForm

ROOT = Path(__file__).resolve().parents[2]
SMALL = KvLayout(layers=3, kv_heads=2, k_width=8, v_width=8, itemsize=2)


class _TakenForCuda(CpuBackend):
    """Real copies on the CPU, with what else the parts ask a device's backend for."""

    def __init__(self):
        super().__init__()
        self.copier = SimpleNamespace(methods=MethodTable(), possible=("engine",), missing={"batch": "none"})
        self.clock = SimpleNamespace(latest=SimpleNamespace(error_s=1e-6), drift=None)


# The parts ask for nothing that it does not have, whatever its type.
TakenForCuda: Any = _TakenForCuda


class Late(_TakenForCuda):
    """Every copy begins late."""

    def _copy_piece(self, destination, source, piece):
        time.sleep(0.01)
        super()._copy_piece(destination, source, piece)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Saved(dict):
    """What a part saved, and how often."""

    def __init__(self):
        self.times = 0

    def __call__(self, found):
        self.times += 1
        self.update(json.loads(json.dumps(found)))


class TestCopies:
    def test_blocks_of_16_tokens_are_a_copy_of_keys_and_one_of_values_each(self):
        with TakenForCuda() as backend:
            source, target = regions(64, BlockForm(16), SMALL)
            host = random_bytes(backend, source.nbytes)
            row = load_rate(backend, None, host, source, target, 64, reps=1)
            assert row["copies_a_layer"] == 2 * 4
            assert row["bytes"] == 64 * SMALL.bytes_per_token
            assert row["bytes_per_s"] > 0
            contiguous = load_rate(backend, None, host, *regions(64, None, SMALL), 64, reps=1)
            assert contiguous["copies_a_layer"] == 1
            assert backend.copier.methods == MethodTable()

    def test_bytes_that_did_not_arrive_are_an_error(self):
        host = np.arange(64, dtype=np.uint8)
        check_arrived(host[8:24], 40, host, [CopyDescriptor(0, 8, 40, 16)])
        with pytest.raises(RuntimeError, match="did not bring its bytes"):
            check_arrived(host[8:24], 40, host, [CopyDescriptor(0, 9, 40, 15)])

    def test_compute_is_timed_alone_and_beside_copies(self):
        with TakenForCuda() as backend:
            batch = [CopyDescriptor(0, at, at, 1 << 16) for at in range(0, 1 << 20, 1 << 16)]
            seen = []

            def work():
                time.sleep(0.02)
                seen.append(1)
                return 0.02 * len(seen)

            beside = beside_copies(backend, "engine", batch, work, reps=1)
            assert len(seen) == 2
            assert beside.slowdown == pytest.approx(1.0)
            # At least one batch was copied while the work ran.
            assert beside.copied_bytes_per_s > 0
            assert total_bytes(batch) == 1 << 20

    def test_copies_that_fail_beside_compute_are_no_rate(self, monkeypatch):
        with TakenForCuda() as backend:
            monkeypatch.setattr(backend, "failure", lambda event: RuntimeError("invalid argument"))
            with pytest.raises(RuntimeError, match="beside compute failed: invalid argument"):
                beside_copies(backend, "engine", [CopyDescriptor(0, 0, 0, 64)], lambda: 1.0, reps=1)


class TestOrdering:
    def found(self, backend):
        with backend:
            lab = Lab(build_model(Shape(4, 32, 2, 1, 64, 100), 128, 1), 128, "seed-1", backend=backend)
            found = ordering(lab, np.random.default_rng(1).integers(0, 100, 100))
            lab.engine.close()
        return found

    def test_late_copies_are_waited_for_and_the_control_shows_that_they_were_late(self):
        found = self.found(Late())
        assert found["problems"] == []
        assert found["bulk"]
        assert found["layered"]
        assert found["grouped"]
        assert not found["control"]

    def test_copies_that_are_not_late_show_nothing(self, monkeypatch):
        # On a device so fast that nothing is missed without waiting.
        monkeypatch.setattr("kvlane.bench.device_ordering._hasty", LayerLoad.hold)
        assert self.found(TakenForCuda())["problems"] == [
            "control: right without waiting, so the copies were not late"
        ]


class TestParts:
    def test_copies(self, monkeypatch):
        monkeypatch.setattr(device_parts, "CudaBackend", TakenForCuda)
        monkeypatch.setattr(device_parts, "plain_rate", lambda backend: 10e9)
        monkeypatch.setattr(device_parts, "_TOKENS", 64)
        monkeypatch.setattr(device_parts, "regions", lambda tokens, form: regions(tokens, form, SMALL))
        saved = Saved()
        device_parts.run("copies", 0, saved)
        assert saved.times > 3
        assert saved["plain_bytes_per_s"] == 10e9
        assert set(saved["by_size"]) == {"engine"}
        assert set(saved["loads"]) == {
            "contiguous, chosen",
            "contiguous, engine",
            "blocks of 16, chosen",
            "blocks of 16, engine",
            "blocks of 16, heads first, chosen",
        }
        assert saved["thresholds"] == [[2048, "engine"]]
        assert any(line.startswith("no batch: none") for line in saved["lines"])

    def test_a_way_that_fails_is_a_problem_and_costs_no_other_its_row(self, monkeypatch):
        def rate(backend, way, *args):
            if way == "engine":
                raise RuntimeError("invalid argument")
            return load_rate(backend, way, *args)

        monkeypatch.setattr(device_parts, "CudaBackend", TakenForCuda)
        monkeypatch.setattr(device_parts, "plain_rate", lambda backend: 10e9)
        monkeypatch.setattr(device_parts, "_TOKENS", 64)
        monkeypatch.setattr(device_parts, "regions", lambda tokens, form: regions(tokens, form, SMALL))
        monkeypatch.setattr(device_parts, "load_rate", rate)
        saved = Saved()
        device_parts.run("copies", 0, saved)
        assert saved["problems"] == [
            "contiguous, engine: invalid argument",
            "blocks of 16, engine: invalid argument",
        ]
        assert "blocks of 16, heads first, chosen" in saved["loads"]

    def test_a_model(self, monkeypatch):
        @contextmanager
        def small_lab(model, tokens, *, host_grows):
            subject = demo_subject(Shape(3, 32, 2, 1, 64, 100), tokens, 1)
            with TakenForCuda() as backend:
                lab = Lab(subject.model, tokens, "seed-1", backend=backend)
                yield DeviceLab(subject, lab, MethodTable.only("engine"), "a device")

        monkeypatch.setattr(device_parts, "device_lab", small_lab)
        monkeypatch.setattr(device_parts, "CudaBackend", TakenForCuda)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        saved = Saved()
        device_parts.run("a model", 512, saved)
        assert saved["problems"] == []
        assert [row["name"] for row in saved["conditions"]] == [
            "recompute",
            "bulk load",
            "layered load",
            "two-ended",
        ]
        assert set(saved["beside"]) == {"contiguous, engine", "blocks, engine"}
        assert saved.times == 3


class TestRun:
    def part(self, tmp_path, code, seconds=30.0):
        file = tmp_path / "part.json"
        with (tmp_path / "log").open("wb") as log:
            return device_check.run_part([sys.executable, "-c", code, str(file)], file, seconds, log)

    def test_a_part_that_hangs_keeps_what_it_had(self, tmp_path):
        code = 'import sys, time, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"lines": ["a"]}\'); time.sleep(99)'
        found = self.part(tmp_path, code, 2.0)
        assert found["lines"] == ["a"]
        assert not found["ok"]
        assert "took longer" in found["why"]

    def test_a_part_that_dies_says_so(self, tmp_path):
        found = self.part(tmp_path, "import os; os.abort()")
        assert not found["ok"]
        assert "ended with status -6" in found["why"]

    def test_a_part_with_a_problem_is_not_ok(self, tmp_path):
        code = 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"problems": ["wrong"]}\')'
        found = self.part(tmp_path, code)
        assert not found["ok"]
        assert found["why"] == "wrong"

    def test_a_part_without_time_is_not_begun(self, tmp_path):
        assert self.part(tmp_path, "raise SystemExit(3)", 0.0)["why"] == "no time was left"

    def test_time_that_a_part_leaves_is_the_next_one_s(self, tmp_path, monkeypatch):
        given = []

        def run_part(command, file, seconds, log):
            given.append(seconds)
            return {"ok": True, "why": "", "seconds": 0.0}

        monkeypatch.setattr(device_check, "run_part", run_part)
        parts = device_check.PARTS
        assert device_check.check(tmp_path, sum(parts.values()) + 5.0, list(parts)) == 0
        assert given[0] == pytest.approx(parts["copies"], abs=1)
        assert given[1] == pytest.approx(parts["copies"] + parts["ordering"], abs=5)
        assert given[-1] == pytest.approx(sum(parts.values()), abs=20)

    def test_a_part_that_does_not_exist_is_named(self, tmp_path, capsys):
        with pytest.raises(SystemExit) as ended:
            device_check.main(["--out", str(tmp_path), "--parts", "copies,magic"])
        assert ended.value.code == 2
        assert "--parts: magic: there are copies, " in capsys.readouterr().err

    def test_the_budgets_leave_an_eight_minute_run_room(self):
        assert sum(device_check.PARTS.values()) <= 8 * 60 - 10

    def test_what_stops_a_part_stands_beside_what_it_found(self, tmp_path, monkeypatch):
        def run(part, tokens, save):
            save({"lines": ["one"]})
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(device_parts, "run", run)
        file = tmp_path / "copies.json"
        assert device_check._run_part("copies", file) == 1
        assert json.loads(file.read_text()) == {
            "lines": ["one"],
            "problems": ["RuntimeError: the device is gone"],
        }

    @pytest.mark.parametrize(
        ("lines", "status", "problems"),
        [
            (["....", "76 passed in 30.12s"], 0, []),
            (["FAILED tests/a.py::b - x", "1 failed, 75 passed in 3.0s"], 1, ["FAILED tests/a.py::b - x"]),
            (["76 skipped in 1.0s"], 0, ["no test ran"]),
            (["ImportError"], 4, ["pytest ended with status 4", "no test ran"]),
        ],
    )
    def test_tests_are_judged_by_what_ran(self, lines, status, problems):
        assert device_check.judge_tests(lines, status)["problems"] == problems


def test_a_python_without_what_it_needs_is_told_what_before_anything_runs(tmp_path):
    found = tmp_path / "python3"
    # A Python of its own, without this environment's packages.
    found.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    found.chmod(0o755)
    ran = subprocess.run(
        [str(ROOT / "bench" / "device_check.sh"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "WHEELS": str(tmp_path / "wheels")},
        check=False,
    )
    assert ran.returncode == 2
    assert "msgspec" in ran.stderr
    assert str(tmp_path / "wheels") in ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_every_part_says_why_and_there_is_a_table(tmp_path):
    script = ROOT / "bench" / "device_check.sh"
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    ran = subprocess.run(
        [str(script), str(tmp_path / "out"), "--seconds", "120", "--parts", "copies"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    assert "is built without it" in ran.stdout
    results = json.loads((tmp_path / "out" / "device_check.json").read_text())
    assert results["host"]["torch"]
    assert results["host"]["date"]
    assert results["host"]["versions"]["cuda"] == "none"
    assert list(results["parts"]) == ["copies"]
    assert (tmp_path / "out" / "device_check.txt").read_text().strip() == ran.stdout.strip()
