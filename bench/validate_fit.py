"""Efficiencies fitted to published prefills: what share of a device's peak an engine reaches, and its fixed costs.

One model for all rows. A cell is a device, a weight dtype and an engine family; the logarithm of its efficiency is a
sum of effects of the device's family, the dtype and the engine, and of one of its own:

    ln e = mean + family + dtype + engine + cell

An effect that fewer than three rows share is left at zero, so that no constant stands on less; every effect is drawn
towards zero by a prior, so that a cell with few rows stays near what its family, dtype and engine suggest. A device
nobody measured gets the sum without the cell: an assumption, and marked so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from kvlane.bench.validate_predict import Task, pipeline_share
from kvlane.policy.machine import Device, Machine, PrefillEfficiency
from kvlane.policy.pass_rates import PassRates

Vector = npt.NDArray[np.float64]

FEWEST_ROWS = 3
# Priors, as standard deviations of logarithms, and where they are centred.
_SPREAD = {"family": 0.3, "dtype": 0.2, "engine": 0.1, "cell": 0.35, "attention": 0.15, "expert": 0.7}
_MEAN_EFFICIENCY, _MEAN_SPREAD = 0.55, 0.5
_LAYER_S, _LAYER_SPREAD = 80e-6, 0.4
_EXCHANGE_SHARE, _EXCHANGE_SPREAD = 0.7, 0.4
# A residual of this size (relative) is where a row starts to count as an outlier.
_NOISE = 0.08
_HIGHEST = math.log(0.97)
# Peak 16-bit FLOP per second and watt around which the effect of power is zero, and its prior: clocks fall under
# load on a device whose peak asks for more power than it may draw.
_PEAK_PER_WATT, _POWER, _POWER_SPREAD = 1e12, -0.3, 0.2
# Within a box an all-reduce takes about ten microseconds; over a network it crosses two adapters and a cable besides.
_BETWEEN_BOXES_S = 20e-6
_AT_PEAK = PrefillEfficiency("", "", 1.0, 1.0, 0.0, "assumption", "")


@dataclass(frozen=True, slots=True)
class _Cell:
    device: str
    family: str
    dtype: str
    engine: str
    power: float

    def effects(self) -> tuple[tuple[str, str], ...]:
        return (
            ("family", self.family),
            ("dtype", _dtype_class(self.dtype)),
            ("engine", self.engine),
            ("cell", f"{self.device}/{_dtype_class(self.dtype)}/{self.engine}"),
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted effects, by kind and name, and the number of rows each stands on."""

    effects: dict[tuple[str, str], float]
    rows: Counter[tuple[str, str]]

    def efficiency(self, machine: Machine, dtype: str, engine: str) -> PrefillEfficiency:
        """What the fit says of a device, dtype and engine; an assumption where its cell has too few rows."""
        cell = _cell_of(machine, dtype, engine)
        dense = self._log(cell)
        own = cell.effects()[-1]
        count = self.rows[own]
        enough = count >= FEWEST_ROWS
        expert = dense + self.effects.get(("expert", _dtype_class(dtype)), 0.0)
        return PrefillEfficiency(
            engine=engine,
            dtype=dtype,
            efficiency=_share(dense),
            attention_efficiency=_share(self._attention(cell)),
            expert_efficiency=_share(expert),
            pass_overhead_s=0.0,
            layer_overhead_s=math.exp(self.effects.get(("layer", engine), math.log(_LAYER_S))),
            source="profile" if enough else "assumption",
            origin=f"fit of {count} published rows" if enough else self._pooled(cell),
            rows=count if enough else 0,
        )

    def device(self, device: Device) -> Device:
        """The device with the share of its interconnect that the rows show."""
        return replace(device, interconnect_efficiency=self.exchange(device)[0])

    def exchange(self, device: Device) -> tuple[float, int]:
        """The share of an interconnect's rate that all-reduces reach, and the rows it stands on."""
        kind = ("exchange", exchange_kind(device))
        return _share(self.effects.get(kind, math.log(_EXCHANGE_SHARE))), self.rows[kind]

    def _log(self, cell: _Cell) -> float:
        return self._base(cell) + sum(self.effects.get(key, 0.0) for key in cell.effects())

    def _base(self, cell: _Cell) -> float:
        return self.effects[("mean", "")] + self.effects[("power", "")] * cell.power

    def _attention(self, cell: _Cell) -> float:
        # Attention multiplies in 16 bits whatever the weights are stored in.
        wide = [key for key in cell.effects() if key[0] in ("family", "engine")]
        own = ("attention", cell.effects()[-1][1])
        return self._base(cell) + sum(self.effects.get(key, 0.0) for key in wide) + self.effects.get(own, 0.0)

    def _pooled(self, cell: _Cell) -> str:
        known = [
            f"{name} ({self.rows[kind, name]} rows)"
            for kind, name in cell.effects()[:3]
            if (kind, name) in self.effects
        ]
        return "pooled from other devices' rows of " + ", ".join(known) if known else "the mean of all rows"


