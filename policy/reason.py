"""A plan in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlane.policy.units import show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from kvlane.policy.plan import Estimate, Plan


def reason(plan: Plan) -> str:
    """The inequality that decided, with its numbers."""
    chosen = plan.estimates[plan.path]
    assert chosen is not None
    others = [other for other in plan.estimates.values() if other is not None and other.path != plan.path]
    said = _said(plan, chosen)
    if not others:
        missing = "; ".join(dict.fromkeys(plan.unavailable.values()))
        return f"{said}: nothing to weigh it against ({missing})"
    best = min(others, key=lambda other: other.ttft_s)
    if best.ttft_s < chosen.ttft_s:
        verdict = (
            f"{said} is within {plan.tie_margin:.0%} of {_said(plan, best)}, and such a near-tie goes to the"
            " steadier path"
        )
    else:
        verdict = f"{said} < {_said(plan, best)}"
    for other in others:
        if other is not best:
            sign = "<" if chosen.ttft_s < other.ttft_s else ">="
            verdict += f", {sign} {_said(plan, other)}"
    rate, needed = plan.link_bytes_per_s, plan.break_even_bytes_per_s
    if needed is not None and rate is not None:
        # With several tiers in it the sentence says whose link this is.
        alone = len(chosen.load) > 1
        link = f"{plan.basis.tier}'s link at" if alone else "the link's"
        verdict += (
            f"; {link} {show_rate(rate)} is {'above' if rate >= needed else 'below'} the break-even rate of"
            f" {show_rate(needed)} for loading everything{' from it alone' if alone else ''}"
        )
    return f"{verdict} ({plan.executor} executor)"


def _said(plan: Plan, estimate: Estimate) -> str:
    """One estimate in words with its parts, as far as they are disjoint."""
    total = show_seconds(estimate.ttft_s)
    # Copies alone expose no more than they take: the rest is the device's queue.
    if estimate.exposed_s > estimate.transfer_s + 1e-6 * estimate.ttft_s:
        total += f" ({show_seconds(estimate.exposed_s)} of it in the queue)"
    computed = plan.prompt_tokens - plan.resident_tokens - estimate.load_tokens
    if not estimate.load:
        return f"recompute of {computed} tokens {total}"
    tiers = [segment.tier for segment in estimate.load]
    if len(tiers) > 1:
        tiers = [f"{segment.tier} ({segment.tokens})" for segment in estimate.load]
    achieved = show_rate(estimate.load_bytes / estimate.transfer_s) if estimate.transfer_s else "once"
    copy = f"copy {show_seconds(estimate.transfer_s)} at {achieved}"
    if estimate.group_layers > 1:
        copy += f" in groups of {estimate.group_layers} layers"
    front = estimate.start - plan.resident_tokens
    rest = f"{computed - front} tokens computed in {show_seconds(estimate.compute_s - estimate.front_s)}"
    if front:
        parts = f"{copy} beside the {front} tokens before it computed in {show_seconds(estimate.front_s)}, then {rest}"
    elif plan.executor == "bulk":
        parts = f"{copy} then {rest}"
    else:
        parts = f"{copy} under {rest}"
    size = f"{estimate.load_tokens} tokens ({show_bytes(estimate.load_bytes)})"
    return f"{estimate.path} of {size} from {' and '.join(tiers)} {total} ({parts})"
