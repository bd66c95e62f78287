"""The CUDA reproduction's own work, run for real on the CPU backend: only the device is another there."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
import torch

from kvlane.bench import device_memory, device_reproduce
from kvlane.bench.cli import app
from kvlane.bench.device_memory import (
    SHAPES,
    check_device_memory,
    device_bytes,
    fits,
    host_free_bytes,
    refuse_memory,
)
from kvlane.bench.device_reproduce import Options, render, reproduce_shape, to_dict
from kvlane.bench.lab import Lab
from kvlane.bench.shape import Shape
from kvlane.bench.subject import demo_subject
from kvlane.policy.catalog import load_model
from kvlane.policy.cli import run_app
from kvlane.policy.errors import InputError
from kvlane.transfer.host import HostStore

OPTIONS = Options(tokens=600, reps=2, calibration_reps=2)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def lab(threads):
    subject = demo_subject(Shape(3, 32, 2, 1, 64, 100), OPTIONS.capacity_tokens, 1)
    with Lab(subject.model, OPTIONS.capacity_tokens, "seed-1") as made:
        yield subject, made


def run(lab):
    subject, made = lab
    return reproduce_shape(subject, made, OPTIONS, "a device", time.time(), lambda what, work: None)


def test_every_condition_is_predicted_measured_and_the_same_to_the_last_bit(lab):
    found = run(lab)
    assert found.problems == []
    names = [outcome.condition.name for outcome in found.outcomes]
    assert names == ["recompute", "bulk load", "layered load", "two-ended"]
    for outcome in found.outcomes:
        assert outcome.condition.predicted_s > 0
        assert len(outcome.answers) == OPTIONS.reps
        loaded = outcome.condition.executor is not None
        assert len(outcome.alone) == (OPTIONS.reps if loaded else 0)
    two_ended = found.outcomes[-1]
    assert [each.kind for each in two_ended.answers[0].result.passes] == ["front", "tail"]
    assert two_ended.condition.start > 0
    assert found.logit_difference < 1e-3
    values = json.loads(json.dumps(to_dict(found)))
    assert [row["name"] for row in values["conditions"]] == names
    text = render(found)
    assert "PROBLEM" not in text
    for name in names:
        assert name in text


def test_no_length_of_the_calibration_is_the_prompt_s(lab):
    record = run(lab).record
    assert record.fingerprint.device == "a device"
    assert OPTIONS.calibration.tokens > OPTIONS.tokens
    assert record.prefill.new_tokens.high == OPTIONS.calibration.tokens


def test_kv_that_is_not_the_stored_is_a_problem(lab, monkeypatch):
    inner = Lab.load

    def spoiled(self, store, ids, end, mode, start=0):
        answer = inner(self, store, ids, end, mode, start)
        self.engine.kv.memory[7] += 1
        return answer

    monkeypatch.setattr(Lab, "load", spoiled)
    assert any("not the stored KV" in problem for problem in run(lab).problems)


def test_logits_of_other_kv_are_a_problem(lab, monkeypatch):
    inner = Lab.load
    calls = []

    def spoiled(self, store, ids, end, mode, start=0):
        answer = inner(self, store, ids, end, mode, start)
        calls.append(mode)
        if mode == "layered":
            answer.result.logits[3] += 1e-6
        return answer

    monkeypatch.setattr(Lab, "load", spoiled)
    problems = run(lab).problems
    assert any("layered load: not the logits" in problem for problem in problems)
    assert not any("bulk load: not the logits" in problem for problem in problems)


def test_an_event_costs_nothing_or_something_but_never_less(lab):
    _, made = lab
    ids = np.random.default_rng(0).integers(0, 100, 300)
    made.recompute(ids)
    store = HostStore(16)
    made.keep(store, ids, 288)
    assert 0 <= device_reproduce.event_cost_s(made, store, ids, 288) < 1


class TestMemory:
    def test_what_does_not_fit_is_refused_with_one_that_does(self):
        big, small = load_model("qwen3-32b"), load_model("llama-3.1-8b")
        free = device_bytes(small, 12_370)
        with pytest.raises(InputError, match=r"--model: qwen3-32b with 12,370 .* of the device") as caught:
            refuse_memory(big, 12_370, free, 1e12)
        assert caught.value.expected == "llama-3.1-8b, which fits"
        refuse_memory(small, 12_370, free, 1e12)

    def test_where_none_fits_a_shorter_prompt_is_offered(self):
        with pytest.raises(InputError, match="fewer --tokens"):
            refuse_memory(load_model("llama-3.1-8b"), 12_370, 1e9, 1e12)

    def test_a_host_that_grows_is_not_looked_at(self, monkeypatch):
        spec = load_model("llama-3.1-8b")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))
        monkeypatch.setattr(device_memory, "host_free_bytes", lambda: 1e9)
        with pytest.raises(InputError, match="page-locked host memory"):
            check_device_memory(spec, 12_370, torch.device("cpu"))
        check_device_memory(spec, 12_370, torch.device("cpu"), host_grows=True)

    def test_free_memory_of_the_host_is_some_and_no_more_than_there_is(self):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < host_free_bytes() <= there

    def test_host_memory_counts_too(self):
        with pytest.raises(InputError, match="page-locked host memory"):
            refuse_memory(load_model("llama-3.1-8b"), 12_370, 1e12, 3e9)

    def test_shapes_are_offered_from_the_largest_on(self):
        sizes = [device_bytes(load_model(name), 12_370) for name in SHAPES]
        assert sizes == sorted(sizes, reverse=True)

    def test_the_two_shapes_fit_an_h200_and_the_larger_no_80_gb_card_with_much_else_on_it(self):
        assert all(fits(load_model(name), 12_370, 140e9, 100e9) for name in SHAPES)
        assert not fits(load_model("qwen3-32b"), 12_370, 60e9, 100e9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_one_line(tmp_path, capsys):
    assert run_app(app, "kvlane-bench", ["reproduce", "--device", "cuda", "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvlane-bench: --device: is cuda, and torch")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
