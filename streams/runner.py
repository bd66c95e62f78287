"""From a prompt to its first token: look it up in every tier, decide, run the plan, and remember which tiers fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvlane.policy.breaker import CircuitBreaker
from kvlane.policy.errors import InputError
from kvlane.policy.plan import Plan, Request
from kvlane.policy.planner import Planner
from kvlane.streams.backend import Backend, Flag
from kvlane.streams.executor import DEFAULT_DEADLINE_S, check_deadline
from kvlane.streams.faults import LoadFailure, in_words
from kvlane.streams.load import Mode
from kvlane.streams.store_thread import StoreThread
from kvlane.streams.timing import PartTiming
from kvlane.streams.visit import Visit, VisitedRun
from kvlane.transfer.identity import EncodedIds, KvIdentity, TokenIds, encode_token_ids
from kvlane.transfer.store import Hit, KvSafetyError, StaleHitError, Store, StoredRun

DEFAULT_STORE_DEADLINE_S = 1.0
_SHORTEST_DEADLINE_S = 1e-3
"""Of a load whose runs were opened as the time ran out: a deadline must be positive."""


class Result(Protocol):
    """What the runner wants to know of a prefill."""

    @property
    def parts(self) -> Sequence[PartTiming]: ...
    @property
    def failures(self) -> Sequence[LoadFailure]: ...


R = TypeVar("R", bound=Result)
R_co = TypeVar("R_co", bound=Result, covariant=True)


class Engine(Protocol[R_co]):
    """An engine's adapter, as `engines.transformers.TransformersEngine`."""

    @property
    def identity(self) -> KvIdentity: ...
    @property
    def backend(self) -> Backend: ...

    def prefill(
        self,
        token_ids: TokenIds,
        resident: int = 0,
        load: Sequence[StoredRun] = (),
        *,
        mode: Mode,
        group_layers: int,
        submitted_s: float | None,
        deadline_s: float,
        cancel: Flag | None,
    ) -> R_co:
        """The prompt's first new token; a load that fails is recomputed and reported, not raised."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[R]):
    """One request answered: the engine's result, the plan that was run, and every tier's failure on the way to it.

    A close that goes wrong later is counted, and in no answer.
    """

    result: R
    plan: Plan
    failures: tuple[LoadFailure, ...]


@dataclass(slots=True)
class _Attempt:
    """One request under way: what is on offer still, and what has failed so far."""

    ids: EncodedIds
    resident: int
    until_s: float  # nothing of a store is waited for after that
    visits: dict[str, Visit] = field(default_factory=dict)
    hits: dict[str, Hit] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)  # by the breaker
    runs: list[VisitedRun] = field(default_factory=list)
    failures: list[LoadFailure] = field(default_factory=list)


class PlanRunner(Generic[R]):
    """Answers prompts on one engine. Methods may be called from any thread, as far as the engine allows it.

    A tier that fails, in a lookup or in a load, or does not answer in time, costs time and never the answer. After
    failures in a row it is left alone, and later probed, as the breaker says.

    Stores are asked on threads of their own (`StoreThread`), all of them at once: `lookup`, `open`, and `retain` and
    `close` of runs. One that has not come back from a call is not asked again before it has: requests go on without
    it at once, it holds one thread and no more, and a run that it opens too late is closed. No answer waits for a
    close that takes long. While a run loads, its `verify`, `copies` and `count_moved` are called on the load's own
    threads, within the deadline. All else of a run or a store is taken to be answered from memory, on the thread that
    asks: attributes, `check` and `layer_nbytes`.

    Calls of one store come one after another, also those of requests beside each other: how slowly it answers adds up.
    Its thread ends soon after the last of them, so that there is nothing to close. The backend's `close` waits for a
    store that has not come back, as it does for a copy. Each runner has threads of its own: keep one for an engine.

    Args:
        planner: for the engine's model; its machine names the tiers.
        stores: one for each tier, all of one load unit.
        breaker: by tier; a fresh one if None.
        deadline_s: from a request's start; what is not loaded by then is computed.
        store_deadline_s: what a request waits for one store in seconds, all calls together, and never longer than
            `deadline_s`. A hit that takes longer to find than its tokens to recompute is worth nothing: set it to
            what a usual recompute takes, if that is less.

    Raises:
        InputError: two stores of one tier, or of different load units, or none; a deadline that cannot be waited for.
    """

    def __init__(
        self,
        engine: Engine[R],
        planner: Planner,
        stores: Iterable[Store],
        breaker: CircuitBreaker | None = None,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        store_deadline_s: float = DEFAULT_STORE_DEADLINE_S,
    ) -> None:
        check_deadline(deadline_s)
        check_deadline(store_deadline_s, "store_deadline_s")
        self.engine = engine
        self.planner = planner
        self.deadline_s = deadline_s
        self.breaker = CircuitBreaker() if breaker is None else breaker
        self._stores = _by_tier(stores)
        self._threads = {
            tier: StoreThread(engine.backend, f"store-{tier}", store_deadline_s) for tier in self._stores
        }
        self._unit = next(iter(self._stores.values())).unit_tokens
        self._counts: Counter[tuple[str, int | None]] = Counter()
        self._lock = threading.Lock()  # for the breaker and the counts; not held while the backend is called

    @property
    def failure_counts(self) -> Mapping[tuple[str, int | None], int]:
        """How often loads have failed, by tier and layer; layer None counts what failed before there was a load."""
        with self._lock:
            return dict(self._counts)

    def run(
        self,
        token_ids: TokenIds,
        resident: int = 0,
        *,
        submitted_s: float | None = None,
        cancel: Flag | None = None,
    ) -> Answer[R]:
        """Answer one prompt of which the engine holds the first `resident` tokens.

        Raises:
            InputError: a prompt or resident tokens that the engine does not take, or a tier the machine does not have.
            PrefillCancelledError: the request was called off, which is noticed once the stores have been waited for.
            KvSafetyError: the engine is in use or closed.
        """
        began = self._now()
        attempt = _Attempt(encode_token_ids(token_ids), resident, began + self.deadline_s)
        try:
            self._look_up(attempt)
            plan = self._decide(attempt)
            result = self.engine.prefill(
                token_ids,
                resident,
                attempt.runs,
                mode="bulk" if plan.executor == "bulk" else "layered",
                group_layers=plan.group_layers,
                submitted_s=began if submitted_s is None else submitted_s,
                deadline_s=max(_SHORTEST_DEADLINE_S, attempt.until_s - self._now()),
                cancel=cancel,
            )
        finally:
            self._close(attempt)
        self._report(attempt, result)
        return Answer(result, plan, tuple(attempt.failures))

    def _now(self) -> float:
        return self.engine.backend.now()

    def _look_up(self, attempt: _Attempt) -> None:
        """Hits in every tier that is not shut off; a tier that fails has none."""
        asked = {}
        for tier, store in self._stores.items():
            now = self._now()
            with self._lock:
                if not self.breaker.would_admit(tier, now):
                    continue
            visit = attempt.visits[tier] = self._visit(attempt, tier)
            lookup = partial(store.lookup, self.engine.identity, attempt.ids)
            try:
                asked[tier] = visit.ask("lookup", lookup)
            except (InputError, KvSafetyError):
                raise
            except Exception as error:  # noqa: BLE001  as below
                self._lookup_failed(attempt, tier, error)
        for tier, call in asked.items():
            try:
                attempt.hits[tier] = attempt.visits[tier].wait(call)
            except (InputError, KvSafetyError):
                raise
            except Exception as error:  # noqa: BLE001  whatever a store raises, it has nothing for this request
                self._lookup_failed(attempt, tier, error)

    def _visit(self, attempt: _Attempt, tier: str) -> Visit:
        # Not the attempt, which holds the visit: nobody but the garbage collector would find the two.
        failures = attempt.failures

        def failed(reason: str) -> None:
            self._failed(failures, LoadFailure(None, tier, reason))

        return Visit(self.engine.backend, self._threads[tier], attempt.until_s, failed)

    def _lookup_failed(self, attempt: _Attempt, tier: str, error: Exception) -> None:
        # Where the tier was shut off, this was its probe: it is shut off again.
        self._admits(attempt, tier)
        self._failed(attempt.failures, LoadFailure(None, tier, f"lookup failed: {in_words(error)}"))

    def _decide(self, attempt: _Attempt) -> Plan:
        """A plan whose runs are open; a tier that has lost its hit, or fails, is left out and all decided again."""
        while True:
            if self._now() >= attempt.until_s:
                attempt.hits.clear()  # nothing could be loaded any more
            plan = self.planner.decide(self._request(attempt))
            tier = self._open(attempt, plan)
            if tier is None:
                return plan
            self._close(attempt)
            del attempt.hits[tier]

    def _request(self, attempt: _Attempt) -> Request:
        return Request(
            prompt_tokens=attempt.ids.size,
            hits={tier: hit.tokens for tier, hit in attempt.hits.items()},
            resident_tokens=attempt.resident,
            load_unit_tokens=self._unit,
            state_checkpoints={tier: hit.checkpoints for tier, hit in attempt.hits.items()},
        )

    def _open(self, attempt: _Attempt, plan: Plan) -> str | None:
        """Open the plan's runs; the tier that could not, None if all could."""
        for segment in plan.load:
            tier = segment.tier
            if not self._admits(attempt, tier):
                return tier
            opening = partial(
                self._stores[tier].open,
                attempt.hits[tier],
                segment.start,
                segment.end,
                load_end=plan.load[-1].end,
            )
            try:
                run = attempt.visits[tier].open(opening)
                attempt.runs.append(run)
                _check_range(run, tier, segment.start, segment.end)
            except StaleHitError:
                return tier  # evicted since the lookup: no fault
            except (InputError, KvSafetyError):
                raise
            except Exception as error:  # noqa: BLE001  as in a lookup
                self._failed(attempt.failures, LoadFailure(None, tier, f"open failed: {in_words(error)}"))
                return tier
        return None

    def _admits(self, attempt: _Attempt, tier: str) -> bool:
        # Once a request: the first yes to a tier that was shut off is its probe, and there is no second one.
        now = self._now()
        with self._lock:
            if tier not in attempt.admitted and self.breaker.admit(tier, now):
                attempt.admitted.add(tier)
        return tier in attempt.admitted

    def _close(self, attempt: _Attempt) -> None:
        with ExitStack() as closing:  # all of them, also where the wait for one is broken off
            while attempt.runs:
                closing.callback(attempt.runs.pop().close)

    def _report(self, attempt: _Attempt, result: R) -> None:
        for failure in result.failures:
            self._failed(attempt.failures, failure)
        failed = {failure.tier for failure in attempt.failures}
        cut_short = {part.tier for part in result.parts if not part.whole}
        with self._lock:
            for tier in {part.tier for part in result.parts} - cut_short - failed:
                self.breaker.succeeded(tier)

    def _failed(self, failures: list[LoadFailure], failure: LoadFailure) -> None:
        failures.append(failure)
        now = self._now()
        with self._lock:
            self._counts[failure.tier, failure.layer] += 1
            self.breaker.failed(failure.tier, now)


def _check_range(run: StoredRun, tier: str, start: int, end: int) -> None:
    """That it is the one asked for: another could leave a gap in a load, for which nobody asked wrongly."""
    if (run.tier, run.start, run.end) != (tier, start, end):
        raise ValueError(f"it is of [{run.start}, {run.end}) from {run.tier}, not of [{start}, {end})")


def _by_tier(stores: Iterable[Store]) -> dict[str, Store]:
    by_tier: dict[str, Store] = {}
    for store in stores:
        if store.tier in by_tier:
            raise InputError("stores", f"holds two of tier {store.tier}", "one for each tier")
        by_tier[store.tier] = store
    if not by_tier:
        raise InputError("stores", "holds none", "one for each tier")
    units = {store.unit_tokens for store in by_tier.values()}
    if len(units) > 1:
        raise InputError("stores", f"have load units of {sorted(units)} tokens", "one load unit")
    return by_tier
