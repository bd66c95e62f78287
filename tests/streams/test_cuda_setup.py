"""What is said where CUDA, a driver or a package is missing; importing asks no device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvlane.policy.errors import InputError
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.cuda import CudaBackend
from kvlane.streams.cuda_setup import check_cuda, check_not_capturing, find_module
from kvlane.streams.engines import transformers


def test_importing_it_touches_no_device():
    code = (
        "import sys, torch, kvlane.streams.cuda, kvlane.streams.cuda_probe;"
        "assert not torch.cuda.is_initialized();"
        "assert not {'cupy', 'cuda.bindings'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_named():
    with pytest.raises(InputError, match=r"device: is cuda, and torch .* is built without it") as caught:
        CudaBackend()
    assert caught.value.field == "device"


def test_no_device_or_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"CUDA 13\.0\) finds no device or no driver"):
        check_cuda()


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_cuda(1) == torch.device("cuda", 1)
    with pytest.raises(InputError, match="is cuda:2, and there are 2"):
        check_cuda(2)


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13"), (None, "cuda13")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, cuda, extra):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    module, problem = find_module("kvlane.no_such_module")
    assert module is None
    assert "no_such_module" in problem
    assert f"pip install 'kvlane[{extra}]'" in problem
    assert find_module("json") == (__import__("json"), "")


class TestCapture:
    def test_a_forward_that_is_captured_whole_is_refused_with_what_to_set(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(InputError, match=r"cuda_graph: .* would wait for no layer.*PIECEWISE"):
            check_not_capturing("cuda")

    def test_no_device_is_asked_where_there_is_none(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
        check_not_capturing("cpu")

    def test_outside_of_one_it_is_not(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        check_not_capturing("cuda")

    def test_the_engine_asks_before_every_prefill(self, monkeypatch, kit):
        with CpuBackend() as backend:
            engine = kit.engine(kit.model(), backend)
            monkeypatch.setattr(transformers, "check_not_capturing", lambda kind: check_not_capturing("cuda"))
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(InputError, match="cuda_graph"):
                engine.prefill(kit.ids(8))
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            engine.prefill(kit.ids(8))
            engine.close()
