"""Runs one request's plan on any engine: a resident prefix, loads from one tier or several, and what is computed.

What an engine does is behind `Forward`; threads, flags and the clock are the backend's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend, Flag
from kvlane.streams.executor import DEFAULT_DEADLINE_S, LayerExecutor, check_deadline
from kvlane.streams.faults import LoadError, LoadFailure, LoadRefusedError
from kvlane.streams.layer_pass import LayerPass
from kvlane.streams.load import LayerLoad, Mode
from kvlane.streams.quarantine import Block, BlockPool
from kvlane.streams.timing import PartTiming, PassKind, PassTiming
from kvlane.transfer.store import StoredRun

OnFailure: TypeAlias = Literal["recompute", "raise"]

B = TypeVar("B", bound=Block)
T = TypeVar("T")
B_contra = TypeVar("B_contra", bound=Block, contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class Forward(Protocol[B_contra, T_co]):
    """One prompt on one engine. Every layer of a pass says `begin`, `ready` before it reads KV, and `end`."""

    def extend(self, block: B_contra, start: int, end: int, steps: LayerPass) -> None:
        """Write the KV of tokens `[start, end)` into a block that holds those before; may return before it has run."""

    def answer(self, block: B_contra, start: int, end: int, steps: LayerPass) -> T_co:
        """As `extend`, and return once what comes after token `end - 1` is on the host."""

    def carry(self, source: B_contra, target: B_contra, tokens: int) -> None:
        """Copy the KV of the first tokens to another block, in order on the compute stream."""


@dataclass(slots=True)
class SequenceKv(Generic[B]):
    """Where a prompt's KV is. A prefill may move it to another block.

    Attributes:
        block: holds it.
        tokens: how many leading tokens it holds; where layers have states, these are of just as many.
        sparse_until: layers with a window lack some of the tokens before this one, since a load brought only those that
            the tokens after it see. Fewer than so many are no prefix to go on from; 0 if nothing is missing.
        stuck: a load that may still write to the block: only after there was no memory for another one.
    """

    block: B
    tokens: int = 0
    sparse_until: int = 0
    stuck: LayerLoad | None = None

    def check_resident(self, tokens: int) -> None:
        """That a prompt may go on from the first so many tokens.

        Raises:
            InputError: they are not held, or not in every layer.
        """
        if tokens > self.tokens:
            raise InputError("resident", f"is {tokens}", f"at most the {self.tokens} tokens held")
        if 0 < tokens < self.sparse_until:
            raise InputError("resident", f"is {tokens}", f"0 or at least {self.sparse_until}, by the windows")
        if 0 < tokens < self.tokens and self.block.region.layout.has_states:
            raise InputError("resident", f"is {tokens}", f"0 or {self.tokens}, where the states are")


@dataclass(frozen=True, slots=True)
class Job:
    """What one prefill has to do.

    Tokens `[0, resident)` are there, `[resident, start of the first part)` are computed while the parts are on their
    way (a two-ended split; usually there are none), the parts are loaded, and the rest is computed.

    Attributes:
        tokens: the prompt's.
        resident: leading tokens the sequence holds.
        parts: runs that follow one another; none for a recompute.
        mode: what the pass after the load waits for: `layered` for each layer's own KV, `bulk` for all of it at once.
        group_layers: layers that share one event.
        deadline_s: from the start; a load that has not arrived by then is given up.
        submitted_s: when the request arrived, on the backend's clock.
        cancel: calls the request off once it is set; looked at in every layer.
        on_failure: of a load: recompute what it was to bring, or raise.

    Raises:
        InputError: tokens that do not add up, or a deadline that cannot be waited for.
    """

    tokens: int
    resident: int
    parts: tuple[StoredRun, ...]
    submitted_s: float
    mode: Mode = "layered"
    group_layers: int = 1
    deadline_s: float = DEFAULT_DEADLINE_S
    cancel: Flag | None = None
    on_failure: OnFailure = "recompute"

    def __post_init__(self) -> None:
        if not 0 <= self.resident < self.tokens:
            raise InputError(
                "resident", f"is {self.resident} of {self.tokens}", "leaving one token to compute"
            )
        check_deadline(self.deadline_s)
        if self.on_failure not in ("recompute", "raise"):
            raise InputError("on_failure", f"is {self.on_failure!r}", "recompute or raise")
        if not self.parts:
            return
        for one, two in pairwise(self.parts):
            if one.end != two.start:
                raise InputError("load", f"holds a run from {two.start} after one to {one.end}", "no gap")
        if not self.resident <= self.load_start < self.load_end < self.tokens:
            raise InputError(
                "load",
                f"is [{self.load_start}, {self.load_end})",
                f"at or after {self.resident}, ending below {self.tokens}",
            )

    @property
    def load_start(self) -> int:
        """Where the load begins; `resident` without one."""
        return self.parts[0].start if self.parts else self.resident

    @property
    def load_end(self) -> int:
        """Where the load ends; `resident` without one."""
        return self.parts[-1].end if self.parts else self.resident


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """One prefill done.

    Attributes:
        answer: what `Forward.answer` returned.
        loaded_tokens: tokens whose KV is the stored one.
        loaded_bytes: bytes that carried them.
        computed_tokens: all others but the resident ones.
        passes: the passes the answer comes from, in order.
        parts: every run's copies, those of a failed load as far as they arrived.
        failures: the load that failed, if one did.
        refused: why a load was not even started, None where it was or there was none.
        total_s: from the submission until the answer was on the host.
        head_s: from the end of the last layer to the same moment.
    """

    answer: T
    loaded_tokens: int
    loaded_bytes: int
    computed_tokens: int
    passes: tuple[PassTiming, ...]
    parts: tuple[PartTiming, ...]
    failures: tuple[LoadFailure, ...]
    refused: str | None
    total_s: float
    head_s: float

    @property
    def fell_back(self) -> bool:
        """Whether tokens were computed that a load was to bring."""
        return bool(self.failures) or self.refused is not None


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass that is through, its times not read yet."""

    kind: PassKind
    start: int
    end: int
    steps: LayerPass