def fit(tasks: Sequence[Task], attention_spread: float = _SPREAD["attention"]) -> Fit:
    """The effects that published prefills show; `tasks` without a computed prefill are passed over.

    `attention_spread` is how far a cell's attention may lie from its matrices (a logarithm): a little where
    attention is one fused kernel, far where it is several.
    """
    rows = [task for task in tasks if task.method == "recompute" and task.compute is not None]
    cells = [_cell(task) for task in rows]
    counts = _counts(rows, cells)
    fixed = (("mean", ""), ("power", ""))
    names = [*fixed, *sorted(key for key, count in counts.items() if count >= FEWEST_ROWS)]
    centre, spread = _priors(names, attention_spread)
    values = centre
    if rows:
        problem = _Problem(rows, cells, names, centre, spread)
        values = least_squares(problem.residuals, centre, problem.jacobian, method="lm").x
    return Fit(dict(zip(names, (float(value) for value in values), strict=True)), counts)


def exchange_kind(device: Device) -> str:
    """Interconnects that share one share: links between devices, PCIe, a network between boxes."""
    rate = device.interconnect_bytes_per_s or 0.0
    if rate > 70e9:
        return "device link"
    return "network" if device.interconnect_latency_s >= _BETWEEN_BOXES_S else "pcie"


def _dtype_class(dtype: str) -> str:
    return "16-bit" if dtype in ("bf16", "fp16") else dtype.split("_")[0]


def _share(logarithm: float) -> float:
    return math.exp(min(logarithm, _HIGHEST))


def _cell(task: Task) -> _Cell:
    assert task.compute is not None
    return _cell_of(task.compute.machine, task.compute.weight_dtype, task.compute.engine)


def _cell_of(machine: Machine, dtype: str, engine: str) -> _Cell:
    device = machine.device
    power = 0.0
    if device.power_w:
        power = device.peak("bf16") / device.power_w / _PEAK_PER_WATT - 1
    return _Cell(machine.name, device.family or machine.name, dtype, engine, power)


