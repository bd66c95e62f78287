"""A stored run behind another: for what changes some of its calls and passes the rest on."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Self, TypeVar

from kvlane.transfer.identity import EncodedIds, KvIdentity
from kvlane.transfer.layout import CopyDescriptor, KvLayout, Region
from kvlane.transfer.store import HostBytes, StoredRun

R_co = TypeVar("R_co", bound=StoredRun, covariant=True)


class WrappedRun(Generic[R_co]):
    """See `StoredRun`. `retain` passes on, too: what it returns is not wrapped, unless a subclass does so."""

    def __init__(self, run: R_co) -> None:
        self._run = run

    @property
    def tier(self) -> str:
        return self._run.tier

    @property
    def identity(self) -> KvIdentity:
        return self._run.identity

    @property
    def token_ids(self) -> EncodedIds:
        return self._run.token_ids

    @property
    def start(self) -> int:
        return self._run.start

    @property
    def end(self) -> int:
        return self._run.end

    @property
    def load_end(self) -> int:
        return self._run.load_end

    @property
    def region(self) -> Region:
        return self._run.region

    @property
    def layout(self) -> KvLayout:
        return self._run.layout

    @property
    def memory(self) -> HostBytes:
        return self._run.memory

    @property
    def nbytes(self) -> int:
        return self._run.nbytes

    @property
    def bytes_moved(self) -> int:
        return self._run.bytes_moved

    def layer_nbytes(self, layer: int) -> int:
        return self._run.layer_nbytes(layer)

    def verify(self, layer: int) -> None:
        self._run.verify(layer)

    def check(self, destination: Region) -> None:
        self._run.check(destination)

    def copies(self, layer: int, destination: Region) -> tuple[CopyDescriptor, ...]:
        return self._run.copies(layer, destination)

    def count_moved(self, nbytes: int) -> None:
        self._run.count_moved(nbytes)

    def retain(self) -> StoredRun:
        return self._run.retain()

    def close(self) -> None:
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
