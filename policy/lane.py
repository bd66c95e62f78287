"""What can be done with one tier's stored prefix, and how long each would take."""

from __future__ import annotations

from collections.abc import Callable

from kvlane.policy.model import usable_tokens
from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Estimate, Request
from kvlane.policy.transfer_cost import TransferCost

# No crossover is looked for beyond this many tokens.
_LONGEST_PREFIX = 1 << 24


class Lane:
    """One request's choices on one tier: how much to load, and what would change the answer."""

    def __init__(
        self, cost: PathCost, transfer: TransferCost, tier: str, request: Request, band: float
    ) -> None:
        self.cost = cost
        self.transfer = transfer
        self.tier = tier
        self.band = band
        self.request = request
        self.unit = request.load_unit_tokens
        self.start = request.resident_tokens
        self.usable = usable_tokens(request.hit(tier), request.prompt_tokens, self.unit, request.tail_tokens)
        self.gain = max(0, self.usable - self.start)

    def no_gain(self) -> str:
        stored = self.request.hit(self.tier)
        if self.usable == 0:
            return f"{self.tier}: {stored} stored tokens hold no whole load unit of {self.unit} before the last token"
        return f"{self.tier}: {self.usable} usable tokens, {self.start} resident already"

    def copy_bytes(self) -> float:
        tokens = max(1, self.gain)
        return tokens * self.transfer.layer_bytes_per_token / self.transfer.copies(tokens)

    def ttft(self, end: int) -> float:
        request = self.request
        return self.cost.load_s(
            self.transfer, self.start, end, request.prompt_tokens, request.prefill_chunk_tokens
        )

    def estimate(self, end: int) -> Estimate:
        """Loading `[start, end)`: a load when that is everything usable, else a split."""
        request, cost = self.request, self.cost
        tokens = end - self.start
        return Estimate(
            path="load" if end == self.usable else "split",
            ttft_s=self.ttft(end),
            compute_s=cost.recompute_s(end, request.prompt_tokens, request.prefill_chunk_tokens),
            transfer_s=self.transfer.total_s(tokens),
            tier=self.tier,
            start=self.start,
            end=end,
            load_bytes=round(self.transfer.bytes(tokens)),
            band=self.band,
        )

    def best_split(self) -> Estimate | None:
        """The fastest proper split, None where no load unit ends strictly inside the usable run.

        Between two kinks TTFT is the larger of two concave functions of the split point, so its least value
        lies at a kink or where the two cross: where copying a layer takes as long as computing one.
        """
        low, high = self.start // self.unit + 1, self.usable // self.unit - 1
        if low > high:
            return None
        points = {low, high}
        for left, right in self._stretches(low, high):
            points.update((left, right))
            for signed in (self._copy_beyond_compute, self._work_beyond_floor):
                points.update(_crossing(signed, left, right))
        best = min(sorted(points), key=lambda units: self.ttft(units * self.unit))
        return self.estimate(best * self.unit)

    def _stretches(self, low: int, high: int) -> list[tuple[int, int]]:
        """Runs of split points, in load units, over which the number of prefill chunks stays the same."""
        chunk, prompt = self.request.prefill_chunk_tokens, self.request.prompt_tokens
        if chunk is None:
            return [(low, high)]
        stretches = []
        left = low
        while left <= high:
            remaining = prompt - left * self.unit
            shortest = (remaining - 1) // chunk * chunk + 1  # fewest tokens that still take as many chunks
            right = min(high, (prompt - shortest) // self.unit)
            stretches.append((left, right))
            left = right + 1
        return stretches

    def _first_pass(self, end: int) -> int:
        chunk = self.request.prefill_chunk_tokens
        rest = self.request.prompt_tokens - end
        return rest if chunk is None else min(rest, chunk)

    def _copy_beyond_compute(self, units: int) -> float:
        end = units * self.unit
        compute = self.cost.prefill.pass_s(end, self._first_pass(end)) / self.cost.prefill.layers
        return self.transfer.layer_s(end - self.start) - compute

    def _work_beyond_floor(self, units: int) -> float:
        end = units * self.unit
        new = self._first_pass(end)
        prefill = self.cost.prefill
        return prefill.coefficients(end).work_s(end, new) - prefill.floor_of(end + new)

    def crossover(self) -> tuple[int | None, str]:
        """The shortest prefix in tokens, suffix held fixed, for which loading all of it is not slower."""
        request, cost = self.request, self.cost
        suffix = request.prompt_tokens - self.usable
        chunk = request.prefill_chunk_tokens

        def load_gain(prefix: int) -> float:
            prompt = prefix + suffix
            load = cost.load_s(self.transfer, self.start, prefix, prompt, chunk)
            return cost.recompute_s(self.start, prompt, chunk) - load

        shortest = self.start + 1
        if load_gain(shortest) >= 0:
            return None, "loading is faster for a prefix of any length"
        low = high = shortest
        while load_gain(high) < 0:
            if high >= _LONGEST_PREFIX:
                return None, f"recomputing is faster up to {_LONGEST_PREFIX} tokens"
            low, high = high, min(_LONGEST_PREFIX, 2 * high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if load_gain(middle) < 0 else (low, middle)
        return high, f"with the {suffix} tokens after the prefix held fixed, loading is faster from here on"

    def break_even(self) -> tuple[float | None, str]:
        """The flat link rate at which loading everything usable ties with recomputing, this executor's fixed
        costs included."""
        request, cost, transfer = self.request, self.cost, self.transfer
        chunk = request.prefill_chunk_tokens
        recompute = cost.recompute_s(self.start, request.prompt_tokens, chunk)
        after = cost.recompute_s(self.usable, request.prompt_tokens, chunk)
        moved, fixed = transfer.bytes(self.gain), transfer.fixed_s(self.gain)
        budgets = [(moved, recompute - after - fixed)]
        if cost.executor == "layered" and transfer.by_layer:
            layers = cost.prefill.layers
            first = cost.prefill.pass_s(self.usable, self._first_pass(self.usable))
            hidden = first * (layers - 1) / layers  # compute that can run while later layers arrive
            first_fixed = transfer.link.latency_s + transfer.copies(self.gain) * transfer.link.per_copy_s
            budgets = [
                (moved, recompute - after + hidden - fixed),
                (moved / layers, recompute - after - first_fixed),
            ]
        if any(budget <= 0 for _, budget in budgets):
            return None, "loading saves less time than its fixed cost, at any rate"
        return max(
            size / budget for size, budget in budgets
        ), "above this link rate loading everything is faster"


def _crossing(signed: Callable[[int], float], left: int, right: int) -> tuple[int, ...]:
    """The two neighbours in `[left, right]` between which a monotone function changes sign, if it does."""
    at_left = signed(left)
    if at_left * signed(right) > 0:
        return ()
    while right - left > 1:
        middle = (left + right) // 2
        if at_left * signed(middle) > 0:
            left = middle
        else:
            right = middle
    return left, right
