"""From which prefix length on loading is not slower than recomputing, with the suffix held fixed.

A search finds it by the sign of the time saved. Its result is kept where it is shown to be that of every request in
the same queues: where one pass computes everything, with one set of coefficients, what computing up to the prefix's
end takes does not depend on what follows, so that neither does the sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlane.policy.plan import MOST_TOKENS
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.search import crossing
from kvlane.policy.transfer_cost import TransferCost

if TYPE_CHECKING:
    from kvlane.policy.lane import Lane

Crossover = tuple[int | None, str]

# No crossover is looked for beyond this many tokens.
_LONGEST_PREFIX = MOST_TOKENS

_Key = tuple[int, float, float]
_MOST_KEPT = 256

# Of the longest that anything here takes, the share beyond which rounding cannot turn a sign: each of the few terms
# is rounded to 1e-16 of it.
_ROUNDING = 1e-13


class Kept:
    """The crossovers of one tier's transfers that hold for any prompt, by resident tokens and both queues."""

    __slots__ = ("_found", "_once")

    def __init__(self) -> None:
        self._found: dict[_Key, int | None] = {}  # None where it is another for each prompt
        self._once: set[_Key] = set()

    def __len__(self) -> int:
        """How many are remembered, those asked for once among them."""
        return len(self._once)

    def known(self, start: int, busy_s: float, queued_s: float) -> int | None:
        """The crossover behind those queues where all is computed in one pass, None where it is not known to be every
        prompt's."""
        return self._found.get((start, busy_s, queued_s))

    def tokens(self, lane: Lane) -> int | None:
        """The crossover of this lane, its shortest prefix where loading is faster from there on, None where
        recomputing is faster throughout."""
        if lane.chunk is not None and lane.request.prompt_tokens - lane.start > lane.chunk:
            return search(lane)
        key = lane.start, lane.busy_s, lane.transfer.queued_s
        known = self._found.get(key)
        # With chunks only what is not longer than this request's prefix is sure to be one pass.
        if known is not None and (lane.chunk is None or known <= lane.usable):
            return known
        tokens = search(lane)
        if key in self._once:
            if key not in self._found:
                self._found[key] = tokens if tokens is not None and holds_for_all(lane, tokens) else None
        else:
            # Queues that are told anew with each request are not asked about again: showing it would be in vain.
            if len(self._once) >= _MOST_KEPT:
                self._once.clear()
                self._found.clear()
            self._once.add(key)
        return tokens


def crossover(lane: Lane, kept: Kept | None) -> Crossover:
    """The prefix length from which on loading all of it is not slower, and a word on it."""
    tokens = search(lane) if kept is None else kept.tokens(lane)
    return in_words(tokens, lane.start, lane.request.prompt_tokens - lane.usable)


def in_words(tokens: int | None, start: int, suffix: int) -> Crossover:
    """What `Kept.tokens` says, with a word on it."""
    if tokens is None:
        return None, f"recomputing is faster up to {_LONGEST_PREFIX:,} tokens"
    if tokens == start + 1:
        return None, "loading is faster for a prefix of any length up to this one"
    return tokens, f"with the {suffix} tokens after the prefix held fixed, loading is faster from here on"


def search(lane: Lane) -> int | None:
    """What `Kept.tokens` says, looked for.

    Where chunks make several crossovers it is the one nearest to this request's prefix: it answers for this request.
    """
    saved_s = saved(lane, lane.chunk)
    shortest = lane.start + 1
    low = high = max(shortest, lane.usable)
    if saved_s(high) >= 0:
        while saved_s(low) >= 0:
            if low == shortest:
                return shortest
            # Without chunks what is saved is convex in the prefix, and turns once at most.
            low, high = (shortest if lane.chunk is None else (shortest + low) // 2), low
    else:
        high = min(_LONGEST_PREFIX, 2 * high)
        while saved_s(high) < 0:
            if high >= _LONGEST_PREFIX:
                return None
            low, high = high, min(_LONGEST_PREFIX, 2 * high)
    return crossing(saved_s, range(low, high + 1))[1]


def saved(lane: Lane, chunk: int | None) -> Callable[[int], float]:
    """Seconds that loading a whole prefix of so many tokens saves over recomputing it, the suffix held fixed."""
    cost, transfer = lane.cost, lane.transfer
    start, busy_s = lane.start, lane.busy_s
    suffix = lane.request.prompt_tokens - lane.usable
    if cost.executor != "bulk":

        def saved_s(prefix: int) -> float:
            prompt = prefix + suffix
            load_s = cost.load_s(transfer, start, prefix, prompt, chunk, busy_s=busy_s)
            return busy_s + cost.recompute_s(start, prompt, chunk) - load_s

        return saved_s

    prefill_s, total_s, head_s = cost.prefill.prefill_s, transfer.total_s, cost.prefill.head_s

    def saved_in_bulk_s(prefix: int) -> float:
        # The same written out, to the last bit: some ten prefixes are tried.
        wait_s = total_s(prefix - start)
        load_s = prefill_s(prefix, suffix, chunk) + head_s + (wait_s if wait_s > busy_s else busy_s)
        return busy_s + (prefill_s(start, prefix + suffix - start, chunk) + head_s) - load_s

    return saved_in_bulk_s


def holds_for_all(lane: Lane, tokens: int) -> bool:
    """Whether every search in the same queues finds the same, whatever prompt it begins with that is one pass.

    That is where loading is slower for all shorter prefixes and for none from `tokens` on, by more than rounding.
    For `x` tokens loaded what is saved, but for the device's queue, is `q(x) - stair * ceil(x / run)` with a convex
    quadratic `q`: it is convex in each run of a copy, and so are the values at all runs' first tokens, and at all
    their last ones. Before `tokens` the largest are therefore at the ends of runs at either end; after it all rise
    where the quadratic rises by more than a stair a run.
    """
    prefill, transfer, start = lane.cost.prefill, lane.transfer, lane.start
    cost = prefill.coefficients(start)
    link = transfer.link
    if (
        type(prefill) is not PrefillCost
        or type(transfer) is not TransferCost
        or (lane.cost.executor != "bulk" and transfer.by_layer)
        or prefill.floored
        or cost != prefill.extend
        or cost.rectangle
        or cost.pair_s < 0
        or link.rate_table
        or transfer.counted is not None
    ):
        return False
    saved_s = saved(lane, None)
    longest_s = prefill.pass_s(start, 2 * MOST_TOKENS) + transfer.total_s(MOST_TOKENS) + lane.busy_s
    surely = _ROUNDING * longest_s
    run = transfer.run_tokens or 2 * MOST_TOKENS
    copies_in_layer = transfer.runs_per_layer * (transfer.layers if transfer.by_layer else 1)
    stair_s = copies_in_layer * link.per_copy_s
    copied_s = transfer.per_token_s + transfer.layers * transfer.layer_bytes_per_token / link.rate_bytes_per_s
    # What the quadratic gains with one token more, from here on at the least.
    rise_s = cost.token_s + cost.pair_s * tokens - copied_s
    if rise_s <= 0 or rise_s * run <= stair_s * (1 + 1e-9):
        return False
    at = tokens - start
    last = at - 1
    whole = (last - 1) // run * run
    slower = {1, min(run, last), whole, whole + 1, last} if last else set()
    next_run = -(-at // run) * run + 1
    faster = {at} if transfer.run_tokens is None else {at, next_run}
    return all(saved_s(start + x) <= -surely for x in slower if x > 0) and all(
        saved_s(start + x) >= surely for x in faster
    )
