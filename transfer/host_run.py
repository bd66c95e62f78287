"""A run of tokens of one stored prompt, pinned for copying."""

from __future__ import annotations

import threading
from types import TracebackType

from kvlane.policy.errors import InputError
from kvlane.transfer.copies import WHOLE, KnownCopies, check_regions, layer_copies
from kvlane.transfer.host_entry import Entry, Moved, StoredBytes
from kvlane.transfer.identity import EncodedIds, KvIdentity
from kvlane.transfer.layout import CopyDescriptor, Region
from kvlane.transfer.shapes import TpShard
from kvlane.transfer.store import HostBytes, KvSafetyError


class HostRun:
    """Tokens `[start, end)` of one entry, pinned until closed. See `StoredRun`."""

    def __init__(
        self,
        tier: str,
        lock: threading.Lock,
        entry: Entry,
        start: int,
        end: int,
        load_end: int,
        shard: TpShard,
        moved: tuple[Moved, Moved],
    ) -> None:
        self.tier = tier
        self.start = start
        self.end = end
        self.load_end = load_end
        self.layout = entry.region.layout if shard == WHOLE else entry.region.layout.shard(shard)
        self._lock = lock
        self._entry = entry
        self._shard = shard
        self._moved = moved  # of this run and those retained from it, and of the store
        self._open = True
        self._known: KnownCopies = {}

    @property
    def identity(self) -> KvIdentity:
        return self._entry.identity

    @property
    def token_ids(self) -> EncodedIds:
        return self._entry.token_ids

    @property
    def region(self) -> Region:
        return self._entry.region

    @property
    def memory(self) -> HostBytes:
        return self._stored.memory

    @property
    def _stored(self) -> StoredBytes:
        if not self._open:
            raise KvSafetyError("the run was closed: its memory may be gone")
        return self._entry.stored

    @property
    def nbytes(self) -> int:
        return sum(self.layer_nbytes(layer) for layer in range(self.layout.layers))

    def layer_nbytes(self, layer: int) -> int:
        """Bytes a whole copy of one layer moves."""
        shape = self.layout.shape(layer)
        first, last = shape.moved(self.start, self.end, self.load_end)
        return (last - first) * shape.bytes_per_token + (shape.state_bytes if self._last else 0)

    @property
    def _last(self) -> bool:
        """Whether this part's end is the load's, where the states belong."""
        return self.end == self.load_end

    def verify(self, layer: int) -> None:
        """Check what is stored of what this run moves of a layer, in whole units; no-op without checksums.

        Raises:
            ChecksumError: it is not what was put; the error names the first unit, or the tokens before the state.
            KvSafetyError: the run was closed.
        """
        shape = self.layout.shape(layer)
        first, last = shape.moved(self.start, self.end, self.load_end)
        state_at = self.end if shape.state_bytes and self._last else None
        self._stored.verify(layer, first, last, state_at)

    @property
    def bytes_moved(self) -> int:
        return self._moved[0].nbytes

    def check(self, destination: Region) -> None:
        """That this run can be copied there.

        Raises:
            InputError: another layout, or too small a destination.
        """
        check_regions(self.region, destination, self._shard)
        if self.end > destination.capacity_tokens:
            raise InputError("source.end", f"is {self.end}", f"at most {destination.capacity_tokens} tokens")

    def copies(self, layer: int, destination: Region) -> tuple[CopyDescriptor, ...]:
        """The coalesced copies of one layer into the same tokens of `destination`.

        Raises:
            InputError: another layout, or too small a destination.
        """
        return layer_copies(
            self.region,
            destination,
            layer,
            self.start,
            self.end,
            load_end=self.load_end,
            shard=self._shard,
            known=self._known,
        )

    def count_moved(self, nbytes: int) -> None:
        """Count bytes whose copy has finished."""
        with self._lock:
            for moved in self._moved:
                moved.nbytes += nbytes

    def retain(self) -> HostRun:
        """A second handle with a pin of its own.

        Raises:
            KvSafetyError: this one was closed.
        """
        with self._lock:
            if not self._open:
                raise KvSafetyError("a closed run holds no pin to share")
            self._entry.pins += 1
        return HostRun(
            self.tier, self._lock, self._entry, self.start, self.end, self.load_end, self._shard, self._moved
        )

    def close(self) -> None:
        """Give up this handle's pin. Closing twice is harmless."""
        # Open and pins change together: two threads that close one run give up one pin.
        with self._lock:
            if self._open:
                self._open = False
                self._entry.pins -= 1

    def __enter__(self) -> HostRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
