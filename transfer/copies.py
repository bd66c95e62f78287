"""The copies that bring one layer of some tokens from where it lies to where it is wanted, as few as there can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from kvlane.policy.errors import InputError
from kvlane.transfer.layout import CopyDescriptor, Region, Rows, coalesce
from kvlane.transfer.shapes import TpShard

WHOLE = TpShard(1, 0)

Sides: TypeAlias = tuple[Rows, ...]
KnownCopies: TypeAlias = dict[tuple[Sides, Sides, range, int, int], tuple[CopyDescriptor, ...]]
"""What `row_copies` has answered, by what it was asked."""


def layer_copies(
    source: Region,
    destination: Region,
    layer: int,
    start: int,
    end: int,
    *,
    load_end: int | None = None,
    shard: TpShard = WHOLE,
    known: KnownCopies | None = None,
) -> tuple[CopyDescriptor, ...]:
    """The coalesced copies that carry tokens `[start, end)` of one layer to the same tokens of another region.

    In the order of the destination's bytes. Fewer cannot carry them: two copies could be one only where the second
    begins at the end of the first on both sides, and in this order such two are neighbours. `len()` of the result
    is the copy count that the cost model prices.

    Args:
        load_end: where the whole load ends that this is a part of, `end` if None. Windows are counted back from it,
            and states move with the part that reaches it.
        shard: the rank whose heads are taken out of the source's.
        known: what was found for other layers, which holds for all of their shape; added to.

    Raises:
        InputError: regions of different layouts, a layer or a token range outside one of them, no state at `load_end`.
    """
    check_regions(source, destination, shard)
    shape = source.layout.shape(layer)
    room = min(source.capacity_tokens, destination.capacity_tokens)
    if not 0 <= start <= end <= room:
        raise InputError(
            "tokens", f"[{start}, {end}) is no range of {room} tokens", "0 <= start <= end <= capacity"
        )
    load_end = end if load_end is None else load_end
    if load_end < end:
        raise InputError("load_end", f"is {load_end}", f"at least {end}, where this part ends")
    copies: list[CopyDescriptor] = []
    first, last = shape.moved(start, end, load_end)
    if first < last:
        heads = shard.heads(shape.kv_heads)
        from_, to = source.layer_offset(layer), destination.layer_offset(layer)
        # Layers of one shape differ by where they begin only.
        key = source.rows(layer), destination.rows(layer), heads, first, last
        runs = known.get(key) if known is not None else None
        if runs is None:
            runs = row_copies(*key)
            if known is not None:
                known[key] = runs
        copies.extend(
            CopyDescriptor(layer, from_ + run.source, to + run.destination, run.nbytes) for run in runs
        )
    if shape.state_bytes and start < end == load_end:
        at = source.state_offset(layer, end), destination.state_offset(layer, end)
        copies.append(CopyDescriptor(layer, *at, shape.state_bytes))
    return tuple(copies)


def check_regions(source: Region, destination: Region, shard: TpShard = WHOLE) -> None:
    """Raises InputError where KV of `source`, or a rank's heads of it, is not what `destination` has room for."""
    needed = source.layout if shard == WHOLE else source.layout.shard(shard)
    if destination.layout != needed:
        raise InputError(
            "layout", f"{needed.name} cannot be copied into {destination.layout.name}", "the same layout"
        )


def row_copies(
    sources: Sides, destinations: Sides, heads: range, start: int, end: int
) -> tuple[CopyDescriptor, ...]:
    """The coalesced copies of tokens `[start, end)`, offsets counted from the layers' first bytes."""
    runs: list[CopyDescriptor] = []
    for from_, to in _side_by_side(sources, destinations):
        for first, last in _pieces(start, end, from_, to):
            at_source = from_.at(first) + heads.start * from_.head_stride
            at_destination = to.at(first)
            for source, destination, nbytes in _runs(from_, to, len(heads), last - first):
                runs.append(CopyDescriptor(0, at_source + source, at_destination + destination, nbytes))
    return coalesce(sorted(runs, key=lambda run: run.destination))


def _side_by_side(sources: Sides, destinations: Sides) -> list[tuple[Rows, Rows]]:
    """Keys and values, as one longer row where each value lies right after its key on both sides."""
    if all(v == k._replace(nbytes=v.nbytes, offset=k.offset + k.nbytes) for k, v in (sources, destinations)):
        nbytes = sum(rows.nbytes for rows in sources)
        return [(sources[0]._replace(nbytes=nbytes), destinations[0]._replace(nbytes=nbytes))]
    return [pair for pair in zip(sources, destinations, strict=True) if pair[0].nbytes]


def _pieces(start: int, end: int, *sides: Rows) -> Iterator[tuple[int, int]]:
    """`[start, end)` cut wherever a side goes on to its next block."""
    at = start
    while at < end:
        stop = min(end, *((at // rows.block_tokens + 1) * rows.block_tokens for rows in sides))
        yield at, stop
        at = stop


def _runs(from_: Rows, to: Rows, heads: int, tokens: int) -> list[tuple[int, int, int]]:
    """Source, destination and length of the runs that tokens of one block on both sides are made of."""
    nbytes = from_.nbytes
    apart: list[tuple[int, int, int]] = []
    # The inner dimension first: as long as it is dense on both sides, the run grows over it.
    for count, source, destination in sorted(
        [(heads, from_.head_stride, to.head_stride), (tokens, from_.token_stride, to.token_stride)],
        key=lambda dimension: dimension[2],
    ):
        if count > 1 and source == destination == nbytes:
            nbytes *= count
        elif count > 1:
            apart.append((count, source, destination))
    runs = [(0, 0, nbytes)]
    for count, source, destination in apart:
        runs = [(s + i * source, d + i * destination, nbytes) for i in range(count) for s, d, _ in runs]
    return runs
