"""One request on one instance: what it waits for by the ledger, what it does then, and what that books.

Requests decided one after the other, each booked before the next, spread over devices and links by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvlane.policy.booking import Booking, Join, LinkKey, Load, LoadKey, Scope, link_key
from kvlane.policy.joining import Flying, Joined, join
from kvlane.policy.objective import SOONEST, Aim, Verdict, choose, device_s
from kvlane.policy.plain import Told
from kvlane.policy.plan import Estimate, Executor, LoadSegment, Plan, Request
from kvlane.policy.planner import Planner
from kvlane.policy.units import LONGEST_S


@dataclass(frozen=True, slots=True)
class Place:
    """An instance, the node it runs on, and whose its links are; those that `scopes` does not name are its own."""

    instance: str = ""
    node: str | None = None
    scopes: Mapping[str, Scope] = field(default_factory=dict)

    def link(self, name: str) -> LinkKey:
        return link_key(name, self.scopes.get(name, "device"), self.instance, self.node)


@dataclass(frozen=True, slots=True)
class Seen:
    """What somebody saw waiting, in seconds, links by name: it stands in for what the ledger holds."""

    device_busy_s: float | None = None
    link_queue_s: Mapping[str, float] = field(default_factory=dict)


NOTHING_SEEN = Seen()


class Waiting(Flying, Protocol):
    """Who knows what is booked: a ledger, or what one held a moment ago."""

    def device_busy_s(self, instance: str, now: float) -> float:
        """Seconds of booked work ahead of a new request on that instance's device."""
        ...

    def link_queue_s(self, link: LinkKey, now: float) -> float:
        """Seconds of booked copies ahead of a new load on that link."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one request does at one place.

    It keeps the device for `device_s`, from `ready_s` on at the soonest. `joins` are the loads in flight that it waits
    for, and `own` is what it loads itself. `verdict` says by what it was chosen, None where the planner's own choice
    stands.
    """

    plan: Plan
    request: Request
    place: Place
    joins: tuple[Join, ...]
    own: tuple[LoadSegment, ...]
    device_s: float
    ready_s: float
    verdict: Verdict | None = None

    @property
    def reason(self) -> str:
        """One sentence: what decided, with its numbers."""
        reason = self.plan.reason if self.verdict is None else self.verdict.reason(self.plan)
        if not self.joins:
            return reason
        if not self.own:
            return f"{reason}; the load joins an equal one in flight"
        return f"{reason}; {self.joined_tokens} of the tokens join a load in flight"

    @property
    def joined(self) -> bool:
        """Whether it waits for another request's load."""
        return bool(self.joins)

    @property
    def joined_tokens(self) -> int:
        """How many of the tokens it loads come with the loads that it waits for."""
        if not self.joins:
            return 0
        return self.plan.load_tokens - sum([segment.tokens for segment in self.own])

    def booking(
        self, planner: Planner, *, prefix_id: str | None = None, seen: Seen = NOTHING_SEEN
    ) -> Booking:
        """What it books; `planner` and `seen` are those it was assigned with. Loads without a `prefix_id` are nobody
        else's to join."""
        return booked(
            planner,
            self.place,
            self.request.load_unit_tokens,
            self.plan.ttft_s,
            (self.device_s, self.ready_s),
            self.plan.load,
            self.own,
            self.joins,
            prefix_id,
            seen,
        )


def booked(
    planner: Planner,
    place: Place,
    unit: int,
    ttft_s: float,
    device: tuple[float, float],
    load: Sequence[LoadSegment],
    own: Sequence[LoadSegment],
    joins: tuple[Join, ...],
    prefix_id: str | None,
    seen: Seen,
) -> Booking:
    """What is booked there for such a TTFT: `device` seconds, from when on, and `own`, the part of the load that others
    do not bring."""
    loads = []
    for part in own:
        load_end = load[-1].end
        transfer = planner.transfer(part.tier, unit).before(load_end - part.end)
        loads.append(
            Load(
                place.link(transfer.link.name),
                transfer.total_s(part.tokens),
                float(part.bytes),
                None if prefix_id is None else LoadKey(place.instance, part.tier, prefix_id),
                part.start,
                part.end,
                load_end,
            )
        )
    return Booking(
        place.instance,
        ttft_s,
        *device,
        tuple(loads),
        joins,
        seen.device_busy_s,
        {place.link(name): seconds for name, seconds in seen.link_queue_s.items()},
    )


def booked_plainly(
    told: Told, planner: Planner, place: Place, unit: int, prefix_id: str | None, seen: Seen
) -> Booking:
    """The same for what was told in few steps."""
    chosen = told.chosen
    device = keeps(planner.executor, chosen, told.busy_s)
    return booked(planner, place, unit, chosen.ttft_s, device, chosen.load, chosen.load, (), prefix_id, seen)


def keeps(executor: Executor, chosen: Estimate, busy_s: float) -> tuple[float, float]:
    """For how long a choice that joins nothing keeps the device, which others keep busy for `busy_s` before, and from
    when on at the soonest: a pass that waits for its layers keeps it meanwhile."""
    return device_s(executor, chosen, busy_s), chosen.transfer_s if executor == "bulk" else 0.0


def queues(
    ledger: Waiting,
    planner: Planner,
    tiers: Iterable[str],
    place: Place,
    now: float,
    seen: Seen = NOTHING_SEEN,
) -> tuple[float, dict[str, float]]:
    """What a request's `device_busy_s` and `link_queue_s` are: seconds waiting on the device and, by tier, on the link,
    as long as a request may wait at most.

    Raises `InputError` naming `hit` for a tier that the machine does not have.
    """
    busy_s = ledger.device_busy_s(place.instance, now) if seen.device_busy_s is None else seen.device_busy_s
    queued: dict[str, float] = {}
    for tier in tiers:
        link = planner.machine.tier(tier).link
        told = seen.link_queue_s.get(link)
        waiting = ledger.link_queue_s(place.link(link), now) if told is None else told
        queued[tier] = min(waiting, LONGEST_S)
    return min(busy_s, LONGEST_S), queued


def assign(
    ledger: Flying,
    planner: Planner,
    request: Request,
    place: Place,
    now: float,
    *,
    prefix_id: str | None = None,
    aim: Aim = SOONEST,
) -> Assignment:
    """Decides `request`, which carries its `queues`, and lets it join a load of the same prefix in flight.

    Nothing is booked: `ledger.reserve` takes the assignment's `booking`. Raises `InputError` as `Planner.decide` does.
    """
    plan = planner.decide(request)
    joined: Joined | None = None
    instead_of: Estimate | None = None
    if prefix_id is not None:
        joined = join(ledger, planner, request, plan, place.instance, prefix_id, now)
        if joined is not None:
            instead_of = plan.estimates[joined.estimate.path]
            plan.estimates[joined.estimate.path] = joined.estimate
            plan.unavailable.pop(joined.estimate.path, None)
    busy_s = request.device_busy_s
    verdict = None
    if joined is not None or not aim.plain:
        verdict = choose(plan, aim, busy_s, joined, instead_of)
    chosen = plan.estimates[plan.path]
    assert chosen is not None
    if joined is not None and chosen is joined.estimate:
        return Assignment(
            plan, request, place, joined.joins, joined.own, joined.device_s, joined.ready_s, verdict
        )
    held_s, ready_s = keeps(plan.executor, chosen, busy_s)
    return Assignment(plan, request, place, (), plan.load, held_s, ready_s, verdict)
