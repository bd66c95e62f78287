"""What every tier's store offers: put, look up, and open a run of tokens for copying."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvlane.transfer.identity import EncodedIds, KvIdentity, TokenIds
from kvlane.transfer.layout import CopyDescriptor, KvLayout, Region
from kvlane.transfer.shapes import TpShard

HostBytes: TypeAlias = npt.NDArray[np.uint8]
LayerKv: TypeAlias = tuple[HostBytes, HostBytes] | tuple[HostBytes, HostBytes, HostBytes]
"""One layer's keys and values as flat bytes, `[token][head][dim]` each, and its states where it has one."""


class KvSafetyError(RuntimeError):
    """Going on could have read, stored or freed KV that is not what it is taken for: a mistake of the caller.

    Something was used after it was closed or changed, before it was ready, or by two threads at once.
    """


class StaleHitError(LookupError):
    """The entry a hit names has been evicted since the lookup: treat it as a miss."""


class StoreFullError(RuntimeError):
    """No room, and nothing that may be evicted makes enough."""


class ChecksumError(RuntimeError):
    """Stored bytes are no longer those that were put: tokens `[start, end)` of `layer` must not be loaded."""

    def __init__(self, layer: int, start: int, end: int) -> None:
        self.layer = layer
        self.start = start
        self.end = end
        super().__init__(f"stored KV of layer {layer}, tokens [{start}, {end}), fails its checksum")


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored prefix: tokens `[0, tokens)` of the prompt looked up.

    Attributes:
        tier: name of the tier that holds it.
        state: `hit`, or `miss` with 0 tokens.
        tokens: whole units, counted from token 0.
        store: which store found it: numbers of entries mean nothing to another one.
        entry: which stored prompt, for the store's own use; 0 on a miss.
        checkpoints: token counts at which a load may end where layers have states; empty where none has.
    """

    tier: str
    state: Literal["hit", "miss"]
    tokens: int
    store: str
    entry: int
    checkpoints: tuple[int, ...] = ()


class StoredRun(Protocol):
    """Tokens `[start, end)` of one stored prompt, pinned until closed: its memory is neither freed nor rewritten.

    `verify`, `copies`, `count_moved`, `retain` and `close` may take their time; all else is answered from memory.
    """

    @property
    def tier(self) -> str: ...
    @property
    def identity(self) -> KvIdentity: ...
    @property
    def token_ids(self) -> EncodedIds:
        """The ids the stored prompt was made from, from token 0 to at least `end`."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def load_end(self) -> int:
        """Where the load ends that this run is a part of: windows are counted back from it, states belong there."""

    @property
    def region(self) -> Region:
        """How `memory` is arranged."""

    @property
    def memory(self) -> HostBytes:
        """The block the descriptors' source offsets count in."""

    @property
    def nbytes(self) -> int:
        """Bytes a copy of the whole run moves."""

    @property
    def bytes_moved(self) -> int:
        """Bytes of finished copies out of this run and every run retained from it."""

    @property
    def layout(self) -> KvLayout:
        """The layout of what is moved, which a destination must have."""

    def layer_nbytes(self, layer: int) -> int:
        """Bytes a whole copy of one layer moves: copies that carry fewer are short."""

    def verify(self, layer: int) -> None:
        """Check the stored bytes of one layer of the run; call before its copies are issued.

        Nothing happens in a store that keeps no checksums.

        Raises:
            ChecksumError: they are not those that were put.
        """

    def check(self, destination: Region) -> None:
        """That this run can be copied there.

        Raises:
            InputError: another layout, or too small a destination.
        """

    def copies(self, layer: int, destination: Region) -> tuple[CopyDescriptor, ...]:
        """The coalesced copies of one layer into the same tokens of `destination`; none where it moves nothing."""

    def count_moved(self, nbytes: int) -> None:
        """Count bytes whose copy has finished."""

    def retain(self) -> StoredRun:
        """A second handle with a pin of its own: the copies' pin outlives the caller's."""

    def close(self) -> None:
        """Give up this handle's pin. Closing twice is harmless."""

    def __enter__(self) -> StoredRun: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """A tier's store. Every method may be called from any thread, and may take its time: whoever cannot wait asks on
    another thread, as `streams.store_thread` does. Properties are answered from memory."""

    @property
    def tier(self) -> str: ...
    @property
    def unit_tokens(self) -> int:
        """The load unit: smallest run of tokens stored."""

    @property
    def bytes_moved(self) -> int:
        """Bytes of finished copies out of this store."""

    def put(
        self,
        identity: KvIdentity,
        token_ids: TokenIds,
        layout: KvLayout,
        layers: Iterable[LayerKv],
        checkpoints: Sequence[int] = (),
    ) -> int:
        """Store a prompt's whole units; returns how many tokens are now stored.

        Each layer is copied before the next is asked for, and `layers` is read to its end before any of it can be
        found: a source that changes meanwhile has the chance to raise. `checkpoints` are the token counts whose states
        it holds, where layers have states.
        """

    def lookup(self, identity: KvIdentity, token_ids: TokenIds) -> Hit: ...

    def open(
        self, hit: Hit, start: int, end: int, *, load_end: int | None = None, shard: TpShard = ...
    ) -> StoredRun:
        """Pin tokens `[start, end)` of a hit, as a part of a load that ends at `load_end` (`end` if None)."""
