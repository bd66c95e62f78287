"""One request on one instance: what it waits for by the ledger, what it does then, and what that books.

Requests decided one after the other, each booked before the next, spread over devices and links by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvlane.policy.booking import Booking, InFlight, LinkKey, Load, LoadKey, Scope, link_key
from kvlane.policy.layer_transfer import LayerwiseTransfer
from kvlane.policy.ledger import Ledger
from kvlane.policy.model import usable_tokens
from kvlane.policy.objective import SOONEST, Aim, Verdict, choose, device_s
from kvlane.policy.plan import Estimate, LoadSegment, Path, Plan, Request
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


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one request does at one place.

    It keeps the device for `device_s`, from `ready_s` on at the soonest. `joins` are the loads in flight that it waits
    for, one for each tier that brings a part; then it has none of its own. `verdict` says by what it was chosen, None
    where the planner's own choice stands.
    """

    plan: Plan
    request: Request
    place: Place
    joins: tuple[LoadKey, ...]
    device_s: float
    ready_s: float
    verdict: Verdict | None = None

    @property
    def reason(self) -> str:
        """One sentence: what decided, with its numbers."""
        reason = self.plan.reason if self.verdict is None else self.verdict.reason(self.plan)
        return reason if self.joined is None else f"{reason}; the load joins an equal one in flight"

    @property
    def joined(self) -> LoadKey | None:
        """The first of the loads it waits for."""
        return self.joins[0] if self.joins else None

    def booking(
        self, planner: Planner, *, prefix_id: str | None = None, seen: Seen = NOTHING_SEEN
    ) -> Booking:
        """What it books; `planner` and `seen` are those it was assigned with. Loads without a `prefix_id` are nobody
        else's to join."""
        plan, place = self.plan, self.place
        return Booking(
            instance=place.instance,
            ttft_s=plan.ttft_s,
            device_s=self.device_s,
            device_ready_s=self.ready_s,
            loads=() if self.joins else tuple(self._loads(planner, prefix_id)),
            joins=self.joins,
            device_busy_s=seen.device_busy_s,
            link_queue_s={place.link(name): seconds for name, seconds in seen.link_queue_s.items()},
        )

    def _loads(self, planner: Planner, prefix_id: str | None) -> Iterable[Load]:
        for part in self.plan.load:
            load_end = self.plan.load[-1].end
            transfer = planner.transfer(part.tier, self.request.load_unit_tokens).before(load_end - part.end)
            key = None if prefix_id is None else LoadKey(self.place.instance, part.tier, prefix_id)
            yield Load(
                self.place.link(transfer.link.name),
                transfer.total_s(part.tokens),
                float(part.bytes),
                key,
                part.start,
                part.end,
                load_end,
            )


def queues(
    ledger: Ledger,
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
    ledger: Ledger,
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
    joined: Estimate | None = None
    keys: tuple[LoadKey, ...] = ()
    if prefix_id is not None:
        for flights in _flights(ledger, request, place, prefix_id, now):
            estimate = joining(planner, request, plan, flights)
            if estimate is not None and (joined is None or estimate.ttft_s < joined.ttft_s):
                joined = estimate
                keys = tuple(LoadKey(place.instance, tier, prefix_id) for tier, _ in flights)
        if joined is not None:
            plan.estimates[joined.path] = joined
            plan.unavailable.pop(joined.path, None)
    busy_s = request.device_busy_s
    verdict = None
    if joined is not None or not aim.plain:
        verdict = choose(plan, aim, busy_s, joined)
    chosen = plan.estimates[plan.path]
    assert chosen is not None
    # A pass that waits for its layers keeps the device meanwhile.
    apart = plan.executor == "bulk" or chosen is joined
    return Assignment(
        plan,
        request,
        place,
        keys if chosen is joined else (),
        device_s(plan, chosen, busy_s, joined),
        chosen.transfer_s if apart else 0.0,
        verdict,
    )


Flights = tuple[tuple[str, InFlight], ...]


def _flights(ledger: Ledger, request: Request, place: Place, prefix_id: str, now: float) -> Iterator[Flights]:
    """What may be waited for: each tier's load in flight, and those that go on where another ends."""
    found: list[tuple[str, InFlight]] = []
    for tier in request.hits:
        flight = ledger.in_flight(LoadKey(place.instance, tier, prefix_id), now)
        if flight is not None and flight.end > request.resident_tokens:
            found.append((tier, flight))
            yield ((tier, flight),)
    chain: list[tuple[str, InFlight]] = []
    for tier, flight in sorted(found, key=lambda each: each[1].start):
        if not chain or flight.start <= chain[-1][1].end < flight.end:
            chain.append((tier, flight))
    if len(chain) > 1:
        yield tuple(chain)


def joining(planner: Planner, request: Request, plan: Plan, flights: Flights) -> Estimate | None:
    """The estimate of waiting for loads in flight and computing the rest; None where they do not fit, or would be
    later than a load of the request's own by more than the tie margin.

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
    elif any(flight.load_end != end for _, flight in flights):
        return None
    begin = max(resident, flights[0][1].start)
    if not begin < end <= whole or (begin > resident and planner.executor != "two_ended"):
        return None
    load: list[LoadSegment] = []
    at = begin
    for each, flight in flights:
        if flight is not last and request.hit(each) < flight.end:
            return None
        until = min(flight.end, end)
        if until > at:
            nbytes = round(planner.transfer(each, unit).before(end - until).bytes(until - at))
            load.append(LoadSegment(each, at, until, nbytes))
            at = until
    path: Path = "load" if end == whole and begin == resident else "split"
    remaining = max(flight.remaining_s for _, flight in flights)
    front = planner.prefill.prefill_s(resident, begin - resident, chunk) if begin > resident else 0.0
    compute = planner.cost.recompute_s(end, prompt, chunk)
    ttft = max(remaining, request.device_busy_s + front) + compute
    known, busy_s = plan.estimates[path], request.device_busy_s
    # What is on its way already is steadier than what has yet to queue, so that a near-tie is its.
    if known is not None and (known.ttft_s - busy_s) * (1 + planner.tie_margin) < ttft - busy_s:
        return None
    return Estimate(
        path=path,
        ttft_s=ttft,
        compute_s=front + compute,
        transfer_s=remaining,
        load=tuple(load),
        front_s=front,
        band=max(estimate.band for estimate in plan.estimates.values() if estimate is not None),
    )
