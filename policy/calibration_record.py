"""A calibration on disk: what was measured, on what, how sure it is, and where it holds.

One JSON object, decoded strictly: an unknown or missing field, a number that is not finite or cannot be, is refused
with one `InputError` naming it, and so is a record of another model, device, engine, dtype or number of ranks than
the one asked about. Times are seconds, sizes bytes, rates bytes per second.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvlane.policy.errors import InputError

_FIELD = "calibration"
# A record is a few kilobytes; whatever is larger is another file named by mistake.
_LARGEST_BYTES = 1 << 20

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e16)]
Share = Annotated[float, msgspec.Meta(ge=0, le=100)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Fingerprint(_Strict, frozen=True):
    """What a calibration is of. All but `host` must match what is asked about; `host` is there to be read.

    Attributes:
        model: the name it was measured under.
        device: what computed.
        engine: family of the engine.
        dtype: of the weights.
        kv_dtype: of the KV.
        tp: tensor-parallel ranks.
        host: facts such as versions and the number of threads.
    """

    model: Name
    device: Name
    engine: Name
    dtype: Name
    kv_dtype: Name
    tp: Positive
    host: dict[Name, Text] = {}


class SpanRecord(_Strict, frozen=True):
    """The least and the most that was measured."""

    low: Amount
    high: Amount

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")


class PassRecord(_Strict, frozen=True):
    """One kind of pass: coefficients in seconds (see `PassCost`), their standard errors, and what they stand on.

    `relative_error` is the half-width nine of ten samples lie within; `scaled` says that what was known before was
    scaled by one factor.
    """

    overhead_s: Seconds
    token_s: Seconds
    pair_s: Seconds
    context_s: Seconds
    rectangle: bool
    overhead_error_s: Seconds
    token_error_s: Seconds
    pair_error_s: Seconds
    context_error_s: Seconds
    relative_error: Share
    samples: Count
    outliers: Count
    scaled: bool
    notes: list[Text] = []

    def __post_init__(self) -> None:
        if self.overhead_s + self.token_s + self.pair_s + self.context_s <= 0:
            raise ValueError("a pass that takes no time")


class PrefillRecord(_Strict, frozen=True):
    """Both kinds of pass, the LM head, and the tokens they were measured at.

    `floor_s` and `floor_context_s` are a scaled profile's: what reading the weights, and one token's KV, takes.
    """

    layers: Positive
    fresh: PassRecord
    extend: PassRecord
    head_s: Seconds
    floor_s: Seconds
    floor_context_s: Seconds
    resident_tokens: SpanRecord
    new_tokens: SpanRecord
    refused: dict[Name, Count] = {}


class LinkRecord(_Strict, frozen=True):
    """One link: either a rate with `per_copy_s`, or a table `[[copy_bytes, bytes_per_s], ...]`; see `Link`.

    `bytes` and `copy_bytes` are the sizes of the transfers and of single copies it was measured at.
    """

    rate_bytes_per_s: Rate
    per_copy_s: Seconds
    latency_s: Seconds
    first_use_s: Seconds | None
    ceiling_bytes_per_s: Rate | None
    rate_table: list[tuple[Rate, Rate]]
    rate_error_bytes_per_s: Amount
    per_copy_error_s: Seconds
    latency_error_s: Seconds
    relative_error: Share
    samples: Positive
    outliers: Count
    scaled: bool
    bytes: SpanRecord
    copy_bytes: SpanRecord
    refused: dict[Name, Count] = {}
    notes: list[Text] = []

    def __post_init__(self) -> None:
        ceiling = self.ceiling_bytes_per_s
        if ceiling is not None and self.rate_bytes_per_s > ceiling * (1 + 1e-9):
            raise ValueError(
                f"rate_bytes_per_s {self.rate_bytes_per_s:g} is above ceiling_bytes_per_s {ceiling:g}"
            )
        if self.rate_table and self.per_copy_s:
            raise ValueError("per_copy_s stands beside a rate_table, which already holds it")
        sizes = [size for size, _ in self.rate_table]
        if sizes != sorted(set(sizes)):
            raise ValueError("rate_table is not rising in copy size")


class TierRecord(_Strict, frozen=True):
    """Where KV lies and over which link it comes; see `Tier`."""

    link: Name
    layout: Literal["layer_major", "chunk_major"]
    run_tokens: Count | None
    runs_per_layer: Annotated[int, msgspec.Meta(ge=1, le=2)]


class Record(_Strict, frozen=True):
    """One calibration. At least passes or one link; `model_config` holds the model's numbers under a config.json's
    field names where the model is no built-in one; `date` is ISO 8601 with its offset."""

    format: Literal["kvlane-calibration/1"]
    date: str
    fingerprint: Fingerprint
    model_config: dict[str, Any] | None
    prefill: PrefillRecord | None
    links: dict[Name, LinkRecord]
    tiers: dict[Name, TierRecord]

    def __post_init__(self) -> None:
        try:
            aware = datetime.fromisoformat(self.date).tzinfo is not None
        except ValueError:
            aware = False
        if not aware:
            raise ValueError(f"date {self.date[:40]!r} is not an ISO 8601 date and time with its offset")
        if self.prefill is None and not self.links:
            raise ValueError("neither prefill nor links: it calibrates nothing")
        for name, tier in self.tiers.items():
            if tier.link not in self.links:
                raise ValueError(f"tiers.{name}.link: there is no link {tier.link!r} in it")


def decode(raw: bytes, where: str = "the record") -> Record:
    """A record from JSON text; raises `InputError` naming the field (`calibration.prefill.head_s`)."""
    try:
        return msgspec.json.decode(raw, type=Record, strict=True)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$.")
        field = f"{_FIELD}.{at.rstrip('`')}" if at else _FIELD
        raise InputError(field, f"{where}: {problem}", "a record written by kvlane-bench calibrate") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = str(error) or type(error).__name__
        raise InputError(_FIELD, f"{where} is not JSON: {problem}", "a record, whole") from None


def encode(record: Record) -> bytes:
    """The record as JSON text; decoding it gives an equal one.

    Raises `InputError` for a record that decoding would refuse, a number that is not finite above all.
    """
    raw = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
    decode(raw)
    return raw


def read(path: str | Path) -> Record:
    """The record in a file; raises `InputError` naming `calibration` or its field."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise InputError(
            _FIELD, f"{path}: {error.strerror or error}", "a file that kvlane-bench calibrate wrote"
        ) from None
    if len(raw) > _LARGEST_BYTES:
        raise InputError(_FIELD, f"{path} is larger than 1 MiB", "a calibration record")
    return decode(raw, str(path))


def write(record: Record, path: str | Path) -> None:
    """Writes the record, whole or not at all; raises `InputError` naming `--out` where it cannot be."""
    raw, path = encode(record), Path(path)
    draft = ""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            draft = file.name
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).chmod(0o644)
        Path(draft).replace(path)
    except OSError as error:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise InputError(
            "--out", f"{path}: {error.strerror or error}", "a file that can be written"
        ) from None


def check_match(record: Record, wanted: Mapping[str, str | int | None]) -> None:
    """Raises `InputError` naming the first field of the fingerprint that is another than asked for.

    `wanted` maps fingerprint fields to values; None stands for whatever the record says.
    """
    for name, value in wanted.items():
        found = getattr(record.fingerprint, name)
        if value is not None and found != value:
            raise InputError(
                f"{_FIELD}.fingerprint.{name}",
                f"is {found!r}, and this is {value!r}: a calibration of something else",
                "a record of the same model, device, engine, dtypes and ranks",
            )
