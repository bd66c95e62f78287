"""The three scenarios of the reproduction, and how each one is calibrated, predicted and measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import numpy as np

from kvlane.bench.lab import AloneTimes, Answer, Ids, Lab
from kvlane.bench.tuning import Tick
from kvlane.policy.model import ModelSpec
from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Path, Plan, Request
from kvlane.policy.planner import Planner
from kvlane.streams.executor import Mode
from kvlane.transfer.host import HostStore

UNIT_TOKENS = 16

# The largest logit difference between two paths that rounding may explain in fp32.
MAX_LOGIT_DIFFERENCE = 1e-4


class WrongAnswerError(RuntimeError):
    """A path gave another first token, other logits or other bytes than it must: never a matter of speed."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One way to answer: its prediction and how many tokens it loads (`choice` asks the policy each time)."""

    name: str
    path: Path
    executor: Mode | None
    load_tokens: int
    predicted_s: float


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
class Scenario:
    """One scenario: a prompt, how much of it is stored, and the conditions to compare."""

    key: str
    title: str
    tokens: int
    stored_tokens: int
    conditions: tuple[str, ...]

    @property
    def usable_tokens(self) -> int:
        return min(self.stored_tokens, (self.tokens - 1) // UNIT_TOKENS * UNIT_TOKENS)

    @property
    def suffix_tokens(self) -> int:
        return self.tokens - self.usable_tokens

    def plan(self, planner: Planner) -> Plan:
        hits = {"host": min(self.stored_tokens, self.tokens)}
        return planner.decide(Request(self.tokens, hits, load_unit_tokens=UNIT_TOKENS))


def published(tokens: int) -> Scenario:
    """A: everything usable is stored in host memory, one plain memcpy away."""
    return Scenario(
        "A", "the published one", tokens, tokens, ("recompute", "bulk load", "layered load", "choice")
    )


def chat_turn(tokens: int) -> Scenario:
    """B: 20 of 21 tokens are stored, 11,776 of 12,370, and a new message follows."""
    stored = tokens * 11_776 // 12_370 // UNIT_TOKENS * UNIT_TOKENS
    return Scenario("B", "a chat turn", tokens, stored, ("bulk load", "layered load", "choice"))


def near_break_even(tokens: int) -> Scenario:
    """C: a prompt a third as long, on a link on which loading it takes about as long as computing it."""
    short = max(8 * UNIT_TOKENS, round(tokens * 4096 / 12_370))
    conditions = ("recompute", "layered load", "prefix split", "choice")
    return Scenario("C", "near the break-even rate", short, short, conditions)


def conditions(scenario: Scenario, layered: Planner) -> list[Condition]:
    """The scenario's conditions with their predictions, from one calibrated policy."""
    plan = scenario.plan(layered)
    bulk = PathCost(layered.prefill, "bulk")
    transfer = layered.transfer("host", UNIT_TOKENS)
    load, split, recompute = (plan.estimates[path] for path in ("load", "split", "recompute"))
    assert load is not None
    assert recompute is not None
    chosen = plan.estimates[plan.path]
    assert chosen is not None
    every = [
        Condition("recompute", "recompute", None, 0, recompute.ttft_s),
        Condition("bulk load", "load", "bulk", load.end, bulk.load_s(transfer, 0, load.end, scenario.tokens)),
        Condition("layered load", "load", "layered", load.end, load.ttft_s),
        Condition("choice", plan.path, "layered" if plan.load else None, plan.load_tokens, chosen.ttft_s),
    ]
    if split is not None:
        every.insert(3, Condition("prefix split", "split", "layered", split.end, split.ttft_s))
    return [condition for condition in every if condition.name in scenario.conditions]


def measure(
    scenario: Scenario,
    lab: Lab,
    store: HostStore,
    ids: Ids,
    planner: Planner,
    reps: int,
    reference: Answer | None,
    spec: ModelSpec,
    tick: Tick,
) -> list[Outcome]:
    """Every condition `reps` times, interleaved, each repetition starting with another one.

    `reference` is an answer computed without any stored KV, if the scenario has none among its conditions.
    Raises `WrongAnswerError` when a token, a logit or a byte is not what it must be.
    """
    outcomes = [Outcome(condition) for condition in conditions(scenario, planner)]
    for rep in range(reps):
        alone: dict[
            int, AloneTimes
        ] = {}  # by tokens loaded: conditions that load as many share the measurement
        # The first answer and the last of a repetition see different moments of a drifting machine: take turns.
        for outcome in outcomes[rep % len(outcomes) :] + outcomes[: rep % len(outcomes)]:
            condition = outcome.condition
            answer = _answer(condition, lab, store, ids, planner)
            outcome.answers.append(answer)
            loaded = answer.result.loaded_tokens
            passes = 1
            if loaded:
                if loaded not in alone:
                    alone[loaded] = lab.alone(store, ids, loaded)
                    passes = 2
                outcome.alone.append(alone[loaded])
            work = passes * spec.prefill_flop(loaded, scenario.tokens - loaded)
            tick(f"scenario {scenario.key}: {condition.name}, {rep + 1} of {reps}", work)
    _check(scenario, outcomes, reference, planner)
    return outcomes


def _answer(condition: Condition, lab: Lab, store: HostStore, ids: Ids, planner: Planner) -> Answer:
    if condition.name == "choice":
        return lab.choose(store, ids, planner)
    if condition.executor is None:
        return lab.recompute(ids)
    return lab.load(store, ids, condition.load_tokens, condition.executor)


def _check(scenario: Scenario, outcomes: list[Outcome], reference: Answer | None, planner: Planner) -> None:
    """Same token, same logits but for rounding, and exactly the planned bytes, on every path each time."""
    if reference is None:
        reference = next(outcome for outcome in outcomes if outcome.condition.path == "recompute").answers[0]
    expected = reference.result
    per_token = round(planner.layer_bytes_per_token * planner.layers)
    for outcome in outcomes:
        where = f"scenario {scenario.key}, {outcome.condition.name}"
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
