"""The three scenarios of the reproduction, and how each one is calibrated, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.bench.lab import Answer, Ids, Lab
from kvlane.bench.measuring import Condition, Outcome, Setting, measure_conditions
from kvlane.bench.paths import UNIT_TOKENS, decide, path_conditions
from kvlane.bench.tuning import Tick
from kvlane.policy.model import ModelSpec
from kvlane.policy.plan import Plan
from kvlane.policy.planner import Planner
from kvlane.transfer.host import HostStore


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
        return decide(planner, self.tokens, self.stored_tokens)


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
    conditions = ("recompute", "layered load", "prefix split", "two-ended", "choice")
    return Scenario("C", "near the break-even rate", short, short, conditions)


def conditions(scenario: Scenario, planner: Planner) -> list[Condition]:
    """The scenario's conditions with their predictions, from one calibrated policy."""
    every = path_conditions(planner, scenario.tokens, scenario.stored_tokens)
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
    """Every condition of the scenario `reps` times; see `measure_conditions`."""
    setting = Setting(f"scenario {scenario.key}", lab, store, ids, planner, spec)
    return measure_conditions(setting, conditions(scenario, planner), reps, tick, reference)
