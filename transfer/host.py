"""KV in host memory: whole prompts as a prefill wrote them, layer-major or in an engine's form of blocks."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvlane.policy.errors import InputError
from kvlane.transfer.copies import WHOLE
from kvlane.transfer.host_entry import Entry, Moved, StoredBytes, write_layers
from kvlane.transfer.host_run import HostRun
from kvlane.transfer.identity import KvIdentity, TokenIds, encode_token_ids, iter_token_chain
from kvlane.transfer.layout import KvLayout, KvRegion
from kvlane.transfer.paged import BlockForm, PagedRegion
from kvlane.transfer.shapes import TpShard
from kvlane.transfer.store import (
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


class HostStore:
    """Prompts' KV in host memory, tier `host`, least recently used evicted first.

    An entry holds one whole prompt; entries that share a prefix do not share memory. Methods may be called from
    any thread. An entry becomes visible after its last byte is written, never before.

    Args:
        unit_tokens: the load unit; prompts are stored and found in whole units.
        capacity_bytes: most bytes to hold, no limit if None.
        form: how a prompt's KV lies: in blocks of this form, one after another, which an engine that has the same takes
            in the fewest copies (a chunk-major store where they hold all layers); layer-major if None.
        checksums: keep a CRC-32 of every layer and unit, for `StoredRun.verify`. Off by default: host memory has checks
            of its own, and finding the sum takes about three times as long as the copy of the bytes (6.8 and 20.7
            GB/s on one core), while the copy waits.
        allocate: where memory comes from: a function of a byte count that returns touched memory (a device's backend
            gives pinned memory here).

    Raises:
        InputError: a unit or a capacity below one, blocks of which a unit holds no whole number.
    """

    tier = "host"

    def __init__(
        self,
        unit_tokens: int,
        capacity_bytes: int | None = None,
        *,
        form: BlockForm | None = None,
        checksums: bool = False,
        allocate: Callable[[int], HostBytes] = touched_bytes,
    ) -> None:
        if unit_tokens < 1:
            raise InputError("unit_tokens", f"is {unit_tokens}", "at least 1")
        if form is not None and unit_tokens % form.tokens:
            raise InputError("form.tokens", f"is {form.tokens}", f"a divisor of the unit, {unit_tokens}")
        if capacity_bytes is not None and capacity_bytes < 1:
            raise InputError("capacity_bytes", f"is {capacity_bytes}", "at least 1")
        self.unit_tokens = unit_tokens
        self.capacity_bytes = capacity_bytes
        self.form = form
        self.checksums = checksums
        self._allocate = allocate
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # oldest use first
        self._by_digest: dict[bytes, set[int]] = {}
        self._writing: set[bytes] = set()  # last digests of the prompts that are being put
        self._next_number = 1
        self._used_bytes = 0
        self._moved = Moved()

    @property
    def bytes_moved(self) -> int:
        """Bytes of finished copies out of this store."""
        with self._lock:
            return self._moved.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes held, those of puts under way included."""
        with self._lock:
            return self._used_bytes

    def put(
        self,
        identity: KvIdentity,
        token_ids: TokenIds,
        layout: KvLayout,
        layers: Iterable[LayerKv],
        checkpoints: Sequence[int] = (),
    ) -> int:
        """Store a prompt's whole units; returns how many tokens are now stored.

        A prompt that is already stored, with these checkpoints, is only marked as used. 0 tokens are below one unit, or
        of a prompt that another call is storing right now: nothing is read then. What has to go to make room goes once
        the first layer has been read and found right; the memory of the new entry is never held beside it, so a put
        that fails later has cost the entries it took the place of.

        Where layers have states, what follows the last checkpoint could never be used and is not stored.

        Args:
            identity: what the KV belongs to; `identity.layout` must be `layout.name`.
            token_ids: the prompt's ids, shape [tokens].
            layers: for every layer in order its keys and values as flat bytes, at least the whole units' worth, and
                third, where it has a state, that state after each checkpoint, one after another. Read one layer at a
                time, so it may be a generator that copies from a device.
            checkpoints: token counts, rising, after which `layers` holds states; of no meaning where no layer has one.

        Raises:
            InputError: a layout that is not the identity's, checkpoints out of order or inside a unit, too few layers
                or bytes.
            StoreFullError: larger than the capacity, or than what may be evicted.
        """
        if identity.layout != layout.name:
            raise InputError("identity.layout", f"is {identity.layout}", layout.name)
        ids = encode_token_ids(token_ids)
        tokens = ids.size // self.unit_tokens * self.unit_tokens
        points: tuple[int, ...] = ()
        if layout.has_states:
            points = self._checked_checkpoints(checkpoints, tokens)
            tokens = points[-1] if points else 0
        if tokens == 0:
            return 0
        ids = ids[:tokens].copy()
        digests = tuple(iter_token_chain(identity, ids, self.unit_tokens))
        region = self._region(layout, tokens, points)
        with self._lock:
            number = self._holder(digests[-1], points or (tokens,))
            if number:
                self._entries.move_to_end(number)
                return tokens
            if digests[-1] in self._writing:
                return 0
            self._writing.add(digests[-1])
        try:
            stored = self._write(region, layers, points)
            # Published only now: until here no index knows the entry, so no reader can find it half written.
            with self._lock:
                entry = Entry(self._next_number, identity, ids, digests, stored)
                self._next_number += 1
                self._entries[entry.number] = entry
                for digest in digests:
                    self._by_digest.setdefault(digest, set()).add(entry.number)
        finally:
            with self._lock:
                self._writing.discard(digests[-1])
        return tokens

    def _checked_checkpoints(self, checkpoints: Sequence[int], tokens: int) -> tuple[int, ...]:
        points = tuple(checkpoints)
        if list(points) != sorted(set(points)) or any(at < 1 or at % self.unit_tokens for at in points):
            raise InputError("checkpoints", f"are {points}", f"rising multiples of {self.unit_tokens}")
        return tuple(at for at in points if at <= tokens)

    def _holder(self, digest: bytes, ends: Iterable[int]) -> int:
        """An entry of this prefix that serves hits with all of these ends, 0 for none; under the lock."""
        for number in self._by_digest.get(digest, ()):
            if all(self._entries[number].usable_to(end) for end in ends):
                return number
        return 0

    def _region(self, layout: KvLayout, tokens: int, checkpoints: tuple[int, ...]) -> KvRegion | PagedRegion:
        if self.form is None:
            return KvRegion(layout, tokens, checkpoints)
        if layout.has_states:
            raise InputError("layout", "has states", "a store without a form of blocks for it")
        blocks = tokens // self.form.tokens
        return PagedRegion(layout, self.form, blocks, range(blocks))

    def _write(
        self, region: KvRegion | PagedRegion, layers: Iterable[LayerKv], checkpoints: tuple[int, ...]
    ) -> StoredBytes:
        """The layers in memory that is reserved for them once the first has been read."""
        reserved = False

        def allocate() -> HostBytes:
            nonlocal reserved
            with self._lock:
                self._reserve(region.nbytes)
                reserved = True
            return self._allocate(region.nbytes)

        try:
            return write_layers(
                region, layers, allocate, self.unit_tokens, checkpoints, checksums=self.checksums
            )
        except BaseException:
            if reserved:
                with self._lock:
                    self._used_bytes -= region.nbytes
            raise

    def lookup(self, identity: KvIdentity, token_ids: TokenIds) -> Hit:
        """The longest stored prefix of a prompt, in whole units; also a part of a longer or different prompt's.

        Where layers have states it ends at a checkpoint: what is stored beyond the last one is worth nothing.

        Raises:
            InputError: unusable token ids.
        """
        tokens = matched = number = 0
        checkpoints: tuple[int, ...] = ()
        chain = iter_token_chain(identity, encode_token_ids(token_ids), self.unit_tokens)
        with self._lock:
            for digest in chain:
                if digest not in self._by_digest:
                    break
                matched += self.unit_tokens
                holder = self._holder(digest, (matched,))
                if holder:
                    tokens, number = matched, holder
            if number:
                kept = self._entries[number].stored.checkpoints
                checkpoints = tuple(at for at in kept if at <= tokens)
        return Hit(self.tier, "hit" if tokens else "miss", tokens, self._id, number, checkpoints)

    def open(
        self, hit: Hit, start: int, end: int, *, load_end: int | None = None, shard: TpShard = WHOLE
    ) -> HostRun:
        """Pin tokens `[start, end)` of a hit for copying; close it (or leave its `with`) to let go.

        Args:
            load_end: where the load ends that this run is a part of, `end` if None. A part that ends before moves no
                state, and of a layer with a window only what that leaves of it.
            shard: move the heads of one tensor-parallel rank only.

        Raises:
            InputError: a miss, a hit of another store, a range outside the hit or ending inside a unit, a load of
                layers with states that does not end at a checkpoint, heads that cannot be divided so.
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
        load_end = end if load_end is None else load_end
        if load_end < end:
            raise InputError("load_end", f"is {load_end}", f"at least {end}, where this part ends")
        with self._lock:
            entry = self._entries.get(hit.entry)
            if entry is None:
                raise StaleHitError(f"entry {hit.entry} of tier {self.tier} was evicted after the lookup")
            if end == load_end and not entry.usable_to(end):
                raise InputError("end", f"no state is stored after {end}", f"one of {hit.checkpoints}")
            run = HostRun(self.tier, self._lock, entry, start, end, load_end, shard, (Moved(), self._moved))
            self._entries.move_to_end(entry.number)
            entry.pins += 1
        return run

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
            victims: list[Entry] = []
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

    def _drop(self, entry: Entry) -> None:
        if entry.pins:
            raise KvSafetyError(f"entry {entry.number} is pinned: it is being read")
        del self._entries[entry.number]
        self._used_bytes -= entry.region.nbytes
        for digest in entry.digests:
            holders = self._by_digest[digest]
            holders.discard(entry.number)
            if not holders:
                del self._by_digest[digest]
