"""The 12,370-token reproduction on a CUDA device: recompute, bulk, layered and two-ended, each predicted before it is
measured.

In the 16-bit types of real models a recompute and a load differ by rounding, since a pass after a prefix runs other
kernels than one from token 0. What has to be the same to the last bit is checked instead: the loaded KV and the
stored, and the logits of every load and of the same pass over KV that never left the device.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvlane.bench.calibrate import Options as CalibrateOptions
from kvlane.bench.calibrate import calibrate_lab
from kvlane.bench.lab import AloneTimes, Answer, Ids, Lab
from kvlane.bench.measuring import Condition, Outcome
from kvlane.bench.paths import UNIT_TOKENS
from kvlane.bench.subject import Subject
from kvlane.bench.tuning import Tick
from kvlane.policy.calibration_apply import calibrated
from kvlane.policy.calibration_record import Record
from kvlane.policy.errors import InputError
from kvlane.policy.path_cost import PathCost
from kvlane.policy.planner import Planner
from kvlane.policy.units import show_bytes, show_rate, show_seconds
from kvlane.streams.executor import LayerExecutor
from kvlane.transfer.host import HostStore
from kvlane.transfer.layout import KvRegion

SHORTEST_PROMPT = 256
# The calibration goes beyond the prompt, and to none of its own lengths.
_CALIBRATED = 1.03
_SEED = 12_370


@dataclass(frozen=True, slots=True)
class Options:
    """What to reproduce: `reps` measurements a condition, `calibration_reps` of each calibrating pass."""

    tokens: int = 12_370
    reps: int = 3
    calibration_reps: int = 2

    def __post_init__(self) -> None:
        if self.tokens < SHORTEST_PROMPT:
            raise InputError("tokens", f"is {self.tokens}", f"{SHORTEST_PROMPT} or more")
        if self.reps < 1:
            raise InputError("reps", f"is {self.reps}", "1 or more")

    @property
    def calibration(self) -> CalibrateOptions:
        longest = int(self.tokens * _CALIBRATED) // UNIT_TOKENS * UNIT_TOKENS
        return CalibrateOptions(longest, self.calibration_reps)

    @property
    def capacity_tokens(self) -> int:
        """The longest prompt there will be."""
        return max(self.tokens, self.calibration.tokens)


@dataclass(slots=True)
class ShapeRun:
    """One model done.

    Attributes:
        event_s: what an event for each layer costs the copies, beyond one for all of them, a layer.
        problems: what was not the same to the last bit, in words; nothing then holds of the numbers.
        logit_difference: the largest one between a load and a recompute, beside the gap of the two largest logits.
    """

    subject: Subject
    options: Options
    device: str
    record: Record
    planner: Planner
    event_s: float
    outcomes: list[Outcome]
    problems: list[str] = field(default_factory=list)
    logit_difference: float = 0.0
    top2_gap: float = 0.0


def reproduce_shape(
    subject: Subject, lab: Lab, options: Options, device: str, at_s: float, step: Tick
) -> ShapeRun:
    """Calibrates on other prompts, predicts, and then measures. `at_s` is now, seconds since 1970 UTC.

    Raises `InputError` where what was calibrated shows no cost.
    """
    # What the libraries and kernels do once, they do now.
    ids = _prompt(subject, options.tokens)
    lab.recompute(ids)
    step("warm", 0.0)
    record = calibrate_lab(subject, options.calibration, at_s, lab, step, device)
    reference = lab.recompute(ids)
    store = HostStore(UNIT_TOKENS, allocate=lab.backend.host_bytes)
    lab.keep(store, ids, options.tokens)
    usable = (options.tokens - 1) // UNIT_TOKENS * UNIT_TOKENS
    event_s = event_cost_s(lab, store, ids, usable)
    planner = _planner(record, event_s)
    run = ShapeRun(
        subject,
        options,
        device,
        record,
        planner,
        event_s,
        [Outcome(condition) for condition in conditions(planner, options.tokens)],
    )
    for rep in range(options.reps):
        # The first answer and the last of a repetition see different moments of a drifting device: take turns.
        turn = rep % len(run.outcomes)
        for outcome in run.outcomes[turn:] + run.outcomes[:turn]:
            _measure(outcome, lab, store, ids)
            step(f"{subject.name}: {outcome.condition.name}, {rep + 1} of {options.reps}", 0.0)
    _check(run, lab, store, ids, reference)
    return run


def conditions(planner: Planner, tokens: int) -> list[Condition]:
    """Each path at its best, as the policy predicts it."""
    transfer, usable = planner.transfer("host", UNIT_TOKENS), (tokens - 1) // UNIT_TOKENS * UNIT_TOKENS
    bulk, layered = PathCost(planner.prefill, "bulk"), PathCost(planner.prefill, "layered")

    def after(start: int) -> float:
        return layered.load_s(transfer, start, usable, tokens, resident=0)

    begin = min(range(UNIT_TOKENS, usable, UNIT_TOKENS), key=after)
    return [
        Condition("recompute", "recompute", None, 0, layered.recompute_s(0, tokens)),
        Condition("bulk load", "load", "bulk", usable, bulk.load_s(transfer, 0, usable, tokens)),
        Condition("layered load", "load", "layered", usable, layered.load_s(transfer, 0, usable, tokens)),
        Condition("two-ended", "split", "layered", usable - begin, after(begin), begin),
    ]


def event_cost_s(lab: Lab, store: HostStore, ids: Ids, end: int, reps: int = 3) -> float:
    """Seconds a layer that the copies of a load take longer with an event for each layer than with one for all."""
    layers = lab.engine.layout.layers
    executor = LayerExecutor(lab.backend)
    seconds: dict[int, list[float]] = {1: [], layers: []}
    try:
        for _ in range(reps + 1):
            for group, taken in seconds.items():
                lab.poison()
                hit = store.lookup(lab.engine.identity, ids)
                with store.open(hit, 0, end) as run:
                    began = lab.backend.now()
                    kv = lab.engine.kv
                    load = executor.submit([run], kv.memory, kv.region, mode="bulk", group_layers=group)
                    load.finish()
                taken.append(load.timings(began)[0].layers[-1].arrive_s)
    finally:
        executor.close()
    each, once = (statistics.median(taken[1:]) for taken in seconds.values())
    return max(0.0, each - once) / max(1, layers - 1)


def to_dict(run: ShapeRun) -> dict[str, Any]:
    """JSON-ready values; times in seconds, sizes in bytes."""
    link = run.planner.transfer("host", UNIT_TOKENS).link
    return {
        "model": run.subject.name,
        "device": run.device,
        "tokens": run.options.tokens,
        "dtype": run.subject.spec.weight_dtype,
        "weights": "random, fixed seed",
        "kv_bytes": run.options.tokens * run.subject.spec.kv_bytes_per_token(run.subject.spec.weight_dtype),
        "link_bytes_per_s": link.rate_bytes_per_s,
        "per_copy_s": link.per_copy_s,
        "per_event_s": run.event_s,
        "latency_s": link.latency_s,
        "problems": run.problems,
        "logit_difference": run.logit_difference,
        "top2_gap": run.top2_gap,
        "conditions": [_condition(outcome) for outcome in run.outcomes],
    }


def render(run: ShapeRun) -> str:
    """A table: each condition's prediction beside its measurement and, of loads, the bound of its parts."""
    link = run.planner.transfer("host", UNIT_TOKENS).link
    lines = [
        f"{run.subject.name}, {run.subject.spec.weight_dtype}, random weights; {run.options.tokens:,} tokens on"
        f" {run.device}, link {show_rate(link.rate_bytes_per_s)}, {show_seconds(run.event_s)} per event",
        f"  {'condition':13} {'loaded':>9} {'predicted':>10} {'measured':>10} {'min - max':>21} {'error':>7}"
        f" {'bound':>10} {'of bound':>8}",
    ]
    for outcome in run.outcomes:
        row = _condition(outcome)
        times = row["measured_s"]
        loaded = show_bytes(row["loaded_bytes"][0]) if row["loaded_bytes"][0] else "-"
        span = f"{show_seconds(min(times))} - {show_seconds(max(times))}"
        bound = "-" if row["bound_s"] is None else show_seconds(row["bound_s"])
        over = "-" if row["bound_s"] is None else f"{row['median_s'] / row['bound_s']:.2f}"
        lines.append(
            f"  {row['name']:13} {loaded:>9} {show_seconds(row['predicted_s']):>10}"
            f" {show_seconds(row['median_s']):>10} {span:>21} {row['error']:>+7.1%} {bound:>10} {over:>8}"
        )
    lines.append(
        f"  logits: loads and recompute differ by {run.logit_difference:.3g}, the two largest lie"
        f" {run.top2_gap:.3g} apart"
    )
    lines += [f"  PROBLEM  {problem}" for problem in run.problems]
    return "\n".join(lines)


