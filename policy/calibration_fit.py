"""Non-negative fits of seconds to a sum of costs, with errors, for few and for noisy samples.

Everything is relative: a residual is (measured - predicted) / predicted, so that a long measurement does not drown
a short one. The robust fit starts from the least absolute deviations (`scipy.optimize.linprog`) and goes on with
Tukey's biweight by iterated reweighting (`scipy.optimize.nnls`): what the majority clearly contradicts ends with no
weight at all. Tuning constants: Huber and Ronchetti, "Robust Statistics", 2nd ed., chapters 4 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog, nnls

from kvlane.policy.errors import InputError

Vector = npt.NDArray[np.float64]

# Beyond so many robust standard deviations the biweight gives no weight; 95 % efficient under a normal law.
_BIWEIGHT = 4.685
_MAD_TO_SIGMA = 1.4826
# A law that is a little wrong must not have what it misses thrown out as outliers: no scale is below 3 %.
_LEAST_SCALE = 0.03
_ROUNDS = 30
# Columns closer to dependent than this make coefficients of noise.
_WORST_CONDITION = 1e3
# The band of a fit: this share of the samples lies within it. No timing is claimed to better than 1 %.
BAND_QUANTILE = 0.90
_NORMAL_QUANTILE = 1.645
LEAST_ERROR = 0.01
# What is left to say of a fit that passes through all its samples: nothing contradicts it, nothing confirms it.
UNCHECKED_ERROR = 0.25
# Off by ten times or more: no further distinction is of use to anyone.
LARGEST_ERROR = 9.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients in the columns' order, each with its standard error (0 where it stands at its lower bound).

    `relative_error` is the half-width, as a share of the prediction, within which nine of ten samples lie, grown for
    few samples; `worst_error` the largest residual as a share of the measurement; `outliers` how many samples got no
    weight.
    """

    coefficients: tuple[float, ...]
    standard_errors: tuple[float, ...]
    relative_error: float
    worst_error: float
    outliers: int = 0


def plain_fit(columns: Sequence[Vector], seconds: Sequence[float], *, absolute: bool = False) -> Fit:
    """Least squares in which every sample counts; for samples that are medians already.

    Errors are relative to each measurement, or with `absolute` in seconds. Raises `InputError` naming `samples` for
    fewer samples than columns.
    """
    measured = _measured(columns, seconds)
    rows = np.stack(columns, axis=1) / measured[:, None]
    weights = (measured / measured.max()) ** 2 if absolute else np.ones_like(measured)
    solution = _nnls(rows, np.ones_like(measured), weights)
    residual = rows @ solution - 1
    worst = float(np.abs(residual).max())
    errors = _standard_errors(rows, residual, weights, solution)
    return Fit(_floats(solution), errors, max(worst, LEAST_ERROR), worst)


def robust_fit(
    columns: Sequence[Vector],
    seconds: Sequence[float],
    weights: Sequence[float] | None = None,
    lower: Sequence[float] | None = None,
) -> Fit:
    """Fits what the (weighted) majority of the samples agrees on.

    `weights` say how much each sample counts, `lower` what each coefficient cannot go below by physics (default 0).
    With fewer than twice as many samples as columns, and two, none can be told to be an outlier and each counts.

    Raises `InputError` naming `samples` for fewer samples than columns.
    """
    measured = _measured(columns, seconds)
    count, width = len(measured), len(columns)
    share = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
    bound = np.zeros(width) if lower is None else np.asarray(lower, dtype=np.float64)
    matrix = np.stack(columns, axis=1)
    rest = measured - matrix @ bound  # what the coefficients above their bounds have to explain

    def predict(above: Vector) -> Vector:
        # Never zero: what is predicted is what residuals are relative to.
        return np.asarray(np.maximum(matrix @ (bound + above), 1e-4 * measured))

    trust = np.ones(count)
    many = count >= 2 * width + 2
    if many:
        # Relative to what was measured, one sample that claims next to no time would outweigh all others; so the
        # first step is in seconds, and the next ones relative to what the one before predicts.
        solution = _least_absolute(matrix, rest, share)
        for _ in range(2):
            predicted = predict(solution)
            solution = _least_absolute(matrix / predicted[:, None], rest / predicted, share)
    else:
        solution = _nnls(matrix / measured[:, None], rest / measured, share)
    for _ in range(_ROUNDS if many else 3):
        predicted = predict(solution)
        if many:
            residual = measured / predicted - 1
            scale = max(_scale(residual, share, width), _LEAST_SCALE)
            trust = np.clip(1 - (residual / (_BIWEIGHT * scale)) ** 2, 0, None) ** 2
        before = solution
        solution = _nnls(matrix / predicted[:, None], rest / predicted, share * trust)
        if np.allclose(before, solution, rtol=1e-6, atol=0):
            break
    predicted = predict(solution)
    residual = measured / predicted - 1
    errors = _standard_errors(matrix / predicted[:, None], residual, share * trust, solution)
    return Fit(
        _floats(bound + solution),
        errors,
        band_of(residual, share, width),
        float(np.abs(predicted / measured - 1).max()),
        int((trust == 0).sum()),
    )


