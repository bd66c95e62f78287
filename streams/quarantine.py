"""Device blocks, and the quarantine of those that a copy may still write although its load was given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvlane.policy.errors import InputError
from kvlane.streams.faults import LoadRefusedError
from kvlane.streams.load import LayerLoad
from kvlane.transfer.layout import Region

if TYPE_CHECKING:
    import torch


class Block(Protocol):
    """Device memory for the KV of one sequence: all of `memory`, or the pages of it that `region` names."""

    @property
    def memory(self) -> torch.Tensor:
        """uint8 [region.nbytes]"""

    @property
    def region(self) -> Region: ...


B = TypeVar("B", bound=Block)


class BlockPool(Generic[B]):
    """Hands out blocks. One whose load has not settled is kept back until it has, and then handed out again.

    A load is admitted before it starts and holds a place in the quarantine until it has ended one way or the other, so
    that there is always a block to recompute in: with `n` sequences there are never more than `n + most` blocks.
    Methods may be called from any thread.

    Args:
        make: makes a block; called when none is free.
        most: blocks in quarantine and loads that could send one there, together.

    Raises:
        InputError: a quarantine for no block.
    """

    def __init__(self, make: Callable[[], B], most: int = 2) -> None:
        if most < 1:
            raise InputError("most", f"is {most}", "at least 1")
        self.most = most
        self._make = make
        self._free: list[B] = []
        self._quarantined: list[tuple[B, LayerLoad]] = []
        self._admitted = 0
        self._lock = threading.Lock()  # never held while the backend is called, which `settled` does

    def take(self) -> B:
        """A block that nothing else reads or writes."""
        self._sweep()
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._make()

    def give_back(self, block: B) -> None:
        """Nobody uses it any more, and no copy into it is under way."""
        with self._lock:
            self._free.append(block)

    def admit(self) -> None:
        """Keep a place for a load; follow with `dismiss` or `quarantine`.

        Raises:
            LoadRefusedError: all places are taken.
        """
        self._sweep()
        with self._lock:
            if len(self._quarantined) + self._admitted >= self.most:
                raise LoadRefusedError(
                    f"{len(self._quarantined)} blocks are in quarantine and {self._admitted} loads under way, of "
                    f"{self.most} that may be"
                )
            self._admitted += 1

    def dismiss(self) -> None:
        """A load that was admitted left nothing behind."""
        with self._lock:
            self._admitted -= 1

    def quarantine(self, block: B, load: LayerLoad) -> None:
        """Keep a block until a load that was admitted, and given up, has settled."""
        with self._lock:
            self._admitted -= 1
            self._quarantined.append((block, load))

    @property
    def quarantined(self) -> int:
        """Blocks kept back now."""
        self._sweep()
        return len(self._quarantined)

    @property
    def quarantined_bytes(self) -> int:
        """Device memory kept back now."""
        self._sweep()
        with self._lock:
            return sum(_nbytes(block.region) for block, _ in self._quarantined)

    def _sweep(self) -> None:
        """Free the blocks whose loads have settled."""
        with self._lock:
            held = tuple(self._quarantined)
        settled = [each for each in held if each[1].settled]
        with self._lock:
            for each in settled:
                if each in self._quarantined:  # another thread may have been here, too
                    self._quarantined.remove(each)
                    self._free.append(each[0])


def _nbytes(region: Region) -> int:
    # Not `region.nbytes`: pages of a pool are not the whole pool.
    return region.capacity_tokens * region.layout.bytes_per_token + region.layout.state_bytes
