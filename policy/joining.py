"""Waiting for loads of the same prefix in flight, and loading only what they lack: no byte is moved twice.

What follows the loads in flight is decided like any request's: as one that finds their tokens resident, and a device
that is busy until they are there. On a link that serves first come, first served that is never later than a load of its
own from the beginning, which would queue behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Protocol

import msgspec

from kvlane.policy.booking import InFlight, Join, LoadKey
from kvlane.policy.layer_transfer import LayerwiseTransfer
from kvlane.policy.model import usable_tokens
from kvlane.policy.plan import Estimate, LoadSegment, Path, Plan, Request
from kvlane.policy.planner import Planner
from kvlane.policy.search import lowest_maximum
from kvlane.policy.transfer_cost import TransferCost
from kvlane.policy.units import LONGEST_S


class Flying(Protocol):
    """Who knows what is in flight: a ledger, or what one held a moment ago."""

    def in_flight(self, key: LoadKey, now: float) -> tuple[InFlight, ...]:
        """The loads in flight under that key."""
        ...


# Tiers and their loads in flight, in the order of their tokens.
Flights = tuple[tuple[str, InFlight], ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """What comes of waiting for loads in flight: the estimate, and `own`, the part of its load that they lack.

    It keeps the device for `device_s`, none of them before `ready_s` from now.
    """

    estimate: Estimate
    joins: tuple[Join, ...]
    device_s: float
    ready_s: float
    own: tuple[LoadSegment, ...] = ()


def join(
    ledger: Flying, planner: Planner, request: Request, plan: Plan, instance: str, prefix_id: str, now: float
) -> Joined | None:
    """The soonest way to wait for loads of the prefix in flight; None where there is none that fits, or each would be
    later than what `plan` does without them by more than the tie margin. Raises `InputError` as a planner does.
    """
    found: Joined | None = None
    band = max(estimate.band for estimate in plan.estimates.values() if estimate is not None)
    for flights, continued in _chains(ledger, request, instance, prefix_id, now):
        waited = waiting(planner, request, flights, band)
        if waited is None:
            continue
        joins = tuple(
            [Join(LoadKey(instance, tier, prefix_id), each.start, each.end) for tier, each in flights]
        )
        arrived_s = waited.transfer_s
        options = [Joined(waited, joins, waited.compute_s, arrived_s)]
        more = None if continued else _more(planner, request, waited)
        if more is not None:
            options.append(_extended(planner, request, waited, more, joins))
        for option in options:
            known, ttft = plan.estimates[option.estimate.path], option.estimate.ttft_s
            if known is not None and _later(planner, request, ttft, known.ttft_s):
                continue
            if found is None or ttft < found.estimate.ttft_s:
                found = option
    return found


def _later(planner: Planner, request: Request, one: float, other: float) -> bool:
    """Whether one TTFT is later than another by more than the tie margin, the device's queue apart."""
    return (other - request.device_busy_s) * (1 + planner.tie_margin) < one - request.device_busy_s


def _chains(
    ledger: Flying, request: Request, instance: str, prefix_id: str, now: float
) -> Iterator[tuple[Flights, bool]]:
    """What may be waited for: of each tier the load that brings most, and the loads that go on where others end, as
    far as they go, from the beginning and after every gap; and whether others in flight go on from there."""
    listed: list[tuple[str, InFlight]] = []
    every: list[Flights] = []
    for tier in request.hits:
        flying = [
            (tier, flight)
            for flight in ledger.in_flight(LoadKey(instance, tier, prefix_id), now)
            if flight.end > request.resident_tokens and flight.start < request.hit(tier)
        ]
        if flying:
            listed += flying
            every.append((max(flying, key=_brings),))
    chain: list[tuple[str, InFlight]] = []
    rest = sorted(listed, key=_starts)
    while rest:
        at = chain[-1][1].end if chain else max(request.resident_tokens, rest[0][1].start)
        onward = [each for each in rest if each[1].start <= at < each[1].end]
        if not onward:
            chain = []  # a gap: what lies behind it is another chain
            continue
        chain.append(max(onward, key=_ends))
        rest = [each for each in rest if each[1].end > chain[-1][1].end]
        if len(chain) > 1:
            every.append(tuple(chain))
    for flights in every:
        begin, end = flights[0][1].start, flights[-1][1].end
        yield (
            flights,
            any(each.start < begin <= each.end or each.start <= end < each.end for _, each in listed),
        )


def _brings(flying: tuple[str, InFlight]) -> tuple[int, int]:
    return flying[1].end - flying[1].start, flying[1].end


def _starts(flying: tuple[str, InFlight]) -> int:
    return flying[1].start


def _ends(flying: tuple[str, InFlight]) -> tuple[int, float]:
    return flying[1].end, -flying[1].remaining_s


def waiting(planner: Planner, request: Request, flights: Flights, band: float) -> Estimate | None:
    """The estimate of waiting for loads in flight and computing the rest, None where they do not fit.

    They fit where they leave no gap after the resident tokens, but for one that is computed meanwhile, and end where a
    load may end here. One that brings more than is usable fits where layers keep everything: what a window or a state
    keeps depends on where the load ends.
    """
    prompt, unit, resident = request.prompt_tokens, request.load_unit_tokens, request.resident_tokens
    chunk = request.prefill_chunk_tokens
    tier, last = flights[-1]
    whole = usable_tokens(request.hit(tier), prompt, unit, request.tail_tokens)
    end = last.end
    if planner.model.recurrent:
        ends = [at for at in request.checkpoints(tier) if at <= whole and at % unit == 0]
        if end not in ends:
            return None
        whole = max(ends)
    if not isinstance(planner.transfer(tier, unit), LayerwiseTransfer):
        end = min(end, whole)
    elif not _whole([flight for _, flight in flights]):
        return None
    begin = max(resident, flights[0][1].start)
    if not max(begin, last.start) < end <= whole or (begin > resident and planner.executor != "two_ended"):
        return None
    load: list[LoadSegment] = []
    at = begin
    for each, flight in flights:
        if flight is not last and request.hit(each) < flight.end:
            return None
        until = min(flight.end, end)
        if until > at:
            ends_at = max(until, min(flight.load_end, end))
            nbytes = round(planner.transfer(each, unit).before(ends_at - until).bytes(until - at))
            load.append(LoadSegment(each, at, until, nbytes))
            at = until
    path: Path = "load" if end == whole and begin == resident else "split"
    remaining = max(flight.remaining_s for _, flight in flights)
    front = planner.prefill.prefill_s(resident, begin - resident, chunk) if begin > resident else 0.0
    compute = planner.cost.recompute_s(end, prompt, chunk)
    return Estimate(
        path=path,
        ttft_s=max(remaining, request.device_busy_s + front) + compute,
        compute_s=front + compute,
        transfer_s=remaining,
        load=_runs(load),
        front_s=front,
        band=band,
    )


def _whole(flights: Sequence[InFlight]) -> bool:
    """Whether all parts of each load are among them: what windows keep comes with the last."""
    following = [*flights[1:], None]
    return all(
        flight.end == flight.load_end or (after is not None and after.load_end == flight.load_end)
        for flight, after in zip(flights, following, strict=True)
    )


def _more(planner: Planner, request: Request, waited: Estimate) -> Estimate | None:
    """What to load beside what is waited for: an estimate of all that is left; None where nothing is worth it."""
    if waited.start > request.resident_tokens:
        return _front(planner, request, waited)
    arrived_s = min(max(request.device_busy_s, waited.transfer_s), LONGEST_S)
    further = replace(request, resident_tokens=waited.end, device_busy_s=arrived_s)
    unit, tail = request.load_unit_tokens, request.tail_tokens
    if all(
        usable_tokens(further.hit(tier), further.prompt_tokens, unit, tail) <= waited.end
        for tier in further.hits
    ):
        return None
    plan = planner.decide(further)
    found = plan.estimates[plan.path]
    if found is not None and found.start > waited.end:
        # A gap would be computed in the middle of what is loaded, which no executor does.
        found = plan.estimates["load"]
        if found is not None and not _later(planner, further, waited.ttft_s, found.ttft_s):
            return None
    return found if found is not None and found.load else None


