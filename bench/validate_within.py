"""How well a source predicts itself: calibrated on some of its own rows, the rest predicted.

The machine's profile says which terms a time has; the known rows say by what factor each is off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from kvlane.bench.validate_predict import Efficiencies, Task, compute_s, prefill_parts, transfer_s

Vector = npt.NDArray[np.float64]

Split = Literal["every_other", "short_half"]
FEWEST_ROWS = 4
# Published times scatter by so much (a logarithm), and factors lie so far from one: what few rows do not show stays as
# the profile has it, scaled with the rest.
_NOISE = 0.01
_PREFILL_SPREAD = np.array([1.0, 0.5, 0.2])
_LOAD_SPREAD = np.array([0.5, 0.5])


@dataclass(frozen=True, slots=True)
class Calibrated:
    """One held-back row: what a calibration on its neighbours predicts, in the row's unit."""

    task: Task
    split: Split
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.task.measured - 1


def within_source(tasks: Sequence[Task], source: Efficiencies) -> list[Calibrated]:
    """Predictions of held-back rows, in every group of four rows or more of one source and one configuration."""
    groups: dict[tuple[object, ...], list[Task]] = defaultdict(list)
    for task in tasks:
        if task.method in ("recompute", "load"):
            groups[_configuration(task)].append(task)
    results: list[Calibrated] = []
    for members in groups.values():
        if len(members) < FEWEST_ROWS:
            continue
        members.sort(key=lambda task: (task.row.prompt_tokens or 0, task.row.id))
        half = -(-len(members) // 2)
        splits: tuple[tuple[Split, list[Task], list[Task]], ...] = (
            ("every_other", members[::2], members[1::2]),
            ("short_half", members[:half], members[half:]),
        )
        for split, known, held_back in splits:
            calibrate = _calibrated_prefill if members[0].method == "recompute" else _calibrated_load
            seconds = calibrate(known, source)
            results += [Calibrated(task, split, 1e3 * seconds(task)) for task in held_back]
    return results


def _configuration(task: Task) -> tuple[object, ...]:
    assert task.compute is not None
    setup, row = task.compute, task.row
    link = task.transfer.link.name if task.transfer is not None else ""
    return (
        row.source,
        setup.model.name,
        setup.machine.name,
        setup.engine,
        row.engine,
        setup.weight_dtype,
        setup.tp,
        setup.stages,
        setup.sequences,
        task.method,
        link,
    )


def _calibrated(
    known: Sequence[Task], parts_of: Callable[[Task], Vector], mix: Vector, spread: Vector
) -> Callable[[Task], float]:
    """Seconds by the profile's own terms, each times a factor fitted to known rows.

    `mix` says which free logarithms make up the factor of each term (row), `spread` how far each lies from zero.
    """
    parts = np.array([parts_of(task) for task in known])
    measured = np.log([task.measured / 1e3 for task in known])

    def residuals(values: Vector) -> Vector:
        misfit = np.log(parts @ np.exp(mix @ values)) - measured
        return np.concatenate([misfit / _NOISE, values / spread])

    factors = np.exp(mix @ least_squares(residuals, np.zeros(mix.shape[1])).x)
    return lambda task: float(parts_of(task) @ factors)


def _calibrated_prefill(known: Sequence[Task], source: Efficiencies) -> Callable[[Task], float]:
    """Fixed, per-token and attention terms: one common factor, and what fixed costs and attention have beside it."""
    mix = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    return _calibrated(known, lambda task: np.array(prefill_parts(task, source)), mix, _PREFILL_SPREAD)


def _calibrated_load(known: Sequence[Task], source: Efficiencies) -> Callable[[Task], float]:
    """Computing and moving, each with a factor of its own."""

    def parts(task: Task) -> Vector:
        return np.array([compute_s(task, source), transfer_s(task)])

    return _calibrated(known, parts, np.eye(2), _LOAD_SPREAD)
