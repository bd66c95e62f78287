"""Where a prefix may best be split, for layers all alike: the few points among which the least TTFT is found.

Between two bends TTFT is the larger of two concave functions of the split point, the first layer's wait and the last
one's beyond the rest of the compute, so its least value lies at a bend or where the two cross: where copying a
layer takes as long as computing one. It bends where a prefill chunk more is needed, where a copy outgrows a row of
the link's table, where a run of a copy ends, and where a pass's work takes as long as reading the weights.

While the device is busy with others, what arrives meanwhile is free: no split loads less than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Request
from kvlane.policy.search import crossing
from kvlane.policy.transfer_cost import TransferCost

# Split points are looked for in at most so many runs of equally many prefill chunks.
_MOST_STRETCHES = 512


def only_ends_count(cost: PathCost, transfer: TransferCost, request: Request) -> bool:
    """Whether TTFT has no bend between the first and the last split point that the device's queue does not hide."""
    return (
        request.prefill_chunk_tokens is None
        and (cost.executor == "bulk" or not transfer.by_layer)
        and not cost.prefill.floored
        and transfer.even(request.load_unit_tokens)
    )


class SplitPoints:
    """The points to try from the end of load unit number `low` to that of number `high`."""

    def __init__(self, cost: PathCost, transfer: TransferCost, request: Request, low: int, high: int) -> None:
        self.cost, self.prefill, self.transfer, self.request = cost, cost.prefill, transfer, request
        self.busy_s = request.device_busy_s
        self.unit, self.start = request.load_unit_tokens, request.resident_tokens
        self.prompt, self.chunk = request.prompt_tokens, request.prefill_chunk_tokens
        self.by_layer = cost.executor != "bulk" and transfer.by_layer
        self.floored = cost.prefill.floored
        self.low, self.high = self._beyond_queue(low, high) if self.busy_s else low, high

    def find(self) -> list[int]:
        """Tokens after which to split, ascending; the best is among them, or hardly better than one of them."""
        low, high = self.low, self.high
        if only_ends_count(self.cost, self.transfer, self.request):
            return [low * self.unit, high * self.unit]
        even = self.transfer.even(self.unit) and not self.floored
        signs: list[Callable[[int], float]] = []
        if self.by_layer:
            signs.append(self._copy_beyond_compute)
        if self.floored:
            signs += [self._first_beyond_floor, self._last_beyond_floor]
        points = {low, high}
        turns = self._chunk_turns() if self.floored else ()
        for left, right in self._few_stretches() if even and self._whole_chunks else self._stretches():
            points.update((left, right))
            for signed in signs:
                points.update(crossing(signed, range(left, right + 1)))
            points.update(self._before_turns(turns, left, right))
        if not even:
            for point in tuple(points):
                # A copy moves a whole run: loading up to its end costs no more copies.
                for tokens in self.transfer.run_ends(point * self.unit - self.start):
                    points.add((self.start + tokens) // self.unit)
        return sorted(point * self.unit for point in points if low <= point <= high)

    def _beyond_queue(self, low: int, high: int) -> int:
        """The last split point, if there is one, whose load the device's queue hides."""

        def waited_longer(units: int) -> float:
            end = units * self.unit
            computes = self.cost.computes(end, self.prompt, self.chunk)
            return self.cost.alone_s(self.transfer, end - self.start, computes) - self.busy_s

        if waited_longer(high) <= 0:
            return high
        found = crossing(waited_longer, range(low, high + 1))
        return found[0] if found else low

    @property
    def _whole_chunks(self) -> bool:
        return self.chunk is None or self.chunk % self.unit == 0

    def _few_stretches(self) -> Iterable[tuple[int, int]]:
        """Those stretches that the best split can lie in when every load unit costs the same to copy.

        What the ends of stretches cost is concave in the number of chunks too, so that only the first and the last
        stretch count, each with its neighbour, and those around the point where the two waits cross.
        """
        chunk = self.chunk
        if chunk is None:
            return [(self.low, self.high)]
        most, least = self._chunks(self.low), self._chunks(self.high)
        counts = {most, most - 1, least + 1, least}
        if self.by_layer:
            for point in crossing(self._copy_beyond_compute, range(self.low, self.high + 1)):
                counts.update(range(self._chunks(point) - 1, self._chunks(point) + 2))
        return [
            (max(self.low, self._end(count + 1) + 1), self._end(count))
            for count in counts
            if least <= count <= most
        ]

    def _chunks(self, units: int) -> int:
        """Prefill chunks that what follows this split point takes."""
        assert self.chunk is not None
        return -(-(self.prompt - units * self.unit) // self.chunk)

    def _end(self, chunks: int) -> int:
        """The last split point after which so many chunks follow."""
        assert self.chunk is not None
        return min(self.high, (self.prompt - (chunks - 1) * self.chunk - 1) // self.unit)

    def _stretches(self) -> Iterable[tuple[int, int]]:
        """All runs of split points without a bend inside: the same number of prefill chunks, and copies between the
        same rows of the link's table."""
        low, high = self.low, self.high
        cuts = {low}
        for tokens in self.transfer.bends():
            units = (self.start + tokens) // self.unit
            cuts.update(cut for cut in (units, units + 1) if low <= cut <= high)
        if self.chunk is not None and (high - low) * self.unit <= _MOST_STRETCHES * self.chunk:
            # Chunks smaller than that next to the prompt make bends too slight to look for.
            left = low
            while left <= high:
                cuts.add(left)
                left = max(left, self._end(self._chunks(left))) + 1
        ordered = sorted(cuts)
        return zip(ordered, [*(cut - 1 for cut in ordered[1:]), high], strict=True)

    def _first_pass(self, end: int) -> int:
        rest = self.prompt - end
        return rest if self.chunk is None else min(rest, self.chunk)

    def _copy_beyond_compute(self, units: int) -> float:
        end, prefill = units * self.unit, self.prefill
        new = self.prompt - end if self.chunk is None else self._first_pass(end)
        return self.transfer.layer_s(end - self.start) - prefill.pass_s(end, new) / prefill.layers

    def _beyond_floor(self, resident: int, new: int) -> float:
        prefill = self.prefill
        return prefill.coefficients(resident).work_s(resident, new) - prefill.floor_of(resident + new)

    def _first_beyond_floor(self, units: int) -> float:
        end = units * self.unit
        return self._beyond_floor(end, self._first_pass(end))

    def _last_beyond_floor(self, units: int) -> float:
        rest = self.prompt - units * self.unit
        last = rest if self.chunk is None else (rest - 1) % self.chunk + 1
        return self._beyond_floor(self.prompt - last, last)

    def _chunk_turns(self) -> tuple[int, ...]:
        """Resident tokens around which a whole prefill chunk leaves the floor, wherever the split is."""
        chunk = self.chunk
        if chunk is None:
            return ()
        return crossing(lambda resident: self._beyond_floor(resident, chunk), range(1, self.prompt + 1))

    def _before_turns(self, turns: tuple[int, ...], left: int, right: int) -> set[int]:
        """Split points in a stretch from which a later whole chunk starts at one of the turns."""
        chunk = self.chunk or 1  # without chunks there are no turns
        points: set[int] = set()
        for turn in turns:
            # The chunk that starts at `turn` is a whole number of chunks after the split point.
            before = (turn - left * self.unit) // chunk * chunk
            units = (turn - before) // self.unit
            points.update(point for point in (units, units + 1) if left <= point <= right)
        return points
