"""Samples of passes and transfers, and the costs fitted to them.

`fit_pass` and `fit_link` take samples that are medians already and let each count. `calibrate_pass` and
`calibrate_link` take single, noisy ones, weighted, and fall back on a prior where the samples cannot tell the
coefficients apart; what they did then stands in the estimate's `notes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvlane.policy.calibration_fit import (
    UNCHECKED_ERROR,
    Fit,
    Vector,
    plain_fit,
    robust_fit,
    scale_factor,
    well_posed,
)
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link
from kvlane.policy.prefill_cost import PassCost

_KINDS = ("overhead_s", "token_s", "pair_s", "context_s")
# A prior scaled by one factor is right where it was measured and a guess elsewhere.
_SCALED_ERROR = 0.10


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One measured pass over all layers, LM head apart. `at_s` is when it ended, on the observer's clock."""

    resident_tokens: int
    new_tokens: int
    seconds: float
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One measured transfer: bytes moved, in how many copies, in how many seconds.

    `cold` says that it paid for what only a first use pays for; `at_s` is when it ended, on the observer's clock.
    `submissions` is how often the latency of a transfer is in it: 0 where copies were timed on a stream that ran
    already.
    """

    bytes: int
    copies: int
    seconds: float
    cold: bool = False
    at_s: float = 0.0
    submissions: int = 1

    @property
    def rate_bytes_per_s(self) -> float:
        """Achieved rate, everything included."""
        return self.bytes / self.seconds


@dataclass(frozen=True, slots=True)
class PassFit:
    """A fitted pass and the largest relative residual among the samples it stands on."""

    cost: PassCost
    relative_error: float


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A fitted link and the largest relative residual among the samples it stands on."""

    link: Link
    relative_error: float


@dataclass(frozen=True, slots=True)
class PassEstimate:
    """A pass calibrated on noisy samples.

    `relative_error` is the half-width nine of ten samples lie within, as a share of the prediction;
    `standard_errors` are the coefficients' own, in their units; `scaled` says that a prior's coefficients were all
    multiplied by one `factor`; `outliers` counts samples that got no weight.
    """

    cost: PassCost
    relative_error: float
    standard_errors: PassCost
    samples: int
    outliers: int = 0
    scaled: bool = False
    factor: float = 1.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """A link calibrated on noisy samples; the fields as of `PassEstimate`, standard errors in the link's own units.

    `rate_error_bytes_per_s` is the standard error of the rate. Extra time of a cold first use stands beside it,
    None where none was seen.
    """

    link: Link
    relative_error: float
    rate_error_bytes_per_s: float
    per_copy_error_s: float
    latency_error_s: float
    samples: int
    outliers: int = 0
    scaled: bool = False
    first_use_s: float | None = None
    notes: tuple[str, ...] = ()


def fit_pass(samples: Sequence[PrefillSample], *, rectangle: bool = False, absolute: bool = False) -> PassFit:
    """Fits `t0 + b*m + c*w + d*(p + m)` to passes of one kind (all from token 0, or all after a prefix).

    `rectangle` says that the kernel computes masked entries too. From token 0 the context is the new tokens,
    so `d` is left out there. Errors are made small relative to each measurement, or with `absolute` in seconds,
    which suits few points whose longest matters most. Raises `InputError` naming `samples` for fewer samples than
    coefficients, or a sample that is no measurement.
    """
    check_prefills(samples)
    extends = any(sample.resident_tokens > 0 for sample in samples)
    kinds = _KINDS if extends else _KINDS[:3]
    seconds = [sample.seconds for sample in samples]
    fit = plain_fit(_pass_columns(samples, kinds, rectangle), seconds, absolute=absolute)
    return PassFit(_pass_cost(kinds, fit.coefficients, rectangle), fit.worst_error)


def fit_link(name: str, samples: Sequence[TransferSample], origin: str) -> LinkFit:
    """Fits `copies * per_copy_s + bytes / rate` to transfers over one link.

    Raises `InputError` naming `samples` for fewer than two of them, or a sample that is no measurement.
    """
    check_transfers(samples)
    fit = plain_fit([_copies(samples), _bytes(samples)], [sample.seconds for sample in samples])
    per_copy, per_byte = fit.coefficients
    if per_byte <= 0:
        raise InputError(
            "samples", "do not take longer for more bytes", "transfers of clearly different sizes"
        )
    link = Link(name, 1 / per_byte, per_copy_s=per_copy, source="calibration", origin=origin)
    return LinkFit(link, fit.worst_error)


def calibrate_pass(
    samples: Sequence[PrefillSample],
    weights: Sequence[float] | None = None,
    *,
    prior: PassCost | None = None,
    floor: tuple[float, float] = (0.0, 0.0),
    rectangle: bool = False,
    least_token_s: float = 0.0,
) -> PassEstimate:
    """The pass that the majority of noisy samples agrees on.

    `least_token_s` is what a token costs at the device's peak: no coefficient goes below it. Where the samples
    cannot tell the coefficients apart (too few different ones), `prior`, whose work takes at least `floor` (seconds,
    and seconds per context token), is scaled by one factor and the notes say so. A fit has no floor: what a pass
    pays to read the weights was in its samples.

    Raises `InputError` naming `samples` when they cannot and there is no prior.
    """
    check_prefills(samples)
    weights = [1.0] * len(samples) if weights is None else weights
    seconds = [sample.seconds for sample in samples]
    extends = any(sample.resident_tokens > 0 for sample in samples)
    for kinds in (_KINDS, _KINDS[:3]) if extends else (_KINDS[:3],):
        columns = _pass_columns(samples, kinds, rectangle)
        if not well_posed(columns):
            continue
        lower = [least_token_s if kind == "token_s" else 0.0 for kind in kinds]
        fit = robust_fit(columns, seconds, weights, lower)
        cost = _pass_cost(kinds, fit.coefficients, rectangle)
        errors = _pass_cost(kinds, fit.standard_errors, rectangle)
        return PassEstimate(cost, fit.relative_error, errors, len(samples), fit.outliers)
    points = len({(sample.resident_tokens, sample.new_tokens) for sample in samples})
    found = f"{_these(points, 'length')} cannot tell the coefficients of a pass apart"
    if prior is None or not samples:
        raise InputError("samples", f"of {found}", "at least 3 clearly different ones")
    ratios = np.array(
        [
            sample.seconds
            / prior.pass_s(
                sample.resident_tokens,
                sample.new_tokens,
                floor[0] + floor[1] * (sample.resident_tokens + sample.new_tokens),
            )
            for sample in samples
        ]
    )
    factor, error = scale_factor(ratios, weights)
    scaled = replace(
        prior,
        overhead_s=prior.overhead_s * factor,
        token_s=max(prior.token_s * factor, least_token_s),
        pair_s=prior.pair_s * factor,
        context_s=prior.context_s * factor,
    )
    note = f"{found}: those known before, all scaled by {factor:.3g}"
    return PassEstimate(
        scaled,
        max(error, _SCALED_ERROR),
        PassCost(0.0, 0.0, 0.0),
        len(samples),
        scaled=True,
        factor=factor,
        notes=(note,),
    )


def calibrate_link(
    name: str,
    samples: Sequence[TransferSample],
    weights: Sequence[float] | None = None,
    *,
    prior: Link | None = None,
    ceiling_bytes_per_s: float | None = None,
) -> LinkEstimate:
    """The link that the majority of noisy warm samples agrees on: `latency_s + copies * per_copy_s + bytes / rate`.

    What the samples cannot tell apart is not split: with one copy count everywhere the fixed cost is all latency
    (one copy) or all per copy (several). Where they do not even show a rate, `prior` is scaled by one factor. No
    rate is fitted above the ceiling.

    Raises `InputError` naming `samples` when they show no rate and there is no prior.
    """
    check_transfers(samples)
    weights = [1.0] * len(samples) if weights is None else weights
    seconds = [sample.seconds for sample in samples]
    least_byte_s = 0.0 if ceiling_bytes_per_s is None else 1 / ceiling_bytes_per_s
    notes: tuple[str, ...] = ()
    for kinds in _link_laws(samples):
        columns = [_link_column(samples, kind) for kind in kinds]
        if not well_posed(columns):
            continue
        lower = [least_byte_s if kind == "bytes" else 0.0 for kind in kinds]
        fit = robust_fit(columns, seconds, weights, lower)
        found, errors = _by_kind(kinds, fit)
        if found["bytes"] <= 0:
            continue
        rate = 1 / found["bytes"]
        if len(kinds) < 3:
            fixed = "copies" if "copies" in kinds else "transfers"
            notes = (f"latency and per-copy cost could not be told apart: all given to the {fixed}",)
        link = _calibrated(name, rate, found["copies"], found["latency"], len(samples), ceiling_bytes_per_s)
        return LinkEstimate(
            link,
            fit.relative_error,
            rate * rate * errors["bytes"],
            errors["copies"],
            errors["latency"],
            len(samples),
            fit.outliers,
            notes=notes,
        )
    points = len({(sample.bytes, sample.copies) for sample in samples})
    found_text = f"{_these(points, 'size')} cannot tell the cost of bytes from that of copies"
    if prior is None or not samples:
        raise InputError("samples", f"of {found_text}", "transfers of clearly different sizes")
    ratios = np.array([sample.seconds / transfer_s(prior, sample) for sample in samples])
    factor, error = scale_factor(ratios, weights)
    link = _scaled_link(name, prior, factor, len(samples), ceiling_bytes_per_s)
    note = f"{found_text}: those known before, all scaled by {factor:.3g}"
    return LinkEstimate(
        link, max(error, _SCALED_ERROR), 0.0, 0.0, 0.0, len(samples), scaled=True, notes=(note,)
    )


