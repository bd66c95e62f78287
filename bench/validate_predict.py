"""One published row, predicted: milliseconds of a prefill or a load, GB/s of a copy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from kvlane.bench.validate_rows import Row
from kvlane.bench.validate_setup import (
    Compute,
    Transfer,
    block_tokens_bytes,
    compute_setup,
    transfer_setup,
)
from kvlane.bench.validate_text import UnpredictableError
from kvlane.policy.machine import Device, Machine, PrefillEfficiency
from kvlane.policy.pass_rates import PassRates
from kvlane.policy.workload import Workload, prefill_workload

Unit = Literal["ms", "GB/s"]
# llama.cpp hands a pipeline of devices 2,048 tokens at a time (`n_batch`), 512 a stage (`n_ubatch`).
_PIPELINE_TOKENS = 2048
# What odd numbers end in (`InputError` is a ValueError): one row's reason, never the end of a validation.
ARITHMETIC = (ValueError, ArithmeticError)
_LOADS = ("load", "layerwise_load")
_METHODS = ("recompute", "hbm_hit", *_LOADS)


class Efficiencies(Protocol):
    """Where efficiencies come from: the machines' profiles, or a fit that left a source out."""

    def efficiency(self, machine: Machine, dtype: str, engine: str) -> PrefillEfficiency: ...

    def device(self, device: Device) -> Device: ...


class Profiles:
    """The efficiencies that the machines' profiles state."""

    def efficiency(self, machine: Machine, dtype: str, engine: str) -> PrefillEfficiency:
        return machine.efficiency_for(dtype, engine)

    def device(self, device: Device) -> Device:
        return device


@dataclass(frozen=True, slots=True)
class Task:
    """What a row measures: computing after `resident` tokens, moving bytes before it, or only moving.

    `moved_bytes` are those of one rank. `measured` and `unit` are the row's.
    """

    row: Row
    method: str
    measured: float
    unit: Unit
    compute: Compute | None
    work: Workload | None
    transfer: Transfer | None
    moved_bytes: float
    loaded_tokens: int

    @property
    def engine(self) -> str:
        return self.compute.engine if self.compute is not None else ""

    @property
    def device(self) -> str:
        return self.compute.machine.name if self.compute is not None else (self.row.gpu or "not stated")


def task_of(row: Row) -> Task:
    """What is to be predicted for a row; raises `UnpredictableError` with the reason where nothing can be."""
    try:
        return _task_of(row)
    except ARITHMETIC as error:
        raise UnpredictableError(str(error)) from None


def _task_of(row: Row) -> Task:
    _no_doubt(row)
    if row.kind == "C":
        _no_doubt(row, "rate_gb_per_s", "copy_bytes")
        if row.rate_gb_per_s is None:
            raise UnpredictableError("states no single rate")
        return Task(row, "transfer", row.rate_gb_per_s, "GB/s", None, None, transfer_setup(row), 0.0, 0)
    _no_doubt(row, "ttft_ms", "prompt_tokens")
    if row.ttft_ms is None:
        raise UnpredictableError("states no time")
    if row.prompt_tokens is None or row.prompt_tokens < 1:
        raise UnpredictableError("states no length")
    if row.method == "split":
        raise UnpredictableError(
            "computed elsewhere and sent here: the other machine and its network are not stated"
        )
    if row.method not in _METHODS:
        raise UnpredictableError(f"the method is not one that is predicted: {row.method or 'none stated'}")
    loads = row.method in _LOADS
    if row.method != "recompute":
        _no_doubt(row, "cached_tokens")
    if loads:
        _no_doubt(row, "copy_bytes")
        if not row.cached_tokens:
            raise UnpredictableError("states no tokens that are loaded")
    setup = compute_setup(row)
    cached = min(row.cached_tokens, row.prompt_tokens - 1) if row.method != "recompute" else 0
    work = workload_of(setup, cached, row.prompt_tokens - cached)
    if not loads:
        method = "hbm_hit" if row.method == "hbm_hit" else "recompute"
        return Task(row, method, row.ttft_ms, "ms", setup, work, None, 0.0, 0)
    moved = setup.model.move_bytes(row.cached_tokens, setup.kv_dtype, setup.tp)
    return Task(row, "load", row.ttft_ms, "ms", setup, work, transfer_setup(row), moved, row.cached_tokens)


