"""Where KV lies in one block of memory, and the copies that carry it from one block to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlane.policy.errors import InputError


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The weight of one token's KV: layers of K rows and V rows, `[token][head][dim]` each.

    K comes whole before V within a layer, and layers follow one another, so a run of tokens is one contiguous
    run of bytes for K and one for V.

    Attributes:
        layers: layers that hold KV.
        kv_heads: key/value heads on this rank.
        k_width: elements of one head's key.
        v_width: elements of one head's value.
        itemsize: bytes of one element.

    Raises:
        InputError: a size below one.
    """

    layers: int
    kv_heads: int
    k_width: int
    v_width: int
    itemsize: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "k_width", "v_width", "itemsize"):
            if getattr(self, name) < 1:
                raise InputError(f"layout.{name}", f"is {getattr(self, name)}", "at least 1")

    @property
    def name(self) -> str:
        """The arrangement and its sizes, as an identity carries them."""
        return f"layer_major/l{self.layers}/h{self.kv_heads}/k{self.k_width}/v{self.v_width}/b{self.itemsize}"

    @property
    def k_bytes_per_token(self) -> int:
        """Bytes of one token's keys in one layer."""
        return self.kv_heads * self.k_width * self.itemsize

    @property
    def v_bytes_per_token(self) -> int:
        """Bytes of one token's values in one layer."""
        return self.kv_heads * self.v_width * self.itemsize

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        return self.k_bytes_per_token + self.v_bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return self.layers * self.layer_bytes_per_token

    def holds(self, layer: int) -> bool:
        """Whether a load brings anything for this layer: one that holds nothing is never awaited.

        Raises:
            InputError: no such layer.
        """
        if not 0 <= layer < self.layers:
            raise InputError("layer", f"is {layer}", f"0 to {self.layers - 1}")
        return True


@dataclass(frozen=True, slots=True)
class KvRegion:
    """Memory for `capacity_tokens` tokens in a layout, starting at byte 0 of its block.

    Raises:
        InputError: a capacity below one token.
    """

    layout: KvLayout
    capacity_tokens: int

    def __post_init__(self) -> None:
        if self.capacity_tokens < 1:
            raise InputError("capacity_tokens", f"is {self.capacity_tokens}", "at least 1")

    @property
    def nbytes(self) -> int:
        return self.capacity_tokens * self.layout.bytes_per_token

    def key_offset(self, layer: int, token: int = 0) -> int:
        """Byte at which a token's keys begin in a layer."""
        before = layer * self.capacity_tokens * self.layout.layer_bytes_per_token
        return before + token * self.layout.k_bytes_per_token

    def value_offset(self, layer: int, token: int = 0) -> int:
        """Byte at which a token's values begin in a layer."""
        after_keys = self.key_offset(layer, self.capacity_tokens)
        return after_keys + token * self.layout.v_bytes_per_token


@dataclass(frozen=True, slots=True)
class CopyDescriptor:
    """One contiguous copy: `nbytes` from byte `source` of the source block to byte `destination` of the other."""

    layer: int
    source: int
    destination: int
    nbytes: int


def coalesce(copies: Iterable[CopyDescriptor]) -> tuple[CopyDescriptor, ...]:
    """The same bytes in fewer copies: neighbours of one layer that touch on both sides become one.

    Order is kept, so the runs must be given in the order they lie in. Done before copies are counted, because
    every copy has a fixed cost.
    """
    merged: list[CopyDescriptor] = []
    for copy in copies:
        if copy.nbytes == 0:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.layer == copy.layer
            and last.source + last.nbytes == copy.source
            and last.destination + last.nbytes == copy.destination
        ):
            merged[-1] = CopyDescriptor(last.layer, last.source, last.destination, last.nbytes + copy.nbytes)
        else:
            merged.append(copy)
    return tuple(merged)


def layer_copies(
    source: KvRegion, destination: KvRegion, layer: int, start: int, end: int
) -> tuple[CopyDescriptor, ...]:
    """The coalesced copies that carry tokens `[start, end)` of one layer to the same tokens of another region.

    Two of them, keys and values; one where the run fills both regions. `len()` of the result is the copy count
    the cost model prices.

    Raises:
        InputError: regions of different layouts, a layer or a token range outside one of them.
    """
    layout = source.layout
    if destination.layout != layout:
        raise InputError(
            "layout", f"{layout.name} cannot be copied into {destination.layout.name}", "the same layout"
        )
    if not 0 <= layer < layout.layers:
        raise InputError("layer", f"is {layer}", f"0 to {layout.layers - 1}")
    room = min(source.capacity_tokens, destination.capacity_tokens)
    if not 0 <= start <= end <= room:
        raise InputError(
            "tokens", f"[{start}, {end}) is no range of {room} tokens", "0 <= start <= end <= capacity"
        )
    tokens = end - start
    keys = CopyDescriptor(
        layer,
        source.key_offset(layer, start),
        destination.key_offset(layer, start),
        tokens * layout.k_bytes_per_token,
    )
    values = CopyDescriptor(
        layer,
        source.value_offset(layer, start),
        destination.value_offset(layer, start),
        tokens * layout.v_bytes_per_token,
    )
    return coalesce((keys, values))


def total_bytes(copies: Sequence[CopyDescriptor]) -> int:
    """Bytes the copies carry together."""
    return sum(copy.nbytes for copy in copies)
