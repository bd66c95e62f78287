"""A plan in one sentence."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kvlane.policy.units import show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlane.policy.plan import Estimate, Executor, Plan


def reason(plan: Plan) -> str:
    """The inequality that decided, with its numbers."""
    chosen = plan.estimates[plan.path]
    assert chosen is not None
    others = [other for other in plan.estimates.values() if other is not None and other.path != plan.path]
    if not others:
        missing = "; ".join(dict.fromkeys(plan.unavailable.values()))
        said = _said(chosen, plan.prompt_tokens, plan.resident_tokens, plan.executor)
        return f"{said}: nothing to weigh it against ({missing})"
    basis = plan.basis
    return weighed(
        chosen,
        others,
        plan.prompt_tokens,
        plan.resident_tokens,
        plan.executor,
        plan.tie_margin,
        basis.tier,
        basis.link_rate,
        basis.break_even[0],
    )


def weighed(
    chosen: Estimate,
    others: Sequence[Estimate],
    prompt: int,
    resident: int,
    executor: Executor,
    tie_margin: float,
    tier: str | None,
    rate: float | None,
    needed: float | None,
) -> str:
    """The same from its parts: what was chosen and the others there were, the request's tokens, and the tier whose link
    reaches `rate` where `needed` would make a tie; both None where there is no such rate."""
    said = _said(chosen, prompt, resident, executor)
    best = others[0] if len(others) == 1 else min(others, key=_ttft)
    if best.ttft_s < chosen.ttft_s:
        verdict = (
            f"{said} is within {tie_margin:.0%} of {_said(best, prompt, resident, executor)}, and such a near-tie"
            " goes to the steadier path"
        )
    else:
        verdict = f"{said} < {_said(best, prompt, resident, executor)}"
    for other in others:
        if other is not best:
            sign = "<" if chosen.ttft_s < other.ttft_s else ">="
            verdict += f", {sign} {_said(other, prompt, resident, executor)}"
    if needed is None or rate is None:
        return f"{verdict} ({executor} executor)"
    # With several tiers in it the sentence says whose link this is.
    alone = len(chosen.load) > 1
    link = f"{tier}'s link at" if alone else "the link's"
    return (
        f"{verdict}; {link} {_shown(rate)} is {'above' if rate >= needed else 'below'} the break-even rate of"
        f" {show_rate(needed)} for loading everything{' from it alone' if alone else ''} ({executor} executor)"
    )


# A link's rate is in the words of most of its decisions.
_shown = lru_cache(64)(show_rate)


def _ttft(estimate: Estimate) -> float:
    return estimate.ttft_s


def _said(estimate: Estimate, prompt: int, resident: int, executor: Executor) -> str:
    """One estimate in words with its parts, as far as they are disjoint."""
    ttft_s, compute_s, transfer_s = estimate.ttft_s, estimate.compute_s, estimate.transfer_s
    load = estimate.load
    # Copies alone expose no more than they take: the rest is the device's queue.
    queue = ""
    if ttft_s - compute_s > transfer_s + 1e-6 * ttft_s:
        queue = f" ({show_seconds(estimate.exposed_s)} of it in the queue)"
    computed = prompt - resident
    if not load:
        return f"recompute of {computed} tokens {show_seconds(ttft_s)}{queue}"
    first = load[0]
    start, tiers, size = first.start, first.tier, first.bytes
    loaded = load[-1].end - start
    if len(load) > 1:
        size = estimate.load_bytes
        tiers = " and ".join([f"{segment.tier} ({segment.tokens})" for segment in load])
    groups = f" in groups of {estimate.group_layers} layers" if estimate.group_layers > 1 else ""
    then = " then" if executor == "bulk" else " under"
    if start > resident:
        front_s = show_seconds(estimate.front_s)
        then = f" beside the {start - resident} tokens before it computed in {front_s}, then"
    rest_s = compute_s - estimate.front_s
    if ttft_s < 0.99 and 0.01 <= transfer_s < 0.99 and rest_s >= 0.01:
        # What `show_seconds` says of most; it is called a dozen times for a reason.
        total, copied, rest = f"{ttft_s * 1e3:.1f} ms", f"{transfer_s * 1e3:.1f} ms", f"{rest_s * 1e3:.1f} ms"
    else:
        total, copied, rest = show_seconds(ttft_s), show_seconds(transfer_s), show_seconds(rest_s)
    return (
        f"{estimate.path} of {loaded} tokens ({show_bytes(size)}) from {tiers} {total}{queue}"
        f" (copy {copied} at {show_rate(size / transfer_s) if transfer_s else 'once'}{groups}{then}"
        f" {computed - loaded - start + resident} tokens computed in {rest})"
    )
