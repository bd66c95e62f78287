"""Host memory that a CUDA device copies from at full speed: plain memory, exactly as large as asked for, page-locked.

torch's own pinned allocator rounds up to a power of two and keeps what is freed; a store of KV cannot afford either.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvlane.transfer.host import touched_bytes
from kvlane.transfer.store import HostBytes

# A single registration of hundreds of GiB fails; one of this size has room below every limit met so far.
CHUNK_BYTES = 8 << 30


class PinError(RuntimeError):
    """Host memory could not be page-locked; nothing of it stays so."""


class Registrar(Protocol):
    """The two calls of the CUDA runtime that lock pages and let them go; each returns its error code, 0 for success."""

    def register(self, address: int, nbytes: int) -> int: ...
    def unregister(self, address: int) -> int: ...
    def describe(self, code: int) -> str:
        """What an error code means."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One registration: bytes `[address, end)`."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def chunks(address: int, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The registrations that cover some memory, in order: all of them `chunk_bytes` long but the last."""
    for at in range(0, nbytes, chunk_bytes):
        yield Chunk(address + at, min(chunk_bytes, nbytes - at))


@dataclass(slots=True)
class PinnedMemory:
    """Allocates page-locked memory and knows where it lies. Methods may be called from any thread.

    Memory is let go when the last view of it is, and must not be in use by a copy then: whoever copies keeps a view.

    Args:
        chunk_bytes: size of one registration.
    """

    registrar: Registrar
    chunk_bytes: int = CHUNK_BYTES
    # By the identity of the array that owns the memory. No lock: a memory's last view can go at any moment, also while
    # this thread is in here, and each change is one step of a dict.
    _held: dict[int, list[Chunk]] = field(default_factory=dict)

    def allocate(self, nbytes: int) -> HostBytes:
        """Page-aligned, touched and page-locked memory, uint8 [nbytes].

        Raises:
            PinError: the driver refused; what it had locked of it is let go again.
        """
        memory = touched_bytes(nbytes)
        made: list[Chunk] = []
        try:
            for chunk in chunks(memory.ctypes.data, nbytes, self.chunk_bytes):
                self._register(chunk, nbytes)
                made.append(chunk)
        except BaseException:
            self._unregister(made)
            raise
        owner = _owner(memory)
        self._held[id(owner)] = made
        # On the owner, since that is the array that every view keeps. At the end of the process the driver may be gone
        # before it is called, and the system takes everything back anyway.
        weakref.finalize(owner, self._let_go, id(owner)).atexit = False
        return memory

    def boundaries(self, memory: HostBytes) -> list[int] | None:
        """Offsets in `memory` at which one registration ends and the next begins; None if it is not page-locked."""
        held = self._held.get(id(_owner(memory)))
        if not held:
            return None
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.size
        if begin < held[0].address or end > held[-1].end:
            return None
        return [chunk.end - begin for chunk in held if begin < chunk.end < end]

    @property
    def nbytes(self) -> int:
        """Memory that is locked now."""
        return sum(chunk.nbytes for held in list(self._held.values()) for chunk in held)

    def _register(self, chunk: Chunk, whole: int) -> None:
        code = self.registrar.register(chunk.address, chunk.nbytes)
        if code:
            raise PinError(
                f"page-locking {chunk.nbytes} of {whole} bytes failed: {self.registrar.describe(code)}; "
                "look at the memory that is free, and at `ulimit -l` where the process is not privileged"
            )

    def _let_go(self, owner: int) -> None:
        self._unregister(self._held.pop(owner))

    def _unregister(self, made: list[Chunk]) -> None:
        # Errors are of no use to anybody here: the memory is going, and a device that is lost has let go of it.
        for chunk in made:
            self.registrar.unregister(chunk.address)


def _owner(memory: HostBytes) -> HostBytes:
    owner = memory
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner
