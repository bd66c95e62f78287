"""Measurements of this machine become the parameters of its costs.

The fits are non-negative least squares on relative errors, so that a long measurement does not drown a short
one and no coefficient goes below zero. Not imported by `kvlane.policy` itself, since it needs numpy and scipy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link
from kvlane.policy.model import attention_pairs
from kvlane.policy.prefill_cost import PassCost


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One measured pass over all layers, LM head apart."""

    resident_tokens: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One measured transfer: bytes moved, in how many copies, in how many seconds."""

    bytes: int
    copies: int
    seconds: float


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


def fit_pass(samples: Sequence[PrefillSample], *, rectangle: bool = False) -> PassFit:
    """Fits `t0 + b*m + c*w + d*(p + m)` to passes of one kind (all from token 0, or all after a prefix).

    `rectangle` says that the kernel computes masked entries too. From token 0 the context is the new tokens,
    so `d` is left out there. Raises `InputError` naming `samples` for fewer samples than coefficients, or a
    sample that is no measurement.
    """
    for sample in samples:
        if sample.new_tokens < 1 or sample.resident_tokens < 0 or not _is_duration(sample.seconds):
            raise InputError(
                "samples", f"{sample} is no measurement", "new tokens and finite seconds above zero"
            )
    extends = any(sample.resident_tokens > 0 for sample in samples)
    new = np.array([sample.new_tokens for sample in samples], dtype=np.float64)
    context = np.array([sample.resident_tokens + sample.new_tokens for sample in samples], dtype=np.float64)
    pairs = np.array([attention_pairs(sample.resident_tokens, sample.new_tokens) for sample in samples])
    columns = [np.ones_like(new), new, new * context if rectangle else pairs]
    if extends:
        columns.append(context)
    coefficients, error = _fit(columns, [sample.seconds for sample in samples])
    overhead, token, pair = coefficients[:3]
    cost = PassCost(overhead, token, pair, coefficients[3] if extends else 0.0, rectangle)
    return PassFit(cost, error)


def fit_link(name: str, samples: Sequence[TransferSample], origin: str) -> LinkFit:
    """Fits `copies * per_copy_s + bytes / rate` to transfers over one link.

    Raises `InputError` naming `samples` for fewer than two of them, or a sample that is no measurement.
    """
    for sample in samples:
        if sample.bytes < 1 or sample.copies < 1 or not _is_duration(sample.seconds):
            raise InputError(
                "samples", f"{sample} is no measurement", "bytes, copies and finite seconds above zero"
            )
    columns = [
        np.array([sample.copies for sample in samples], dtype=np.float64),
        np.array([sample.bytes for sample in samples], dtype=np.float64),
    ]
    (per_copy, per_byte), error = _fit(columns, [sample.seconds for sample in samples])
    if per_byte <= 0:
        raise InputError(
            "samples", "do not take longer for more bytes", "transfers of clearly different sizes"
        )
    link = Link(name, 1 / per_byte, per_copy_s=per_copy, source="calibration", origin=origin)
    return LinkFit(link, error)


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0


def _fit(columns: list[npt.NDArray[np.float64]], seconds: list[float]) -> tuple[list[float], float]:
    if len(seconds) < len(columns):
        raise InputError(
            "samples", f"are {len(seconds)}", f"at least {len(columns)} for as many coefficients"
        )
    measured = np.array(seconds)
    rows = np.stack(columns, axis=1) / measured[:, None]
    scale = rows.max(axis=0)  # tokens, pairs and seconds lie many orders of magnitude apart
    solution, _ = nnls(rows / scale, np.ones_like(measured))
    residual = np.abs(rows / scale @ solution - 1).max()
    return [float(value) for value in solution / scale], float(residual)
