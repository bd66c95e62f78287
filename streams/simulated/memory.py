"""Blocks of memory with real bytes, and who has read and written which of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from kvlane.streams.simulated.order import Access, Kind, OrderError
from kvlane.transfer.store import HostBytes, KvSafetyError

Bytes: TypeAlias = "torch.Tensor | HostBytes"
Span: TypeAlias = tuple[Bytes, int, int]
"""Bytes `[low, high)` of a piece of memory."""

POISON = 0xFF
"""What memory holds before anything is written to it, and while a copy into it is under way."""


class _Cell:
    """Neighbouring bytes of one history: their last write, and by every actor its last read since."""

    __slots__ = ("reads", "write")

    def __init__(self, write: Access | None, reads: dict[int, Access]) -> None:
        self.write = write
        self.reads = reads


class Block:
    """One allocation. Its bytes lie in `data`; `touch` says whether an access is ordered after those before it."""

    __slots__ = ("_cells", "_starts", "base", "data", "name", "side")

    def __init__(self, side: Literal["host", "device"], number: int, nbytes: int) -> None:
        self.side = side
        self.name = f"{side} block {number}"
        self.data: HostBytes = np.full(max(1, nbytes), POISON, np.uint8)[:nbytes]
        self.base: int = self.data.__array_interface__["data"][0]
        self._starts = [0]
        self._cells = [_Cell(None, {})]

    def read(self, low: int, high: int, access: Access) -> None:
        """Note a read of bytes `[low, high)`.

        Raises:
            OrderError: nothing orders it after the last write.
        """
        reader = access.actor
        for cell in self._cells[self._split(low) : self._split(high)]:
            write = cell.write
            if write is not None and not reader.after(write):
                raise self._race("unordered_read", access, write, low, high)
            cell.reads[reader.id] = access

    def write(self, low: int, high: int, access: Access) -> None:
        """Note a write of bytes `[low, high)`.

        Raises:
            OrderError: nothing orders it after the reads and the write before it.
        """
        if low == high:
            return
        first, last = self._split(low), self._split(high)
        for cell in self._cells[first:last]:
            for earlier in (*cell.reads.values(), cell.write):
                if earlier is not None and not access.actor.after(earlier):
                    raise self._race("overwritten", access, earlier, low, high)
        # One history from here on: neighbours that were written together are one cell again.
        self._starts[first:last] = [low]
        self._cells[first:last] = [_Cell(access, {})]

    def _split(self, at: int) -> int:
        """The cell that begins at byte `at`, made so if none does; one past the last at the end."""
        place = bisect_left(self._starts, at)
        if place < len(self._starts) and self._starts[place] == at:
            return place
        if at >= self.data.size:
            return len(self._starts)
        cell = self._cells[place - 1]
        self._starts.insert(place, at)
        self._cells.insert(place, _Cell(cell.write, dict(cell.reads)))
        return place

    def _race(self, kind: Kind, later: Access, earlier: Access, low: int, high: int) -> OrderError:
        if self.side == "host" and (earlier.of_copy or later.of_copy):
            kind = "source_reused"
        elif earlier.given_up or later.given_up:
            kind = "quarantined"
        return OrderError(
            kind,
            f"{self.name} bytes [{low}, {high}): nothing orders {later} after {earlier}, which came first here",
        )


class Place(NamedTuple):
    """Bytes `[low, high)` of a block."""

    block: Block
    low: int
    high: int

    @property
    def data(self) -> HostBytes:
        return self.block.data[self.low : self.high]


class Memory:
    """All blocks, found again by the address of any view into them."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, side: Literal["host", "device"], nbytes: int) -> Block:
        block = Block(side, len(self._bases), nbytes)
        insort(self._bases, block.base)
        self._blocks[block.base] = block
        return block

    def find(self, memory: Bytes) -> Place:
        """Where a piece of memory lies.

        Raises:
            KvSafetyError: it is not this backend's, or not flat bytes.
        """
        if isinstance(memory, torch.Tensor):
            if memory.dtype != torch.uint8 or not memory.is_contiguous():
                raise KvSafetyError(f"device memory is handed around as flat bytes, not as {memory.dtype}")
            address, nbytes = memory.data_ptr(), memory.numel()
        else:
            address, nbytes = memory.__array_interface__["data"][0], memory.size
        at = bisect_right(self._bases, address)
        if at:
            block = self._blocks[self._bases[at - 1]]
            low = address - block.base
            if low + nbytes <= block.data.size:
                return Place(block, low, low + nbytes)
        raise KvSafetyError(f"{nbytes} bytes at {address:#x} are no memory of this backend")

    def find_all(self, spans: Sequence[Span]) -> list[Place]:
        places = []
        for memory, low, high in spans:
            block, base, _ = self.find(memory)
            places.append(Place(block, base + low, base + high))
        return places