def _counts(rows: Sequence[Task], cells: Sequence[_Cell]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for task, cell in zip(rows, cells, strict=True):
        assert task.compute is not None
        assert task.work is not None
        # What an engine does to large matrices does not show in a model that is mostly experts.
        counts.update(key for key in cell.effects() if key[0] != "engine" or not task.work.expert_flop)
        counts["attention", cell.effects()[-1][1]] += 1
        counts["layer", cell.engine] += 1
        if task.work.expert_flop:
            counts["expert", _dtype_class(cell.dtype)] += 1
        if task.compute.tp > 1:
            counts["exchange", exchange_kind(task.compute.machine.device)] += 1
    return counts


def _columns(rows: Sequence[Task]) -> list[Vector]:
    """Seconds at peak of dense, expert and attention FLOP, of memory, layers, and seconds of exchange."""
    table = []
    for task in rows:
        assert task.compute is not None
        assert task.work is not None
        work, setup = task.work, task.compute
        device, tp, share = setup.machine.device, setup.tp, pipeline_share(task)
        rates = PassRates.of(setup.machine, _AT_PEAK, setup.weight_dtype, tp=tp)
        exchange = 0.0
        if tp > 1 and device.interconnect_bytes_per_s:
            exchange = work.all_reduce_bytes * 2 * (tp - 1) / tp / device.interconnect_bytes_per_s
        fixed = work.all_reduces * device.interconnect_latency_s if tp > 1 else 0.0
        table.append(
            (
                share * (work.dense_flop / rates.dense_flops + work.wide_flop / rates.wide_flops),
                share * work.expert_flop / rates.expert_flops,
                share * work.attention_flop / rates.attention_flops,
                share * (work.weight_bytes + work.kv_bytes) / rates.memory_bytes_per_s + fixed,
                share * work.layers,
                exchange,
            )
        )
    return [np.array(column) for column in zip(*table, strict=True)]


class _Problem:
    """Least squares over the logarithms of all rows' times, drawn towards the priors.

    Each `Vector` of two dimensions says by how much an effect (column) enters a row's logarithm of an efficiency, of a
    layer's cost, of the interconnect's share.
    """

    def __init__(
        self,
        rows: Sequence[Task],
        cells: Sequence[_Cell],
        names: Sequence[tuple[str, str]],
        centre: Vector,
        spread: Vector,
    ) -> None:
        index = {name: at for at, name in enumerate(names)}

        def enters(*keys: Sequence[tuple[str, str]]) -> Vector:
            table = np.zeros((len(rows), len(names)))
            for row, present in enumerate(zip(*keys, strict=True)):
                for key in present:
                    if key in index:
                        table[row, index[key]] = 1.0
            return table

        mean = [("mean", "")] * len(rows)
        family, dtype, engine, own = zip(*(cell.effects() for cell in cells), strict=True)
        self._seconds = _columns(rows)
        self._measured = np.log([task.measured / 1e3 for task in rows])
        self._centre, self._spread = centre, spread
        self._dense = enters(mean, family, dtype, engine, own)
        self._attention = enters(mean, family, engine, [("attention", key[1]) for key in own])
        for table in (self._dense, self._attention):
            table[:, index["power", ""]] = [cell.power for cell in cells]
        self._expert = self._dense + enters([("expert", _dtype_class(cell.dtype)) for cell in cells])
        self._layer = enters([("layer", cell.engine) for cell in cells])
        self._exchange = enters([("exchange", _exchange_of(task)) for task in rows])
        self._layer_default = np.where(self._layer.any(axis=1), 0.0, math.log(_LAYER_S))
        self._exchange_default = np.where(self._exchange.any(axis=1), 0.0, math.log(_EXCHANGE_SHARE))

    def residuals(self, values: Vector) -> Vector:
        """Softened misfits, a row far from all others ceasing to pull, and distances from the priors."""
        _, total, _ = self._parts(values)
        misfit = (np.log(total) - self._measured) / _NOISE
        softened = np.sign(misfit) * np.sqrt(np.log1p(misfit**2))
        return np.concatenate([softened, (values - self._centre) / self._spread])

    def jacobian(self, values: Vector) -> Vector:
        """Derivatives of the residuals."""
        parts, total, open_ends = self._parts(values)
        tables = (self._dense, self._expert, self._attention, self._layer, self._exchange)
        signs = (-1.0, -1.0, -1.0, 1.0, -1.0)
        slope = sum(
            sign * (part * free)[:, None] * table
            for sign, part, free, table in zip(signs, parts, open_ends, tables, strict=True)
        )
        misfit = (np.log(total) - self._measured) / _NOISE
        squared = np.maximum(misfit**2, 1e-12)
        softening = np.sqrt(squared / np.log1p(squared)) / (1 + squared)
        rows = (softening / (_NOISE * total))[:, None] * slope
        return np.concatenate([rows, np.diag(1 / self._spread)])

    def _parts(self, values: Vector) -> tuple[list[Vector], Vector, list[Vector]]:
        """Seconds by kind, their sum with what is fixed, and where an efficiency is not held at its highest."""
        dense, expert, attention, memory, layers, exchange = self._seconds
        logs = [table @ values for table in (self._dense, self._expert, self._attention)]
        layer = self._layer @ values + self._layer_default
        share = self._exchange @ values + self._exchange_default
        parts = [
            *(
                seconds / np.exp(np.minimum(log, _HIGHEST))
                for seconds, log in zip((dense, expert, attention), logs, strict=True)
            ),
            layers * np.exp(layer),
            exchange / np.exp(np.minimum(share, _HIGHEST)),
        ]
        open_ends = [(log < _HIGHEST).astype(np.float64) for log in logs]
        open_ends += [np.ones_like(layer), (share < _HIGHEST).astype(np.float64)]
        return parts, np.asarray(sum(parts) + memory), open_ends


def _exchange_of(task: Task) -> str:
    assert task.compute is not None
    return exchange_kind(task.compute.machine.device)


def _priors(names: Sequence[tuple[str, str]], attention_spread: float) -> tuple[Vector, Vector]:
    centre, spread = [], []
    for kind, _ in names:
        if kind == "mean":
            centre.append(math.log(_MEAN_EFFICIENCY))
            spread.append(_MEAN_SPREAD)
        elif kind == "power":
            centre.append(_POWER)
            spread.append(_POWER_SPREAD)
        elif kind == "layer":
            centre.append(math.log(_LAYER_S))
            spread.append(_LAYER_SPREAD)
        elif kind == "exchange":
            centre.append(math.log(_EXCHANGE_SHARE))
            spread.append(_EXCHANGE_SPREAD)
        else:
            centre.append(0.0)
            spread.append(attention_spread if kind == "attention" else _SPREAD[kind])
    return np.array(centre), np.array(spread)