def well_posed(columns: Sequence[Vector]) -> bool:
    """Whether samples at these points can tell the columns' coefficients apart.

    As many different points as columns, and no column close to a sum of the others.
    """
    matrix = np.stack(columns, axis=1)
    points = np.unique(matrix, axis=0)
    if len(points) < matrix.shape[1]:
        return False
    rows = points / points.sum(axis=1, keepdims=True) if matrix.shape[1] == 1 else _balanced(points)
    return bool(np.linalg.cond(rows) < _WORST_CONDITION)


def scale_factor(ratios: Vector, weights: Sequence[float]) -> tuple[float, float]:
    """The weighted median of measured over predicted, and the relative error within which nine of ten lie."""
    share = np.asarray(weights, dtype=np.float64)
    factor = weighted_quantile(ratios, share, 0.5)
    return factor, band_of(ratios / factor - 1, share, 1)


def band_of(residual: Vector, share: Vector, width: int) -> float:
    """The half-width within which nine of ten residuals lie, grown for the coefficients the samples also paid for."""
    free = len(residual) - width
    if free <= 0:
        return UNCHECKED_ERROR
    # The tail of few samples is luck; their middle says what the tail of a normal law would be. The wider counts.
    middle = _MAD_TO_SIGMA * weighted_quantile(np.abs(residual), share, 0.5)
    within = max(weighted_quantile(np.abs(residual), share, BAND_QUANTILE), _NORMAL_QUANTILE * middle)
    return min(max(within * math.sqrt(len(residual) / free), LEAST_ERROR), LARGEST_ERROR)


def weighted_quantile(values: Vector, weights: Vector, quantile: float) -> float:
    """The smallest value below or at which this share of the weight lies."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    at = int(np.searchsorted(reached, quantile * reached[-1] * (1 - 1e-12)))
    return float(values[order][min(at, len(values) - 1)])


def _measured(columns: Sequence[Vector], seconds: Sequence[float]) -> Vector:
    if len(seconds) < len(columns):
        raise InputError(
            "samples", f"are {len(seconds)}", f"at least {len(columns)} for as many coefficients"
        )
    return np.asarray(seconds, dtype=np.float64)


def _nnls(rows: Vector, target: Vector, weights: Vector) -> Vector:
    root = np.sqrt(weights)
    weighted = rows * root[:, None]
    scale = weighted.max(axis=0)  # tokens, pairs and seconds lie many orders of magnitude apart
    scale[scale <= 0] = 1.0
    solution, _ = nnls(weighted / scale, target * root)
    return np.asarray(solution / scale)


def _least_absolute(rows: Vector, target: Vector, weights: Vector) -> Vector:
    """The non-negative solution of least weighted absolute residuals."""
    count, width = rows.shape
    scale = rows.max(axis=0)
    identity = np.eye(count)
    found = linprog(
        np.concatenate((np.zeros(width), weights, weights)),
        A_eq=np.hstack((rows / scale, -identity, identity)),
        b_eq=target,
        bounds=(0, None),
        method="highs",
    )
    if found.status != 0:
        return _nnls(rows, target, weights)
    return np.asarray(found.x[:width] / scale)


def _scale(residual: Vector, share: Vector, width: int) -> float:
    """A robust standard deviation: the median absolute residual, the ones a fit makes zero by itself left out."""
    size = np.abs(residual)
    kept = np.argsort(size)[width:] if len(size) > 2 * width else np.arange(len(size))
    return _MAD_TO_SIGMA * weighted_quantile(size[kept], share[kept], 0.5)


def _balanced(points: Vector) -> Vector:
    """Rows of about equal weight and columns of equal length, as a relative fit sees them."""
    columns = points / points.max(axis=0)
    rows = columns / columns.sum(axis=1, keepdims=True)
    return np.asarray(rows / np.linalg.norm(rows, axis=0))


def _standard_errors(rows: Vector, residual: Vector, weights: Vector, solution: Vector) -> tuple[float, ...]:
    active = solution > 0
    errors = np.zeros(len(solution))
    total = weights.sum()
    effective = total**2 / (weights**2).sum() if total > 0 else 0.0
    free = effective - active.sum()
    if active.any() and free > 0:
        used = rows[:, active] * np.sqrt(weights / total)[:, None]
        scale = np.linalg.norm(used, axis=0)
        inverse = np.linalg.pinv((used / scale).T @ (used / scale))
        variance = float((weights * residual**2).sum() / total) / free
        errors[active] = np.sqrt(np.maximum(np.diag(inverse), 0) * variance) / scale
    return _floats(errors)


def _floats(values: Vector) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
