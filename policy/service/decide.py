"""Answering `/v1/decide`: one instance or many candidates assigned by the ledger, booked, counted and remembered."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from time import monotonic, perf_counter

import msgspec
from msgspec import UNSET

from kvlane.policy.assignment import NOTHING_SEEN, Assignment, Place, assign, booked_plainly, queues
from kvlane.policy.booking import EXPIRY_LEAST_S, EXPIRY_TTFTS, Booking, LinkKey, LoadKey
from kvlane.policy.breaker import CircuitBreaker
from kvlane.policy.errors import InputError
from kvlane.policy.glimpse import Glimpse
from kvlane.policy.ledger import Ledger
from kvlane.policy.objective import SOONEST, Aim
from kvlane.policy.plan import Executor, Path, Request
from kvlane.policy.planner import Planner
from kvlane.policy.service.answer import Gist, choice, decision, gist_of, gist_of_plain
from kvlane.policy.service.config import Limits
from kvlane.policy.service.deployments import Deployment
from kvlane.policy.service.line import TURN_S
from kvlane.policy.service.metrics import Cells
from kvlane.policy.service.metrics import count as one_more
from kvlane.policy.service.problems import Path as Where
from kvlane.policy.service.problems import ProblemError, pointer
from kvlane.policy.service.promises import Promises
from kvlane.policy.service.said import fewest, located, seen_of
from kvlane.policy.service.spots import Spot
from kvlane.policy.service.types import Candidate, DecideRequest, Hit, State

# Answers kept for those who ask the same again; each is some two kilobytes.
_MOST_WORKED = 1024
_MOST_SPOTS = 4096

# A link is left alone after so many loads over it failed one after the other, and tried again after so long.
_FAILURES = 3
_PROBE_AFTER_S = 10.0

# So many candidates are decided once more at the end, where others were answered meanwhile.
_MOST_AGAIN = 4

_Key = tuple[object, ...]


class _Work(msgspec.Struct, frozen=True):
    """What one instance should do; how it is booked where that was asked for, and what it follows from where it was
    worked out anew and at length."""

    spot: Spot
    gist: Gist
    booking: Callable[[], Booking] | None = None
    found: Assignment | None = None


class Made(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A decision as far as it is remembered: to score what became of it, and to end what it booked. `links` are those
    that its `tiers` are loaded over, one for each."""

    deployment: str
    path: Path
    ttft_s: float
    load_tokens: int
    unit: int
    tiers: tuple[str, ...]
    links: tuple[LinkKey, ...]
    request_id: str | None


