"""Published measurements as rows: read from CSV, checked, nothing interpreted yet."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from kvlane.policy.errors import InputError

Kind = Literal["A", "B", "C"]
Grade = Literal["U1", "U2", "U3"]

_LINK_RATE = "link_bandwidth_gbps_stated(GB/s)"
_COLUMNS = (
    "id",
    "pair_id",
    "kind",
    "source_url",
    "model",
    "params_note",
    "gpu",
    "n_gpus_tp",
    "weight_dtype",
    "kv_dtype",
    "engine",
    "prompt_tokens",
    "cached_tokens",
    "batch_or_concurrency",
    "tier",
    _LINK_RATE,
    "method",
    "ttft_ms",
    "other_metric",
    "notes",
    "rate_gb_per_s",
    "copy_bytes",
)
_KINDS: tuple[Kind, ...] = ("A", "B", "C")
_GRADES: tuple[Grade, ...] = ("U1", "U2", "U3")


@dataclass(frozen=True, slots=True)
class Row:
    """One published number: its texts as they stand, its numbers as numbers (None where empty).

    `ttft_ms` in milliseconds, `rate_gb_per_s` in 1e9 bytes a second, `copy_bytes` in bytes. A row of grade U3 is
    context: it may say "short, varying" where others say a number of tokens, and is never scored.
    """

    id: str
    pair_id: str
    kind: Kind
    grade: Grade
    source_url: str
    model: str
    params_note: str
    gpu: str
    n_gpus_tp: str
    weight_dtype: str
    kv_dtype: str
    engine: str
    prompt_tokens: int | None
    cached_tokens: int
    batch: str
    tier: str
    link_rate: str
    method: str
    ttft_ms: float | None
    other_metric: str
    notes: str
    rate_gb_per_s: float | None
    copy_bytes: float | None

    @property
    def usable(self) -> bool:
        """Whether a prediction is to be held against it."""
        return self.grade != "U3"

    @property
    def source(self) -> str:
        """Who published it: the repository on a code host, the site elsewhere."""
        parts = urlsplit(self.source_url)
        host = parts.netloc.removeprefix("www.")
        if host in ("github.com", "raw.githubusercontent.com", "huggingface.co"):
            return "/".join([host, *parts.path.strip("/").split("/")[:2]])
        return host or self.source_url


def packaged() -> Path:
    """The measurements that come with the package."""
    return Path(str(resources.files("kvlane.bench").joinpath("published", "measurements.csv")))


def read(path: Path) -> list[Row]:
    """The rows of a CSV with the published columns, others ignored.

    Raises `InputError` naming the file, and the row and column where there is one, for what is unreadable, missing,
    not a number, or of an unknown kind or grade.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError("CSV", f"{path}: {reason}", "a readable CSV of measurements") from None
    reader = csv.DictReader(text.splitlines(keepends=True), strict=True)
    try:
        header = reader.fieldnames or ()
        missing = [name for name in _COLUMNS if name not in header]
        if missing:
            raise InputError("CSV", f"{path}: no column {', '.join(missing)}", "the published columns")
        rows = [_row(cells, f"{path}, line {reader.line_num}") for cells in reader]
    except csv.Error as error:
        raise InputError("CSV", f"{path}, line {reader.line_num}: {error}", "a CSV of measurements") from None
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise InputError("id", f"{path}: {row.id!r} stands twice", "each row its own")
        seen.add(row.id)
    if not rows:
        raise InputError("CSV", f"{path}: has no rows", "at least one measurement")
    return rows


def _row(cells: dict[str, str | None], where: str) -> Row:
    short = [name for name in _COLUMNS if cells.get(name) is None]
    if short or None in cells:
        raise InputError("CSV", f"{where}: as many cells as columns are wanted", "a whole row")
    text = {name: (cells[name] or "").strip() for name in _COLUMNS}
    where = f"{where}, {text['id'] or 'no id'}"
    if not text["id"]:
        raise InputError("id", f"{where}: is empty", "a name of its own for every row")
    kind = next((known for known in _KINDS if known == text["kind"]), None)
    if kind is None:
        raise InputError("kind", f"{where}: unknown kind {text['kind']!r}", ", ".join(_KINDS))
    grade = next((known for known in _GRADES if known == text["notes"][:2]), None)
    if grade is None:
        raise InputError(
            "notes", f"{where}: begins with no grade: {text['notes'][:12]!r}", ", ".join(_GRADES)
        )
    context = grade == "U3"
    return Row(
        id=text["id"],
        pair_id=text["pair_id"],
        kind=kind,
        grade=grade,
        source_url=text["source_url"],
        model=text["model"],
        params_note=text["params_note"],
        gpu=text["gpu"],
        n_gpus_tp=text["n_gpus_tp"],
        weight_dtype=text["weight_dtype"],
        kv_dtype=text["kv_dtype"],
        engine=text["engine"],
        prompt_tokens=_tokens(text, "prompt_tokens", where, context),
        cached_tokens=_tokens(text, "cached_tokens", where, context) or 0,
        batch=text["batch_or_concurrency"],
        tier=text["tier"],
        link_rate=text[_LINK_RATE],
        method=text["method"],
        ttft_ms=_positive(text, "ttft_ms", where),
        other_metric=text["other_metric"],
        notes=text["notes"],
        rate_gb_per_s=_positive(text, "rate_gb_per_s", where),
        copy_bytes=_positive(text, "copy_bytes", where),
    )


def _tokens(text: dict[str, str], name: str, where: str, context: bool) -> int | None:
    if not text[name]:
        return None
    value = _number(text[name])
    if value is None or value < 0 or value != int(value):
        if context:
            return None
        raise InputError(name, f"{where}: {text[name]!r} is not a number of tokens", "a whole number")
    return int(value)


def _positive(text: dict[str, str], name: str, where: str) -> float | None:
    if not text[name]:
        return None
    value = _number(text[name])
    if value is None or value <= 0:
        raise InputError(name, f"{where}: {text[name]!r} is not a number above zero", "a number, or nothing")
    return value


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
