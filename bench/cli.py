"""`kvlane-bench`: prove it on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvlane.bench.cli_sweep import sweep
from kvlane.bench.cli_validate import validate
from kvlane.bench.outputs import check_file, check_folder
from kvlane.policy.cli import run_app
from kvlane.policy.errors import InputError
from kvlane.policy.units import parse_rate

_WRITTEN = ("results.json", "report.txt", "trace.json", "observations.json", "timeline.png")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _front_door() -> None:
    """Measure what the policy predicts, on this machine."""


@app.command()
def reproduce(
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the prompt [12370, or 2048 with --quick].")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model [16, or 4 with --quick].")] = None,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 2,
    ffn: Annotated[int, typer.Option(help="Width of the MLP.")] = 704,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 2048,
    link: Annotated[
        str, typer.Option(help='Scenario A\'s link: memcpy, or a rate such as "2 GB/s".')
    ] = "memcpy",
    reps: Annotated[int, typer.Option(help="Measurements per condition.")] = 3,
    quick: Annotated[
        bool, typer.Option(help="A small model and a short prompt: seconds instead of minutes.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="On cuda: a built-in model or a config.json, random weights; again for more"
            " [llama-3.1-8b and qwen3-32b]."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results.json, report.txt, timeline.png and so on.")
    ] = Path("results"),
) -> None:
    """The 12,370-token result on this CPU: recompute, load in bulk, load by layer, and the policy's choice.

    On cuda with models of full size: recompute, load in bulk and by layer, and compute the front while the rest loads.
    """
    try:
        # The only place that needs torch and transformers, both of them extras. torch first: transformers has words
        # of its own for its absence.
        import torch  # noqa: F401

        from kvlane.bench.calibrate import check_device
        from kvlane.bench.measuring import WrongAnswerError
        from kvlane.bench.reproduce import Options, check, reproduce
        from kvlane.bench.reproduce_results import write
        from kvlane.bench.shape import Shape
        from kvlane.streams.executor import LoadError
    except ImportError as error:
        raise InputError("reproduce", f"needs {error.name}", "pip install 'kvlane[transformers]'") from None
    check_device(device)
    if device == "cuda":
        _reproduce_on_device(model or (), tokens, reps, out)
        return
    rate = None if link == "memcpy" else parse_rate(link, "--link")
    options = Options(
        tokens=tokens if tokens is not None else 2048 if quick else 12_370,
        reps=reps,
        shape=Shape(
            layers if layers is not None else 4 if quick else 16, hidden, heads, kv_heads, ffn, vocab
        ),
        link_bytes_per_s=rate,
    )
    check(options)
    check_folder(out, _WRITTEN)
    try:
        reproduction = reproduce(options)
    except (WrongAnswerError, LoadError) as error:
        what = "wrong answer" if isinstance(error, WrongAnswerError) else "a load failed"
        print(f"kvlane-bench: {what}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(write(reproduction, out))


def _reproduce_on_device(models: Sequence[str], tokens: int | None, reps: int, out: Path) -> None:
    from kvlane.bench.cli_device import reproduce_on_device
    from kvlane.bench.device_reproduce import Options

    options = Options(tokens=tokens if tokens is not None else 12_370, reps=reps)
    check_folder(out, _WRITTEN)
    if not reproduce_on_device(models, options, out):
        print("kvlane-bench: wrong answer: see the problems above", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="The record to write, for kvlane decide --calibration.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    model: Annotated[
        str | None,
        typer.Option(
            help="A built-in model, its Hugging Face id, or a config.json, with random weights"
            " [the reproduction's own small model; on cuda llama-3.1-8b]."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Longest prompt to measure [4096, or 512 with --quick].")
    ] = None,
    reps: Annotated[
        int | None, typer.Option(help="Measurements of each pass [4, or 2 with --quick].")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the small model [16, or 4 with --quick].")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Its hidden size.")] = 256,
    heads: Annotated[int, typer.Option(help="Its attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Its KV heads.")] = 2,
    ffn: Annotated[int, typer.Option(help="Width of its MLP.")] = 704,
    vocab: Annotated[int, typer.Option(help="Size of its vocabulary.")] = 2048,
    quick: Annotated[bool, typer.Option(help="Short prompts, few measurements, a wider band.")] = False,
    observations: Annotated[
        Path | None,
        typer.Option(help="Measure nothing: fit the observations that reproduce left in this file."),
    ] = None,
) -> None:
    """Measure this machine's prefill and its link, and write them down for kvlane decide --calibration."""
    try:
        from kvlane.bench import observations as observed
        from kvlane.bench.calibrate import SEED, Options, calibrate_cpu, check_device, summary
        from kvlane.bench.device_calibrate import DEFAULT_MODEL, calibrate_device
        from kvlane.bench.shape import Shape
        from kvlane.bench.subject import demo_subject, named_subject
        from kvlane.policy.calibration_record import write
    except ImportError as error:
        raise InputError("calibrate", f"needs {error.name}", "pip install 'kvlane[transformers]'") from None
    check_device(device)
    if observations is not None:
        check_file(out)
        record = observed.calibrate(observed.read(observations))
        write(record, out)
        print(summary(record, out))
        return
    options = Options(
        tokens=tokens if tokens is not None else 512 if quick else 4096,
        reps=reps if reps is not None else 2 if quick else 4,
    )
    check_file(out)
    if device == "cuda":
        record = calibrate_device(model if model is not None else DEFAULT_MODEL, options, time.time())
    else:
        if model is not None:
            subject = named_subject(model, options.tokens, SEED)
        else:
            depth = layers if layers is not None else 4 if quick else 16
            subject = demo_subject(Shape(depth, hidden, heads, kv_heads, ffn, vocab), options.tokens, SEED)
        record = calibrate_cpu(subject, options, time.time())
    write(record, out)
    print(summary(record, out))


app.command()(validate)
app.command()(sweep)


def main() -> None:
    """The `kvlane-bench` command."""
    sys.exit(run_app(app, "kvlane-bench"))


if __name__ == "__main__":
    main()
