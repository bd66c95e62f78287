"""When the last layer is done, if each layer may start only once its own KV has arrived.

Layer `l`'s KV arrives at `a[l]` and its compute takes `c[l]`; both lists run over the layers in order, in
seconds from the moment the pass could start. The forms agree: the recurrence is what happens, the closed form
is what one can reason with, the uniform form is what a decision can afford. What the last layer finishes later
than compute alone would have it is the pass's *wait*. Of two sources that bring a layer's KV together the later one
counts, so the wait for both is the longer of the waits for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Where = Literal["before", "compute_thread", "own_thread"]


def with_enqueue(
    arrivals: Sequence[float], computes: Sequence[float], each_s: float, where: Where
) -> tuple[list[float], list[float]]:
    """Arrivals and computes once handing a layer's copies to the device costs `each_s`.

    On a thread of its own it is one more thing that each arrival follows. On the compute thread every layer pays it
    before its compute. Before the forward, all of it is exposed: no layer computes before the last one is enqueued.
    """
    if where == "own_thread":
        return [max(arrival, (layer + 1) * each_s) for layer, arrival in enumerate(arrivals)], list(computes)
    if where == "compute_thread":
        return list(arrivals), [each_s + compute for compute in computes]
    exposed = each_s * len(computes)
    return [max(arrival, exposed) for arrival in arrivals], list(computes)


def grouped(arrivals: Sequence[float], group: int, event_s: float = 0.0) -> list[float]:
    """Arrivals when `group` layers share one event: each layer arrives with the last of its group.

    Recording an event costs `event_s` on the link, after the group's copies.
    """
    layers, found = len(arrivals), list[float]()
    for number, first in enumerate(range(0, layers, group), 1):
        count = min(group, layers - first)
        found += [arrivals[first + count - 1] + number * event_s] * count
    return found


def recurrence(arrivals: Sequence[float], computes: Sequence[float], begin_s: float = 0.0) -> list[float]:
    """Finish time of every layer: `f[l] = max(f[l-1], a[l]) + c[l]`, the first beginning at `begin_s`."""
    finished = begin_s
    finishes = []
    for arrival, compute in zip(arrivals, computes, strict=True):
        finished = max(finished, arrival) + compute
        finishes.append(finished)
    return finishes


def closed_form(arrivals: Sequence[float], computes: Sequence[float], begin_s: float = 0.0) -> float:
    """Finish of the last layer: `C[L] + max over k of (a[k] - C[k-1])`, `C` the running sum of computes.

    The pass starts no earlier than `begin_s`, whatever has arrived before.
    """
    return sum(computes) + max(begin_s, longest_wait(arrivals, computes))


def longest_wait(arrivals: Sequence[float], computes: Sequence[float]) -> float:
    """The wait of a pass that could start at 0: `max over k of (a[k] - C[k-1])`, or 0 where that is less."""
    before = 0.0
    wait = 0.0
    for arrival, compute in zip(arrivals, computes, strict=True):
        late = arrival - before
        wait = late if late > wait else wait
        before += compute
    return wait


def group_waits(copied: Sequence[float], needed: Sequence[float], event_s: float) -> list[float]:
    """The waits when 1, 2, ... of the awaited layers share an event, below 0 where there is time to spare.

    `copied` is when each awaited layer's copies are done, `needed` when compute would get to it had it never
    waited: what `longest_wait` finds for `grouped` arrivals, for every size of a group.
    """
    count = len(copied)
    waits = []
    for group in range(1, count + 1):
        fired, wait = 0.0, -math.inf
        for first in range(0, count, group):
            fired += event_s
            end = first + group
            late = copied[(end if end < count else count) - 1] + fired - needed[first]
            wait = late if late > wait else wait
        waits.append(wait)
    return waits


def uniform_wait(
    lead: float, gap: float, compute: float, layers: int, group: int = 1, event_s: float = 0.0
) -> float:
    """The wait for layers all alike, which take `gap` to arrive, one after another from `lead` on, and `compute` each.

    `group` layers share an event that costs `event_s`. `a[k] - C[k-1]` is linear in the group's number, but for
    a last group that is smaller: its largest value is at the first group, at the last, or at the last but one.
    """
    groups = -(-layers // group)
    last = lead + layers * gap + groups * event_s - (groups - 1) * group * compute
    if groups == 1:
        return max(0.0, last)
    step = group * gap + event_s
    return max(0.0, lead + step, lead + (groups - 1) * step - (groups - 2) * group * compute, last)
