"""One prompt's KV in a block of host memory: how it gets in, and whether it is still what was put."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvlane.policy.errors import InputError
from kvlane.transfer.identity import EncodedIds, KvIdentity
from kvlane.transfer.layout import KvRegion, Region
from kvlane.transfer.paged import PagedRegion
from kvlane.transfer.store import ChecksumError, HostBytes, LayerKv


@dataclass(frozen=True, slots=True)
class LayerSums:
    """CRC-32 of one layer: of every unit's rows, and of the state at every checkpoint."""

    units: tuple[int, ...]
    states: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StoredBytes:
    """A prompt's bytes and, in a store that keeps checksums, those of every layer."""

    region: KvRegion | PagedRegion
    memory: HostBytes
    unit_tokens: int
    checkpoints: tuple[int, ...]
    sums: list[LayerSums] = field(default_factory=list)

    def rows(self, layer: int) -> tuple[HostBytes, HostBytes]:
        """A layer's keys and values, views of shape [blocks, tokens, kv_heads, bytes of a row]."""
        heads, base = self.region.layout.shape(layer).kv_heads, self.region.layer_offset(layer)
        keys, values = (
            as_strided(
                self.memory[base + rows.offset :],
                (len(rows.blocks), rows.block_tokens, heads, rows.nbytes),
                (rows.block_stride, rows.token_stride, rows.head_stride, 1),
            )
            for rows in self.region.rows(layer)
        )
        return keys, values

    def verify(self, layer: int, start: int, end: int, state_at: int | None) -> None:
        """Check the units that hold rows `[start, end)` of a layer, and its state after `state_at` tokens.

        Raises:
            ChecksumError: they are not those that were put; it names the first unit, or all tokens before the state.
        """
        if not self.sums:
            return
        sums, unit, rows = self.sums[layer], self.unit_tokens, self.rows(layer)
        for first in range(start // unit * unit, end, unit):
            if _unit_sum(rows, first, first + unit) != sums.units[first // unit]:
                raise ChecksumError(layer, first, first + unit)
        if state_at is not None:
            put = sums.states[self.checkpoints.index(state_at)]
            if self._state_sum(layer, state_at) != put:
                raise ChecksumError(layer, 0, state_at)

    def sum_up(self, layer: int) -> LayerSums:
        """The checksums of a layer's bytes as they are now."""
        shape, region = self.region.layout.shape(layer), self.region
        unit, rows = self.unit_tokens, self.rows(layer)
        firsts = range(0, region.capacity_tokens, unit) if shape.kv_heads else ()
        checkpoints = self.checkpoints if shape.state_bytes else ()
        return LayerSums(
            tuple(_unit_sum(rows, first, first + unit) for first in firsts),
            tuple(self._state_sum(layer, tokens) for tokens in checkpoints),
        )

    def _state_sum(self, layer: int, tokens: int) -> int:
        at = self.region.state_offset(layer, tokens)
        return zlib.crc32(self.memory[at : at + self.region.layout.shape(layer).state_bytes].data)


def _unit_sum(rows: tuple[HostBytes, HostBytes], first: int, last: int) -> int:
    """CRC-32 of a unit's keys and values, as `StoredBytes.rows` gives them: of some whole blocks, or a part of one."""
    crc = 0
    for blocks in rows:
        size = blocks.shape[1]
        unit = blocks[:, first:last] if len(blocks) == 1 else blocks[first // size : last // size]
        crc = zlib.crc32(np.ascontiguousarray(unit).data, crc)
    return crc


@dataclass(slots=True, eq=False)
class Entry:
    """One stored prompt. `pins` changes under the store's lock only."""

    number: int
    identity: KvIdentity
    token_ids: EncodedIds
    digests: tuple[bytes, ...]
    stored: StoredBytes
    pins: int = 0

    @property
    def region(self) -> KvRegion | PagedRegion:
        return self.stored.region

    def usable_to(self, tokens: int) -> bool:
        """Whether a hit may end after so many of its tokens: where layers have states, only at a checkpoint."""
        return not self.region.layout.has_states or tokens in self.stored.checkpoints


@dataclass(slots=True)
class Moved:
    """Bytes whose copies have finished; changes under the store's lock only."""

    nbytes: int = 0


def write_layers(
    region: KvRegion | PagedRegion,
    layers: Iterable[LayerKv],
    allocate: Callable[[], HostBytes],
    unit_tokens: int,
    checkpoints: tuple[int, ...],
    *,
    checksums: bool,
) -> StoredBytes:
    """Copy layers into memory, which is allocated once the first of them has been read and found right.

    Raises:
        InputError: too few or too many layers, or one whose bytes are not its shape's.
    """
    parts = _checked(region, layers, len(checkpoints))
    first = next(parts)
    stored = StoredBytes(region, allocate(), unit_tokens, checkpoints)
    for layer, (keys, values, states) in enumerate(chain((first,), parts)):
        for rows, part in zip(stored.rows(layer), (keys, values), strict=True):
            np.copyto(rows, part.reshape(rows.shape))
        if states.size:
            at = region.state_offset(layer, checkpoints[0])
            np.copyto(stored.memory[at : at + states.size], states)
        if checksums:
            stored.sums.append(stored.sum_up(layer))
    return stored


_NOTHING: HostBytes = np.empty(0, np.uint8)


def _checked(
    region: Region, layers: Iterable[LayerKv], checkpoints: int
) -> Iterator[tuple[HostBytes, HostBytes, HostBytes]]:
    """The layers' keys, values and states, each as long as its place in the region.

    Read to their end, and refused if there are not as many as the layout's.
    """
    layout, tokens = region.layout, region.capacity_tokens
    read = 0
    for keys, values, *rest in layers:
        if read == layout.layers:
            raise InputError("layers", "holds more layers than the layout", str(layout.layers))
        shape = layout.shape(read)
        states = rest[0] if rest else _NOTHING
        yield (
            _part(keys, tokens * shape.k_bytes_per_token, "keys", read),
            _part(values, tokens * shape.v_bytes_per_token, "values", read),
            _part(states, checkpoints * shape.state_bytes, "states", read),
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