def _front(planner: Planner, request: Request, waited: Estimate) -> Estimate | None:
    """Loading the end of what lies before a load in flight, from the tier that is soonest, while the rest before it is
    computed."""
    resident, begin = request.resident_tokens, waited.start
    prompt, unit, chunk = request.prompt_tokens, request.load_unit_tokens, request.prefill_chunk_tokens
    computes = planner.cost.computes(waited.end, prompt, chunk)
    points = [resident, *range((resident // unit + 1) * unit, begin, unit)]

    def front(at: int) -> float:
        computed = planner.prefill.prefill_s(resident, at - resident, chunk) if at > resident else 0.0
        return request.device_busy_s + computed

    ways: list[tuple[float, int, str, TransferCost]] = []
    for tier in request.hits:
        if request.hit(tier) < begin:
            continue
        transfer = planner.transfer(tier, unit).before(waited.end - begin)
        transfer = transfer.behind(request.link_queue_s.get(tier, 0.0))

        def wait(at: int, transfer: TransferCost = transfer) -> float:
            return max(waited.transfer_s, planner.cost.alone_s(transfer, begin - at, computes))

        at, held = lowest_maximum(front, wait, points)
        ways.append((held, at, tier, transfer))
    rest = waited.compute_s - waited.front_s
    if not ways:
        return None
    held, at, tier, transfer = min(ways, key=itemgetter(0))
    if not _later(planner, request, waited.ttft_s, held + rest):
        return None
    front_s = front(at) - request.device_busy_s
    whole = usable_tokens(request.hit(waited.load[-1].tier), prompt, unit, request.tail_tokens)
    return Estimate(
        path="load" if at == resident and waited.end == whole else "split",
        ttft_s=held + rest,
        compute_s=front_s + rest,
        transfer_s=transfer.total_s(begin - at),
        load=(LoadSegment(tier, at, begin, round(transfer.bytes(begin - at))),),
        front_s=front_s,
        band=waited.band,
    )


def _extended(
    planner: Planner, request: Request, waited: Estimate, more: Estimate, joins: tuple[Join, ...]
) -> Joined:
    """Both together. A pass that waits for its own layers keeps the device meanwhile; what is in flight is waited for
    before it begins."""
    arrived_s = max(waited.transfer_s, more.transfer_s)
    estimate = msgspec.structs.replace(
        more,
        path="load" if more.path == "load" else "split",
        transfer_s=arrived_s,
        load=_runs(sorted((*waited.load, *more.load), key=_first)),
        band=max(waited.band, more.band),
    )
    if planner.executor == "bulk":
        return Joined(estimate, joins, estimate.compute_s, arrived_s, more.load)
    ready_s = 0.0 if more.front_s else waited.transfer_s
    device_s = max(estimate.compute_s, estimate.ttft_s - max(request.device_busy_s, ready_s))
    return Joined(estimate, joins, device_s, ready_s, more.load)


def _runs(load: Sequence[LoadSegment]) -> tuple[LoadSegment, ...]:
    """The same in as few runs as it can be said."""
    runs: list[LoadSegment] = []
    for part in load:
        if runs and runs[-1].tier == part.tier and runs[-1].end == part.start:
            part = msgspec.structs.replace(runs[-1], end=part.end, bytes=runs.pop().bytes + part.bytes)
        runs.append(part)
    return tuple(runs)


def _first(segment: LoadSegment) -> int:
    return segment.start
