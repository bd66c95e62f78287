"""`kvlane-bench calibrate` for real on a tiny model, and `kvlane decide` with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvlane.bench.calibrate import Options, extend_points, fresh_lengths, load_lengths
from kvlane.bench.cli import app as bench_app
from kvlane.policy.calibration_record import read
from kvlane.policy.cli import app, run_app
from kvlane.policy.errors import InputError

TINY = [
    "--tokens",
    "256",
    "--reps",
    "2",
    "--layers",
    "2",
    "--hidden",
    "32",
    "--heads",
    "2",
    "--kv-heads",
    "1",
]
TINY += ["--ffn", "64", "--vocab", "100"]


@pytest.fixture
def threads():
    """Calibrating computes on one thread; other tests find as many as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def calibrate(*words: str | Path) -> int:
    return run_app(bench_app, "kvlane-bench", ["calibrate", *(str(word) for word in words)])


@pytest.mark.usefixtures("threads")
def test_the_small_model_is_measured_and_decided_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    assert calibrate(*TINY, "--out", file) == 0
    out, err = capsys.readouterr()
    assert "written" in out
    assert "256 tokens, 2 of 2" in err
    record = read(file)
    assert record.fingerprint.model == "demo-llama-2x32"
    assert record.fingerprint.engine == "transformers"
    assert record.fingerprint.dtype == record.fingerprint.kv_dtype == "fp32"
    assert {"python", "torch", "transformers"} <= set(record.fingerprint.host)
    assert record.prefill is not None
    assert record.prefill.fresh.samples == 2 * len(fresh_lengths(256))
    assert record.prefill.extend.samples == 2 * len(extend_points(256))
    assert (record.prefill.new_tokens.low, record.prefill.new_tokens.high) == (1, 256)
    tier = record.tiers["host"]
    assert (tier.run_tokens, tier.runs_per_layer) == (None, 2)  # keys and values, each in one piece
    link = record.links["host link"]
    # Every length's warm loads, and the probes of eight sizes.
    assert link.samples == 7 * len(load_lengths(256)) + 8

    words = ["decide", "--calibration", str(file), "--prompt-tokens", "200", "--hit", "host=200", "--json"]
    assert run_app(app, "kvlane", words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["calibrated"] is True
    assert plan["kv_bytes_per_token"] == 2 * 1 * (16 + 16) * 4
    assert plan["model"] == "demo-llama-2x32"
    assert {parameter["source"] for parameter in plan["parameters_from"].values()} == {"calibration"}
    for estimate in plan["estimates"].values():
        assert 0 < estimate["ttft_s"] < 60
    # What was measured is what is predicted, as far as a busy machine repeats itself.
    measured = record.prefill.fresh
    assert plan["estimates"]["recompute"]["ttft_s"] == pytest.approx(
        measured.overhead_s
        + 200 * measured.token_s
        + 200 * 201 / 2 * measured.pair_s
        + 200 * measured.context_s
        + record.prefill.head_s
    )


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_config_file_is_measured_in_its_own_dtype_and_must_then_match(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small-qwen.json"
    fields = {
        "model_type": "qwen3",
        "dtype": dtype,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 100,
    }
    config.write_text(json.dumps(fields), encoding="utf-8")
    file = tmp_path / "record.json"
    assert calibrate("--model", config, "--tokens", "256", "--reps", "2", "--out", file) == 0
    assert read(file).fingerprint.model == "small-qwen"
    words = ["decide", "--calibration", str(file), "--prompt-tokens", "100", "--model"]
    assert run_app(app, "kvlane", [*words, str(config)]) == 0
    config.write_text(json.dumps({**fields, "intermediate_size": 96}), encoding="utf-8")
    capsys.readouterr()
    assert run_app(app, "kvlane", [*words, str(config)]) == 2
    assert "calibration.fingerprint.model" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_one_line_and_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate("--device", "cuda", "--out", tmp_path / "record.json") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"kvlane-bench: --device: is cuda, and torch {torch.__version__} is built without it"
        " (expected cpu, or a CUDA build of torch)\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "tpu"], "--device: 'tpu' is not a device"),
        (["--tokens", "8"], "tokens: is 8"),
        (["--reps", "1"], "reps: is 1"),
        (["--model", "deepseek-v3"], "--model: deepseek-v3 is of kind 'deepseek_v3'"),
        (["--model", "mistral-7b"], "--model: mistral-7b has layers with a sliding window"),
        (["--model", "qwen3-32b-fp8"], "--model: qwen3-32b-fp8 has fp8"),
        (["--model", "llama-3.1-405b"], "--model: llama-3.1-405b with 4096 tokens needs about"),
        (["--model", "lama-3.1-8b"], "did you mean llama-3.1-8b?"),
        (["--heads", "3"], "heads: 3 heads of an even size do not fill hidden 256"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(*words, "--out", tmp_path / "record.json") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_an_output_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate("--out", tmp_path) == 2
    assert "is a folder" in capsys.readouterr().err
    assert calibrate("--out", tmp_path / "none" / "record.json") == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [256, 257, 512, 4096, 12_370])
def test_what_is_measured_fits_the_prompt(tokens: int) -> None:
    assert max(fresh_lengths(tokens)) <= tokens
    assert max(load_lengths(tokens)) < tokens
    assert all(0 < resident < resident + new <= tokens for resident, new in extend_points(tokens))


def test_options_are_checked() -> None:
    with pytest.raises(InputError, match="tokens"):
        Options(tokens=10)
