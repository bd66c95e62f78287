"""Copies on a CUDA device: how fast they are beside a plain page-locked memcpy, and what they cost compute."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvlane.streams.backend import Stream
from kvlane.streams.cuda import CudaBackend
from kvlane.streams.cuda_methods import Method, MethodTable
from kvlane.transfer.copies import layer_copies
from kvlane.transfer.layout import CopyDescriptor, KvLayout, KvRegion, Region, total_bytes
from kvlane.transfer.paged import BlockForm, PagedRegion
from kvlane.transfer.probe import MIB
from kvlane.transfer.store import HostBytes

# Llama-3.1-8B's KV in bf16, in vLLM's blocks of 16 tokens.
LAYOUT = KvLayout(layers=32, kv_heads=8, k_width=128, v_width=128, itemsize=2)
BLOCK_TOKENS = 16
_WAIT_S = 60.0


def plain_rate(backend: CudaBackend, nbytes: int = 256 * MIB, reps: int = 5) -> float:
    """Bytes per second of one large copy out of memory that torch has pinned, by torch's own means."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=backend.device)
    stream = torch.cuda.Stream(backend.device)
    seconds = []
    with torch.cuda.stream(stream):
        for _ in range(reps + 1):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record(stream)
            target.copy_(source, non_blocking=True)
            ended.record(stream)
            ended.synchronize()
            seconds.append(float(began.elapsed_time(ended)) * 1e-3)
    return nbytes / statistics.median(seconds[1:])


class only:  # noqa: N801  reads as a word
    """Copies go by one method inside."""

    def __init__(self, backend: CudaBackend, method: Method | None) -> None:
        self._copier, self._before = backend.copier, backend.copier.methods
        self._methods = self._before if method is None else MethodTable.only(method)

    def __enter__(self) -> None:
        self._copier.methods = self._methods

    def __exit__(self, *_: object) -> None:
        self._copier.methods = self._before


