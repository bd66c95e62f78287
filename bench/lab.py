"""One model on one link, and what can be measured there: answers, and copy and compute each alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from kvlane.policy import pipeline
from kvlane.policy.calibration import PrefillSample, TransferSample
from kvlane.policy.plan import Plan, Request
from kvlane.policy.planner import Planner
from kvlane.streams.cpu import CpuBackend
from kvlane.streams.cuda import CudaBackend
from kvlane.streams.engines.transformers import PrefillResult, TransformersEngine
from kvlane.streams.executor import LayerExecutor, Mode
from kvlane.transfer.host import HostStore
from kvlane.transfer.pattern import CopyPattern, copy_pattern
from kvlane.transfer.store import StoredRun

Ids = npt.NDArray[np.int64]

# Near the break-even rate a load takes as long as a prefill, and a large model's takes minutes.
LOAD_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request answered: what came out, the bytes the store counted, and the plan if the policy was asked."""

    result: PrefillResult
    moved_bytes: int = 0
    plan: Plan | None = None

    @property
    def loaded(self) -> tuple[int, int]:
        """The tokens loaded, `(0, 0)` if none were."""
        parts = self.result.parts
        return (parts[0].start, parts[-1].end) if parts else (0, 0)


@dataclass(frozen=True, slots=True)
class AloneTimes:
    """One load's copies and the compute beside it, each measured with the other absent, in seconds.

    `arrivals` are per layer from the submission; `lead_s` is what runs before the first layer, `computes` the
    layers, `head_s` what runs after the last one. `front_s` is the pass over the tokens before the load, which waits
    for none of it, 0 where there are none.
    """

    arrivals: tuple[float, ...]
    lead_s: float
    computes: tuple[float, ...]
    head_s: float
    front_s: float = 0.0

    @classmethod
    def fastest(cls, times: Sequence[AloneTimes]) -> AloneTimes:
        """The least of several measurements, layer by layer: a bound that no disturbance has loosened."""
        return cls(
            tuple(map(min, *(each.arrivals for each in times))) if len(times) > 1 else times[0].arrivals,
            min(each.lead_s for each in times),
            tuple(map(min, *(each.computes for each in times))) if len(times) > 1 else times[0].computes,
            min(each.head_s for each in times),
            min(each.front_s for each in times),
        )

    @property
    def bound_s(self) -> float:
        """The best TTFT the two allow: each layer after its own KV, nothing else in the way."""
        before = self.front_s + self.lead_s
        layers = pipeline.recurrence((0.0, *self.arrivals), (before, *self.computes))
        return layers[-1] + self.head_s


