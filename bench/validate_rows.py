"""Published measurements as rows: read from CSV, checked, nothing interpreted yet.

One odd cell is one row's doubt, never the file's: a row keeps what is wrong with it, and who needs that cell says so.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

from kvlane.policy.errors import InputError
from kvlane.policy.plan import MOST_TOKENS

_LINK_RATE = "link_bandwidth_gbps_stated(GB/s)"
# What a measurement is nothing without; every other column may be missing, and is empty then.
_KEYS = (
    "id",
    "kind",
    "model",
    "gpu",
    "engine",
    "method",
    "prompt_tokens",
    "ttft_ms",
    "notes",
)
_OTHERS = (
    "pair_id",
    "source_url",
    "params_note",
    "n_gpus_tp",
    "weight_dtype",
    "kv_dtype",
    "cached_tokens",
    "batch_or_concurrency",
    "tier",
    _LINK_RATE,
    "other_metric",
    "rate_gb_per_s",
    "copy_bytes",
)
_COLUMNS = (*_KEYS, *_OTHERS)
KINDS = ("A", "B", "C")
_GRADES = ("U1", "U2", "U3")
# Beyond these no number here is a measurement: milliseconds, GB/s and bytes alike.
_LEAST, _MOST = 1e-6, 1e15
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
# Texts that tables of patterns are held against, and what no such text is: long, or with a number of so many digits.
_TEXTS = (
    "model",
    "gpu",
    "n_gpus_tp",
    "weight_dtype",
    "kv_dtype",
    "engine",
    "batch_or_concurrency",
    "tier",
    _LINK_RATE,
    "notes",
)
_LONGEST = 4000
_ENDLESS = re.compile(r"\d{40}")
# What is wrong with a row as a whole stands under this name in its doubts.
WHOLE = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One published number: its texts as they stand, its numbers as numbers (None where empty).

    `ttft_ms` in milliseconds, `rate_gb_per_s` in 1e9 bytes a second, `copy_bytes` in bytes. A row of grade U3 is
    context: it may say "short, varying" where others say a number of tokens, and is never scored. `doubts` says what
    is wrong, by column (`WHOLE` for the row itself); a cell in doubt is None.
    """

    id: str
    pair_id: str
    kind: str
    grade: str
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
    doubts: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether a prediction is to be held against it."""
        return self.kind in KINDS and self.grade in ("U1", "U2")

    @property
    def context(self) -> bool:
        """Whether it says of itself that it is not to be predicted."""
        return self.grade == "U3"

    def doubt(self, *columns: str) -> str | None:
        """What is wrong with the row or with the first of these columns that something is wrong with."""
        return next((self.doubts[name] for name in (WHOLE, *columns) if name in self.doubts), None)

    @property
    def source(self) -> str:
        """Who published it."""
        return source_of(self.source_url)


def source_of(url: str) -> str:
    """Who published what stands at an address: the repository on a code host, the site elsewhere."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    host = parts.netloc.removeprefix("www.")
    if host in ("github.com", "raw.githubusercontent.com", "huggingface.co"):
        return "/".join([host, *parts.path.strip("/").split("/")[:2]])
    return host or url


def packaged() -> Path:
    """The measurements that come with the package."""
    return Path(str(resources.files("kvlane.bench").joinpath("published", "measurements.csv")))


def read(path: Path) -> list[Row]:
    """The rows of a CSV with the published columns, others ignored; what is wrong with a row stands in its doubts.

    Raises `InputError` naming the file for one that is unreadable or empty, or has no column of its keys.
    """
    reader = csv.reader(io.StringIO(_text(path), newline=""))
    header = [name.strip().lower() for name in _next(reader) or ()]
    missing = [name for name in _KEYS if name.lower() not in header]
    if missing:
        raise InputError("CSV", f"{path}: no column {', '.join(missing)}", "the published columns")
    places = {name: header.index(name.lower()) for name in _COLUMNS if name.lower() in header}
    rows: list[Row] = []
    taken: set[str] = set()
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            rows.append(_own(_row({}, f"line {first}", {WHOLE: f"not CSV: {error}"}), taken))
            continue
        if cells is None:
            break
        if any(cell.strip() for cell in cells):
            text = {name: cells[at].strip() for name, at in places.items() if at < len(cells)}
            doubts = _shape(cells, header, text, reader.line_num - first)
            rows.append(_own(_row(text, f"line {first}", doubts), taken))
    if not rows:
        raise InputError("CSV", f"{path}: has no rows", "at least one measurement")
    return rows


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(
            "CSV", f"{path}: {error.strerror or error}", "a readable CSV of measurements"
        ) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("latin-1")  # which reads any byte


