"""Many requests decided at once, as columns: what a planner decides for each on an idle device and idle links.

Where layers are alike, links have one rate and passes no floor, a few array operations price all rows: between two
bends every path's TTFT is concave in the split point, so that its least value is at a bend or where copying a layer
takes as long as computing one, and that point is a root of a quadratic. All else goes to the planner row by row, two
tiers at once included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlane.policy.errors import InputError
from kvlane.policy.plan import MOST_TOKENS, Path, Request
from kvlane.policy.planner import Planner
from kvlane.policy.prefill_cost import PassCost
from kvlane.policy.transfer_cost import TransferCost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Column = Sequence[int] | Ints

# A path's code in a column; the steadiest first.
PATHS: tuple[Path, ...] = ("recompute", "load", "split")
_RECOMPUTE, _LOAD, _SPLIT = range(3)

# Rows priced together: few enough that what is computed of them stays in a core's cache.
_BLOCK_ROWS = 4096
# As in a planner's search: more prefill chunks than that make bends too slight to look for.
_MOST_STRETCHES = 512


@dataclass(frozen=True, slots=True)
class Decisions:
    """Columns, one row a request: `path` is a place in `PATHS`, `tier` one in `tiers`, -1 where nothing is loaded.

    Where two tiers bring a load together it is the one that brings the front.
    """

    path: npt.NDArray[np.int8]
    load_tokens: Ints
    recompute_tokens: Ints
    ttft_s: Floats
    tier: npt.NDArray[np.int8]
    tiers: tuple[str, ...]


def decide_batch(
    planner: Planner,
    prompt_tokens: Column,
    hits: Mapping[str, Column] | None = None,
    resident_tokens: Column | None = None,
    *,
    load_unit_tokens: int = 16,
    prefill_chunk_tokens: int | None = None,
    tail_tokens: int = 1,
) -> Decisions:
    """What `planner` decides for each row: the columns are those of `Request`, and as long as each other.

    A hit is one number of tokens, the smallest over the ranks. Path and load tokens are the planner's, unless two
    choices' TTFTs are within rounding (1e-9 of them). Raises `InputError` naming the column and the row for what
    `Request` would refuse, `hit` for a tier the machine lacks.
    """
    found, rest = begin_batch(
        planner,
        prompt_tokens,
        hits,
        resident_tokens,
        load_unit_tokens=load_unit_tokens,
        prefill_chunk_tokens=prefill_chunk_tokens,
        tail_tokens=tail_tokens,
    )
    for _ in rest:
        pass
    return found


def begin_batch(
    planner: Planner,
    prompt_tokens: Column,
    hits: Mapping[str, Column] | None = None,
    resident_tokens: Column | None = None,
    *,
    load_unit_tokens: int = 16,
    prefill_chunk_tokens: int | None = None,
    tail_tokens: int = 1,
) -> tuple[Decisions, Iterator[None]]:
    """As `decide_batch`, for who has other things to do meanwhile: the columns are filled once the iterator is through.

    It stops before each row that goes to the planner by itself, which takes about a millisecond.
    """
    # The scalars are checked as every request's are.
    Request(
        prompt_tokens=1,
        load_unit_tokens=load_unit_tokens,
        prefill_chunk_tokens=prefill_chunk_tokens,
        tail_tokens=tail_tokens,
    )
    prompt = _column("prompt_tokens", prompt_tokens, None, 1)
    resident = np.zeros_like(prompt)
    if resident_tokens is not None:
        resident = _column("resident_tokens", resident_tokens, len(prompt), 0)
        _refuse("resident_tokens", resident, resident >= prompt, "fewer than the prompt's")
    stored: dict[str, Ints] = {}
    for tier, column in (hits or {}).items():
        stored[tier] = _column(f"hits.{tier}", column, len(prompt), 0)
        _refuse(f"hits.{tier}", stored[tier], stored[tier] > prompt, "at most the prompt's")
    common = _Common(planner, load_unit_tokens, prefill_chunk_tokens, tail_tokens)
    rows = len(prompt)
    found = Decisions(
        path=np.zeros(rows, np.int8),
        load_tokens=np.zeros(rows, np.int64),
        recompute_tokens=np.zeros(rows, np.int64),
        ttft_s=np.zeros(rows),
        tier=np.full(rows, -1, np.int8),
        tiers=tuple(stored),
    )
    transfers = {tier: planner.transfer(tier, load_unit_tokens) for tier in stored}
    alone: Iterable[int] = range(rows)
    if common.is_plain(transfers.values()):
        for first in range(0, rows, _BLOCK_ROWS):
            part = slice(first, first + _BLOCK_ROWS)
            block = _Block(common, prompt[part], resident[part])
            for place, (tier, transfer) in enumerate(transfers.items()):
                block.consider(place, transfer, stored[tier][part])
            block.choose(found, part)
        many = prompt > _MOST_STRETCHES * (prefill_chunk_tokens or MOST_TOKENS)
        # Where several tiers have something to load, it may be loaded from two at once.
        useful = [common.usable(column, prompt) > resident for column in stored.values()]
        alone = np.flatnonzero(many | (np.sum(useful, axis=0) > 1) if useful else many).tolist()

    def rest() -> Iterator[None]:
        for row in alone:
            yield
            _one(common, found, row, prompt, resident, stored)
        np.subtract(prompt, resident, out=found.recompute_tokens)
        np.subtract(found.recompute_tokens, found.load_tokens, out=found.recompute_tokens)

    return found, rest()


@dataclass(frozen=True, slots=True)
class _Common:
    """What all rows share."""

    planner: Planner
    unit: int
    chunk: int | None
    tail: int

    def usable(self, stored: Ints, prompt: Ints) -> Ints:
        """Tokens of a hit that can be loaded."""
        return np.minimum(stored, prompt - self.tail) // self.unit * self.unit

    def is_plain(self, transfers: Iterable[TransferCost]) -> bool:
        """Whether passes and transfers cost what the closed forms here say."""
        prefill = self.planner.prefill
        return (
            self.planner.executor in ("bulk", "layered")
            and prefill.uniform
            and prefill.floor_s == prefill.floor_context_s == 0.0
            and all(
                type(transfer) is TransferCost
                and not transfer.link.rate_table
                and transfer.run_tokens in (None, self.unit)
                and transfer.event_s == 0.0
                for transfer in transfers
            )
        )


class _Passes:
    """Seconds to compute tokens `[begin, prompt)` after a cached prefix, by row: `compute_s` in all chunks, `first_s`
    in the first of them.

    One pass costs `fixed + (prompt - begin) * (slope + bend * (begin + prompt))`: what is attended is the trapezium
    of causal pairs, or a rectangle, whose `bend` is zero.
    """

    def __init__(self, cost: PassCost, prompt: Floats, chunk: int | None) -> None:
        self.cost, self.prompt, self.chunk = cost, prompt, chunk
        self.fixed = cost.overhead_s + cost.context_s * prompt
        self.bend = 0.0 if cost.rectangle else cost.pair_s / 2
        self.slope: Floats | float = cost.token_s + self.bend
        if cost.rectangle:
            self.slope = cost.token_s + cost.pair_s * prompt

    def take(self, rows: Any) -> _Passes:
        """The same for some of the rows; a slice stands for all of them."""
        return self if isinstance(rows, slice) else _Passes(self.cost, self.prompt[rows], self.chunk)

    def whole_s(self, begin: Floats) -> Floats:
        """As one pass, whatever its size."""
        return self.fixed + (self.prompt - begin) * (self.slope + self.bend * (begin + self.prompt))

    def compute_s(self, begin: Floats) -> Floats:
        whole = self.whole_s(begin)
        if self.chunk is None:
            return whole
        # A pass more costs its overhead and reads its context; the pairs of all passes are those of one, but for
        # what rectangles of an earlier end leave out.
        more = np.ceil((self.prompt - begin) / self.chunk) - 1
        cost, half = self.cost, self.chunk / 2
        context = begin + half * (more + 1)
        each = cost.overhead_s + cost.context_s * context
        if cost.rectangle:
            each += cost.pair_s * self.chunk * (context - self.prompt)
        return whole + more * each

    def first_s(self, begin: Floats) -> Floats:
        if self.chunk is None:
            return self.whole_s(begin)
        size = np.minimum(self.prompt - begin, self.chunk)
        end, cost = begin + size, self.cost
        attended = end if cost.rectangle else (begin + end + 1) / 2
        return cost.overhead_s + size * (cost.token_s + cost.pair_s * attended) + cost.context_s * end


class _Block:
    """Some rows: their best load and their best split so far, over the tiers considered."""

    def __init__(self, common: _Common, prompt: Ints, resident: Ints) -> None:
        self.common = common
        self.prompt, self.resident = prompt, resident
        prefill = common.planner.prefill
        n, p = prompt.astype(np.float64), resident.astype(np.float64)
        self.passes = _Passes(prefill.extend, n, common.chunk)
        self.recompute_s = self.passes.compute_s(p)
        if prefill.fresh != prefill.extend:
            fresh = _Passes(prefill.fresh, n, common.chunk).first_s(p)
            first = n if common.chunk is None else np.minimum(n, common.chunk)
            later = np.where(first < n, self.passes.compute_s(first), 0.0)
            self.recompute_s = np.where(resident > 0, self.recompute_s, fresh + later)
        self.recompute_s += prefill.head_s
        rows = len(prompt)
        self.load_s, self.load_end = np.full(rows, np.inf), np.zeros(rows, np.int64)
        self.split_s, self.split_end = np.full(rows, np.inf), np.zeros(rows, np.int64)
        self.load_tier, self.split_tier = np.full(rows, -1, np.int8), np.full(rows, -1, np.int8)

    def consider(self, tier: int, transfer: TransferCost, stored: Ints) -> None:
        """Takes a tier's load and split where they are sooner than what earlier tiers offered."""
        common, unit = self.common, self.common.unit
        last = common.usable(stored, self.prompt) // unit
        rows = np.flatnonzero(last * unit > self.resident)
        if not len(rows):
            return
        at: Any = slice(None) if len(rows) == len(last) else rows
        last = last[at]
        lane = _Lane(common, transfer, self.passes.take(at), self.resident[at])
        load_s = lane.ttft_s(last.astype(np.float64))
        _keep(load_s, last * unit, tier, self.load_s, self.load_end, self.load_tier, at)
        bound = np.minimum(load_s, self.recompute_s[at])
        split_s, split_units = lane.best_split(last - 1, bound)
        _keep(split_s, split_units * unit, tier, self.split_s, self.split_end, self.split_tier, at)

    def choose(self, found: Decisions, part: slice) -> None:
        """The planner's choice: the soonest, or the steadiest of a near-tie."""
        recompute, load, split = self.recompute_s, self.load_s, self.split_s
        best = np.minimum(np.minimum(recompute, load), split)
        within = best * (1 + self.common.planner.tie_margin)
        recomputes = (recompute <= best) | (recompute < within)
        loads = ((load <= best) | (load < within)) & ~recomputes
        found.path[part] = np.where(recomputes, _RECOMPUTE, np.where(loads, _LOAD, _SPLIT))
        found.ttft_s[part] = np.where(recomputes, recompute, np.where(loads, load, split))
        end = np.where(loads, self.load_end, self.split_end)
        found.load_tokens[part] = np.where(recomputes, 0, end - self.resident)
        found.tier[part] = np.where(recomputes, -1, np.where(loads, self.load_tier, self.split_tier))


