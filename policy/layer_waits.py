"""How long loads of unlike layers are waited for, in few steps: a search for where to cut one asks it again and again.

Layers come in few kinds and in patterns that repeat. When the copies of a layer are done is a sum over kinds, and so
is when compute would get to it: of layers whose counts of both grow evenly, as from period to period of a pattern, the
one waited for longest is the first or the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from operator import mul

from kvlane.policy.layer_transfer import LayerwiseTransfer
from kvlane.policy.path_cost import PathCost
from kvlane.policy.waits import Then, Waits


class Awaited:
    """The layers among which the one waited for longest is, whatever each kind takes to copy and to compute.

    `copied` are, for each of them, how many layers of each moving kind are copied until it is there, `before` how many
    of each kind are computed before it. The first is the first of all that anything is moved for.
    """

    __slots__ = ("before", "copied")

    def __init__(self, copied: Sequence[tuple[int, ...]], before: Sequence[tuple[int, ...]]) -> None:
        self.copied, self.before = copied, before

    def due_s(self, then: Then) -> Sequence[float]:
        """When compute would get to each of these layers had it never waited."""
        found = then.due_s.get(self)
        if found is None:
            kinds_s = then.kinds_s
            found = then.due_s[self] = [sum(map(mul, counts, kinds_s)) for counts in self.before]
        return found

    def latest_s(self, each: Sequence[float], due_s: Sequence[float]) -> float:
        """How much later than due the copies of a layer are done at most, each moving kind's taking so long."""
        layers = zip(self.copied, due_s, strict=True)
        # As a rule one kind moves, or two.
        if len(each) == 1:
            (one,) = each
            return max([count * one - at for (count,), at in layers])
        if len(each) == 2:
            one, other = each
            return max([count * one + more * other - at for (count, more), at in layers])
        late: list[float] = [sum(map(mul, counts, each)) - at for counts, at in layers]
        return max(late)


@lru_cache(256)
def awaited(order: tuple[int, ...], computed: tuple[int, ...], moving: tuple[int, ...]) -> Awaited | None:
    """Which layers count where layers are of the kinds `order` to copy and of the kinds `computed` to compute, and only
    those of `moving` are copied; None where nothing is moved."""
    copied, before = dict.fromkeys(moving, 0), dict.fromkeys(sorted(set(computed)), 0)
    points: list[tuple[int, ...]] = []
    for kind, compute in zip(order, computed, strict=True):
        if kind in copied:
            copied[kind] += 1
            points.append((*copied.values(), *before.values()))
        before[compute] += 1
    if not points:
        return None
    known = set(points)
    kept = [point for at, point in enumerate(points) if not _half_way(point, points[:at], known)]
    kinds = len(moving)
    return Awaited([point[:kinds] for point in kept], [point[kinds:] for point in kept])


def _half_way(
    point: tuple[int, ...], earlier: Sequence[tuple[int, ...]], known: set[tuple[int, ...]]
) -> bool:
    """Whether it lies half-way between two others: a sum over kinds is no larger there than at one of these."""
    return any(
        tuple([2 * mine - its for mine, its in zip(point, other, strict=True)]) in known for other in earlier
    )


class LayerWaits(Waits):
    """Waits for loads of unlike layers as if their events cost nothing: the same but for rounding where that is so,
    else no longer than they are."""

    __slots__ = ("_awaited", "_kinds", "_order", "_terms")

    def __init__(self, cost: PathCost, transfer: LayerwiseTransfer) -> None:
        super().__init__(cost, transfer)
        link, count = transfer.link, Counter(transfer.order)
        self._order = transfer.order
        self._terms = (
            transfer.by_layer,
            transfer.lead_s(0),
            transfer.per_token_s,
            transfer.run_tokens,
            transfer.counted,
            link.per_copy_s,
            link.rate_bytes_per_s,
            link.rate_table,
        )
        self._kinds = [
            (number, count[number], kind.per_token, kind.window, kind.runs, kind.static, kind.static_runs)
            for number, kind in enumerate(transfer.kinds)
            if kind.per_token or kind.static
        ]
        self._awaited: dict[tuple[int, ...], Awaited | None] = {}

    def seconds(self, tokens: int, after: int, then: Then, group_layers: int | None = None) -> float:  # noqa: ARG002
        if tokens <= 0:
            return 0.0
        by_layer, lead_s, token_s, run, counted, per_copy_s, rate, table = self._terms
        moving: list[int] = []
        each: list[float] = []
        total_s = total = 0.0
        most = 1
        for number, count, per_token, window, runs, static, static_runs in self._kinds:
            # As `LayerBytes.before` and `LayerwiseTransfer._one_s` have it.
            moved = tokens if window is None or tokens < window - after else window - after
            if moved > 0 and per_token:
                if counted is None:
                    copies = runs if run is None else -(-moved // run) * runs
                else:
                    copies = self._counted(moved, *counted) * runs
                size = moved * per_token
                if static and not after:
                    copies, size = copies + static_runs, size + static
            elif static and not after:
                copies, size = static_runs, static
            else:
                continue
            moving.append(number)
            if by_layer:
                one_s = copies * per_copy_s + size / (self._rate_at(size / copies) if table else rate)
                each.append(one_s)
                total_s += count * one_s
            else:
                total += count * size
                most = copies if copies > most else most
        if not by_layer:
            total_s = most * per_copy_s
            if total:
                total_s += total / (self._rate_at(total / most) if table else rate)
        lead_s += tokens * token_s
        if self.bulk:
            return lead_s + total_s
        found = self._of(tuple(moving))
        if found is None:
            return 0.0
        due_s = found.due_s(then)
        wait_s = lead_s + (found.latest_s(each, due_s) if by_layer else total_s - due_s[0])
        return wait_s if wait_s > 0 else 0.0

    def _counted(self, moved: int, whole: int, copies: int) -> int:
        return max(1, -(-moved * copies // (whole * self.transfer.runs_per_layer)))

    def _rate_at(self, copy_bytes: float) -> float:
        return self.transfer.link.rate_at(copy_bytes)

    def _of(self, moving: tuple[int, ...]) -> Awaited | None:
        """Which layers count where those kinds move."""
        known = self._awaited
        if moving not in known:
            known[moving] = awaited(self._order, self.cost.prefill.order, moving)
        return known[moving]
