"""From which prefix length on loading pays, in closed form: where one pass computes everything, with one set of
coefficients, and all layers are alike.

What loading a prefix saves is then the same for every prompt in the same queues, but for its rounding. An onset is told
only where no rounding could turn a sign, so that it is what a search by the sign of the time saved finds.
"""

from __future__ import annotations

from math import ceil, sqrt

from kvlane.policy.plan import MOST_TOKENS, Executor
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.transfer_cost import TransferCost

# Of the longest that anything here takes, the share beyond which rounding cannot turn a sign: each of the few terms
# is rounded to 1e-16 of it.
_ROUNDING = 1e-13

# More tokens than there can be.
_NOWHERE = 2 * MOST_TOKENS

# Of idle queues, which are the same for many, so many onsets are kept.
_MOST_KEPT = 256


class Onset:
    """From where on loading from one tier pays, for whatever prompt is computed in one pass.

    Loading `x` tokens saves what computing them takes, less what the device's queue does not hide of the wait: in bulk
    that for all layers, else the longer of those for the first and for the last. What computing takes is a convex
    quadratic in `x`; a wait is linear, but for a stair where each run of a copy begins.
    """

    __slots__ = ("_first", "_idle", "_last", "_latency_s", "_longest_s", "_prefill", "_run", "_under_s")

    def __init__(self, prefill: PrefillCost, transfer: TransferCost, executor: Executor) -> None:
        link, layers = transfer.link, transfer.layers
        layer_s = transfer.layer_bytes_per_token / link.rate_bytes_per_s
        copies_s = transfer.runs_per_layer * link.per_copy_s
        # Seconds per token and per run of a copy, until the first layer is there and until the last is.
        first = layer_s + transfer.per_token_s, copies_s
        last = layers * layer_s + transfer.per_token_s, copies_s * (layers if transfer.by_layer else 1)
        by_layer = executor != "bulk" and transfer.by_layer
        self._first = first if by_layer else last
        self._last = last if by_layer else None
        # All other layers are computed before the last is awaited, for a suffix of one token at the least.
        self._under_s = (prefill.extend.overhead_s + prefill.extend.token_s) * (layers - 1) / layers
        self._prefill, self._latency_s = prefill, link.latency_s
        self._run = transfer.run_tokens or _NOWHERE
        self._idle: dict[int, int | None] = {}
        self._longest_s = prefill.pass_s(MOST_TOKENS, 2 * MOST_TOKENS) + transfer.total_s(MOST_TOKENS)

    @classmethod
    def of(cls, prefill: PrefillCost, transfer: TransferCost, executor: Executor) -> Onset | None:
        """None where what is saved has another form."""
        cost = prefill.extend
        fits = (
            type(prefill) is PrefillCost
            and type(transfer) is TransferCost
            and not (prefill.floored or cost.rectangle or cost.pair_s < 0)
            and not transfer.link.rate_table
            and transfer.counted is None
            and (executor == "bulk" or not transfer.event_s)
        )
        return cls(prefill, transfer, executor) if fits else None

    def tokens(self, start: int, busy_s: float, queued_s: float) -> int | None:
        """The crossover after `start` resident tokens behind those queues, None where it takes a search to tell.

        By more than rounding, loading is slower for all shorter prefixes and for none from there on.
        """
        if busy_s or queued_s:
            return self._find(start, busy_s, queued_s)
        if start not in self._idle:
            if len(self._idle) >= _MOST_KEPT:
                self._idle.clear()
            self._idle[start] = self._find(start, 0.0, 0.0)
        return self._idle[start]

    def _find(self, start: int, busy_s: float, queued_s: float) -> int | None:
        cost = self._prefill.extend
        if not start and cost != self._prefill.fresh:
            return None
        surely = _ROUNDING * (self._longest_s + busy_s + queued_s)
        half, token_s = cost.pair_s / 2, cost.token_s + cost.pair_s * (start + 0.5)
        lead_s = self._latency_s + queued_s - busy_s
        per_token_s, stair_s = self._first
        saved = _Saved(half, token_s - per_token_s, lead_s, stair_s, self._run)
        at = saved.reached()
        # However much the device's queue hides, what computing takes is all that can be saved.
        if start + at > MOST_TOKENS or (half * at + token_s) * at < surely:
            return None
        if not saved.below(at, -surely) or not saved.above(at, surely):
            return None
        if self._last is not None:
            per_token_s, stair_s = self._last
            saved = _Saved(half, token_s - per_token_s, lead_s - self._under_s, stair_s, self._run)
            if not saved.above(at, surely):
                return None
        return start + at


class _Saved:
    """What loading saves where it is one wait that counts: `(half * x + slope) * x` less `fixed_s`, and less `stair_s`
    for each run of so many tokens.

    It is convex in each run, and so are the values at all runs' first tokens, and those at all their last ones.
    """

    __slots__ = ("fixed_s", "half", "run", "slope", "stair_s")

    def __init__(self, half: float, slope: float, fixed_s: float, stair_s: float, run: int) -> None:
        self.half, self.slope, self.fixed_s, self.stair_s, self.run = half, slope, fixed_s, stair_s, run

    def at(self, tokens: int) -> float:
        return (
            (self.half * tokens + self.slope) * tokens - self.stair_s * -(-tokens // self.run) - self.fixed_s
        )

    def below(self, tokens: int, most: float) -> bool:
        """Whether it is no more than `most` for all that are fewer: the largest are at the ends of the runs at either
        end."""
        last, run, at = tokens - 1, self.run, self.at
        if not last:
            return True
        if at(1) > most or at(last) > most:
            return False
        whole = (last - 1) // run * run
        return not whole or (at(run) <= most and at(whole) <= most and at(whole + 1) <= most)

    def above(self, tokens: int, least: float) -> bool:
        """Whether it is no less than `least` from there on: it rises in the run, and from each run to the next."""
        run, rise_s = self.run, self.slope + 2 * self.half * tokens
        if rise_s <= 0 or rise_s * run <= self.stair_s * (1 + 1e-9):
            return False
        return self.at(tokens) >= least and (
            not self.stair_s or self.at(-(-tokens // run) * run + 1) >= least
        )

    def reached(self) -> int:
        """Where it rises above 0, as far as that can be told without trying: in its run, and only once."""
        run, stair_s, stairs = self.run, self.stair_s, 1
        tokens = self._root(self.slope, stair_s)
        if tokens > run and stair_s:
            # Near where it would rise above 0 if the stairs were a slope; that is one run off at most.
            about = self._root(self.slope - stair_s / run, stair_s / 2)
            stairs = -(-about // run)
            tokens = self._root(self.slope, stair_s * stairs)
            if tokens <= (stairs - 1) * run:
                stairs -= 1
                tokens = self._root(self.slope, stair_s * stairs)
            if tokens > stairs * run:
                tokens = max(stairs * run + 1, self._root(self.slope, stair_s * (stairs + 1)))
        return tokens

    def _root(self, slope: float, stairs_s: float) -> int:
        """From how many tokens on it is above 0 with such a slope and such stairs, more than there can be where it is
        nowhere."""
        half, needed = self.half, self.fixed_s + stairs_s
        within = slope * slope + 4 * half * needed
        if within < 0:
            return 1
        if slope > 0:
            found = 2 * needed / (slope + sqrt(within))
        elif half:
            found = (sqrt(within) - slope) / (2 * half)
        else:
            return _NOWHERE
        return 1 if found <= 1 else ceil(found) if found < _NOWHERE else _NOWHERE
