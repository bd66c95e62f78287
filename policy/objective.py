"""Which of a plan's estimates is taken, when TTFT is not all that counts.

Device seconds are those for which a path keeps the device from others: in bulk its compute, since the device is free
while the load goes on; by layer all of the pass, waiting included (DESIGN, "What the executor can do").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from kvlane.policy.errors import InputError
from kvlane.policy.joining import Joined
from kvlane.policy.plan import Estimate, Executor, Path, Plan
from kvlane.policy.units import show_seconds

Objective = Literal["ttft", "device_time", "blend"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

_STEADIEST_FIRST: tuple[Path, ...] = ("recompute", "load", "split")


@dataclass(frozen=True, slots=True)
class Aim:
    """What is wanted of a decision.

    `ttft` is the soonest first token, `device_time` the fewest device seconds, and `blend` the least `ttft + beside *
    device seconds`: each of the requests running or waiting `beside` this one is held up for as long as the device is.

    With `ttft_slo_s`, soon enough is enough: among the paths that meet it, error band included, `ttft` takes the one
    with the fewest device seconds. Where none meets it, the soonest is taken whatever the objective.

    Raises `InputError` naming the field.
    """

    objective: Objective = "ttft"
    ttft_slo_s: float | None = None
    beside: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError("objective", f"unknown objective {self.objective!r}", ", ".join(OBJECTIVES))
        if self.ttft_slo_s is not None and not self.ttft_slo_s > 0:
            raise InputError("ttft_slo_s", f"is {self.ttft_slo_s}", "seconds above zero")

    @property
    def plain(self) -> bool:
        """Whether the soonest path is all that is wanted, as a planner decides by itself."""
        return self.objective == "ttft" and self.ttft_slo_s is None


SOONEST = Aim()


@dataclass(frozen=True, slots=True)
class Verdict:
    """By what a choice was made: the objective that decided in the end, and by it the seconds each path costs."""

    aim: Aim
    objective: Objective
    costs: Mapping[Path, float]

    def reason(self, plan: Plan) -> str:
        """One sentence on the choice of `plan`."""
        slo = self.aim.ttft_slo_s
        if self.objective == "ttft":
            return (
                plan.reason if slo is None else f"no path is sure to meet {show_seconds(slo)}; {plan.reason}"
            )
        ranked = sorted(self.costs, key=lambda path: (path != plan.path, self.costs[path]))
        if self.objective == "device_time":
            said = [f"{path} keeps the device for {show_seconds(self.costs[path])}" for path in ranked]
            verdict = ", ".join(said)
        else:
            said = [f"{path} {show_seconds(self.costs[path])}" for path in ranked]
            verdict = (
                f"{', '.join(said)}, counting TTFT after the device's queue and the device's seconds for each of"
                f" {self.aim.beside} requests beside this one"
            )
        if self.costs[plan.path] > min(self.costs.values()):
            verdict += f"; within {plan.tie_margin:.0%}, such a near-tie goes to the steadier path"
        if slo is not None:
            verdict += f"; all of these are sure to meet {show_seconds(slo)}"
        return f"{verdict} ({plan.executor} executor)"


def device_s(executor: Executor, estimate: Estimate, busy_s: float, joined: Joined | None = None) -> float:
    """Seconds for which an estimate keeps the device, which others keep busy for `busy_s` before.

    `joined` is what waits, outside the pass, for another request's load.
    """
    if joined is not None and estimate is joined.estimate:
        return joined.device_s
    if executor == "bulk" or not estimate.load:
        return estimate.compute_s
    return estimate.ttft_s - busy_s


def choose(
    plan: Plan,
    aim: Aim,
    busy_s: float = 0.0,
    joined: Joined | None = None,
    instead_of: Estimate | None = None,
) -> Verdict:
    """Chooses anew among the estimates of `plan`, writes the choice into it, and says by what.

    A near-tie goes to the steadier path: one of what comes after the device's queue, which all paths wait for.
    `instead_of` is the estimate whose place `joined` has taken: no choice is later than that by more than a near-tie,
    either.
    """
    found = [estimate for estimate in plan.estimates.values() if estimate is not None]
    objective: Objective = aim.objective
    if aim.ttft_slo_s is not None:
        meeting = [estimate for estimate in found if estimate.high_s <= aim.ttft_slo_s]
        found = meeting or found
        objective = "ttft" if not meeting else "device_time" if objective == "ttft" else objective

    def cost(estimate: Estimate) -> float:
        seconds = 0.0 if objective == "device_time" else estimate.ttft_s - busy_s
        if objective != "ttft":
            beside = 1 if objective == "device_time" else aim.beside
            seconds += beside * device_s(plan.executor, estimate, busy_s, joined)
        return seconds

    costs = {estimate.path: cost(estimate) for estimate in found}
    least = min(costs, key=lambda path: costs[path])
    best = costs[least]
    if instead_of is not None and objective == "ttft":
        best = min(best, cost(instead_of))
    within = best * (1 + plan.tie_margin)
    order: tuple[Path, ...] = _STEADIEST_FIRST
    if joined is not None:
        # What is on its way already is steadier than what has yet to queue.
        order = ("recompute", joined.estimate.path, *order)
    near = (path for path in order if path in costs and (costs[path] == best or costs[path] < within))
    path = next(near, least)
    chosen = plan.estimates[path]
    assert chosen is not None
    plan.take(chosen)
    return Verdict(aim, objective, costs)