class Lab:
    """A model's engine on a CPU backend of its own, with the link that backend has, or on a backend it is given.

    Close it, or use it as a context manager: it owns threads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity_tokens: int,
        weights_revision: str,
        link_bytes_per_s: float | None = None,
        backend: CudaBackend | None = None,
    ) -> None:
        self.backend = CpuBackend(link_bytes_per_s) if backend is None else backend
        self.engine = TransformersEngine(
            model, self.backend, capacity_tokens, name="reproduction", weights_revision=weights_revision
        )
        self._copier = LayerExecutor(self.backend)
        self.deadline_s = LOAD_DEADLINE_S
        if link_bytes_per_s is not None:
            # The longest load there can be here, and as much again for a busy machine.
            longest = capacity_tokens * self.engine.layout.bytes_per_token / link_bytes_per_s
            self.deadline_s = max(LOAD_DEADLINE_S, 2 * longest)
        self.computing_s = 0.0
        self.on_core_s = 0.0

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.backend.close()

    def poison(self) -> None:
        """Overwrite the device's KV, and wait until that is done: it is no part of what is timed next."""
        self.engine.poison()
        done = self.backend.event()
        self.backend.record(self.backend.compute, done)
        self.backend.synchronize(done, self.deadline_s)

    def keep(self, store: HostStore, ids: Ids, tokens: int) -> None:
        """Store the first tokens of a prompt whose KV the engine holds."""
        self.engine.save(store, ids, tokens)

    def recompute(self, ids: Ids) -> Answer:
        """Answer without any stored KV."""
        self.poison()
        return Answer(self._compute(ids, 0))

    def load(self, store: HostStore, ids: Ids, end: int, mode: Mode, start: int = 0) -> Answer:
        """Answer with tokens `[start, end)` loaded, those before them computed meanwhile.

        The device KV is poisoned before, outside the timed part.
        """
        self.poison()
        submitted = self.backend.now()
        hit = store.lookup(self.engine.identity, ids)
        with store.open(hit, start, end) as run:
            return Answer(self._prefill(ids, run, mode, submitted), run.bytes_moved)

    def choose(self, store: HostStore, ids: Ids, planner: Planner) -> Answer:
        """Answer by whatever path the policy picks: lookup, decision and load all in the measured time."""
        self.poison()
        submitted = self.backend.now()
        hit = store.lookup(self.engine.identity, ids)
        plan = planner.decide(
            Request(prompt_tokens=len(ids), hits={hit.tier: hit.tokens}, load_unit_tokens=store.unit_tokens)
        )
        if not plan.load:
            return Answer(self.engine.prefill(ids, submitted_s=submitted), plan=plan)
        segment = plan.load[0]
        mode: Mode = "bulk" if planner.executor == "bulk" else "layered"
        with store.open(hit, segment.start, segment.end) as run:
            result = self._prefill(ids, run, mode, submitted, plan.group_layers)
            return Answer(result, run.bytes_moved, plan)

    def _prefill(
        self, ids: Ids, run: StoredRun, mode: Mode, submitted_s: float, group_layers: int = 1
    ) -> PrefillResult:
        """A load that fails is an error here, and not recomputed in silence."""
        return self.engine.prefill(
            ids,
            load=run,
            mode=mode,
            group_layers=group_layers,
            submitted_s=submitted_s,
            deadline_s=self.deadline_s,
            on_failure="raise",
        )

    def alone(self, store: HostStore, ids: Ids, end: int, start: int = 0) -> AloneTimes:
        """Compute what follows `[start, end)` with everything resident, and what comes before it; then copy it
        without computing."""
        self.hold(store, ids, end)
        result = self._compute(ids, end)
        ends = [row.compute_end_s for row in result.layers]
        lead = result.layers[0].compute_begin_s
        computes = tuple(after - before for before, after in zip([lead, *ends], ends, strict=False))
        front_s = self._compute(ids[:start], 0).layers[-1].compute_end_s if start else 0.0
        arrivals, _ = self._copies_alone(store, ids, end, start)
        return AloneTimes(arrivals, lead, computes, result.head_s, front_s)

    def hold(self, store: HostStore, ids: Ids, end: int) -> None:
        """Make the engine hold the KV of tokens `[0, end)`: loaded as far as whole units are stored, then computed."""
        if self.engine.holds(ids, end):
            return
        hit, unit = store.lookup(self.engine.identity, ids), store.unit_tokens
        loaded = min(hit.tokens, -(-end // unit) * unit, (len(ids) - 1) // unit * unit)
        if loaded == 0:
            self.engine.prefill(ids[:end])
            return
        with store.open(hit, 0, loaded) as run:
            self.engine.prefill(
                ids[: max(end, loaded + 1)],
                load=run,
                mode="bulk",
                deadline_s=self.deadline_s,
                on_failure="raise",
            )

    def sample_prefill(
        self, ids: Ids, resident: int, new: int, repeats: int = 1
    ) -> tuple[PrefillSample, float]:
        """The median of several passes of `new` tokens after `resident` held ones, and the LM head's seconds."""
        results = [self._compute(ids[: resident + new], resident) for _ in range(repeats)]
        seconds = statistics.median(result.total_s - result.head_s for result in results)
        return PrefillSample(resident, new, seconds), statistics.median(result.head_s for result in results)

    def _compute(self, ids: Ids, resident: int) -> PrefillResult:
        """A pass that waits for nothing: what it takes beyond its time on a core, others had of the machine."""
        began, began_on_core = self.backend.now(), time.thread_time()
        result = self.engine.prefill(ids, resident=resident)
        self.on_core_s += time.thread_time() - began_on_core
        self.computing_s += self.backend.now() - began
        return result

    def sample_transfer(self, store: HostStore, ids: Ids, end: int) -> TransferSample:
        """The median of several copies of `[0, end)`, all layers, nothing computing; a first one is discarded."""
        _, *warm = self.transfer_series(store, ids, end)
        seconds = statistics.median(sample.seconds for sample in warm)
        return TransferSample(warm[0].bytes, warm[0].copies, seconds)

    def transfer_series(
        self, store: HostStore, ids: Ids, end: int, count: int | None = None
    ) -> list[TransferSample]:
        """`count` copies of `[0, end)`, all layers, nothing computing, of which the first is cold.

        Without a count short ones are repeated more often: they are what a busy machine disturbs most.
        """
        series: list[TransferSample] = []
        warm_s = 0.0
        least, most = (4, 16) if count is None else (count, count)
        while len(series) < least or (warm_s < 0.1 and len(series) < most):
            arrivals, (copies, nbytes) = self._copies_alone(store, ids, end)
            cold = not series
            warm_s += 0.0 if cold else arrivals[-1]
            series.append(TransferSample(nbytes, copies, arrivals[-1], cold, self.backend.now()))
        return series

    def _copies_alone(
        self, store: HostStore, ids: Ids, end: int, start: int = 0
    ) -> tuple[tuple[float, ...], tuple[int, int]]:
        """When each layer arrived after the submission, and how many copies and bytes that took."""
        self.poison()
        hit = store.lookup(self.engine.identity, ids)
        with store.open(hit, start, end) as run:
            began = self.backend.now()
            load = self._copier.submit(
                [run], self.engine.kv.memory, self.engine.kv.region, mode="bulk", deadline_s=self.deadline_s
            )
            load.finish()
        rows = load.timings(began)[0].layers
        arrivals = tuple(row.arrive_s for row in rows)
        return arrivals, (sum(row.copies for row in rows), sum(row.bytes for row in rows))

    def copies_of(self, store: HostStore, ids: Ids) -> CopyPattern:
        """How a layer's copies from the store's memory into the engine's lie, for the cost model to count them."""
        hit = store.lookup(self.engine.identity, ids)
        with store.open(hit, 0, store.unit_tokens) as run:
            return copy_pattern(run.region, self.engine.kv.region, unit_tokens=store.unit_tokens)

    def lookup_s(self, store: HostStore, ids: Ids, repeats: int = 5) -> float:
        """Seconds to look a prompt up, the median of several."""
        times = []
        for _ in range(repeats):
            began = self.backend.now()
            store.lookup(self.engine.identity, ids)
            times.append(self.backend.now() - began)
        return statistics.median(times)


def timeline_rows(result: PrefillResult) -> list[dict[str, Any]]:
    """The layers of one answer's passes as plain values, seconds after the submission."""
    return [
        {
            "pass": each.kind,
            "layer": row.layer,
            "bytes": row.bytes,
            "copies": row.copies,
            "enqueue_s": row.enqueue_s,
            "start_s": row.start_s,
            "arrive_s": row.arrive_s,
            "compute_begin_s": row.compute_begin_s,
            "compute_end_s": row.compute_end_s,
            "exposed_s": row.exposed_s,
        }
        for each in result.passes
        for row in each.layers
    ]
