"""What follows a load, by where it ends, and how long one is waited for: what searches over many ends and cuts ask."""

from __future__ import annotations

from collections.abc import Sequence

from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Request
from kvlane.policy.transfer_cost import Computes, TransferCost

# What searches compare may differ by rounding from the estimate of the same.
SURELY = 1 + 1e-9


class Then:
    """What follows a load that ends at `end`: `rest_s` for all of it with the first token, and what each layer of the
    first pass takes, during which others may arrive."""

    __slots__ = ("_computes", "_cost", "_first", "_kinds_s", "due_s", "end", "rest_s")

    def __init__(self, cost: PathCost, request: Request, end: int) -> None:
        self._cost, self.end = cost, end
        self._computes: Computes | None = None
        # When compute would get to some of the layers had it never waited, by which these are.
        self.due_s: dict[object, Sequence[float]] = {}
        prefill, prompt, chunk = cost.prefill, request.prompt_tokens, request.prefill_chunk_tokens
        rest = prompt - end
        self._first = rest if chunk is None else min(chunk, rest)
        self._kinds_s: Sequence[float] | None = None
        if cost.executor == "bulk":
            self._kinds_s, self.rest_s = (), cost.recompute_s(end, prompt, chunk)
        elif self._first < rest:
            self.rest_s = prefill.prefill_s(end, rest, chunk) + prefill.head_s
        else:
            whole_s, self._kinds_s = prefill.whole_and_kinds_s(end, rest)
            self.rest_s = whole_s + prefill.head_s

    @property
    def kinds_s(self) -> Sequence[float]:
        """Seconds of each layer of each kind in the first pass; nothing where none waits for its own."""
        if self._kinds_s is None:
            self._kinds_s = self._cost.prefill.whole_and_kinds_s(self.end, self._first)[1]
        return self._kinds_s

    @property
    def computes(self) -> Computes:
        """Seconds of each layer of the first pass, one number where all take the same."""
        if self._computes is None:
            kinds_s, prefill = self.kinds_s, self._cost.prefill
            if not kinds_s:
                self._computes = 0.0
            elif prefill.uniform:
                self._computes = kinds_s[0]
            else:
                self._computes = [kinds_s[kind] for kind in prefill.order]
        return self._computes


class Ends:
    """What follows one request's loads, worked out once for each end whatever tiers bring them."""

    __slots__ = ("_cost", "_known", "_request")

    def __init__(self, cost: PathCost, request: Request) -> None:
        self._cost, self._request = cost, request
        self._known: dict[int, Then] = {}

    def at(self, end: int) -> Then:
        """What follows a load that ends there."""
        found = self._known.get(end)
        if found is None:
            found = self._known[end] = Then(self._cost, self._request, end)
        return found


class Waits:
    """How long loads over one tier's `transfer` are waited for."""

    __slots__ = ("_before", "_reach", "bulk", "cost", "transfer")

    def __init__(self, cost: PathCost, transfer: TransferCost) -> None:
        self.cost, self.transfer = cost, transfer
        self.bulk = cost.executor == "bulk"
        self._reach = transfer.reach
        self._before: dict[int, TransferCost] = {}

    def seconds(self, tokens: int, after: int, then: Then, group_layers: int | None = None) -> float:
        """The wait for `tokens` tokens that end `after` tokens before the load does, by what follows it; with the
        best number of layers to an event where none is given."""
        after = min(after, self._reach)
        transfer = self._before.get(after)
        if transfer is None:
            transfer = self._before[after] = self.transfer.before(after)
        return self.cost.alone_s(transfer, tokens, then.computes, group_layers)
