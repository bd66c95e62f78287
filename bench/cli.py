"""`kvlane-bench`: prove it on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlane.policy.cli import run_app
from kvlane.policy.errors import InputError
from kvlane.policy.units import parse_rate

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
    out: Annotated[Path, typer.Option(help="Folder for results.json and report.txt.")] = Path("results"),
) -> None:
    """The 12,370-token result on this CPU: recompute, load in bulk, load by layer, and the policy's choice."""
    try:
        # The only place that needs torch and transformers, both of them extras.
        from kvlane.bench.reproduce import Options, reproduce
        from kvlane.bench.results import write
        from kvlane.bench.scenarios import WrongAnswerError
        from kvlane.bench.shape import Shape
        from kvlane.streams.executor import LoadError
    except ImportError as error:
        raise InputError("reproduce", f"needs {error.name}", "pip install 'kvlane[transformers]'") from None
    rate = None if link == "memcpy" else parse_rate(link, "--link")
    options = Options(
        tokens=tokens if tokens is not None else 2048 if quick else 12_370,
        reps=reps,
        shape=Shape(
            layers if layers is not None else 4 if quick else 16, hidden, heads, kv_heads, ffn, vocab
        ),
        link_bytes_per_s=rate,
    )
    write_check(out)
    try:
        reproduction = reproduce(options)
    except (WrongAnswerError, LoadError) as error:
        what = "wrong answer" if isinstance(error, WrongAnswerError) else "a load failed"
        print(f"kvlane-bench: {what}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(write(reproduction, out))


def write_check(out: Path) -> None:
    """Refuses a folder that cannot be written before minutes are spent; raises `InputError` naming `--out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
        for name in ("results.json", "report.txt"):
            if (out / name).exists():
                (out / name).open("ab").close()
    except OSError as error:
        raise InputError(
            "--out", f"{error.filename or out}: {error.strerror or error}", "a folder that can be written"
        ) from None


def main() -> None:
    """The `kvlane-bench` command."""
    sys.exit(run_app(app, "kvlane-bench"))


if __name__ == "__main__":
    main()