def regions(tokens: int, form: BlockForm | None, layout: KvLayout = LAYOUT) -> tuple[KvRegion, Region]:
    """A stored prompt, and where it goes: a region of its own, or blocks of a pool in no order."""
    source = KvRegion(layout, tokens)
    if form is None:
        return source, KvRegion(layout, tokens)
    needed = -(-tokens // form.tokens)
    pool = needed + needed // 8
    table = np.random.default_rng(1).permutation(pool)[:needed].tolist()
    return source, PagedRegion(layout, form, pool, table)


def random_bytes(backend: CudaBackend, nbytes: int) -> HostBytes:
    """Page-locked memory in which no two places look alike."""
    host = backend.host_bytes(nbytes)
    host[:] = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
    return host


def load_rate(
    backend: CudaBackend,
    method: Method | None,
    host: HostBytes,
    source_region: KvRegion,
    target_region: Region,
    tokens: int,
    reps: int = 3,
) -> dict[str, Any]:
    """A whole prompt's KV layer by layer, as the executor gives it: by one method, or by the backend's choice.

    Args:
        host: what lies in the source region.

    Raises `RuntimeError` where a copy failed, or where bytes arrived other than they were.
    """
    copies = [
        layer_copies(source_region, target_region, layer, 0, tokens)
        for layer in range(source_region.layout.layers)
    ]
    device = backend.device_bytes(target_region.nbytes)
    stream = backend.stream("load")
    seconds, enqueued = [], []
    try:
        with only(backend, method):
            for _ in range(reps + 1):
                events = [(backend.event(), backend.event()) for _ in copies]
                begun = backend.now()
                for layer, (began, done) in zip(copies, events, strict=True):
                    backend.copy(stream, device, host, layer, backend.flag(), began, done)
                enqueued.append(backend.now() - begun)
                for _, done in events:
                    backend.synchronize(done, _WAIT_S)
                    failure = backend.failure(done)
                    if failure is not None:
                        raise RuntimeError(f"a copy by {method} failed: {failure}") from failure
                seconds.append(backend.time_of(events[-1][1]) - backend.time_of(events[0][0]))
    finally:
        backend.release(stream)
    first = min(copy.destination for copy in copies[-1])
    last = max(copy.destination + copy.nbytes for copy in copies[-1])
    check_arrived(backend.read(device[first:last]), first, host, copies[-1])
    nbytes = sum(total_bytes(layer) for layer in copies)
    return {
        "copies_a_layer": len(copies[0]),
        "bytes": nbytes,
        "seconds": seconds[1:],
        "bytes_per_s": nbytes / statistics.median(seconds[1:]),
        "enqueue_s": statistics.median(enqueued[1:]),
    }


def check_arrived(device: HostBytes, first: int, host: HostBytes, copies: Sequence[CopyDescriptor]) -> None:
    """Raises `RuntimeError` naming a copy that did not bring its bytes; `device` is its block from byte `first` on."""
    for copy in copies:
        to, from_ = (slice(at, at + copy.nbytes) for at in (copy.destination - first, copy.source))
        if not np.array_equal(device[to], host[from_]):
            raise RuntimeError(f"{copy} did not bring its bytes")


@dataclass(frozen=True, slots=True)
class Beside:
    """Compute beside copies: its seconds alone and with them, and the bytes that were copied meanwhile."""

    alone_s: float
    beside_s: float
    copied_bytes_per_s: float

    @property
    def slowdown(self) -> float:
        """How much longer compute took, as a share."""
        return self.beside_s / self.alone_s - 1


def beside_copies(
    backend: CudaBackend,
    method: Method,
    copies: Sequence[CopyDescriptor],
    work: Callable[[], float],
    reps: int = 3,
) -> Beside:
    """Compute alone and beside a stream of copies that never stops, taking turns.

    Args:
        work: does the compute and returns its seconds.
    """
    room = max(max(copy.source, copy.destination) + copy.nbytes for copy in copies)
    host, device = backend.host_bytes(room), backend.device_bytes(room)
    stream = backend.stream("beside")
    alone, beside, rates = [], [], []
    try:
        with only(backend, method):
            for _ in range(reps):
                alone.append(work())
                with _Copying(backend, stream, device, host, copies) as copying:
                    beside.append(work())
                rates.append(copying.bytes_per_s)
    finally:
        backend.release(stream)
    return Beside(*map(statistics.median, (alone, beside, rates)))


class _Copying:
    """Copies one batch after another, two given at a time, until it is left."""

    def __init__(
        self,
        backend: CudaBackend,
        stream: Stream,
        device: torch.Tensor,
        host: HostBytes,
        copies: Sequence[CopyDescriptor],
    ) -> None:
        self._backend, self._stream = backend, stream
        self._blocks = device, host
        self._copies = copies
        self._stop, self._ended, self._first = threading.Event(), threading.Event(), threading.Event()
        self._batches = 0
        self._error: BaseException | None = None
        self.bytes_per_s = 0.0

    def __enter__(self) -> _Copying:
        self._backend.start(self._run, "beside")
        self._first.wait(_WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if not self._ended.wait(_WAIT_S):
            raise TimeoutError(f"copies beside compute did not end within {_WAIT_S} s")
        if self._error is not None:
            raise RuntimeError(f"a copy beside compute failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            began, done = self._give()
            start = began
            while not self._stop.is_set():
                following = self._give()
                self._wait(done)
                began, done = following
            self._wait(done)
            passed = self._backend.time_of(done) - self._backend.time_of(start)
            self.bytes_per_s = self._batches * total_bytes(self._copies) / passed
        except Exception as error:  # noqa: BLE001  the thread that measures raises it
            self._error = error
        finally:
            self._first.set()
            self._ended.set()

    def _give(self) -> tuple[Any, Any]:
        began, done = self._backend.event(), self._backend.event()
        self._backend.copy(self._stream, *self._blocks, self._copies, self._backend.flag(), began, done)
        self._batches += 1
        return began, done

    def _wait(self, done: Any) -> None:
        self._backend.synchronize(done, _WAIT_S)
        failure = self._backend.failure(done)
        if failure is not None:
            raise failure
        self._first.set()
