"""Copies as arrays, and their cutting and gathering before a device gets them. No device is touched here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import KvSafetyError

Runs: TypeAlias = npt.NDArray[np.int64]
"""Copies as rows of source byte, destination byte and bytes, shape [copies, 3]."""

# Where a run of device memory begins as its source does within this, a staged copy is as aligned as a direct one.
_ALIGN = 16


def runs_of(copies: Sequence[CopyDescriptor], source_bytes: int, destination_bytes: int) -> Runs:
    """The copies as an array.

    Raises:
        KvSafetyError: one reaches outside a block; on a device it would end every later call, not only this one.
    """
    flat = np.fromiter(chain.from_iterable(copies), np.int64, 4 * len(copies))
    runs = np.ascontiguousarray(flat.reshape(-1, 4)[:, 1:])
    if runs.size:
        ends = runs[:, :2] + runs[:, 2:]
        if runs.min() < 0 or ends[:, 0].max() > source_bytes or ends[:, 1].max() > destination_bytes:
            raise KvSafetyError(
                f"a copy reaches outside its blocks of {source_bytes} and {destination_bytes} bytes"
            )
    return runs


def cut(runs: Runs, piece_bytes: int) -> Runs:
    """The same bytes in the same order, in runs of at most `piece_bytes`."""
    pieces = -(-runs[:, 2] // piece_bytes)
    if runs.size == 0 or pieces.max() <= 1:
        return runs
    last = np.cumsum(pieces)
    number = np.arange(last[-1]) - np.repeat(last - pieces, pieces)
    made = np.repeat(runs, pieces, axis=0)
    made[:, :2] += (number * piece_bytes)[:, None]
    made[:, 2] = np.minimum(piece_bytes, made[:, 2] - number * piece_bytes)
    return made


def cut_at(runs: Runs, boundaries: Sequence[int]) -> Runs:
    """The same bytes in runs none of which has a boundary of the source inside."""
    for at in boundaries:
        across = (runs[:, 0] < at) & (runs[:, 0] + runs[:, 2] > at)
        if across.any():
            first, second = runs[across].copy(), runs[across].copy()
            first[:, 2] = at - first[:, 0]
            second += np.column_stack((first[:, 2], first[:, 2], -first[:, 2]))
            runs = np.concatenate((runs[~across], first, second))
    return runs


def by_source(runs: Runs) -> tuple[Runs, Runs]:
    """The runs in the order they lie in the source, and the number of the stretch of it that each is in, shape [runs].

    Runs that follow one another in the source without a gap share a stretch.
    """
    ordered = runs[np.argsort(runs[:, 0], kind="stable")]
    gaps = ordered[1:, 0] != ordered[:-1, 0] + ordered[:-1, 2]
    return ordered, np.concatenate((np.zeros(min(1, len(runs)), np.int64), np.cumsum(gaps)))


def stages(ordered: Runs, stretch: Runs, staging_bytes: int) -> Iterator[tuple[Runs, Runs]]:
    """Copies by way of a buffer: for each filling of it, what goes into it and what goes on from there.

    Both are runs; those into the buffer are one a stretch.

    Args:
        ordered: what `by_source` returns, as `stretch`.
        staging_bytes: size of the buffer, with room for the longest run and twice the alignment.
    """
    begin = 0
    while begin < len(ordered):
        # Every stretch may lose as much as the alignment, at each of its ends.
        lost = 2 * _ALIGN * (stretch[begin:] - stretch[begin] + 1)
        count = int(np.searchsorted(np.cumsum(ordered[begin:, 2]) + lost, staging_bytes, side="right"))
        assert count > 0, "the buffer has no room for one run"
        yield _staged(ordered[begin : begin + count], stretch[begin : begin + count])
        begin += count


def _staged(part: Runs, stretch: Runs) -> tuple[Runs, Runs]:
    """One filling: the part's stretches, one behind the other in the buffer, each as aligned as in the source."""
    _, first = np.unique(stretch, return_index=True)
    begins = part[first, 0]
    sizes = np.add.reduceat(part[:, 2], first)
    room = -(-(sizes + begins % _ALIGN) // _ALIGN) * _ALIGN
    places = np.cumsum(room) - room + begins % _ALIGN
    into = np.column_stack((begins, places, sizes))
    onward = part.copy()
    onward[:, 0] += np.repeat(places - begins, np.diff(np.append(first, len(part))))
    return into, onward
