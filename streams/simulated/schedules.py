"""Runs a drawn schedule with the real executor, driver and store, and checks all that has to hold of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Flag
from kvlane.streams.executor import DEFAULT_DEADLINE_S, LoadError, LoadRefusedError, PrefillCancelledError
from kvlane.streams.prefill import Job, Outcome, SequenceKv
from kvlane.streams.simulated.backend import HostCosts, SimulatedBackend
from kvlane.streams.simulated.choosers import Seeded
from kvlane.streams.simulated.draw import LAYER_S, MOST_TOKENS, TIERS, RequestDraw, Schedule
from kvlane.streams.simulated.engine import Answer, SimulatedBlock, SimulatedEngine
from kvlane.streams.simulated.host import Chooser
from kvlane.streams.simulated.kv import PromptKv
from kvlane.streams.simulated.threads import HostThreads
from kvlane.streams.simulated.tier import ON_THE_LINK, FaultKind, FaultyRun, LinkFaults, SimulatedTier
from kvlane.transfer.identity import KvIdentity, encode_token_ids
from kvlane.transfer.layout import KvRegion
from kvlane.transfer.paged import PagedRegion
from kvlane.transfer.store import StaleHitError

_HARMLESS: tuple[FaultKind, ...] = ("late", "stall")
"""Faults that a load survives if its deadline is far enough away."""
_SLACK = 1 + 1e-9


@dataclass(slots=True)
class _Sequence:
    """A sequence, and the prompt whose KV it holds."""

    kv: SequenceKv[SimulatedBlock]
    prompt: PromptKv | None = None


class ScheduleRun:
    """One schedule on one backend.

    Args:
        threads: to run on.
        chooser: who goes on where several could, drawn from the schedule's seed if None.
        jumps: see `Scheduler`.

    Attributes:
        seen: what happened how often.
    """

    def __init__(
        self,
        schedule: Schedule,
        threads: HostThreads,
        *,
        chooser: Chooser | None = None,
        jumps: bool = False,
    ) -> None:
        self.schedule = schedule
        self.seen: Counter[str] = Counter()
        self._threads = threads
        self._faults = LinkFaults()
        self._seeded = Seeded(
            schedule.seed, switch=schedule.switch, stall=schedule.stall, longest_stall_s=5 * LAYER_S
        )
        self._chooser = self._seeded if chooser is None else chooser
        self._jumps = jumps
        self._rotten = False

    def run(self) -> Counter[str]:
        """Do it all; returns what was seen.

        Raises:
            OrderError: something does not hold.
        """
        schedule = self.schedule
        with SimulatedBackend(
            schedule.links,
            compute=schedule.compute,
            chooser=self._chooser,
            timed=schedule.timed,
            jumps=self._jumps,
            costs=schedule.costs,
            disturb=self._faults,
            threads=self._threads,
        ) as self.backend:
            self._set_up()
            if schedule.evictions:
                self.backend.start(self._evict, "evict")
            for requests in schedule.requests[1:]:
                self.backend.start(lambda requests=requests: self._serve(requests), "second")  # type: ignore[misc]
            self._serve(schedule.requests[0])
            self.backend.join()
            self.engine.executor.close()
            self.backend.close()
            self._check_nothing_leaked()
        return self.seen

    def _set_up(self) -> None:
        schedule, backend = self.schedule, self.backend
        layout = schedule.layout
        identity = KvIdentity("simulated", "r0", None, "bytes", layout.name, 0, 1, "none", "none")
        self.tiers = {name: SimulatedTier(backend, name, schedule.unit_tokens, identity) for name in TIERS}
        self.prompts = [PromptKv(encode_token_ids(ids), layout) for ids in schedule.prompts]
        most_blocks = len(schedule.requests) + schedule.quarantine_blocks
        self.engine = SimulatedEngine(
            backend,
            layout,
            _block_maker(schedule, backend, most_blocks),
            schedule.seconds,
            ring_sets=schedule.ring_sets,
            quarantine_blocks=schedule.quarantine_blocks,
            before_share=schedule.before_share,
            head_s=0.1 * LAYER_S,
            carry_s=0.5 * LAYER_S,
        )

    def _store(self, prompt: PromptKv, tiers: Iterable[str]) -> None:
        whole = prompt.tokens // self.schedule.unit_tokens * self.schedule.unit_tokens
        for tier in tiers:
            self.tiers[tier].put(prompt, tuple(at for at in self.schedule.checkpoints if at <= whole))

    def _evict(self) -> None:
        for pause in self.schedule.evictions:
            self._pass_time(pause)
            for tier in self.tiers.values():
                tier.evict()
                self.seen["evictions"] += 1

    def _pass_time(self, pause: float) -> None:
        if self.schedule.timed:
            self.backend.sleep(pause)
            return
        for _ in range(int(pause)):
            self.backend.sleep(0)

    def _serve(self, requests: tuple[RequestDraw, ...]) -> None:
        sequence = _Sequence(self.engine.sequence())
        for request in requests:
            self._request(sequence, request)
            quarantined = self.engine.pool.quarantined
            self.seen["quarantined"] += quarantined > 0
            if quarantined > self.schedule.quarantine_blocks:
                self.backend.report("leak", "more blocks in quarantine than may be")

    def _request(self, sequence: _Sequence, request: RequestDraw) -> None:
        prompt = self.prompts[request.prompt]
        if request.store_first and request.plan != "recompute":
            self._store(prompt, request.tiers if "tiers" in request.plan else request.tiers[:1])
        resident = _resident(sequence, prompt, request.resident)
        runs = self._open(prompt, request, resident)
        cancel = self._cancel_later(request)
        fault = request.fault if runs else None
        if fault is not None:
            self._rotten |= fault.kind == "rot"
            if fault.kind in ON_THE_LINK:
                self._faults.arm(runs[-1].tier, fault)
        sequence.prompt = prompt
        try:
            job = Job(
                tokens=prompt.tokens,
                resident=resident,
                parts=tuple(runs),
                submitted_s=self.backend.now(),
                mode=request.mode,
                group_layers=request.group_layers,
                deadline_s=request.deadline_s,
                cancel=cancel,
                on_failure=request.on_failure,
            )
            outcome = self.engine.prefill(sequence.kv, prompt, job)
        except PrefillCancelledError:
            self.seen["cancelled"] += 1
            if cancel is None or not cancel.is_set():
                self.backend.report("no_cause", "called off by nobody")
        except (LoadError, LoadRefusedError) as error:
            self.seen["raised"] += 1
            if request.on_failure != "raise":
                self.backend.report("no_cause", f"raised instead of recomputing: {error}")
        else:
            self._check(request, runs, outcome)
        finally:
            if fault is not None and fault.kind in ON_THE_LINK:
                self._faults.disarm(runs[-1].tier, fault)
            for run in runs:
                run.close()

    def _open(self, prompt: PromptKv, request: RequestDraw, resident: int) -> list[FaultyRun]:
        """The runs of a request's plan; none where nothing is stored that would help."""
        if request.plan == "recompute":
            return []
        cut = request.plan in ("two_tiers", "two_ended_tiers")
        tiers = [self.tiers[name] for name in (request.tiers if cut else request.tiers[:1])]
        hits = [tier.lookup(prompt) for tier in tiers]
        unit = self.schedule.unit_tokens
        usable = min(prompt.tokens - 1, *(hit.tokens for hit in hits)) // unit * unit
        ends = [at for at in range(unit, usable + 1, unit) if at > resident]
        start = resident
        if prompt.layout.has_states:
            ends = [at for at in ends if at in hits[-1].checkpoints]
        if not ends:
            return []
        end = ends[int(request.loaded * (len(ends) - 1))]
        if "two_ended" in request.plan and not prompt.layout.has_states:
            start = resident + int(request.seam * (end - resident))
        seams = [at for at in range(unit, end, unit) if at > start] if cut else []
        seam = seams[int(request.seam * (len(seams) - 1))] if seams else end
        pieces = [(tiers[0], hits[0], start, seam)]
        if seam < end:
            pieces.append((tiers[1], hits[1], seam, end))
        elif cut:
            pieces = [(tiers[1], hits[1], start, end)]
        runs: list[FaultyRun] = []
        try:
            for tier, hit, low, high in pieces:
                fault = request.fault if high == end else None
                runs.append(tier.open(hit, low, high, end, fault))
        except StaleHitError:
            for run in runs:
                run.close()
            return []
        self.seen[f"parts {len(runs)}"] += 1
        self.seen["two_ended"] += start > resident
        return runs

    def _cancel_later(self, request: RequestDraw) -> Flag | None:
        after = request.cancel_after
        if after is None:
            return None
        cancel = self.backend.flag()

        def call_off() -> None:
            self._pass_time(after)
            cancel.set()

        self.backend.start(call_off, "cancel")
        return cancel

    def _check(self, request: RequestDraw, runs: list[FaultyRun], outcome: Outcome[Answer]) -> None:
        self.seen["answers"] += 1
        self.seen["loaded"] += outcome.loaded_tokens > 0
        self.seen["fell_back"] += bool(outcome.failures)
        self.seen["refused"] += outcome.refused is not None
        if request.fault is not None and outcome.failures:
            self.seen[f"fault {request.fault.kind}"] += 1
        if not runs:
            return
        whole = outcome.refused is None and not outcome.failures
        if whole and request.deadline_s == DEFAULT_DEADLINE_S:
            moved, expected = outcome.loaded_bytes, sum(run.nbytes for run in runs)
            if moved != expected:
                self.backend.report("unreported", f"{moved} bytes were loaded, and {expected} are the plan's")
        must = self._must_fail(request, runs)
        if must and whole:
            self.backend.report("unreported", f"{request.fault} was taken for a good load")
        if must and outcome.failures and self._alone and not self._rotten:
            self._check_layer(request, runs, outcome)
        if not self._may_fail(request) and outcome.failures:
            self.backend.report("no_cause", f"{outcome.failures[0]} although nothing was wrong")
        self._check_time(request, runs, outcome)

    def _must_fail(self, request: RequestDraw, runs: list[FaultyRun]) -> bool:
        """Whether the fault is one that no accepted load may have had."""
        fault = request.fault
        if fault is None or fault.kind in (*_HARMLESS, "stuck"):
            return False
        if fault.kind == "unpinnable":
            return True
        if fault.kind == "raise":
            return self.schedule.layout.holds(fault.layer)
        # One on the link may strike the other sequence's load instead.
        if fault.kind in ON_THE_LINK and not self._alone:
            return False
        return runs[-1].layer_nbytes(fault.layer) > 0

    @property
    def _alone(self) -> bool:
        return len(self.schedule.requests) == 1

    def _may_fail(self, request: RequestDraw) -> bool:
        """Whether there is a reason for a load to fail."""
        if request.deadline_s < DEFAULT_DEADLINE_S or self._rotten:
            return True
        if not self._alone:
            return any(one.fault is not None for requests in self.schedule.requests for one in requests)
        return request.fault is not None and request.fault.kind not in _HARMLESS

    def _check_layer(self, request: RequestDraw, runs: list[FaultyRun], outcome: Outcome[Answer]) -> None:
        fault = request.fault
        if fault is None or request.deadline_s < DEFAULT_DEADLINE_S or fault.kind == "unpinnable":
            return
        named = {fault.layer}
        # One on the link strikes whichever run of the tier comes first.
        for run in runs:
            moved = [layer for layer in range(self.schedule.layout.layers) if run.layer_nbytes(layer)]
            if run.tier == runs[-1].tier and fault.layer in moved:
                at = moved.index(fault.layer)
                named.add(moved[at - at % request.group_layers])
        if outcome.failures[0].layer not in named:
            self.backend.report("unreported", f"{fault} was reported as {outcome.failures[0]}")

    def _check_time(self, request: RequestDraw, runs: list[FaultyRun], outcome: Outcome[Answer]) -> None:
        """No request takes longer than its deadline and a recompute, and the layer computed when the deadline passed.

        What a front computed meanwhile is kept, so that it is no part of the recompute.
        """
        schedule = self.schedule
        if not schedule.timed or schedule.costs != HostCosts():
            return
        tokens = self.prompts[request.prompt].tokens
        most = request.deadline_s + schedule.pass_s(tokens) + 0.6 * LAYER_S + self._seeded.stalled_s
        start, end = runs[-1].end, tokens
        most += max(schedule.seconds(layer, start, end) for layer in range(schedule.layout.layers))
        if schedule.compute == "stream":
            # What was given to the device before is still ahead of a recompute.
            served = sum(len(requests) for requests in schedule.requests)
            most += 2 * served * schedule.pass_s(MOST_TOKENS)
        if outcome.total_s > most * _SLACK:
            self.backend.report("late", f"{outcome.total_s} s, and {most} s would have been the most")

    def _check_nothing_leaked(self) -> None:
        engine, schedule = self.engine, self.schedule
        most = len(schedule.requests) + schedule.quarantine_blocks
        spare = engine.blocks - len(schedule.requests)
        left = {
            "event sets": schedule.ring_sets - engine.executor.ring.free,
            "blocks in quarantine": engine.pool.quarantined,
            "streams": self.backend.open_streams,
            "pinned prompts": sum(tier.evict() for tier in self.tiers.values()),
            "blocks too many": max(0, engine.blocks - most),
        }
        for _ in range(spare):
            engine.pool.take()
        try:
            for _ in range(schedule.quarantine_blocks):
                engine.pool.admit()
        except LoadRefusedError:
            left["places in quarantine"] = 1
        left["blocks"] = engine.blocks - len(schedule.requests) - spare
        for what, count in left.items():
            if count:
                self.backend.report("leak", f"{count} {what}")