class Prefiller(Generic[B]):
    """Runs jobs on one device. Calls for different sequences may come from different threads.

    Args:
        layers: every layer of the model.
    """

    def __init__(self, backend: Backend, executor: LayerExecutor, pool: BlockPool[B], layers: int) -> None:
        self._backend = backend
        self._executor = executor
        self._pool = pool
        self._layers = layers

    def run(self, forward: Forward[B, T], sequence: SequenceKv[B], job: Job) -> Outcome[T]:
        """Do the job; afterwards, also after an error, the sequence says what it holds and where.

        A load that fails is given up, never waited for, and what it was to bring is computed; in another block if a
        copy into this one is still under way.

        Raises:
            InputError: resident tokens that are not there, a two-ended split where layers have states, a load that does
                not fit (see `LayerExecutor.submit`).
            LoadError: a load failed that was not to be recomputed.
            LoadRefusedError: the same, of one that could not be started.
            PrefillCancelledError: the job was called off.
            KvSafetyError: the executor or its backend is closed.
        """
        if sequence.stuck is not None:
            self._recover(forward, sequence, sequence.stuck)
        sequence.check_resident(job.resident)
        layout = sequence.block.region.layout
        if layout.has_states and job.load_start > job.resident:
            raise InputError(
                "load", f"begins at {job.load_start}", f"{job.resident}: the states are one place"
            )
        # What lies after the resident tokens is overwritten from here on, and so are states.
        sequence.tokens = 0 if layout.has_states else job.resident
        if job.resident == 0:
            sequence.sparse_until = 0
        passes: list[_Pass] = []
        if not job.parts:
            return self._compute(forward, sequence, job, passes, "forward")
        load: LayerLoad | None = None
        try:
            load = self._submit(sequence.block, job)
            answer, done = self._beside(forward, sequence, job, passes, load)
        except BaseException as error:
            if load is not None:
                self._recover(forward, sequence, load)
            if job.on_failure == "raise" or not isinstance(error, (LoadError, LoadRefusedError)):
                raise
            failed = error
        else:
            self._pool.dismiss()
            outcome = _outcome(job, answer, done, passes, load, job.load_end)
            if any(s.window and job.load_end - s.window > job.load_start for s in layout.shapes):
                sequence.sparse_until = job.load_end
            sequence.tokens = job.tokens
            return outcome
        return self._compute(forward, sequence, job, passes, "recompute", load, failed)

    def _submit(self, block: B, job: Job) -> LayerLoad:
        self._pool.admit()
        try:
            return self._executor.submit(
                job.parts,
                block.memory,
                block.region,
                mode=job.mode,
                group_layers=job.group_layers,
                deadline_s=job.deadline_s,
            )
        except BaseException:
            self._pool.dismiss()
            raise

    def _beside(
        self, forward: Forward[B, T], sequence: SequenceKv[B], job: Job, passes: list[_Pass], load: LayerLoad
    ) -> tuple[T, float]:
        """The passes beside a load: the answer, and when it was there."""
        kind: PassKind = "forward"
        if job.load_start > job.resident:
            # It waits for nothing: the load brings none of what it reads.
            front = self._steps(job)
            forward.extend(sequence.block, job.resident, job.load_start, front)
            passes.append(_Pass("front", job.resident, job.load_start, front))
            sequence.tokens = job.load_start
            kind = "tail"
        steps = self._steps(job, load)
        steps.before()
        answer = forward.answer(sequence.block, job.load_end, job.tokens, steps)
        done = self._backend.now()
        steps.finish()
        passes.append(_Pass(kind, job.load_end, job.tokens, steps))
        return answer, done

    def _recover(self, forward: Forward[B, T], sequence: SequenceKv[B], load: LayerLoad) -> None:
        """Give a load up, and leave the sequence with what is good of it, in a block that nothing else writes."""
        load.close()
        kept = sequence.tokens
        if all(
            shape.window is None and not shape.state_bytes for shape in sequence.block.region.layout.shapes
        ):
            kept = _whole_until(load, kept)
        sequence.tokens, sequence.stuck = 0, load
        if load.settled:
            self._pool.dismiss()
        else:
            left, sequence.block = sequence.block, self._pool.take()
            try:
                # What is still under way writes other tokens than these.
                forward.carry(left, sequence.block, kept)
            finally:
                self._pool.quarantine(left, load)
                sequence.stuck = None
        sequence.tokens, sequence.stuck = kept, None

    def _compute(
        self,
        forward: Forward[B, T],
        sequence: SequenceKv[B],
        job: Job,
        passes: list[_Pass],
        kind: PassKind,
        load: LayerLoad | None = None,
        failed: LoadError | LoadRefusedError | None = None,
    ) -> Outcome[T]:
        """One pass over everything that the sequence does not hold."""
        held = job.resident if load is None else sequence.tokens
        steps = self._steps(job)
        answer = forward.answer(sequence.block, held, job.tokens, steps)
        done = self._backend.now()
        passes.append(_Pass(kind, held, job.tokens, steps))
        outcome = _outcome(job, answer, done, passes, load, held, failed)
        sequence.tokens = job.tokens
        return outcome

    def _steps(self, job: Job, load: LayerLoad | None = None) -> LayerPass:
        return LayerPass(self._backend, self._layers, load, job.submitted_s, job.cancel)


