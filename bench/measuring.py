"""Measures ways to answer one prompt, interleaved, and makes sure that all of them give the same answer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlane.bench.lab import AloneTimes, Answer, Ids, Lab
from kvlane.bench.tuning import Tick
from kvlane.policy.model import ModelSpec
from kvlane.policy.plan import Path
from kvlane.policy.planner import Planner
from kvlane.streams.executor import Mode
from kvlane.transfer.host import HostStore

# The largest logit difference between two paths that rounding may explain in fp32.
MAX_LOGIT_DIFFERENCE = 1e-4


class WrongAnswerError(RuntimeError):
    """A path gave another first token, other logits or other bytes than it must: never a matter of speed."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One way to answer: its prediction, how many tokens it loads, and from which on (`choice` asks the policy each
    time)."""

    name: str
    path: Path
    executor: Mode | None
    load_tokens: int
    predicted_s: float
    start: int = 0

    @property
    def end(self) -> int:
        """The first token after those loaded."""
        return self.start + self.load_tokens


@dataclass(slots=True)
class Outcome:
    """What one condition did, one entry per repetition; a list that stays empty does not apply to its path."""

    condition: Condition
    answers: list[Answer] = field(default_factory=list)
    alone: list[AloneTimes] = field(default_factory=list)
    logit_differences: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> list[float]:
        return [answer.result.total_s for answer in self.answers]

    @property
    def median_s(self) -> float:
        return statistics.median(self.measured_s)

    @property
    def overlap_efficiencies(self) -> list[float]:
        """The max-plus bound of copies and compute measured apart, over the measured TTFT.

        A little above 1 is possible: the bound lets a layer begin after its KV, the engine lets its projections.
        """
        if not self.alone:
            return []
        bound = AloneTimes.fastest(self.alone).bound_s
        return [bound / seconds for seconds in self.measured_s]

    @property
    def median_efficiency(self) -> float | None:
        return statistics.median(self.overlap_efficiencies) if self.alone else None

    @property
    def median_answer(self) -> Answer:
        """The answer whose time is the median (of an even number, the lower of the middle two)."""
        ordered = sorted(self.answers, key=lambda answer: answer.result.total_s)
        return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where one prompt is answered: a lab, the store that holds the prompt, and the policy calibrated for both."""

    name: str
    lab: Lab
    store: HostStore
    ids: Ids
    planner: Planner
    spec: ModelSpec


def measure_conditions(
    setting: Setting,
    conditions: Sequence[Condition],
    reps: int,
    tick: Tick,
    reference: Answer | None = None,
    alone_reps: int | None = None,
) -> list[Outcome]:
    """Every condition `reps` times, interleaved, each repetition starting with another one.

    `reference` is an answer computed without any stored KV, if there is none among the conditions. In the first
    `alone_reps` repetitions, or in all, the parts of every load are measured alone, too.

    Raises `WrongAnswerError` when a token, a logit or a byte is not what it must be.
    """
    outcomes = [Outcome(condition) for condition in conditions]
    lab, store, ids = setting.lab, setting.store, setting.ids
    for rep in range(reps):
        # By the tokens loaded: conditions that load the same ones share the measurement.
        alone: dict[tuple[int, int], AloneTimes] = {}
        # The first answer and the last of a repetition see different moments of a drifting machine: take turns.
        for outcome in outcomes[rep % len(outcomes) :] + outcomes[: rep % len(outcomes)]:
            condition = outcome.condition
            answer = _answer(condition, setting)
            outcome.answers.append(answer)
            start, end = loaded = answer.loaded
            work = setting.spec.prefill_flop(0, start) + setting.spec.prefill_flop(end, len(ids) - end)
            if end and (alone_reps is None or rep < alone_reps):
                if loaded not in alone:
                    alone[loaded] = lab.alone(store, ids, end, start)
                    work *= 2
                outcome.alone.append(alone[loaded])
            tick(f"{setting.name}: {condition.name}, {rep + 1} of {reps}", work)
    _check(setting, outcomes, reference)
    return outcomes


def _answer(condition: Condition, setting: Setting) -> Answer:
    lab, store, ids = setting.lab, setting.store, setting.ids
    if condition.name == "choice":
        return lab.choose(store, ids, setting.planner)
    if condition.executor is None:
        return lab.recompute(ids)
    return lab.load(store, ids, condition.end, condition.executor, condition.start)


def _check(setting: Setting, outcomes: Sequence[Outcome], reference: Answer | None) -> None:
    """Same token, same logits but for rounding, and exactly the planned bytes, on every path each time."""
    if reference is None:
        reference = next(outcome for outcome in outcomes if outcome.condition.path == "recompute").answers[0]
    expected = reference.result
    per_token = round(setting.planner.layer_bytes_per_token * setting.planner.layers)
    for outcome in outcomes:
        where = f"{setting.name}, {outcome.condition.name}"
        for answer in outcome.answers:
            result = answer.result
            difference = float(np.abs(result.logits - expected.logits).max())
            outcome.logit_differences.append(difference)
            if result.first_token != expected.first_token:
                raise WrongAnswerError(
                    f"{where}: first token {result.first_token}, without stored KV {expected.first_token}"
                )
            if not difference <= MAX_LOGIT_DIFFERENCE:  # NaN must not pass
                raise WrongAnswerError(
                    f"{where}: logits differ by {difference:.3g}, at most {MAX_LOGIT_DIFFERENCE:g}"
                )
            planned = (
                outcome.condition.load_tokens * per_token if answer.plan is None else answer.plan.load_bytes
            )
            if answer.moved_bytes != planned:
                raise WrongAnswerError(f"{where}: {answer.moved_bytes} bytes moved, planned {planned}")
