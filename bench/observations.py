"""What answers showed of the machine: tagged records that a calibration takes, and the calibration they come to.

On disk one JSON object, decoded strictly: what was observed, and the list of `{"kind": "transfer", ...}` and
`{"kind": "prefill", ...}`. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from kvlane.bench.timeline import Timeline, waits_inside
from kvlane.policy.calibration import (
    Calibrator,
    LinkCalibrator,
    LinkObserved,
    PrefillCalibrator,
    PrefillSample,
    TransferSample,
)
from kvlane.policy.calibration_build import build_record
from kvlane.policy.calibration_record import Count, Fingerprint, Name, Positive, Record, Seconds, TierRecord
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Tier

# A few hundred observations are some tens of kilobytes.
_LARGEST_BYTES = 16 << 20
_WINDOW = 4096


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Transfer(_Strict, frozen=True, tag_field="kind", tag="transfer"):
    """One load over one link: all its bytes and copies, in seconds from the submission to the last one's arrival.

    `cold` says that it paid for what only a first use pays for.
    """

    link: Name
    bytes: Positive
    copies: Positive
    seconds: Seconds
    cold: bool = False


class Prefill(_Strict, frozen=True, tag_field="kind", tag="prefill"):
    """One pass over all layers: `new_tokens` after `resident_tokens`, LM head and waits for KV apart."""

    resident_tokens: Count
    new_tokens: Positive
    seconds: Seconds


Observation: TypeAlias = Transfer | Prefill


class Observations(_Strict, frozen=True):
    """Observations of one model on one machine; `date` is when they ended, ISO 8601 with its offset.

    `rectangle` says that passes after a prefix compute masked entries too. `tiers` says what KV lies where.
    """

    format: Literal["kvlane-observations/1"]
    date: str
    fingerprint: Fingerprint
    model_config: dict[str, Any] | None
    layers: Positive
    head_s: Seconds
    rectangle: bool
    tiers: dict[Name, TierRecord]
    observations: list[Observation]

    def __post_init__(self) -> None:
        try:
            aware = datetime.fromisoformat(self.date).tzinfo is not None
        except ValueError:
            aware = False
        if not aware:
            raise ValueError(f"date {self.date[:40]!r} is not an ISO 8601 date and time with its offset")
        links = {each.link for each in self.observations if isinstance(each, Transfer)}
        for name, tier in self.tiers.items():
            if tier.link not in links:
                raise ValueError(f"tiers.{name}.link: nothing was observed of {tier.link!r}")


def observed(timeline: Timeline, links: Mapping[str, str]) -> Iterator[Observation]:
    """What one answer showed: a transfer for each run that came whole, over the link of its tier, and its passes."""
    for part in timeline.parts:
        if part.whole and part.bytes:
            copies = sum(row.copies for row in part.layers)
            seconds = max(row.arrive_s for row in part.layers)
            yield Transfer(links[part.tier], part.bytes, copies, seconds)
    began_s = 0.0
    for each in timeline.passes:
        first, last = each.layers[0], each.layers[-1]
        if timeline.parts:
            # What comes before the first layer is not the pass's alone: lookup, decision and submission are in it.
            began_s = first.compute_begin_s
        waited = sum(row.exposed_s for row in each.layers if waits_inside(row))
        yield Prefill(each.start, each.end - each.start, last.compute_end_s - began_s - waited)


def transfer(link: str, sample: TransferSample) -> Transfer:
    """A calibration's sample as an observation."""
    return Transfer(link, sample.bytes, sample.copies, sample.seconds, sample.cold)


def prefill(sample: PrefillSample) -> Prefill:
    """A calibration's sample as an observation."""
    return Prefill(sample.resident_tokens, sample.new_tokens, sample.seconds)


def calibrate(source: Observations) -> Record:
    """The calibration that the observations come to, all of them weighing alike.

    A calibrator discards the first sample of each kind as cold. A link whose loads are too alike to tell what bytes
    cost is left out.

    Raises `InputError` naming `samples` when the passes cannot be told apart, or the loads of every link that a tier
    lies behind.
    """
    passes = PrefillCalibrator(
        source.layers, head_s=source.head_s, rectangle=source.rectangle, half_life=None, window=_WINDOW
    )
    names = dict.fromkeys(each.link for each in source.observations if isinstance(each, Transfer))
    links = [LinkCalibrator(name, half_life=None, window=_WINDOW) for name in names]
    calibrator = Calibrator(passes, links)
    _feed(calibrator, source.observations)
    needed = {tier.link for tier in source.tiers.values()}
    return build_record(
        source.fingerprint,
        datetime.fromisoformat(source.date).timestamp(),
        prefill=(passes.estimate(), passes.cost()),
        links=dict(_estimates(links, needed)),
        tiers={
            name: Tier(name, tier.link, tier.layout, tier.run_tokens, tier.runs_per_layer)
            for name, tier in source.tiers.items()
        },
        model_config=source.model_config,
    )


def _feed(calibrator: Calibrator, observations: Iterable[Observation]) -> None:
    for each in observations:
        if isinstance(each, Transfer):
            calibrator.add_transfer(
                each.link, TransferSample(each.bytes, each.copies, each.seconds, each.cold)
            )
        else:
            calibrator.add_prefill(PrefillSample(each.resident_tokens, each.new_tokens, each.seconds))


def _estimates(links: Iterable[LinkCalibrator], needed: set[str]) -> Iterator[tuple[str, LinkObserved]]:
    for link in links:
        try:
            yield link.name, link.estimate()
        except InputError:
            if link.name in needed:
                raise


def encode(source: Observations) -> bytes:
    """The observations as JSON text; decoding it gives equal ones."""
    return msgspec.json.format(msgspec.json.encode(source), indent=2) + b"\n"


def decode(raw: bytes, where: str) -> Observations:
    """Observations from JSON text; raises `InputError` naming the field (`observations.date`)."""
    try:
        return msgspec.json.decode(raw, type=Observations, strict=True)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$.")
        field = at.rstrip("`") or "observations"
        raise InputError(field, f"{where}: {problem}", "observations that kvlane-bench wrote") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = str(error) or type(error).__name__
        raise InputError(
            "observations", f"{where} is not JSON: {problem}", "observations that kvlane-bench wrote"
        ) from None


def read(path: Path) -> Observations:
    """The observations in a file; raises `InputError` naming `--observations` or the field."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise InputError(
            "--observations", f"{path}: {error.strerror or error}", "a file that kvlane-bench wrote"
        ) from None
    if len(raw) > _LARGEST_BYTES:
        raise InputError("--observations", f"{path} is larger than 16 MiB", "observations")
    return decode(raw, str(path))
