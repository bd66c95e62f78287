"""An engine on the simulated device: passes that read and write every layer's KV, and know it when they see it.

Its answers are sums over all the bytes that attention read, so a prompt has one right answer whichever way its KV came
to be, and any stale, torn or missing row gives another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from kvlane.streams.executor import LayerExecutor, LayerPass
from kvlane.streams.prefill import Job, Outcome, Prefiller, SequenceKv
from kvlane.streams.quarantine import BlockPool
from kvlane.streams.simulated.backend import SimulatedBackend
from kvlane.streams.simulated.kv import PromptKv, rows_only
from kvlane.streams.simulated.memory import Span
from kvlane.transfer.copies import layer_copies
from kvlane.transfer.layout import CopyDescriptor, KvLayout, KvRegion
from kvlane.transfer.paged import PagedRegion
from kvlane.transfer.store import HostBytes

Seconds: TypeAlias = Callable[[int, int, int], float]
"""What a layer's compute takes, from the layer, the first new token and the one after the last."""

ANSWER_BYTES = 8


class SimulatedBlock:
    """Device memory for the KV of one sequence."""

    def __init__(self, memory: torch.Tensor, region: KvRegion | PagedRegion) -> None:
        self.memory = memory
        self.region = region
        self._rows = replace(region, layout=rows_only(region.layout))

    def rows(self, kv: PromptKv, layer: int, start: int, end: int) -> tuple[CopyDescriptor, ...]:
        """Where a layer's rows of some tokens lie: `destination` in `memory`, `source` in `kv.block`."""
        return layer_copies(kv.region, self._rows, layer, start, end)

    def state(self, layer: int) -> tuple[int, int]:
        """Where a layer's state lies."""
        low = self.region.state_offset(layer, 0)
        return low, low + self.region.layout.shapes[layer].state_bytes


def _spans(block: SimulatedBlock, rows: Iterable[CopyDescriptor]) -> list[Span]:
    return [(block.memory, row.destination, row.destination + row.nbytes) for row in rows]


