"""`kvlane-bench validate`, the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvlane.policy.catalog import load_machine, machine_names
from kvlane.policy.errors import InputError


def validate(
    csv: Annotated[
        Path | None,
        typer.Argument(help="Measurements, in the published columns [those that come with the package]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    within_source: Annotated[
        bool,
        typer.Option(
            "--within-source",
            help="Calibrate each source on every other of its rows, and on its short half, and predict the rest.",
        ),
    ] = False,
    leave_source_out: Annotated[
        bool,
        typer.Option(
            "--leave-source-out", help="Refit prefills without each source, and predict its own; links stay."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured into this file (.png, .svg, .pdf).")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Print the [[prefill]] tables that the measurements give instead.")
    ] = False,
) -> None:
    """Predict what others measured, and say how well: by kind, device and engine, with the rows most wrong."""
    # Here and not above: only this command needs scipy.
    from kvlane.bench import validate as validation
    from kvlane.bench.validate_profiles import profile_text
    from kvlane.bench.validate_report import in_words, plain
    from kvlane.bench.validate_report import plot as draw
    from kvlane.bench.validate_rows import packaged

    path = packaged() if csv is None else csv
    if fit:
        if as_json or within_source or leave_source_out or plot is not None:
            raise InputError("--fit", "stands beside other options", "it alone")
        fits = validation.fitted(path)
        for name in machine_names():
            print(f"# {name}\n\n{profile_text(fits, load_machine(name))}\n")
        return
    found = validation.validate(path, within=within_source, leave_out=leave_source_out)
    if plot is not None:
        draw(found, plot)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(plain(found)), indent=2).decode())
    else:
        print(in_words(found))