class _Lane:
    """One tier's choices for rows that can all load from it. Split points are in load units, as floats."""

    def __init__(self, common: _Common, transfer: TransferCost, passes: _Passes, resident: Ints) -> None:
        self.common, self.passes, self.resident = common, passes, resident
        self.unit, self.layers = common.unit, transfer.layers
        self.overlaps = common.planner.executor == "layered" and transfer.by_layer
        link = transfer.link
        shared = 1 if transfer.by_layer else transfer.layers  # layers that travel in one copy
        copies_s = transfer.runs_per_layer * link.per_copy_s / shared
        token_s = transfer.layer_bytes_per_token / link.rate_bytes_per_s
        # One layer of all that ends with load unit u takes `layer_0 + u * unit_s`.
        self.unit_s = common.unit * token_s
        if transfer.run_tokens is None:
            self.layer_0 = copies_s - resident * token_s
        else:
            self.unit_s += copies_s
            self.layer_0 = -(resident // common.unit) * copies_s - resident * token_s
        self.fixed_s = link.latency_s + common.planner.prefill.head_s
        self.per_token_s = transfer.per_token_s

    def ttft_s(self, units: Floats) -> Floats:
        begin = units * self.unit
        layer = self.layer_0 + units * self.unit_s
        compute = self.passes.compute_s(begin)
        if self.per_token_s:
            compute = compute + self.per_token_s * (begin - self.resident)
        if not self.overlaps:
            return compute + (self.fixed_s + self.layers * layer)
        first = self.passes.first_s(begin)
        behind = self.layers * layer - first * ((self.layers - 1) / self.layers)
        return compute + (self.fixed_s + np.maximum(layer, behind))

    def take(self, rows: Any) -> _Lane:
        """The same for some of the rows."""
        lane = copy(self)
        lane.passes, lane.resident = self.passes.take(rows), self.resident[rows]
        lane.layer_0 = self.layer_0[rows]
        return lane

    def best_split(self, high: Ints, bound: Floats) -> tuple[Floats, Ints]:
        """The soonest split that ends at load unit `high` at the latest, infinite where there is none; whatever is
        not sooner than `bound` may be passed over."""
        low = self.resident // self.unit + 1
        first, chunk = low, self.common.chunk
        if chunk is not None:
            # From here on one pass computes the rest.
            first = np.maximum(low, -((chunk - self.passes.prompt.astype(np.int64)) // self.unit))
        best = _Best(self, first, high)
        # Past the root TTFT is concave up to the load of everything, which is then sooner than the last split.
        best.offer(first)
        if self.overlaps:
            root = np.floor(self._one_pass_root() / self.unit)
            best.offer(root)
            best.offer(root + 1)
        if chunk is not None:
            self._over_chunks(best, low, np.minimum(first - 1, high), bound, chunk)
        return best.seconds, best.units.astype(np.int64)

    def _one_pass_root(self) -> Floats:
        """The token up to which to load so that copying a layer takes as long as computing one."""
        passes, layers = self.passes, self.layers
        prompt = passes.prompt
        rise = layers * self.unit_s / self.unit + passes.slope
        lack = passes.fixed + prompt * (passes.slope + passes.bend * prompt) - layers * self.layer_0
        lack = np.maximum(lack, 0.0)
        root: Floats = 2 * lack / (rise + np.sqrt(rise * rise + 4 * passes.bend * lack))
        return root

    def _over_chunks(self, best: _Best, low: Ints, high: Ints, bound: Floats, chunk: int) -> None:
        """Offers the split points up to `high` after which more than one pass is left."""
        ends = [self._no_later_than(units.astype(np.float64)) for units in (low, high)]
        rows = np.flatnonzero((low <= high) & (np.minimum(*ends) < np.minimum(bound, best.seconds)))
        if not len(rows):
            return
        lane, low, high = self.take(rows), low[rows], high[rows]
        inner = _Best(lane, low, high)
        prompt, unit = lane.passes.prompt.astype(np.int64), self.unit
        passes = -((low * unit - prompt) // chunk)  # left after the first split point
        for fewer in range(int((passes + ((high * unit - prompt) // chunk)).max()) + 1):
            count = passes - fewer
            # The first and the last load unit after which so many passes are left.
            inner.offer(-((count * chunk - prompt) // unit))
            inner.offer(-(((count - 1) * chunk - prompt) // unit) - 1)
        if self.overlaps:
            root = np.floor(lane._chunk_root(chunk) / unit)
            inner.offer(root)
            inner.offer(root + 1)
        best.take_over(rows, inner)

    def _chunk_root(self, chunk: int) -> Floats:
        """The same where the first pass is a whole chunk: linear in the token."""
        cost, layers = self.passes.cost, self.layers
        pairs_s = cost.pair_s * chunk
        attended = chunk if cost.rectangle else (chunk + 1) / 2
        lack = cost.overhead_s + cost.context_s * chunk + chunk * cost.token_s + pairs_s * attended
        rise = layers * self.unit_s / self.unit - cost.context_s - pairs_s
        return (lack - layers * self.layer_0) / np.float64(rise or np.inf)

    def _no_later_than(self, units: Floats) -> Floats:
        """Below what any split between two such points with a pass more takes, if below it at both."""
        cost = self.passes.cost
        if cost.rectangle:  # one pass over a rectangle takes longer than several over parts of it
            return np.zeros(len(units))
        layer = self.layer_0 + units * self.unit_s
        copies = layer if self.overlaps else self.layers * layer
        return self.passes.whole_s(units * self.unit) + (self.fixed_s + cost.overhead_s + copies)


class _Best:
    """The soonest split of each row among those offered, all of them brought between `low` and `high`."""

    def __init__(self, lane: _Lane, low: Ints, high: Ints) -> None:
        self.lane, self.low, self.high = lane, low, high
        self.empty = low > high
        self.seconds, self.units = np.full(len(low), np.inf), low.astype(np.float64)

    def offer(self, units: Floats | Ints) -> None:
        units = np.minimum(np.maximum(units, self.low), self.high).astype(np.float64)
        seconds = self.lane.ttft_s(units)
        sooner = (seconds < self.seconds) & ~self.empty
        np.copyto(self.seconds, seconds, where=sooner)
        np.copyto(self.units, units, where=sooner)

    def take_over(self, rows: Ints, other: _Best) -> None:
        """Takes the other's splits for some of the rows where they are sooner."""
        sooner = other.seconds < self.seconds[rows]
        self.seconds[rows[sooner]] = other.seconds[sooner]
        self.units[rows[sooner]] = other.units[sooner]


def _keep(
    seconds: Floats, end: Ints, tier: int, best_s: Floats, best_end: Ints, best_tier: Any, rows: Any
) -> None:
    """Keeps for each of the rows what is sooner; the earlier tier where both take as long."""
    sooner = seconds < best_s[rows]
    at = np.flatnonzero(sooner) if isinstance(rows, slice) else rows[sooner]
    best_s[at], best_end[at], best_tier[at] = seconds[sooner], end[sooner], tier


def _one(
    common: _Common, found: Decisions, row: int, prompt: Ints, resident: Ints, stored: Mapping[str, Ints]
) -> None:
    """One row as the planner decides it."""
    plan = common.planner.decide(
        Request(
            prompt_tokens=int(prompt[row]),
            hits={tier: int(column[row]) for tier, column in stored.items()},
            resident_tokens=int(resident[row]),
            load_unit_tokens=common.unit,
            prefill_chunk_tokens=common.chunk,
            tail_tokens=common.tail,
        )
    )
    found.path[row] = PATHS.index(plan.path)
    found.ttft_s[row] = plan.ttft_s
    found.load_tokens[row] = plan.load_tokens
    found.tier[row] = found.tiers.index(plan.load[0].tier) if plan.load else -1


def _column(name: str, values: Column, rows: int | None, least: int) -> Ints:
    """The column as an array; raises `InputError` naming it, and the first row that is not a number of tokens."""
    try:
        column = np.asarray(values)
    except ValueError:
        raise InputError(name, "holds lists of different lengths", "a list of numbers") from None
    if column.ndim != 1 or (rows is not None and len(column) != rows):
        expected = "a list of numbers" if rows is None else f"{rows} numbers, as many as prompt_tokens"
        raise InputError(name, f"has the shape {column.shape}", expected)
    if column.dtype.kind not in "iu":
        for row, value in enumerate(values):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise InputError(f"{name}[{row}]", f"is {str(value)[:40]}", "a whole number of tokens")
    wrong = (column < least) | (column > MOST_TOKENS)
    _refuse(name, column, wrong, f"from {least} to {MOST_TOKENS:,} tokens")
    return column.astype(np.int64, copy=False)


def _refuse(name: str, column: Ints, wrong: Mask, expected: str) -> None:
    """Raises `InputError` for the first row that is wrong."""
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(f"{name}[{row}]", f"is {str(column[row])[:40]}", expected)