def _whole_until(load: LayerLoad, tokens: int) -> int:
    """How far a prompt's KV is good that was so for `tokens`, with the runs of a failed load that did arrive."""
    for part in load.parts:
        if part.start != tokens or not part.whole:
            break
        tokens = part.end
    return tokens


def _outcome(
    job: Job,
    answer: T,
    done: float,
    passes: list[_Pass],
    load: LayerLoad | None,
    loaded_until: int,
    failed: LoadError | LoadRefusedError | None = None,
) -> Outcome[T]:
    parts = () if load is None else load.timings(job.submitted_s)
    loaded = [part for part in parts if part.end <= loaded_until]
    loaded_tokens = sum(part.end - part.start for part in loaded)
    rows = tuple(PassTiming(each.kind, each.start, each.end, each.steps.timings()) for each in passes)
    total_s = done - job.submitted_s
    return Outcome(
        answer=answer,
        loaded_tokens=loaded_tokens,
        loaded_bytes=sum(part.bytes for part in loaded),
        computed_tokens=job.tokens - job.resident - loaded_tokens,
        passes=rows,
        parts=parts,
        failures=(LoadFailure.of(failed),) if isinstance(failed, LoadError) else (),
        refused=str(failed) if isinstance(failed, LoadRefusedError) else None,
        total_s=total_s,
        head_s=total_s - rows[-1].layers[-1].compute_end_s,
    )