def _condition(outcome: Outcome) -> dict[str, Any]:
    condition, median = outcome.condition, outcome.median_s
    return {
        "name": condition.name,
        "start": condition.start,
        "end": condition.end,
        "predicted_s": condition.predicted_s,
        "measured_s": outcome.measured_s,
        "median_s": median,
        "error": condition.predicted_s / median - 1,
        "loaded_bytes": [answer.moved_bytes for answer in outcome.answers],
        "first_token": [answer.result.first_token for answer in outcome.answers],
        "bound_s": AloneTimes.fastest(outcome.alone).bound_s if outcome.alone else None,
    }


def _planner(record: Record, event_s: float) -> Planner:
    found = calibrated(record)
    links = {name: replace(link, per_event_s=event_s) for name, link in found.machine.links.items()}
    return Planner(
        found.model,
        replace(found.machine, links=links),
        executor="two_ended",
        tp=found.tp,
        kv_dtype=found.kv_dtype,
        calibration=found.calibration,
    )


def _measure(outcome: Outcome, lab: Lab, store: HostStore, ids: Ids) -> None:
    condition = outcome.condition
    if condition.executor is None:
        outcome.answers.append(lab.recompute(ids))
        return
    outcome.answers.append(lab.load(store, ids, condition.end, condition.executor, condition.start))
    outcome.alone.append(lab.alone(store, ids, condition.end, condition.start))