def _resident(sequence: _Sequence, prompt: PromptKv, share: float) -> int:
    """How many leading tokens of the prompt the sequence holds and goes on from."""
    if sequence.prompt is None:
        return 0
    held = min(sequence.kv.tokens, sequence.prompt.tokens, prompt.tokens - 1)
    before, now = sequence.prompt.ids[:held], prompt.ids[:held]
    same = next((at for at in range(held) if before[at] != now[at]), held)
    resident = int(share * same)
    try:
        sequence.kv.check_resident(resident)
    except InputError:
        return 0
    return resident


def _block_maker(schedule: Schedule, backend: SimulatedBackend, most: int) -> Callable[[], SimulatedBlock]:
    """Makes device blocks: memory of their own each, or pages of one pool in no order."""
    form = schedule.paged
    if form is None:
        region = KvRegion(schedule.layout, MOST_TOKENS)
        return lambda: SimulatedBlock(backend.device_bytes(region.nbytes), region)
    pages = -(-MOST_TOKENS // form.tokens)
    order = list(range(most * pages))
    Random(schedule.seed).shuffle(order)
    tables = [order[at : at + pages] for at in range(0, len(order), pages)]
    regions = [
        PagedRegion(schedule.layout, form, len(order), table, state_slots=most, state_slot=slot)
        for slot, table in enumerate(tables)
    ]
    memory = backend.device_bytes(regions[0].nbytes)
    return lambda: SimulatedBlock(memory, regions.pop())


def run_schedule(schedule: Schedule, threads: HostThreads) -> Counter[str]:
    """See `ScheduleRun`."""
    return ScheduleRun(schedule, threads).run()
