"""From which prefix length on loading is not slower than recomputing, with the suffix held fixed.

An `Onset` tells it at once where it is sure that a search would find the same; else a search finds it, by the sign of
the time saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlane.policy.onset import Onset
from kvlane.policy.plan import MOST_TOKENS
from kvlane.policy.search import crossing

if TYPE_CHECKING:
    from kvlane.policy.lane import Lane

Crossover = tuple[int | None, str]

# No crossover is looked for beyond this many tokens.
_LONGEST_PREFIX = MOST_TOKENS


def crossover(lane: Lane, onset: Onset | None) -> Crossover:
    """The prefix length from which on loading all of it is not slower, and a word on it."""
    prompt, chunk = lane.request.prompt_tokens, lane.chunk
    tokens = None
    if onset is not None and (chunk is None or prompt - lane.start <= chunk):
        tokens = onset.tokens(lane.start, lane.busy_s, lane.transfer.queued_s)
    # With chunks only what is not longer than this request's prefix is sure to be one pass.
    if tokens is None or (chunk is not None and tokens > lane.usable):
        tokens = search(lane)
    return in_words(tokens, lane.start, prompt - lane.usable)


def in_words(tokens: int | None, start: int, suffix: int) -> Crossover:
    """What `search` finds, with a word on it."""
    if tokens is None:
        return None, f"recomputing is faster up to {_LONGEST_PREFIX:,} tokens"
    if tokens == start + 1:
        return None, "loading is faster for a prefix of any length up to this one"
    return tokens, f"with the {suffix} tokens after the prefix held fixed, loading is faster from here on"


def search(lane: Lane) -> int | None:
    """The crossover of this lane, its shortest prefix where loading is faster from there on, None where recomputing is
    faster throughout.

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