def transfer_s(link: Link, sample: TransferSample) -> float:
    """Seconds the link would take for a sample's bytes and copies, cold start apart."""
    rate = link.rate_at(sample.bytes / sample.copies)
    return sample.submissions * link.latency_s + sample.copies * link.per_copy_s + sample.bytes / rate


def unchecked(estimate: PassEstimate, note: str) -> PassEstimate:
    """The same numbers for a kind of pass nobody measured, with a band that admits it."""
    error = max(estimate.relative_error, UNCHECKED_ERROR)
    return replace(estimate, relative_error=error, samples=0, outliers=0, scaled=True, notes=(note,))


def check_prefills(samples: Sequence[PrefillSample]) -> None:
    """Raises `InputError` naming `samples` for one that is no measurement."""
    for sample in samples:
        if sample.new_tokens < 1 or sample.resident_tokens < 0 or not is_duration(sample.seconds):
            raise InputError(
                "samples", f"{sample} is no measurement", "new tokens and seconds from 1e-9 to 1e6"
            )


def check_transfers(samples: Sequence[TransferSample]) -> None:
    """Raises `InputError` naming `samples` for one that is no measurement."""
    for sample in samples:
        if sample.bytes < 1 or sample.copies < 1 or not is_duration(sample.seconds):
            raise InputError(
                "samples", f"{sample} is no measurement", "bytes, copies and seconds from 1e-9 to 1e6"
            )


def is_duration(seconds: float) -> bool:
    """Whether something can have taken so long: from a nanosecond to eleven days."""
    return 1e-9 <= seconds <= 1e6


def _pass_columns(samples: Sequence[PrefillSample], kinds: Sequence[str], rectangle: bool) -> list[Vector]:
    """What one second of each coefficient adds to each sample, by the law predictions use."""
    columns = []
    for kind in kinds:
        unit = _pass_cost((kind,), (1.0,), rectangle)
        columns.append(
            np.array([unit.pass_s(sample.resident_tokens, sample.new_tokens) for sample in samples])
        )
    return columns


def _pass_cost(kinds: Sequence[str], values: Sequence[float], rectangle: bool) -> PassCost:
    found = dict.fromkeys(_KINDS, 0.0) | dict(zip(kinds, values, strict=True))
    return PassCost(**found, rectangle=rectangle)


def _copies(samples: Sequence[TransferSample]) -> Vector:
    return np.array([sample.copies for sample in samples], dtype=np.float64)


def _bytes(samples: Sequence[TransferSample]) -> Vector:
    return np.array([sample.bytes for sample in samples], dtype=np.float64)


def _link_column(samples: Sequence[TransferSample], kind: str) -> Vector:
    if kind == "latency":
        return np.array([sample.submissions for sample in samples], dtype=np.float64)
    return _copies(samples) if kind == "copies" else _bytes(samples)


def _link_laws(samples: Sequence[TransferSample]) -> tuple[tuple[str, ...], ...]:
    """What to try to fit, the fullest first."""
    if all(sample.copies == 1 for sample in samples):
        return (("latency", "bytes"),)
    return (("latency", "copies", "bytes"), ("copies", "bytes"), ("latency", "bytes"))


def _by_kind(kinds: Sequence[str], fit: Fit) -> tuple[dict[str, float], dict[str, float]]:
    zero = {"latency": 0.0, "copies": 0.0, "bytes": 0.0}
    return (
        zero | dict(zip(kinds, fit.coefficients, strict=True)),
        zero | dict(zip(kinds, fit.standard_errors, strict=True)),
    )


def _calibrated(
    name: str, rate: float, per_copy: float, latency: float, count: int, ceiling: float | None
) -> Link:
    return Link(
        name,
        rate,
        per_copy_s=per_copy,
        latency_s=latency,
        ceiling_bytes_per_s=ceiling,
        source="calibration",
        origin=f"{count} transfers measured",
    )


def _scaled_link(name: str, prior: Link, factor: float, count: int, ceiling: float | None) -> Link:
    fastest = math.inf if ceiling is None else ceiling
    return replace(
        prior,
        name=name,
        rate_bytes_per_s=min(prior.rate_bytes_per_s / factor, fastest),
        per_copy_s=prior.per_copy_s * factor,
        latency_s=prior.latency_s * factor,
        rate_table=tuple((size, min(rate / factor, fastest)) for size, rate in prior.rate_table),
        ceiling_bytes_per_s=ceiling,
        source="calibration",
        origin=f"{count} transfers measured, {prior.origin or 'what was known before'} scaled by {factor:.3g}",
    )


def _these(count: int, what: str) -> str:
    return f"{count} different {what}{'' if count == 1 else 's'}"
