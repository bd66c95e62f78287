"""KV in host memory: whole prompts, layer-major, as the prefill that computed them wrote them."""

from __future__ import annotations

import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import TracebackType

import numpy as np

from kvlane.policy.errors import InputError
from kvlane.transfer.identity import EncodedIds, KvIdentity, TokenIds, encode_token_ids, iter_token_chain
from kvlane.transfer.layout import CopyDescriptor, KvLayout, KvRegion, layer_copies
from kvlane.transfer.store import (
    ChecksumError,
    Hit,
    HostBytes,
    KvSafetyError,
    LayerKv,
    StaleHitError,
    StoreFullError,
)

_PAGE_BYTES = 4096


def touched_bytes(nbytes: int) -> HostBytes:
    """Page-aligned host memory with every page already present, shape [nbytes].

    A page's first touch costs several times the copy into it, which would be charged to the first transfer.
    """
    raw = np.empty(nbytes + _PAGE_BYTES, np.uint8)
    skip = -raw.ctypes.data % _PAGE_BYTES
    memory = raw[skip : skip + nbytes]
    memory[::_PAGE_BYTES] = 0
    return memory


@dataclass(slots=True, eq=False)
class _Entry:
    """One stored prompt. `pins` changes under the store's lock only."""

    number: int
    identity: KvIdentity
    token_ids: EncodedIds
    digests: tuple[bytes, ...]
    region: KvRegion
    memory: HostBytes
    checksums: list[list[int]]  # by layer and unit; empty in a store without
    pins: int = 0


@dataclass(slots=True)
class _Moved:
    """Bytes counted by a run and those retained from it; changes under the store's lock only."""

    nbytes: int = 0


