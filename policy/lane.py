"""What can be done with one tier's stored prefix, and how long each would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvlane.policy.model import usable_tokens
from kvlane.policy.path_cost import LoadCost, PathCost
from kvlane.policy.plan import MOST_TOKENS, Estimate, Request
from kvlane.policy.transfer_cost import TransferCost

# No crossover is looked for beyond this many tokens.
_LONGEST_PREFIX = MOST_TOKENS

# Split points are looked for in at most so many runs of equally many prefill chunks.
_MOST_STRETCHES = 512


# A crossover is looked for by so many false positions before the range is halved.
_FALSE_POSITIONS = 12


class Lane:
    """One request's choices on one tier: how much to load, and what would change the answer."""

    def __init__(
        self,
        cost: PathCost,
        transfer: TransferCost,
        tier: str,
        request: Request,
        band: float,
        arrives: LoadCost | None = None,
    ) -> None:
        self.cost = cost
        self.transfer = transfer
        self.tier = tier
        self.band = band
        self.request = request
        self.unit = request.load_unit_tokens
        self.start = request.resident_tokens
        self.busy_s = request.device_busy_s
        self._late_s = queued_s = request.link_queue_s.get(tier, 0.0)
        if queued_s:
            # What is queued on the link delays every layer alike, as the latency of the transfer does.
            self.transfer = replace(
                transfer, link=transfer.link.with_latency(transfer.link.latency_s + queued_s)
            )
            if not transfer.uniform:
                # Layers that move nothing wait for nothing: here it is no term of its own.
                arrives, transfer, self._late_s = None, self.transfer, 0.0
        self._idle_s = arrives or cost.bound(transfer, request.prefill_chunk_tokens)
        self.usable = usable_tokens(request.hit(tier), request.prompt_tokens, self.unit, request.tail_tokens)
        self.gain = max(0, self.usable - self.start)

    def no_gain(self) -> str:
        stored = self.request.hit(self.tier)
        if self.usable == 0:
            return f"{self.tier}: {stored} stored tokens hold no whole load unit of {self.unit} before the last token"
        return f"{self.tier}: {self.usable} usable tokens, {self.start} resident already"

    def link_rate(self) -> float:
        """Bytes per second the link achieves for loading everything usable, fixed costs apart."""
        return self.transfer.link.rate_at(self.transfer.copy_bytes(max(1, self.gain)))

    def ttft(self, end: int) -> float:
        return self._load_s(end, self.request.prompt_tokens)

    def _load_s(self, end: int, prompt: int) -> float:
        seconds = self._idle_s(self.start, end, prompt) + self._late_s
        if self.busy_s:
            chunk = self.request.prefill_chunk_tokens
            # Copies go on while the device is busy: they are waited for as far as they take longer.
            seconds = max(seconds, self.busy_s + self.cost.recompute_s(end, prompt, chunk))
        return seconds

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

        Between two bends TTFT is the larger of concave functions of the split point, so its least value lies at
        a bend or where two of them cross: where copying a layer takes as long as computing one, where a
        pass's work takes as long as reading the weights, or where what is waited for takes as long as the
        device's queue.
        """
        low, high = self.start // self.unit + 1, self.usable // self.unit - 1
        if low > high:
            return None
        points = {low, high}
        bends = [self._first_beyond_floor]
        if self.cost.executor != "bulk":
            bends.append(self._copy_beyond_compute)  # in bulk the two add up
        if self.request.prefill_chunk_tokens is not None:
            bends.append(self._last_beyond_floor)
        turns = self._chunk_turns()
        for left, right in self._stretches(low, high):
            points.update((left, right))
            for signed in bends:
                points.update(_crossing(signed, left, right))
            if self.busy_s:
                points.update(_crossing(self._exposed_beyond_queue, left, right))
            points.update(self._before_turns(turns, left, right))
        for point in tuple(points):
            # A copy moves a whole run: loading up to its end costs no more copies.
            for tokens in self.transfer.run_ends(point * self.unit - self.start):
                points.add((self.start + tokens) // self.unit)
        best = min(sorted(point for point in points if low <= point <= high), key=self._ttft_at)
        return self.estimate(best * self.unit)

    def _ttft_at(self, units: int) -> float:
        return self.ttft(units * self.unit)

    def _stretches(self, low: int, high: int) -> list[tuple[int, int]]:
        """Runs of split points, in load units, without a bend inside: the same number of prefill chunks, and
        copies between the same rows of the link's table."""
        cuts = {low}
        for tokens in self.transfer.bends():
            units = (self.start + tokens) // self.unit
            cuts.update(cut for cut in (units, units + 1) if low <= cut <= high)
        chunk, prompt = self.request.prefill_chunk_tokens, self.request.prompt_tokens
        if chunk is not None and (high - low) * self.unit <= _MOST_STRETCHES * chunk:
            # Chunks smaller than that next to the prompt make bends too slight to look for.
            left = low
            while left <= high:
                cuts.add(left)
                remaining = prompt - left * self.unit
                # The fewest tokens that still take as many chunks.
                shortest = (remaining - 1) // chunk * chunk + 1
                left = max(left, (prompt - shortest) // self.unit) + 1
        ordered = sorted(cuts)
        return list(zip(ordered, [*(cut - 1 for cut in ordered[1:]), high], strict=True))

    def _first_pass(self, end: int) -> int:
        chunk = self.request.prefill_chunk_tokens
        rest = self.request.prompt_tokens - end
        return rest if chunk is None else min(rest, chunk)

    def _copy_beyond_compute(self, units: int) -> float:
        end = units * self.unit
        compute = self.cost.prefill.pass_s(end, self._first_pass(end)) / self.cost.prefill.layers
        return self.transfer.layer_s(end - self.start) - compute

    def _beyond_floor(self, resident: int, new: int) -> float:
        prefill = self.cost.prefill
        return prefill.coefficients(resident).work_s(resident, new) - prefill.floor_of(resident + new)

    def _first_beyond_floor(self, units: int) -> float:
        end = units * self.unit
        return self._beyond_floor(end, self._first_pass(end))

    def _last_beyond_floor(self, units: int) -> float:
        rest = self.request.prompt_tokens - units * self.unit
        chunk = self.request.prefill_chunk_tokens
        last = rest if chunk is None else (rest - 1) % chunk + 1
        return self._beyond_floor(self.request.prompt_tokens - last, last)

    def _exposed_beyond_queue(self, units: int) -> float:
        end, request = units * self.unit, self.request
        prompt, chunk = request.prompt_tokens, request.prefill_chunk_tokens
        arrives = self._idle_s(self.start, end, prompt) + self._late_s
        return arrives - self.busy_s - self.cost.recompute_s(end, prompt, chunk)

    def _chunk_turns(self) -> tuple[int, ...]:
        """Resident tokens around which a whole prefill chunk leaves the floor, wherever the split is."""
        chunk = self.request.prefill_chunk_tokens
        if chunk is None:
            return ()
        return _crossing(lambda resident: self._beyond_floor(resident, chunk), 1, self.request.prompt_tokens)

    def _before_turns(self, turns: tuple[int, ...], left: int, right: int) -> set[int]:
        """Split points in a stretch from which a later whole chunk starts at one of the turns."""
        chunk = self.request.prefill_chunk_tokens or 1  # without chunks there are no turns
        points: set[int] = set()
        for turn in turns:
            # The chunk that starts at `turn` is a whole number of chunks after the split point.
            before = (turn - left * self.unit) // chunk * chunk
            units = (turn - before) // self.unit
            points.update(point for point in (units, units + 1) if left <= point <= right)
        return points

    def crossover(self) -> tuple[int | None, str]:
        """The prefix length in tokens, suffix held fixed, from which on loading all of it is not slower.

        Where chunks make several, the one nearest to this request's prefix: it answers for this request.
        """
        suffix = self.request.prompt_tokens - self.usable
        shortest = self.start + 1
        here = max(shortest, self.usable)
        saved = self._saved_s(here, suffix)
        if saved >= 0:
            low, lost, high, saved = self._halve_until_lost(suffix, shortest, here, saved)
            if low is None:
                return None, "loading is faster for a prefix of any length up to this one"
        else:
            low, lost, high = here, saved, min(_LONGEST_PREFIX, 2 * here)
            while (saved := self._saved_s(high, suffix)) < 0:
                if high >= _LONGEST_PREFIX:
                    return None, f"recomputing is faster up to {_LONGEST_PREFIX:,} tokens"
                low, lost, high = high, saved, min(_LONGEST_PREFIX, 2 * high)
        found = self._turn(suffix, low, lost, high, saved)
        return found, f"with the {suffix} tokens after the prefix held fixed, loading is faster from here on"

    def _saved_s(self, prefix: int, suffix: int) -> float:
        """Seconds by which loading all of a prefix of that length is sooner than recomputing it."""
        prompt = prefix + suffix
        recompute = self.cost.recompute_s(self.start, prompt, self.request.prefill_chunk_tokens)
        if self.busy_s:
            return self.busy_s + recompute - self._load_s(prefix, prompt)
        return recompute - self._idle_s(self.start, prefix, prompt) - self._late_s

    def _halve_until_lost(
        self, suffix: int, shortest: int, high: int, saved: float
    ) -> tuple[int | None, float, int, float]:
        """A prefix for which loading does not pay and one above it for which it does, with the seconds each saves; None
        without the first."""
        while high > shortest:
            middle = (shortest + high) // 2
            less = self._saved_s(middle, suffix)
            if less < 0:
                return middle, less, high, saved
            high, saved = middle, less
        return None, 0.0, high, saved

    def _turn(self, suffix: int, low: int, lost: float, high: int, saved: float) -> int:
        """The prefix in `(low, high]` from which loading pays, by false position; halving where that is slow."""
        side, steps = 0, 0
        while high - low > 1:
            steps += 1
            middle = (low + high) // 2
            if steps <= _FALSE_POSITIONS:
                middle = min(max(low + int((high - low) * lost / (lost - saved)), low + 1), high - 1)
            gain = self._saved_s(middle, suffix)
            if gain >= 0:
                # An end that stays counts half: else the other would creep towards it.
                lost = lost / 2 if side > 0 else lost
                high, saved, side = middle, gain, 1
            else:
                saved = saved / 2 if side < 0 else saved
                low, lost, side = middle, gain, -1
        return high

    def break_even(self) -> tuple[float | None, str]:
        """The flat link rate at which loading everything usable ties with recomputing, this executor's fixed
        costs included."""
        request, cost, transfer = self.request, self.cost, self.transfer
        chunk = request.prefill_chunk_tokens
        saved = cost.recompute_s(self.start, request.prompt_tokens, chunk)
        saved -= cost.recompute_s(self.usable, request.prompt_tokens, chunk)
        moved, fixed = transfer.bytes(self.gain), transfer.fixed_s(self.gain)
        budgets = [(moved, self.busy_s + saved - fixed)]
        if cost.executor == "layered" and transfer.by_layer:
            layers = cost.prefill.layers
            first = cost.prefill.pass_s(self.usable, self._first_pass(self.usable))
            hidden = first * (layers - 1) / layers  # compute that can run while later layers arrive
            first_fixed = transfer.link.latency_s + transfer.copies(self.gain) * transfer.link.per_copy_s
            budgets = [
                (moved, self.busy_s + saved + hidden - fixed),
                (moved / layers, self.busy_s + saved - first_fixed),
            ]
        if self.busy_s:
            budgets.append((0.0, saved))  # with all copies done while the device was busy
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
