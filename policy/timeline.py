"""What a plan amounts to in time: when which layers are copied, when each is computed, and when the device waits.

Nothing is priced here. Copies arrive when the plan's transfers say, layers take what its prefill cost says, and
`pipeline.recurrence` puts the two together: the last compute ends at the estimate's TTFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvlane.policy import pipeline
from kvlane.policy.path_cost import Part
from kvlane.policy.plan import Estimate, LoadSegment, Request
from kvlane.policy.planner import Planner
from kvlane.policy.prefill_cost import PrefillCost

PassPart = Literal["front", "tail"]


@dataclass(frozen=True, slots=True)
class Copy:
    """Layers `[first_layer, first_layer + layers)` of one run of tokens, on their link from `start_s` to `end_s`.

    Layers that have nothing to move may be among them. What a transfer pays before its first byte belongs to its first
    copy, what a group's event costs to the group's.
    """

    tier: str
    link: str
    first_layer: int
    layers: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Compute:
    """One layer of a run's first pass, or all layers of the passes after it, on the device.

    `front` is what is computed before the tokens loaded, `tail` what comes after them. The LM head belongs to the last
    one.
    """

    first_layer: int
    layers: int
    part: PassPart
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One estimate in seconds from the request's arrival; lists ordered by start.

    `link_queue_s` is what the load waits for on its link before its first copy, the longest where there are several
    links; `device_busy_s` what the device has to do before. `exposed` are the times when the device is free for this
    request and waits for copies: with `device_busy_s` they sum to the estimate's `exposed_s`, which counts the queue.
    """

    ttft_s: float
    link_queue_s: float
    device_busy_s: float
    copies: tuple[Copy, ...]
    computes: tuple[Compute, ...]
    exposed: tuple[Span, ...]


def timeline(
    planner: Planner,
    request: Request,
    estimate: Estimate,
    *,
    own: Sequence[LoadSegment] | None = None,
    joined: Sequence[tuple[str, float]] = (),
) -> Timeline:
    """The timeline of one of the estimates that `planner` made for `request`.

    `joined` lists loads of others that the estimate waits for, each as its tier and when it will have arrived: no layer
    is computed before all of them are there. `own` is then the part of the load that they do not bring; by default it
    is all of it.
    """
    begin_s = request.device_busy_s
    copies = _joined(planner, joined)
    arrivals = [max((copy.end_s for copy in copies), default=0.0)] * planner.layers
    loaded = estimate.load if own is None else own
    queue_s = _copied(planner, planner.parts(request, loaded, estimate.end), estimate, copies, arrivals)
    prefill, chunk = planner.prefill, request.prefill_chunk_tokens
    resident, prompt = request.resident_tokens, request.prompt_tokens
    at = estimate.end if estimate.load else resident
    computes: list[Compute] = []
    if estimate.load and estimate.start > resident:
        computes = _passes(prefill, "front", resident, estimate.start, chunk, begin_s)
        begin_s = computes[-1].end_s
    computes += _passes(prefill, "tail", at, prompt, chunk, begin_s, arrivals, prefill.head_s)
    return Timeline(
        estimate.ttft_s,
        queue_s,
        request.device_busy_s,
        tuple(sorted(copies, key=lambda copy: (copy.start_s, copy.end_s))),
        tuple(computes),
        _waits(computes, request.device_busy_s),
    )


def _copied(
    planner: Planner,
    parts: Sequence[Part],
    estimate: Estimate,
    copies: list[Copy],
    arrivals: list[float],
) -> float:
    """Adds the copies of runs that travel beside each other, and when each layer is there; returns the longest queue
    before them."""
    queue_s = done_s = 0.0
    for part in parts:
        transfer, tokens = part.transfer, part.end - part.start
        if part.follows:
            transfer = transfer.behind(done_s)
        else:
            queue_s = max(queue_s, transfer.queued_s)
        if planner.executor == "bulk":
            done_s = transfer.total_s(tokens)
            arrived, groups = [done_s] * planner.layers, [range(planner.layers)]
        else:
            done_s = transfer.done_s(tokens, estimate.group_layers)
            arrived = transfer.arrivals(tokens, estimate.group_layers)
            moving = transfer.moving(tokens)
            size = estimate.group_layers if transfer.by_layer else max(1, len(moving))
            groups = [
                range(moving[first], moving[min(first + size, len(moving)) - 1] + 1)
                for first in range(0, len(moving), size)
            ]
        at = transfer.queued_s
        for group in groups:
            until = arrived[group[0]]
            copies.append(Copy(part.tier, transfer.link.name, group[0], len(group), at, until))
            at = until
        arrivals[:] = [max(pair) for pair in zip(arrivals, arrived, strict=True)]
    return queue_s


def _joined(planner: Planner, joined: Sequence[tuple[str, float]]) -> list[Copy]:
    """Loads of others, as copies of all layers: each on its link until it has arrived, after those before it there."""
    copies: list[Copy] = []
    busy_until: dict[str, float] = {}
    for tier, until in sorted(joined, key=lambda each: each[1]):
        link = planner.machine.tier(tier).link
        copies.append(Copy(tier, link, 0, planner.layers, busy_until.get(link, 0.0), until))
        busy_until[link] = until
    return copies


def _passes(
    prefill: PrefillCost,
    part: PassPart,
    start: int,
    end: int,
    chunk: int | None,
    begin_s: float,
    arrivals: Sequence[float] = (),
    head_s: float = 0.0,
) -> list[Compute]:
    """Computing `[start, end)`: the first pass layer by layer, each after its arrival, and then the other passes."""
    first = end - start if chunk is None else min(chunk, end - start)
    each = prefill.layers_s(start, first)
    arrived = arrivals or [0.0] * len(each)
    finishes = pipeline.recurrence(arrived, each, begin_s)
    computes = [
        Compute(layer, 1, part, max(free_s, arrived[layer]), finish_s)
        for layer, (free_s, finish_s) in enumerate(zip([begin_s, *finishes], finishes, strict=False))
    ]
    last = computes[-1]
    if start + first < end:
        until = last.end_s + prefill.prefill_s(start + first, end - start - first, chunk) + head_s
        computes.append(Compute(0, len(each), part, last.end_s, until))
    elif head_s:
        computes[-1] = Compute(last.first_layer, 1, part, last.start_s, last.end_s + head_s)
    return computes


def _waits(computes: Sequence[Compute], busy_s: float) -> tuple[Span, ...]:
    """The gaps between computes, once the device is free."""
    ends = [busy_s, *(compute.end_s for compute in computes)]
    return tuple(
        Span(free_s, compute.start_s)
        for free_s, compute in zip(ends, computes, strict=False)
        if compute.start_s > free_s
    )