class HostStore:
    """Prompts' KV in host memory, tier `host`, least recently used evicted first.

    An entry holds one whole prompt; entries that share a prefix do not share memory. Methods may be called from
    any thread. An entry becomes visible after its last byte is written, never before.

    Args:
        unit_tokens: the load unit; prompts are stored and found in whole units.
        capacity_bytes: most bytes to hold, no limit if None.
        checksums: keep a checksum of every layer and unit, for `StoredRun.verify`.
        allocate: where memory comes from: a function of a byte count that returns touched memory (a device's backend
            gives pinned memory here).

    Raises:
        InputError: a unit or a capacity below one.
    """

    tier = "host"

    def __init__(
        self,
        unit_tokens: int,
        capacity_bytes: int | None = None,
        *,
        checksums: bool = False,
        allocate: Callable[[int], HostBytes] = touched_bytes,
    ) -> None:
        if unit_tokens < 1:
            raise InputError("unit_tokens", f"is {unit_tokens}", "at least 1")
        if capacity_bytes is not None and capacity_bytes < 1:
            raise InputError("capacity_bytes", f"is {capacity_bytes}", "at least 1")
        self.unit_tokens = unit_tokens
        self.capacity_bytes = capacity_bytes
        self.checksums = checksums
        self._allocate = allocate
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # oldest use first
        self._by_digest: dict[bytes, set[int]] = {}
        self._writing: set[bytes] = set()  # last digests of the prompts that are being put
        self._next_number = 1
        self._used_bytes = 0
        self._bytes_moved = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes of finished copies out of this store."""
        with self._lock:
            return self._bytes_moved

    @property
    def used_bytes(self) -> int:
        """Bytes held, those of puts under way included."""
        with self._lock:
            return self._used_bytes

    def put(
        self, identity: KvIdentity, token_ids: TokenIds, layout: KvLayout, layers: Iterable[LayerKv]
    ) -> int:
        """Store a prompt's whole units; returns how many tokens are now stored.

        A prompt that is already stored is only marked as used. 0 tokens are below one unit, or of a prompt that another
        call is storing right now: nothing is read then. What has to go to make room goes once the first layer has been
        read and found right; the memory of the new entry is never held beside it, so a put that fails later has cost
        the entries it took the place of.

        Args:
            identity: what the KV belongs to; `identity.layout` must be `layout.name`.
            token_ids: the prompt's ids, shape [tokens].
            layers: for every layer in order its keys and values as flat bytes, at least the whole units' worth. Read
                one layer at a time, so it may be a generator that copies from a device.

        Raises:
            InputError: a layout that is not the identity's, too few layers or bytes.
            StoreFullError: larger than the capacity, or than what may be evicted.
        """
        if identity.layout != layout.name:
            raise InputError("identity.layout", f"is {identity.layout}", layout.name)
        ids = encode_token_ids(token_ids)
        tokens = ids.size // self.unit_tokens * self.unit_tokens
        if tokens == 0:
            return 0
        ids = ids[:tokens].copy()
        digests = tuple(iter_token_chain(identity, ids, self.unit_tokens))
        region = KvRegion(layout, tokens)
        with self._lock:
            holders = self._by_digest.get(digests[-1])
            if holders:
                self._entries.move_to_end(next(iter(holders)))
                return tokens
            if digests[-1] in self._writing:
                return 0
            self._writing.add(digests[-1])
        try:
            memory, checksums = self._write(region, layers)
            # Published only now: until here no index knows the entry, so no reader can find it half written.
            with self._lock:
                entry = _Entry(self._next_number, identity, ids, digests, region, memory, checksums)
                self._next_number += 1
                self._entries[entry.number] = entry
                for digest in digests:
                    self._by_digest.setdefault(digest, set()).add(entry.number)
        finally:
            with self._lock:
                self._writing.discard(digests[-1])
        return tokens

    def _write(self, region: KvRegion, layers: Iterable[LayerKv]) -> tuple[HostBytes, list[list[int]]]:
        """The layers in memory that has been reserved for them, and the checksums of their units."""
        rows = _checked(region, layers)
        first = next(rows)
        with self._lock:
            self._reserve(region.nbytes)
        try:
            memory = self._allocate(region.nbytes)
            checksums: list[list[int]] = []
            for layer, (keys, values) in enumerate(chain((first,), rows)):
                split, after = region.value_offset(layer), region.key_offset(layer + 1)
                np.copyto(memory[region.key_offset(layer) : split], keys)
                np.copyto(memory[split:after], values)
                if self.checksums:
                    units = range(0, region.capacity_tokens, self.unit_tokens)
                    checksums.append(
                        [_checksum(region, memory, layer, at, at + self.unit_tokens) for at in units]
                    )
        except BaseException:
            with self._lock:
                self._used_bytes -= region.nbytes
            raise
        return memory, checksums

    def lookup(self, identity: KvIdentity, token_ids: TokenIds) -> Hit:
        """The longest stored prefix of a prompt, in whole units; also a part of a longer or different prompt's.

        Raises:
            InputError: unusable token ids.
        """
        tokens, number = 0, 0
        chain = iter_token_chain(identity, encode_token_ids(token_ids), self.unit_tokens)
        with self._lock:
            for digest in chain:
                holders = self._by_digest.get(digest)
                if not holders:
                    break
                tokens += self.unit_tokens
                number = next(iter(holders))
        return Hit(self.tier, "hit" if tokens else "miss", tokens, self._id, number)

    def open(self, hit: Hit, start: int, end: int) -> HostRun:
        """Pin tokens `[start, end)` of a hit for copying; close it (or leave its `with`) to let go.

        Raises:
            InputError: a miss, a hit of another store, or a range outside the hit or ending inside a unit.
            StaleHitError: evicted since the lookup.
        """
        if hit.store != self._id:
            raise InputError("hit", "was found by another store", "one that this store's lookup returned")
        if not 0 <= start < end <= hit.tokens:
            raise InputError(
                "tokens", f"[{start}, {end}) is not inside the hit", f"0 <= start < end <= {hit.tokens}"
            )
        if end % self.unit_tokens:
            raise InputError("end", f"{end} is no whole number of units", f"a multiple of {self.unit_tokens}")
        with self._lock:
            entry = self._entries.get(hit.entry)
            if entry is None:
                raise StaleHitError(f"entry {hit.entry} of tier {self.tier} was evicted after the lookup")
            self._entries.move_to_end(entry.number)
            entry.pins += 1
        return HostRun(self, entry, start, end)

    def clear(self) -> int:
        """Drop every unpinned entry; returns how many stay because they are pinned."""
        with self._lock:
            for entry in [e for e in self._entries.values() if e.pins == 0]:
                self._drop(entry)
            return len(self._entries)

    def _reserve(self, nbytes: int) -> None:
        """Make room, under the lock. Nothing is dropped unless that makes enough."""
        if self.capacity_bytes is not None:
            excess = self._used_bytes + nbytes - self.capacity_bytes
            victims: list[_Entry] = []
            for entry in self._entries.values():
                if excess <= 0:
                    break
                if entry.pins == 0:
                    victims.append(entry)
                    excess -= entry.region.nbytes
            if excess > 0:
                raise StoreFullError(
                    f"tier {self.tier} has no room for {nbytes} bytes: {excess} more than can be evicted "
                    f"from {self.capacity_bytes}"
                )
            for entry in victims:
                self._drop(entry)
        self._used_bytes += nbytes

    def _drop(self, entry: _Entry) -> None:
        if entry.pins:
            raise KvSafetyError(f"entry {entry.number} is pinned: it is being read")
        del self._entries[entry.number]
        self._used_bytes -= entry.region.nbytes
        for digest in entry.digests:
            holders = self._by_digest[digest]
            holders.discard(entry.number)
            if not holders:
                del self._by_digest[digest]

    def _retain(self, run: HostRun) -> None:
        with self._lock:
            if not run._open:
                raise KvSafetyError("a closed run holds no pin to share")
            run._entry.pins += 1

    def _release(self, run: HostRun) -> None:
        # Open and pins change together: two threads that close one run give up one pin.
        with self._lock:
            if run._open:
                run._open = False
                run._entry.pins -= 1

    def _count(self, moved: _Moved, nbytes: int) -> None:
        with self._lock:
            moved.nbytes += nbytes
            self._bytes_moved += nbytes


class HostRun:
    """Tokens `[start, end)` of one entry, pinned until closed. See `StoredRun`."""

    def __init__(
        self, store: HostStore, entry: _Entry, start: int, end: int, moved: _Moved | None = None
    ) -> None:
        self._store = store
        self._entry = entry
        self._moved = moved or _Moved()
        self._open = True
        self.start = start
        self.end = end

    @property
    def tier(self) -> str:
        return self._store.tier

    @property
    def identity(self) -> KvIdentity:
        return self._entry.identity

    @property
    def token_ids(self) -> EncodedIds:
        return self._entry.token_ids

    @property
    def region(self) -> KvRegion:
        return self._entry.region

    @property
    def memory(self) -> HostBytes:
        if not self._open:
            raise KvSafetyError("the run was closed: its memory may be gone")
        return self._entry.memory

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.region.layout.bytes_per_token

    @property
    def layout(self) -> KvLayout:
        return self.region.layout

    def layer_nbytes(self, layer: int) -> int:
        """Bytes a whole copy of one layer moves."""
        if not self.layout.holds(layer):
            return 0
        return (self.end - self.start) * self.layout.layer_bytes_per_token

    def verify(self, layer: int) -> None:
        """Check the stored bytes of one layer of the run. Nothing happens in a store without checksums.

        Raises:
            ChecksumError: they are not those that were put, in the first unit that it names.
            KvSafetyError: the run was closed.
        """
        sums = self._entry.checksums
        if not sums:
            return
        unit = self._store.unit_tokens
        for first in range(self.start // unit * unit, self.end, unit):
            if _checksum(self.region, self.memory, layer, first, first + unit) != sums[layer][first // unit]:
                raise ChecksumError(layer, first, first + unit)

    @property
    def bytes_moved(self) -> int:
        return self._moved.nbytes

    def copies(self, layer: int, destination: KvRegion) -> tuple[CopyDescriptor, ...]:
        """The coalesced copies of one layer into the same tokens of `destination`.

        Raises:
            InputError: another layout, or too small a destination.
        """
        return layer_copies(self.region, destination, layer, self.start, self.end)

    def count_moved(self, nbytes: int) -> None:
        """Count bytes whose copy has finished."""
        self._store._count(self._moved, nbytes)

    def retain(self) -> HostRun:
        """A second handle with a pin of its own."""
        self._store._retain(self)
        return HostRun(self._store, self._entry, self.start, self.end, self._moved)

    def close(self) -> None:
        """Give up this handle's pin. Closing twice is harmless."""
        self._store._release(self)

    def __enter__(self) -> HostRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checksum(region: KvRegion, memory: HostBytes, layer: int, start: int, end: int) -> int:
    """CRC-32 of a token range of one layer, its keys before its values."""
    keys = zlib.crc32(memory[region.key_offset(layer, start) : region.key_offset(layer, end)].data)
    return zlib.crc32(memory[region.value_offset(layer, start) : region.value_offset(layer, end)].data, keys)


def _checked(region: KvRegion, layers: Iterable[LayerKv]) -> Iterator[LayerKv]:
    """The layers, each as long as its place in the region; read to their end, and refused if there are not as many."""
    layout, tokens = region.layout, region.capacity_tokens
    read = 0
    for keys, values in layers:
        if read == layout.layers:
            raise InputError("layers", "holds more layers than the layout", str(layout.layers))
        yield (
            _part(keys, tokens * layout.k_bytes_per_token, "keys", read),
            _part(values, tokens * layout.v_bytes_per_token, "values", read),
        )
        read += 1
    if read < layout.layers:
        raise InputError("layers", f"holds {read} layers", str(layout.layers))


def _part(source: HostBytes, nbytes: int, what: str, layer: int) -> HostBytes:
    if source.dtype != np.uint8 or source.ndim != 1:
        raise InputError(
            "layers", f"{what} of layer {layer} are {source.dtype}[{source.ndim}d]", "flat bytes"
        )
    if source.size < nbytes:
        raise InputError("layers", f"{what} of layer {layer} are {source.size} bytes", f"at least {nbytes}")
    return source[:nbytes]
