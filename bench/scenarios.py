"""The three scenarios of the reproduction, and how each one is calibrated, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.bench.lab import Answer, Ids, Lab
from kvlane.bench.measuring import Condition, Outcome, Setting, measure_conditions
from kvlane.bench.tuning import Tick
from kvlane.policy.model import ModelSpec
from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Plan, Request
from kvlane.policy.planner import Planner
from kvlane.transfer.host import HostStore

UNIT_TOKENS = 16


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
    """Every condition of the scenario `reps` times; see `measure_conditions`."""
    setting = Setting(f"scenario {scenario.key}", lab, store, ids, planner, spec)
    return measure_conditions(setting, conditions(scenario, planner), reps, tick, reference)
