"""A validation in words, as plain values, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlane.bench.validate import Errors, Scored, Validation, grouped
from kvlane.bench.validate_rows import source_of
from kvlane.bench.validate_within import Calibrated
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link

_WORST = 15
_GROUPS = (
    ("kind", lambda row: row.task.row.kind),
    ("method", lambda row: row.method),
    ("device", lambda row: row.task.device),
    ("engine", lambda row: row.task.engine or "plain copies"),
)
_ACROSS = (
    "refits prefills only (efficiencies and the share of the interconnect): links keep the rates they have"
)
_ENGINE_NAMES = {
    "vllm": "vLLM",
    "tensorrt_llm": "TensorRT-LLM",
    "sglang": "SGLang",
    "llama_cpp": "llama.cpp",
    "mlx": "MLX",
    "deepspeed_mii": "DeepSpeed-MII",
}


def plain(validation: Validation) -> dict[str, Any]:
    """The validation as plain values: errors by group, one flat list of rows, what was left out and why."""
    predicted, usable = validation.coverage()
    result: dict[str, Any] = {
        "csv": validation.path.name,
        "coverage": {
            "predicted": predicted,
            "usable": usable,
            "share": predicted / usable if usable else None,
        },
        "groups": {
            name: {group: asdict(errors) for group, errors in validation.groups(key).items()}
            for name, key in _GROUPS
        },
        "sized_transfers": _sized(validation),
        "links_of_one_source": one_source_links(validation),
        "pairs": _pairs(validation),
        "rows": [_row(row.task.row.id, row) for row in validation.scored],
        "left_out": [{"id": row.id, "kind": row.kind, "reason": why} for row, why in validation.left_out],
    }
    if validation.within is not None:
        result["within_source"] = {
            "groups": {
                split: {method: asdict(errors) for method, errors in groups.items()}
                for split, groups in _within(validation.within).items()
            },
            "rows": [
                {**_row(each.task.row.id, each), "split": each.split, "method": each.task.method}
                for each in validation.within
            ],
        }
    if validation.across is not None:
        result["leave_source_out"] = {
            "groups": {
                "method": {name: asdict(errors) for name, errors in _by_method(validation.across).items()},
                "source": {name: asdict(errors) for name, errors in _by_source(validation.across).items()},
            },
            "rows": [_row(row.task.row.id, row) for row in validation.across],
        }
    return result


def in_words(validation: Validation) -> str:
    """The whole report as text."""
    predicted, usable = validation.coverage()
    share = f" ({predicted / usable:.1%})" if usable else ""
    lines = [f"{validation.path}: {predicted} of {usable} usable rows of kinds A and B predicted{share}", ""]
    for name, key in _GROUPS:
        lines += [*_table(f"error by {name}", validation.groups(key), name == "engine"), ""]
    sized = _sized(validation)
    if sized is not None:
        lines += [*_table("transfers that state a copy size", {"transfer": Errors(**sized)}), ""]
    lines += _pairs_in_words(validation)
    lines += _caveats(validation)
    lines += ["", f"the {_WORST} rows most wrong"]
    worst = sorted(validation.scored, key=lambda row: -abs(row.error))[:_WORST]
    lines += [f"  {_row_in_words(row)}" for row in worst]
    if validation.left_out:
        lines += ["", "left out"]
        lines += [f"  {row.id:16} {why}" for row, why in validation.left_out]
    if validation.within is not None:
        for split, groups in _within(validation.within).items():
            lines += ["", *_table(f"within a source, {split.replace('_', ' ')} calibrated", groups)]
    if validation.across is not None:
        lines += ["", *_table("each source predicted from the others", _by_method(validation.across))]
        lines += _table("", _by_source(validation.across))[1:]
        lines += [f"  {_ACROSS}"]
    return "\n".join(lines)


def one_source_links(validation: Validation) -> list[dict[str, Any]]:
    """Links whose rate one source alone measured: how many rows it gave, and how many of those scored are its own.

    Rows that state their link's rate are not counted. A small error says that a curve fits its own points, not that it
    holds elsewhere.
    """
    scored: dict[str, tuple[Link, list[str]]] = {}
    for row in validation.scored:
        if row.task.transfer is not None and row.task.transfer.link.source != "explicit":
            link = row.task.transfer.link
            scored.setdefault(link.name, (link, []))[1].append(row.task.row.source)
    found = []
    for name, (link, sources) in sorted(scored.items()):
        origins = {source_of(address) for address in link.origin.split(", ")}
        if link.rows and len(origins) == 1:
            origin = origins.pop()
            found.append(
                {
                    "link": name,
                    "source": origin,
                    "fitted_rows": link.rows,
                    "n": len(sources),
                    "own": sources.count(origin),
                }
            )
    return found


def plot(validation: Validation, path: Path) -> None:
    """Draws predicted against measured, both axes logarithmic; raises `InputError` where it cannot be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot", "needs matplotlib", "pip install 'kvlane[plot]'") from None
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    for at, (unit, title) in enumerate((("ms", "times, ms"), ("GB/s", "copies, GB/s")), start=1):
        axes = figure.add_subplot(1, 2, at)
        rows = [row for row in validation.scored if row.task.unit == unit]
        for name in dict.fromkeys(row.method for row in rows):
            members = [row for row in rows if row.method == name]
            axes.scatter(
                [row.task.measured for row in members],
                [row.predicted for row in members],
                s=14,
                alpha=0.6,
                label=f"{name} ({len(members)})",
            )
        if rows:
            values = [value for row in rows for value in (row.task.measured, row.predicted)]
            ends = [min(values) / 1.5, max(values) * 1.5]
            axes.plot(ends, ends, color="0.5", linewidth=1)
            axes.legend(fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted", title=title)
        axes.grid(True, which="major", alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(
            "--plot", f"{path}: {error}", "a writable file with an image's ending, such as .png"
        ) from None


def _caveats(validation: Validation) -> list[str]:
    lines = []
    links = one_source_links(validation)
    if links:
        lines += [
            "",
            "links whose rate rests on one source (rows fitted; rows scored, of them the source's own)",
        ]
        lines += [
            f"  {each['link']:20} {each['fitted_rows']:4} {each['n']:6} {each['own']:4}  {each['source']}"
            for each in links
        ]
    hits = sum(row.task.method == "hbm_hit" for row in validation.scored)
    if hits:
        lines += [
            "",
            f"hbm_hit apart: {hits} rows whose prefix was on the device already; nothing is moved, and what is left to"
            " compute is so short that the engine's own time, which is not modelled, decides",
        ]
    return lines


def _row(name: str, row: Scored | Calibrated) -> dict[str, Any]:
    return {
        "id": name,
        "kind": row.task.row.kind,
        "method": row.task.method,
        "predicted": row.predicted,
        "measured": row.task.measured,
        "unit": row.task.unit,
        "error": row.error,
    }


def _sized(validation: Validation) -> dict[str, Any] | None:
    sized = [row.error for row in validation.scored if row.task.row.kind == "C" and row.task.row.copy_bytes]
    return asdict(grouped(("transfer", error) for error in sized)["transfer"]) if sized else None


def _pairs(validation: Validation) -> dict[str, Any]:
    told = [pair for pair in validation.pairs if not pair.close]
    wrong = [pair for pair in told if not pair.right]
    return {
        "n": len(told),
        "close": len(validation.pairs) - len(told),
        "right": len(told) - len(wrong),
        "share_right": (len(told) - len(wrong)) / len(told) if told else None,
        "wrong": [pair.load.task.row.id for pair in wrong],
    }


def _within(rows: Iterable[Calibrated]) -> dict[str, dict[str, Errors]]:
    splits: dict[str, list[Calibrated]] = {}
    for row in rows:
        splits.setdefault(row.split, []).append(row)
    return {
        split: grouped((Scored(row.task, row.predicted).method, row.error) for row in members)
        for split, members in splits.items()
    }


def _by_method(rows: Iterable[Scored]) -> dict[str, Errors]:
    return grouped((row.method, row.error) for row in rows)


def _by_source(rows: Iterable[Scored]) -> dict[str, Errors]:
    return grouped((row.task.row.source, row.error) for row in rows)


def _table(title: str, groups: Mapping[str, Errors], engines: bool = False) -> list[str]:
    lines = [f"{title:44} {'n':>4} {'median':>8} {'p90':>8} {'worst':>8} {'bias':>8}"]
    for name, errors in groups.items():
        shown = _ENGINE_NAMES.get(name, name) if engines else name
        lines.append(
            f"  {shown[-42:]:42} {errors.n:4} {errors.median_abs_error:8.1%} {errors.p90_abs_error:8.1%}"
            f" {errors.worst_abs_error:8.1%} {errors.bias:+8.1%}"
        )
    return lines


def _pairs_in_words(validation: Validation) -> list[str]:
    found = _pairs(validation)
    if not found["n"]:
        return ["no pair of a load and a recompute more than 10 % apart"]
    lines = [
        f"the right path in {found['right']} of {found['n']} pairs ({found['share_right']:.0%});"
        f" {found['close']} closer than 10 % left out"
    ]
    lines += [f"  wrong: {name}" for name in found["wrong"]]
    return lines


def _row_in_words(row: Scored) -> str:
    task = row.task
    tokens = f"{task.row.prompt_tokens} tokens" if task.row.prompt_tokens else ""
    what = " ".join(part for part in (task.row.model, task.row.gpu, tokens) if part)
    return (
        f"{task.row.id:16} {row.error:+8.0%}  {row.predicted:.4g} {task.unit} predicted, {task.measured:.4g} measured:"
        f" {task.method} {what}"
    )