def _check(run: ShapeRun, lab: Lab, store: HostStore, ids: Ids, reference: Answer) -> None:
    """What must be the same to the last bit, and how far rounding goes."""
    second, first = np.sort(reference.result.logits)[-2:]
    run.top2_gap = float(first - second)
    per_token = lab.engine.layout.bytes_per_token
    for outcome in run.outcomes:
        condition = outcome.condition
        for answer in outcome.answers:
            difference = float(np.abs(answer.result.logits - reference.result.logits).max())
            if condition.executor is not None:
                run.logit_difference = max(run.logit_difference, difference)
            if not np.isfinite(answer.result.logits).all():
                run.problems.append(
                    f"{condition.name}: logits that are no numbers: KV that was never written"
                )
            if answer.moved_bytes != condition.load_tokens * per_token:
                run.problems.append(
                    f"{condition.name}: {answer.moved_bytes} bytes moved for {condition.load_tokens} tokens"
                )
    end = next(outcome.condition.end for outcome in run.outcomes if outcome.condition.name == "layered load")
    lab.load(store, ids, end, "layered")
    if not _is_stored(lab, store, ids, end):
        run.problems.append("the KV on the device is not the stored KV after a load by layer")
    resident = lab.engine.prefill(ids, resident=end).logits
    for outcome in run.outcomes:
        if outcome.condition.path == "load" and any(
            not np.array_equal(answer.result.logits, resident) for answer in outcome.answers
        ):
            run.problems.append(f"{outcome.condition.name}: not the logits of the same pass over resident KV")


def _is_stored(lab: Lab, store: HostStore, ids: Ids, end: int) -> bool:
    """Whether the block's KV of tokens `[0, end)` is the store's, byte for byte."""
    hit = store.lookup(lab.engine.identity, ids)
    with store.open(hit, 0, end) as run:
        memory, region = run.memory, run.region
        assert isinstance(region, KvRegion), "this store holds whole prompts, layer by layer"
        for layer, rows in enumerate(lab.engine.layer_bytes(0, end)):
            for mine, at in ((rows[0], region.key_offset(layer)), (rows[1], region.value_offset(layer))):
                if not np.array_equal(mine, memory[at : at + mine.size]):
                    return False
    return True


def _prompt(subject: Subject, tokens: int) -> Ids:
    return np.random.default_rng(_SEED).integers(0, subject.vocab, tokens)
