"""Every way to answer a prompt whose prefix is stored, at its best, as one calibrated policy predicts it."""

from __future__ import annotations

from kvlane.bench.measuring import Condition
from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Plan, Request
from kvlane.policy.planner import Planner
from kvlane.streams.executor import Mode

UNIT_TOKENS = 16


def decide(planner: Planner, tokens: int, stored: int) -> Plan:
    """The plan for a prompt of which so many tokens are stored."""
    return planner.decide(Request(tokens, {"host": min(stored, tokens)}, load_unit_tokens=UNIT_TOKENS))


def path_conditions(planner: Planner, tokens: int, stored: int) -> list[Condition]:
    """Recompute; load everything usable, in bulk and by layer; load a prefix; load what comes after a front that is
    computed meanwhile; and what the policy chooses. A part can be loaded only of several units."""
    plan = decide(planner, tokens, stored)
    recompute, load = plan.estimates["recompute"], plan.estimates["load"]
    assert recompute is not None
    assert load is not None
    transfer, usable = planner.transfer("host", UNIT_TOKENS), load.end
    bulk, layered = PathCost(planner.prefill, "bulk"), PathCost(planner.prefill, "layered")

    def before(end: int) -> float:
        return layered.load_s(transfer, 0, end, tokens)

    def after(start: int) -> float:
        return layered.load_s(transfer, start, usable, tokens, resident=0)

    found = [
        Condition("recompute", "recompute", None, 0, recompute.ttft_s),
        Condition("bulk load", "load", "bulk", usable, bulk.load_s(transfer, 0, usable, tokens)),
        Condition("layered load", "load", "layered", usable, before(usable)),
    ]
    inside = range(UNIT_TOKENS, usable, UNIT_TOKENS)
    if inside:
        end, start = min(inside, key=before), min(inside, key=after)
        found.append(Condition("prefix split", "split", "layered", end, before(end)))
        found.append(Condition("two-ended", "split", "layered", usable - start, after(start), start))
    start = plan.load[0].start if plan.load else 0
    mode: Mode | None = "layered" if plan.load else None
    found.append(Condition("choice", plan.path, mode, plan.load_tokens, plan.ttft_s, start))
    return found