def _next(reader: Iterator[list[str]]) -> list[str] | None:
    try:
        return next(reader, None)
    except csv.Error:
        return None


def _shape(cells: Sequence[str], header: Sequence[str], text: Mapping[str, str], more: int) -> dict[str, str]:
    """What is wrong with a row's cells as a whole: too few of them, or too many."""
    size = f"{len(cells)} cells of {len(header)}"
    if more:
        size += f", over {more + 1} lines"
    if any(name not in text for name in _KEYS):
        return {WHOLE: f"cut short: {size}"}
    if any(cell.strip() for cell in cells[len(header) :]):
        return {WHOLE: f"more cells than columns: {size}"}
    return {}


def _own(row: Row, taken: set[str]) -> Row:
    """The row under an id that no row before it has."""
    name, again = row.id, 1
    while name in taken:
        again += 1
        name = f"{row.id}#{again}"
    taken.add(name)
    return row if again == 1 else replace(row, id=name)


def _row(cells: Mapping[str, str], where: str, doubts: dict[str, str]) -> Row:
    """A row of `cells`; what is wrong with them is added to `doubts`."""
    text = {name: cells.get(name, "") for name in _COLUMNS}
    kind, grade = text["kind"].upper(), text["notes"][:2].upper()
    if kind not in KINDS:
        doubts.setdefault(WHOLE, f"unknown kind {_shown(text['kind'])}: {', '.join(KINDS)} are known")
    if grade not in _GRADES:
        grade = ""
        doubts.setdefault(WHOLE, f"the notes begin with no grade ({', '.join(_GRADES)}): not scored")
    for name in _TEXTS:
        if len(text[name]) > _LONGEST or _ENDLESS.search(text[name]):
            doubts.setdefault(WHOLE, f"{name}: {_shown(text[name])} is too long to be read")
    return Row(
        id=text["id"] or where,
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
        prompt_tokens=_tokens(text, "prompt_tokens", doubts),
        cached_tokens=_tokens(text, "cached_tokens", doubts) or 0,
        batch=text["batch_or_concurrency"],
        tier=text["tier"],
        link_rate=text[_LINK_RATE],
        method=text["method"].lower(),
        ttft_ms=_positive(text, "ttft_ms", doubts),
        other_metric=text["other_metric"],
        notes=text["notes"],
        rate_gb_per_s=_positive(text, "rate_gb_per_s", doubts),
        copy_bytes=_positive(text, "copy_bytes", doubts),
        doubts=doubts,
    )


def _tokens(text: Mapping[str, str], name: str, doubts: dict[str, str]) -> int | None:
    if not text[name]:
        return None
    value = _number(text[name])
    if value is None or value < 0 or value != int(value):
        doubts[name] = f"{name}: {_shown(text[name])} is not a number of tokens"
        return None
    if value > MOST_TOKENS:
        doubts[name] = f"{name}: {_shown(text[name])} is more than {MOST_TOKENS:,} tokens"
        return None
    return int(value)


def _positive(text: Mapping[str, str], name: str, doubts: dict[str, str]) -> float | None:
    if not text[name]:
        return None
    value = _number(text[name])
    if value is None or value <= 0:
        doubts[name] = f"{name}: {_shown(text[name])} is not a number above zero"
        return None
    if not _LEAST <= value <= _MOST:
        doubts[name] = f"{name}: {_shown(text[name])} is no measurement"
        return None
    return value


def _number(text: str) -> float | None:
    """A finite number, with or without commas between thousands."""
    try:
        value = float(text.replace(",", "") if _GROUPED.fullmatch(text) else text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