class Desk:
    """Decides, with one ledger for all deployments. Its clock is monotonic; nothing here waits."""

    def __init__(self, deployments: Mapping[str, Deployment], limits: Limits, cells: Cells) -> None:
        self.ledger = Ledger(most=limits.reservations)
        self.breakers = CircuitBreaker(_FAILURES, _PROBE_AFTER_S)
        self.cells = cells
        self.made: OrderedDict[str, Made] = OrderedDict()
        self.promises = Promises(limits.request_ids)
        # Ids of another run must not be taken for this one's.
        self._stem = secrets.token_hex(6) + "-"
        self._numbers = count(1)
        self.serve(deployments, limits)

    def serve(self, deployments: Mapping[str, Deployment], limits: Limits) -> None:
        """Decides for these deployments from now on; the ledger and what is remembered stay."""
        self.deployments = deployments
        self.limits = limits
        names = {deployment.name: deployment for deployment in deployments.values()}
        self._only = next(iter(names.values())) if len(names) == 1 else None
        self._names = ", ".join(names)[:200]
        self._spots: dict[tuple[str, str, str | None], Spot] = {}
        for name in names:
            self.cells.deployment(name)

    def deployment(self, name: str | None) -> Deployment:
        """The deployment of that name or alias, or the only one; raises `ProblemError`."""
        if name is None:
            if self._only is None:
                raise ProblemError(
                    "invalid_value", f"is missing, and there are several: {self._names}", "/deployment"
                )
            return self._only
        found = self.deployments.get(name)
        if found is None:
            raise ProblemError(
                "unknown_deployment", f"there is no deployment {name!r}, but {self._names}", "/deployment"
            )
        return found

    def decide(self, asked: DecideRequest) -> bytes:
        """The answer as JSON; raises `ProblemError`."""
        started = perf_counter()
        now = monotonic()
        if asked.request_id is not None:
            known = self.promises.kept(asked, now)
            if known is not None:
                return known
        if asked.candidates is not UNSET:
            turns = self.turns(asked)
            while True:
                try:
                    next(turns)
                except StopIteration as last:
                    answer: bytes = last.value
                    return answer
        deployment = self.deployment(asked.deployment)
        executor: Executor = asked.executor or deployment.executor
        planner = deployment.in_force.planners[executor]
        best = self._work(deployment, planner, asked, asked, (), now)
        return self._give(asked, deployment, best, None, now, started)

    def turns(self, asked: DecideRequest, since: float | None = None) -> Generator[None, None, bytes]:
        """Weighs the candidates, and returns the answer as JSON; wherever it yields others may be answered. `since` is
        when it was asked for. Raises `ProblemError`.

        All are weighed on the ledger as it is at the beginning. Where others were answered meanwhile, the best is
        decided once more on the ledger as it is then, until it is no worse than the next: only what was decided on that
        ledger is booked there.
        """
        started = perf_counter()
        now = monotonic()
        # What is learnt meanwhile is for those who ask next.
        deployment = replace(self.deployment(asked.deployment))
        executor: Executor = asked.executor or deployment.executor
        planner = deployment.in_force.planners[executor]
        spots = self._candidates(asked)
        works: list[_Work] = []
        seen: Glimpse | None = None
        until = started + TURN_S
        for index, spot in enumerate(spots):
            if perf_counter() >= until:
                if seen is None:
                    places = [self._spot(deployment, each).place for each in spots[index:]]
                    links = {name: tier.link for name, tier in deployment.told.machine.tiers.items()}
                    seen = Glimpse(self.ledger, places, links, asked.prefix_id, now)
                yield
                until = perf_counter() + TURN_S
            works.append(self._work(deployment, planner, asked, spot, ("candidates", index), now, seen))
        order = sorted(range(len(works)), key=lambda index: works[index].gist.ttft_s)
        if seen is not None:
            yield  # what follows takes a turn of its own
            now = monotonic()
            again: set[int] = set()
            while order[0] not in again and len(again) < _MOST_AGAIN:
                index = order[0]
                again.add(index)
                works[index] = self._work(
                    deployment, planner, asked, spots[index], ("candidates", index), now
                )
                order.sort(key=lambda index: works[index].gist.ttft_s)
            best = next(index for index in order if index in again)
            order.remove(best)
            order.insert(0, best)
        ranked = [(works[index].gist, works[index].spot.whom) for index in order]
        return self._give(asked, deployment, works[order[0]], ranked, now, since or started)

    def _give(
        self,
        asked: DecideRequest,
        deployment: Deployment,
        best: _Work,
        ranked: list[tuple[Gist, bytes]] | None,
        now: float,
        started: float,
    ) -> bytes:
        """Books, counts and remembers what was decided, and puts it into words."""
        decision_id = f"{self._stem}{next(self._numbers):x}"
        lifetime_s = max(EXPIRY_TTFTS * best.gist.ttft_s, EXPIRY_LEAST_S)
        if best.booking is not None:
            try:
                self.ledger.reserve(decision_id, best.booking(), now)
            except InputError as error:
                raise ProblemError(
                    "invalid_value", f"cannot be booked: {error.field} {error.problem}", "/reserve"
                ) from None
        expires_in_s = lifetime_s if asked.reserve else None
        answer = decision(best.gist, best.spot.whom, decision_id, expires_in_s, ranked)
        self._remember(decision_id, deployment, best, asked.request_id, now)
        if asked.request_id is not None:
            self.promises.give(asked, answer, now + lifetime_s)
        self.cells.latency_s.observe(perf_counter() - started)
        return answer

    def keep(self, decision_id: str, made: Made) -> None:
        """Remembers a decision; the oldest goes where there are too many."""
        self.made[decision_id] = made
        if len(self.made) > self.limits.remembered:
            self.made.popitem(last=False)

    def weigh(self, asked: DecideRequest, deployment: Deployment, now: float) -> tuple[bytes, Assignment]:
        """The `Choice` that `asked` would be answered with on that deployment, as JSON, and what it follows from.

        Only asked: nothing is counted, booked or remembered. The deployment must have no answers worked out. Raises
        `ProblemError`.
        """
        quiet = copy(self)
        quiet.cells = Cells()
        quiet._spots = {}  # they know the cells that count
        planner = deployment.in_force.planners[asked.executor or deployment.executor]
        work = quiet._work(deployment, planner, asked, asked, (), now, at_length=True)
        assert work.found is not None
        return choice(work.gist, work.spot.whom), work.found

    def release(self, decision_id: str) -> bool:
        """Ends what a decision booked; False when there is no such decision (any more)."""
        made = self.made.pop(decision_id, None)
        if made is not None and made.request_id is not None:
            self.promises.withdraw(made.request_id, decision_id)
        return self.ledger.release(decision_id, monotonic()) or made is not None

    def left_alone(self, now: float) -> list[LinkKey]:
        """The links over which loads keep failing, so that none is decided."""
        return [
            link
            for link in self.breakers.known()
            if isinstance(link, LinkKey) and not self.breakers.would_admit(link, now)
        ]

    def _candidates(self, asked: DecideRequest) -> list[Candidate]:
        """The candidates; raises `ProblemError`."""
        assert asked.candidates is not UNSET
        for name in ("instance", "node", "resident_tokens", "hits", "state"):
            if getattr(asked, name):
                raise ProblemError(
                    "invalid_value", "stands beside candidates, which have their own", f"/{name}"
                )
        most = self.limits.candidates
        if len(asked.candidates) > most:
            raise ProblemError(
                "invalid_value", f"{len(asked.candidates)} are more than {most}", "/candidates"
            )
        return asked.candidates

    def _work(
        self,
        deployment: Deployment,
        planner: Planner,
        asked: DecideRequest,
        spot: DecideRequest | Candidate,
        base: Where,
        now: float,
        ledger: Glimpse | None = None,
        *,
        at_length: bool = False,
    ) -> _Work:
        """What one instance should do, worked out once for all who ask the same, on the ledger or on what was seen of
        it; raises `ProblemError`."""
        on = self.ledger if ledger is None else ledger
        where = self._spot(deployment, spot)
        place = where.place
        notes: list[str] = []
        hits, checkpoints = self._hits(deployment, spot.hits, place, asked.prompt_tokens, base, notes, now)
        if spot.state is None and ledger is None and self.ledger.idle:
            seen = NOTHING_SEEN
            busy_s, queued_s = 0.0, dict.fromkeys(hits, 0.0)
        else:
            seen = NOTHING_SEEN if spot.state is None else seen_of(deployment, planner, spot.state, base)
            busy_s, queued_s = queues(on, planner, hits, place, now, seen)
        aim = SOONEST
        if asked.objective != "ttft" or asked.ttft_slo_s is not None:
            aim = Aim(asked.objective, asked.ttft_slo_s, self._beside(on, place, spot.state, now))
        unit = asked.load_unit_tokens or deployment.settings.load_unit_tokens
        worked = deployment.in_force.worked
        key: _Key | None = None
        usual = aim is SOONEST and not (
            notes or checkpoints or _flying(on, asked.prefix_id, hits, place, now)
        )
        if usual and not asked.reserve:
            key = (
                planner.executor,
                asked.prompt_tokens,
                spot.resident_tokens,
                unit,
                busy_s,
                tuple(hits.items()),
                tuple(queued_s.values()),
            )
            known = worked.get(key)
            if known is not None:
                return _Work(where, known)
        prompt, resident, chunk = (
            asked.prompt_tokens,
            spot.resident_tokens,
            deployment.settings.prefill_chunk_tokens,
        )
        if usual and len(hits) == 1 and not at_length:
            ((tier, stored),) = hits.items()
            plain = planner.plain(tier, unit)
            told = None
            if plain is not None:
                told = plain.decide(prompt, resident, stored, chunk, busy_s, queued_s[tier])
            if told is not None:
                gist = gist_of_plain(told, prompt, resident, unit, spot.hits)
                if key is not None:
                    _keep(worked, key, gist)
                    return _Work(where, gist)
                booking = partial(booked_plainly, told, planner, place, unit, asked.prefix_id, seen)
                return _Work(where, gist, booking)
        try:
            if checkpoints:
                request = Request(
                    prompt_tokens=prompt,
                    hits=hits,
                    resident_tokens=resident,
                    load_unit_tokens=unit,
                    prefill_chunk_tokens=chunk,
                    state_checkpoints=checkpoints,
                    link_queue_s=queued_s,
                    device_busy_s=busy_s,
                )
            else:
                request = Request.of_decoded(prompt, hits, resident, unit, chunk, queued_s, busy_s)
            found = assign(on, planner, request, place, now, prefix_id=asked.prefix_id, aim=aim)
        except InputError as error:
            raise located(error, spot.hits, base) from None
        if notes:
            found.plan.remarks = tuple(notes)
        gist = gist_of(found, spot.hits, asked.ttft_slo_s)
        if key is not None:
            _keep(worked, key, gist)
        booking = partial(found.booking, planner, prefix_id=asked.prefix_id, seen=seen)
        return _Work(where, gist, booking if asked.reserve else None, found)

    def _spot(self, deployment: Deployment, named: DecideRequest | Candidate) -> Spot:
        """An instance, remembered: what follows from its names is needed for every decision."""
        instance, node = named.instance or deployment.name, named.node
        key = deployment.name, instance, node
        found = self._spots.get(key)
        # What was asked before a reload, and is weighed in turns, goes on with the deployment of that time.
        if found is None or found.told is not deployment.told:
            if len(self._spots) >= _MOST_SPOTS:
                self._spots.clear()
            cells = self.cells.deployment(deployment.name)
            found = self._spots[key] = Spot(deployment, instance, node, cells)
        return found

    def _hits(
        self,
        deployment: Deployment,
        listed: list[Hit],
        place: Place,
        prompt: int,
        base: Where,
        notes: list[str],
        now: float,
    ) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        """The hits that may be loaded, and their state checkpoints; why others may not goes into `notes`."""
        hits: dict[str, int] = {}
        checkpoints: dict[str, tuple[int, ...]] = {}
        tiers = deployment.told.machine.tiers
        for index, hit in enumerate(listed):
            tier = tiers.get(hit.tier)
            if tier is None or (index and any(other.tier == hit.tier for other in listed[:index])):
                problem = "is named twice" if tier is not None else "is no tier of the deployment"
                raise ProblemError(
                    "invalid_value",
                    f"{hit.tier!r} {problem} (expected {', '.join(tiers)}, each once)",
                    pointer(*base, "hits", index, "tier"),
                )
            if hit.state != "hit":
                notes.append(f"{hit.tier}: {hit.state}, so that it cannot be loaded")
            elif self.breakers and not self.breakers.would_admit(place.link(tier.link), now):
                notes.append(f"{hit.tier}: loads over {tier.link} keep failing, and it is left alone for now")
                one_more(self.cells.deployment(deployment.name).fallbacks, "link_left_alone")
            else:
                tokens = hit.tokens
                hits[hit.tier] = fewest(tokens, prompt) if isinstance(tokens, list) else tokens
                if hit.state_checkpoints:
                    checkpoints[hit.tier] = tuple(hit.state_checkpoints)
        return hits, checkpoints

    def _beside(self, ledger: Ledger | Glimpse, place: Place, state: State | None, now: float) -> int:
        """Requests that run or wait on the instance."""
        if state is not None and (
            state.num_requests_waiting is not None or state.num_requests_running is not None
        ):
            return (state.num_requests_waiting or 0) + (state.num_requests_running or 0)
        return ledger.waiting(place.instance, now)

    def _remember(
        self, decision_id: str, deployment: Deployment, work: _Work, request_id: str | None, now: float
    ) -> None:
        """Counts a decision, and keeps what is needed when its outcome is told."""
        gist = work.gist
        links = work.spot.links(gist.tiers)
        if self.breakers:
            for link in set(links):
                self.breakers.admit(link, now)  # while it is left alone, this is the load that tries it
        made = Made(
            deployment.name,
            gist.path,
            gist.ttft_s,
            gist.load_tokens,
            gist.unit,
            gist.tiers,
            links,
            request_id,
        )
        self.keep(decision_id, made)
        cells = work.spot.cells.paths
        chosen = cells[gist.path]
        one_more(chosen.by_tier, gist.tiers[0] if len(gist.tiers) == 1 else "+".join(gist.tiers))
        chosen.predicted_s.observe(gist.ttft_s)
        if gist.rejected is not None:
            cells[gist.rejected].rejected_s.observe(gist.rejected_s)


def _flying(
    on: Ledger | Glimpse, prefix_id: str | None, tiers: Iterable[str], place: Place, now: float
) -> bool:
    """Whether a load of the prefix is in flight there, which may be joined."""
    if prefix_id is None or not len(on):
        return False
    return any(on.in_flight(LoadKey(place.instance, tier, prefix_id), now) for tier in tiers)


def _keep(worked: dict[_Key, Gist], key: _Key, gist: Gist) -> None:
    if len(worked) >= _MOST_WORKED:
        worked.clear()
    worked[key] = gist
