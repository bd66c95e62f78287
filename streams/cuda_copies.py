"""Gives copies to a CUDA stream, by whichever method the measurements favour for their size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlane.streams.backend import Flag
from kvlane.streams.cpu import CopyCancelledError
from kvlane.streams.cuda_batch import BatchCopy
from kvlane.streams.cuda_kernel import (
    MAPPED_BLOCKS,
    RUN_BYTES,
    STAGED_BLOCKS,
    RunsKernel,
    grid_blocks,
    unit_bytes,
)
from kvlane.streams.cuda_memory import PinnedMemory
from kvlane.streams.cuda_methods import METHODS, Method, MethodTable
from kvlane.streams.cuda_runs import Runs, by_source, cut, cut_at, stages
from kvlane.transfer.store import HostBytes

# The copy engine turns to another stream between two copies, so none may be long: an urgent load then waits for no
# more than this of a bulk one. At a host link's rate it is most of a millisecond, far above the cost of a copy.
PIECE_BYTES = 32 << 20
STAGING_BYTES = 64 << 20


@dataclass(slots=True)
class Lane:
    """A stream to copy on and its staging buffer, which the stream's order alone keeps from being overwritten early."""

    stream: torch.cuda.Stream
    staging: torch.Tensor | None = None


@dataclass(slots=True)
class Copier:
    """Copies into one device. Calls for one lane must not overlap; those for different lanes may.

    Attributes:
        methods: what was measured; copies go by it from the next one on.
        missing: why a method cannot be used here.
    """

    device: torch.device
    pinned: PinnedMemory
    methods: MethodTable
    missing: dict[Method, str]
    _kernel: RunsKernel | None
    _batch: BatchCopy | None

    @classmethod
    def on(cls, device: torch.device, pinned: PinnedMemory, methods: MethodTable) -> Copier:
        """With whatever cupy and `cuda.bindings` there are."""
        missing: dict[Method, str] = {}
        kernel = None
        try:
            kernel = RunsKernel(device.index)
        except (ImportError, RuntimeError) as error:
            missing["mapped"] = missing["staged"] = str(error)
        if kernel is not None and not kernel.reads_host:
            missing["mapped"] = f"{device} does not read page-locked host memory by its host address"
        batch = None
        try:
            batch = BatchCopy.of_driver()
        except ImportError as error:
            missing["batch"] = str(error)
        return cls(device, pinned, methods, missing, kernel, batch)

    @property
    def possible(self) -> tuple[Method, ...]:
        """The methods that can be used here."""
        return tuple(method for method in METHODS if method not in self.missing)

    def submit(
        self,
        lane: Lane,
        destination: torch.Tensor,
        source: HostBytes,
        runs: Runs,
        cancel: Flag,
        held: list[object],
    ) -> None:
        """Give copies to the lane's stream, in order after what it was given before.

        Args:
            destination: uint8 on the device, as `source` on the host; `runs` have to lie inside both.
            cancel: looked at between calls of the driver; what was given before it was set still runs.
            held: what has to live until the copies are done is appended before they are given.

        Raises:
            CopyCancelledError: `cancel` was set; a part may have been given.
            RuntimeError: a call of the driver failed; a part may have been given.
        """
        if not len(runs):
            return
        boundaries = self.pinned.boundaries(source)
        ordered, stretch = by_source(runs)
        nbytes = int(runs[:, 2].sum())
        # The driver copies from other memory, too, by a detour and while the caller waits; a kernel cannot read it.
        method: Method = "engine"
        if boundaries is not None:
            method = self.methods.choose(nbytes / len(runs), nbytes / int(stretch[-1] + 1), self.possible)
        if method in self.missing:
            raise RuntimeError(f"copies by {method}: {self.missing[method]}")
        with torch.cuda.stream(lane.stream):
            if method == "mapped":
                self._launch(
                    lane, source.ctypes.data, destination, cut(runs, RUN_BYTES), MAPPED_BLOCKS, cancel, held
                )
            elif method == "staged":
                self._stage(lane, destination, source, ordered, boundaries or (), cancel, held)
            else:
                pieces = cut_at(cut(runs, PIECE_BYTES), boundaries or ())
                self._copy(method, lane, destination, source, pieces, cancel, held)

    def _stage(
        self,
        lane: Lane,
        destination: torch.Tensor,
        source: HostBytes,
        ordered: Runs,
        boundaries: list[int] | tuple[()],
        cancel: Flag,
        held: list[object],
    ) -> None:
        if lane.staging is None:
            with torch.inference_mode(False):
                lane.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=self.device)
        short, stretch = by_source(cut(ordered, RUN_BYTES))
        for into, onward in stages(short, stretch, STAGING_BYTES):
            method: Method = "batch" if len(into) > 1 and "batch" not in self.missing else "engine"
            self._copy(
                method, lane, lane.staging, source, cut_at(cut(into, PIECE_BYTES), boundaries), cancel, held
            )
            self._launch(lane, lane.staging.data_ptr(), destination, onward, STAGED_BLOCKS, cancel, held)

    def _copy(
        self,
        method: Method,
        lane: Lane,
        destination: torch.Tensor,
        source: HostBytes,
        pieces: Runs,
        cancel: Flag,
        held: list[object],
    ) -> None:
        _check_wanted(cancel)
        if method == "batch":
            assert self._batch is not None
            self._batch.submit(
                lane.stream.cuda_stream, destination.data_ptr(), source.ctypes.data, pieces, held
            )
            return
        # copy_ hands page-locked memory of any origin to cudaMemcpyAsync as it is, and returns at once.
        host = torch.from_numpy(source)
        for from_, to, nbytes in pieces.tolist():
            _check_wanted(cancel)
            destination[to : to + nbytes].copy_(host[from_ : from_ + nbytes], non_blocking=True)

    def _launch(
        self,
        lane: Lane,
        source: int,
        destination: torch.Tensor,
        runs: Runs,
        blocks: int,
        cancel: Flag,
        held: list[object],
    ) -> None:
        _check_wanted(cancel)
        assert self._kernel is not None
        table = torch.from_numpy(runs).pin_memory()
        held.append(table)
        target = destination.data_ptr()
        self._kernel.launch(
            lane.stream,
            source,
            target,
            table,
            unit_bytes(runs, source, target),
            grid_blocks(len(runs), blocks),
        )


def _check_wanted(cancel: Flag) -> None:
    if cancel.is_set():
        raise CopyCancelledError("the load was given up")
