"""`kvlane-bench sweep`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvlane.bench.outputs import check_folder
from kvlane.policy.errors import InputError


def sweep(
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the prompt [2560, or 512 with --quick].")
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            help="Load time over recompute time of each link [0.25,0.5,1,2,4, or 0.5,2 with --quick]."
        ),
    ] = None,
    reps: Annotated[
        int | None, typer.Option(help="Measurements of each path [7, or 2 with --quick].")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="A small model, a short prompt, two links: seconds instead of minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for DATE-cpu-sweep.json, .txt and .png.")] = Path(
        "results"
    ),
) -> None:
    """Every path on paced links from fast to slow: which is fastest, how well it was predicted, what was chosen."""
    try:
        # Here for the same reasons as in `reproduce`.
        import torch  # noqa: F401

        from kvlane.bench.measuring import WrongAnswerError
        from kvlane.bench.shape import Shape
        from kvlane.bench.sweep import Options, Overlap
        from kvlane.bench.sweep import sweep as run
        from kvlane.bench.sweep_results import write
        from kvlane.streams.executor import LoadError
    except ImportError as error:
        raise InputError("sweep", f"needs {error.name}", "pip install 'kvlane[transformers]'") from None
    usual = Options()
    if quick:
        usual = Options(
            tokens=512,
            reps=2,
            alone_reps=2,
            ratios=(0.5, 2.0),
            shape=Shape(layers=4),
            overlaps=(Overlap(1024, 16),),
            overlap_reps=2,
        )
    options = replace(
        usual,
        tokens=usual.tokens if tokens is None else tokens,
        reps=usual.reps if reps is None else reps,
        ratios=usual.ratios if ratios is None else parse_ratios(ratios),
    )
    check_folder(out, ())
    try:
        print(write(run(options), out))
    except (WrongAnswerError, LoadError) as error:
        what = "wrong answer" if isinstance(error, WrongAnswerError) else "a load failed"
        print(f"kvlane-bench: {what}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def parse_ratios(text: str) -> tuple[float, ...]:
    """Numbers between commas; raises `InputError` naming `--ratios`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError("--ratios", f"{text!r} is not a list of numbers", '"0.5,1,2"') from None