def _no_doubt(row: Row, *columns: str) -> None:
    doubt = row.doubt(*columns)
    if doubt is not None:
        raise UnpredictableError(doubt)


def workload_of(setup: Compute, resident: int, new: int) -> Workload:
    """The work of computing `new` tokens after `resident` ones in every prompt of the batch."""
    return prefill_workload(
        setup.model,
        resident,
        new,
        setup.pass_tokens,
        weight_dtype=setup.weight_dtype,
        kv_dtype=setup.kv_dtype,
        tp=setup.tp,
        sequences=setup.sequences,
    )


def predict(task: Task, source: Efficiencies) -> float:
    """The prediction in the row's own unit; raises `UnpredictableError` for one that is no number above zero."""
    try:
        value = _predicted(task, source)
    except ARITHMETIC as error:
        raise UnpredictableError(str(error)) from None
    if not (math.isfinite(value) and value > 0):
        raise UnpredictableError(f"no number above zero comes out: {value}")
    return value


def _predicted(task: Task, source: Efficiencies) -> float:
    if task.unit == "GB/s":
        assert task.transfer is not None
        link, size = task.transfer.link, task.transfer.copy_bytes
        return (link.achieved(size) if size else link.rate_bytes_per_s) / 1e9
    return 1e3 * (compute_s(task, source) + transfer_s(task))


def compute_s(task: Task, source: Efficiencies) -> float:
    """Seconds of the computed part."""
    return sum(prefill_parts(task, source))


def prefill_parts(task: Task, source: Efficiencies) -> tuple[float, float, float]:
    """Seconds of the computed part that are fixed, that go with tokens, and that attention takes."""
    assert task.compute is not None
    assert task.work is not None
    setup, share = task.compute, pipeline_share(task)
    row = source.efficiency(setup.machine, setup.weight_dtype, setup.engine)
    machine = replace(setup.machine, device=source.device(setup.machine.device))
    rates = PassRates.of(machine, row, setup.weight_dtype, tp=setup.tp)
    total = rates.seconds(task.work)
    attention = task.work.attention_flop / rates.attention_flops
    tokens = (
        task.work.dense_flop / rates.dense_flops
        + task.work.expert_flop / rates.expert_flops
        + (task.work.all_reduce_bytes / rates.exchange_bytes_per_s if rates.exchange_bytes_per_s else 0.0)
    )
    return share * (total - tokens - attention), share * tokens, share * attention


def transfer_s(task: Task) -> float:
    """Seconds of the moved part: the link's, and what the engine does on the host for every loaded token."""
    if task.transfer is None or not task.moved_bytes:
        return 0.0
    link = task.transfer.link
    copying = moved_bytes(task) / link.achieved(block_of(task))
    return link.latency_s + copying + task.loaded_tokens * task.transfer.per_token_s


def moved_bytes(task: Task) -> float:
    """Bytes that a load brings over its link: every rank's where they share it, one rank's where each has its own."""
    shared = task.transfer is not None and task.transfer.shared and task.compute is not None
    return task.moved_bytes * (task.compute.tp if shared and task.compute is not None else 1)


def block_of(task: Task) -> float:
    """Bytes of one copy of a load."""
    assert task.compute is not None
    stated = task.transfer.copy_bytes if task.transfer is not None else None
    return stated or block_tokens_bytes(task.compute.model, task.compute.kv_dtype, task.compute.tp)


def pipeline_share(task: Task) -> float:
    """Time of a pipeline of stages over that of one device with all layers: 1 where there is one stage.

    A run of `n` passes takes `n + stages - 1` of the steps that one stage's share of the layers takes.
    """
    setup = task.compute
    if setup is None or setup.stages == 1 or not setup.pass_tokens or task.row.prompt_tokens is None:
        return 1.0
    steps, passes = 0, 0
    for start in range(0, task.row.prompt_tokens, _PIPELINE_TOKENS):
        run = -(-min(_PIPELINE_TOKENS, task.row.prompt_tokens - start) // setup.pass_tokens)
        steps += run + setup.stages - 1
        passes += run
    return steps / (setup.stages * passes)