def _ends(row: CopyDescriptor) -> tuple[slice, slice]:
    """Where a row lies in `PromptKv.block`, and where in a block of the device's."""
    return (
        slice(row.source, row.source + row.nbytes),
        slice(row.destination, row.destination + row.nbytes),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What a pass came to: a sum over what its last token saw, and the first thing it saw that was not its own KV."""

    token: int
    wrong: str | None


@dataclass(slots=True)
class _Seen:
    """What a pass has read so far, put back into the order of `PromptKv.block`."""

    rows: HostBytes
    sum: int = 0
    wrong: str | None = None

    def compare(self, what: str, seen: HostBytes, right: HostBytes) -> None:
        if self.wrong is None and not np.array_equal(seen, right):
            self.wrong = what


class _LayerWork:
    """One layer of one pass over tokens `[start, end)`: what it reads and writes, and whether that is right."""

    def __init__(
        self, kv: PromptKv, block: SimulatedBlock, layer: int, start: int, end: int, seen: _Seen
    ) -> None:
        shape = kv.layout.shapes[layer]
        self._kv = kv
        self._layer = layer
        self._start, self._end = start, end
        self._first = 0 if shape.window is None else max(0, start - shape.window)
        self._seen = seen
        self._memory = block.memory.numpy()
        self._old = block.rows(kv, layer, self._first, start)
        self._new = block.rows(kv, layer, start, end)
        self._state = block.state(layer) if shape.state_bytes else None
        self.new = _spans(block, self._new)
        self.old = _spans(block, self._old)
        self.state = [] if self._state is None else [(block.memory, *self._state)]
        if start:
            self.old += self.state

    def project(self) -> None:
        """Write the new tokens' rows; they are what they should be as long as the layers before were."""
        for row in self._new:
            at, to = _ends(row)
            right = self._kv.block[at]
            self._memory[to] = right if self._seen.wrong is None else ~right

    def attend(self) -> None:
        """Read everything the new tokens see, and carry the state on to the last of them."""
        seen, kv, layer = self._seen, self._kv, self._layer
        for row in (*self._old, *self._new):
            at, to = _ends(row)
            seen.rows[at] = self._memory[to]
        for part, what in zip(kv.rows(layer, self._first, self._end), ("keys", "values"), strict=True):
            seen.compare(f"{what} of layer {layer}", seen.rows[part], kv.block[part])
        if self._end == kv.tokens:
            seen.sum = kv.sum(layer, seen.rows, seen.sum)
        if self._state is not None:
            place = slice(*self._state)
            if self._start:
                seen.compare(f"the state of layer {layer}", self._memory[place], kv.state(layer, self._start))
            following = kv.state(layer, self._end)
            self._memory[place] = following if seen.wrong is None else ~following


@dataclass(slots=True)
class SimulatedForward:
    """Passes over one prompt. See `streams.prefill.Forward`.

    Attributes:
        result: device memory for an answer, uint8 [8].
        seconds: of each layer's compute.
        before_share: how much of it needs none of the stored KV (the projections), and comes before `ready`.
        head_s: from the last layer to the answer.
        carry_s: what copying to another block takes.
    """

    backend: SimulatedBackend
    kv: PromptKv
    result: torch.Tensor
    seconds: Seconds
    before_share: float = 0.0
    head_s: float = 0.0
    carry_s: float = 0.0

    def extend(self, block: SimulatedBlock, start: int, end: int, steps: LayerPass) -> None:
        self._run(block, start, end, steps)

    def answer(self, block: SimulatedBlock, start: int, end: int, steps: LayerPass) -> Answer:
        seen = self._run(block, start, end, steps)
        memory = self.result.numpy()

        def head() -> None:
            memory[:] = list(seen.sum.to_bytes(ANSWER_BYTES, "little"))

        self.backend.launch("head", self.head_s, writes=[(self.result, 0, ANSWER_BYTES)], body=head)
        token = int.from_bytes(self.backend.read(self.result).tobytes(), "little")
        return Answer(token, seen.wrong)

    def carry(self, source: SimulatedBlock, target: SimulatedBlock, tokens: int) -> None:
        if tokens == 0:
            return
        out_of, into = source.memory.numpy(), target.memory.numpy()
        rows = np.empty_like(self.kv.block)
        layers = range(self.kv.layout.layers)
        reads = [row for layer in layers for row in source.rows(self.kv, layer, 0, tokens)]
        writes = [row for layer in layers for row in target.rows(self.kv, layer, 0, tokens)]
        states = [
            (source.state(layer), target.state(layer))
            for layer in layers
            if self.kv.layout.shapes[layer].state_bytes
        ]

        def move() -> None:
            for row in reads:
                at, place = _ends(row)
                rows[at] = out_of[place]
            for row in writes:
                at, place = _ends(row)
                into[place] = rows[at]
            for one, other in states:
                into[slice(*other)] = out_of[slice(*one)]

        self.backend.launch(
            f"carrying {tokens} tokens",
            self.carry_s,
            [*_spans(source, reads), *((source.memory, *one) for one, _ in states)],
            [*_spans(target, writes), *((target.memory, *other) for _, other in states)],
            move,
        )

    def _run(self, block: SimulatedBlock, start: int, end: int, steps: LayerPass) -> _Seen:
        seen = _Seen(np.zeros_like(self.kv.block))
        for layer in range(self.kv.layout.layers):
            work = _LayerWork(self.kv, block, layer, start, end, seen)
            seconds = self.seconds(layer, start, end)
            before = seconds * self.before_share
            steps.begin(layer)
            if before > 0:
                self.backend.launch(f"projections of layer {layer}", before, (), work.new, work.project)
            if self.kv.layout.holds(layer):
                steps.ready(layer)
            self._attend(layer, work, seconds - before, projected=before > 0)
            steps.end(layer)
        return seen

    def _attend(self, layer: int, work: _LayerWork, seconds: float, *, projected: bool) -> None:
        def both() -> None:
            work.project()
            work.attend()

        what = f"attention of layer {layer}"
        if projected:
            self.backend.launch(what, seconds, [*work.old, *work.new], work.state, work.attend)
        else:
            self.backend.launch(what, seconds, work.old, [*work.new, *work.state], both)


class SimulatedEngine:
    """One model on a simulated device: sequences, their blocks, and the real executor and driver.

    Args:
        layout: the model's layers.
        make: makes a block of device memory.
        seconds: see `SimulatedForward`.
        ring_sets: see `LayerExecutor`.
        quarantine_blocks: see `BlockPool`.
    """

    def __init__(
        self,
        backend: SimulatedBackend,
        layout: KvLayout,
        make: Callable[[], SimulatedBlock],
        seconds: Seconds,
        *,
        ring_sets: int = 3,
        quarantine_blocks: int = 2,
        before_share: float = 0.0,
        head_s: float = 0.0,
        carry_s: float = 0.0,
    ) -> None:
        self.backend = backend
        self.layout = layout
        self.blocks = 0
        self._make = make
        self._forward = partial(
            SimulatedForward,
            backend,
            seconds=seconds,
            before_share=before_share,
            head_s=head_s,
            carry_s=carry_s,
        )
        with backend.watched_locks():
            self.pool: BlockPool[SimulatedBlock] = BlockPool(self._new_block, quarantine_blocks)
            self.executor = LayerExecutor(backend, ring_sets=ring_sets)
        self._prefiller = Prefiller(backend, self.executor, self.pool, layout.layers)

    def _new_block(self) -> SimulatedBlock:
        self.blocks += 1
        return self._make()

    def sequence(self) -> SequenceKv[SimulatedBlock]:
        """Room for one prompt's KV."""
        return SequenceKv(self.pool.take())

    def prefill(self, sequence: SequenceKv[SimulatedBlock], kv: PromptKv, job: Job) -> Outcome[Answer]:
        """One request, its answer looked at.

        Raises:
            OrderError: the answer was accepted, and is not the one that comes out without a cache.
            LoadError, LoadRefusedError, PrefillCancelledError: see `Prefiller.run`.
        """
        forward = self._forward(kv, self.backend.device_bytes(ANSWER_BYTES))
        outcome = self._prefiller.run(forward, sequence, job)
        wrong = outcome.answer.wrong
        if wrong is not None or outcome.answer.token != kv.answer:
            self.backend.report("wrong_kv", f"{wrong or 'the answer'} is not that of the prompt's own tokens")
        return outcome
