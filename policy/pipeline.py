"""When the last layer is done, if each layer may start only once its own KV has arrived.

Layer `l`'s KV arrives at `a[l]` and its compute takes `c[l]`; both lists run over the layers in order, in
seconds from the moment the pass could start. The three forms agree: the recurrence is what happens, the
closed form is what one can reason with, the uniform form is what a decision can afford.
"""

from __future__ import annotations

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


def recurrence(arrivals: Sequence[float], computes: Sequence[float]) -> list[float]:
    """Finish time of every layer: `f[l] = max(f[l-1], a[l]) + c[l]`."""
    finished = 0.0
    finishes = []
    for arrival, compute in zip(arrivals, computes, strict=True):
        finished = max(finished, arrival) + compute
        finishes.append(finished)
    return finishes


def closed_form(arrivals: Sequence[float], computes: Sequence[float]) -> float:
    """Finish of the last layer: `C[L] + max over k of (a[k] - C[k-1])`, `C` the running sum of computes.

    The pass starts no earlier than 0, whatever has arrived before.
    """
    before = 0.0
    wait = 0.0
    for arrival, compute in zip(arrivals, computes, strict=True):
        wait = max(wait, arrival - before)
        before += compute
    return before + wait


def uniform(first_arrival: float, gap: float, compute: float, layers: int) -> float:
    """The same for layers all alike: arrivals at `first_arrival + l * gap`, each computing `compute`.

    `a[k] - C[k-1]` is linear in `k`, so its largest value is at the first layer or at the last.
    """
    return max(
        layers * compute,
        first_arrival + layers * compute,
        first_arrival + (layers - 1) * gap + compute,
    )
