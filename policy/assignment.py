"""One request on one instance: what it waits for by the ledger, what it does then, and what that books.

Requests decided one after the other, each booked before the next, spread over devices and links by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    It keeps the device for `device_s`, from `ready_s` on at the soonest. `joined` is the load in flight that it waits
    for, if it does; `verdict` says by what it was chosen, None where the planner's own choice stands.
    """

    plan: Plan
    request: Request
    place: Place
    joined: LoadKey | None
    device_s: float
    ready_s: float
    verdict: Verdict | None = None

    @property
    def reason(self) -> str:
        """One sentence: what decided, with its numbers."""
        reason = self.plan.reason if self.verdict is None else self.verdict.reason(self.plan)
        return reason if self.joined is None else f"{reason}; the load joins an equal one in flight"

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
            loads=() if self.joined else tuple(self._loads(planner, prefix_id)),
            joins=(self.joined,) if self.joined else (),
            device_busy_s=seen.device_busy_s,
            link_queue_s={place.link(name): seconds for name, seconds in seen.link_queue_s.items()},
        )

    def _loads(self, planner: Planner, prefix_id: str | None) -> Iterable[Load]:
        for part in self.plan.load:
            transfer = planner.transfer(part.tier, self.request.load_unit_tokens)
            key = None if prefix_id is None else LoadKey(self.place.instance, part.tier, prefix_id)
            yield Load(
                self.place.link(transfer.link.name),
                transfer.total_s(part.tokens),
                float(part.bytes),
                key,
                part.start,
                part.end,
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
    joined, key = None, None
    if prefix_id is not None:
        for tier in request.hits:
            candidate = LoadKey(place.instance, tier, prefix_id)
            flight = ledger.in_flight(candidate, now)
            estimate = None if flight is None else joining(planner, request, plan, tier, flight)
            if estimate is not None:
                plan.estimates[estimate.path] = joined = estimate
                plan.unavailable.pop(estimate.path, None)
                key = candidate
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
        key if chosen is joined else None,
        device_s(plan, chosen, busy_s, joined),
        chosen.transfer_s if apart else 0.0,
        verdict,
    )


def joining(planner: Planner, request: Request, plan: Plan, tier: str, flight: InFlight) -> Estimate | None:
    """The estimate of waiting for a load in flight and computing the rest; None where it does not fit, or would be
    later than a load of the request's own.

    It fits where it leaves no gap after the resident tokens and ends where a load may end here. One that brings more
    than is usable fits where layers keep everything: what a window or a state keeps depends on where the load ends.
    """
    prompt, unit, resident = request.prompt_tokens, request.load_unit_tokens, request.resident_tokens
    whole = usable_tokens(request.hit(tier), prompt, unit, request.tail_tokens)
    transfer = planner.transfer(tier, unit)
    end = flight.end
    if planner.model.recurrent:
        ends = [at for at in request.checkpoints(tier) if at <= whole and at % unit == 0]
        if end not in ends:
            return None
        whole = max(ends)
    elif end > whole and not isinstance(transfer, LayerwiseTransfer):
        end = whole
    if not flight.start <= resident < end <= whole:
        return None
    path: Path = "load" if end == whole else "split"
    compute = planner.cost.recompute_s(end, prompt, request.prefill_chunk_tokens)
    ttft = max(flight.remaining_s, request.device_busy_s) + compute
    known = plan.estimates[path]
    if known is not None and known.ttft_s < ttft:
        return None
    return Estimate(
        path=path,
        ttft_s=ttft,
        compute_s=compute,
        transfer_s=flight.remaining_s,
        load=(LoadSegment(tier, resident, end, round(transfer.bytes(end - resident))),),
        band=max(estimate.band for estimate in plan.estimates.values() if estimate is not None),
    )
