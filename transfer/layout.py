"""What KV weighs layer by layer, where it lies in one block of memory, and the copies that carry it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, Protocol

from kvlane.policy.errors import InputError
from kvlane.transfer.shapes import LayerShape, TpShard


@dataclass(frozen=True, slots=True, init=False)
class KvLayout:
    """The layers of a model's KV on one rank, which may differ: `KvLayout.of` takes their shapes.

    The constructor makes layers that are all alike, with keys and values of every token.

    Attributes:
        shapes: what each layer keeps.

    Raises:
        InputError: no layers, or a size below one.
    """

    shapes: tuple[LayerShape, ...]
    _rows_before: tuple[int, ...] = field(compare=False, repr=False)
    _states_before: tuple[int, ...] = field(compare=False, repr=False)

    def __init__(self, layers: int, kv_heads: int, k_width: int, v_width: int, itemsize: int) -> None:
        if kv_heads < 1:
            raise InputError("layout.kv_heads", f"is {kv_heads}", "at least 1")
        self._set((LayerShape(kv_heads, k_width, v_width, itemsize),) * layers)

    @classmethod
    def of(cls, shapes: Iterable[LayerShape]) -> KvLayout:
        """A layout of these layers, in order."""
        layout = cls.__new__(cls)
        layout._set(tuple(shapes))
        return layout

    def _set(self, shapes: tuple[LayerShape, ...]) -> None:
        if not shapes:
            raise InputError("layout.layers", "is 0 or less", "at least 1")
        object.__setattr__(self, "shapes", shapes)
        rows = (0, *accumulate(shape.bytes_per_token for shape in shapes))
        states = (0, *accumulate(shape.state_bytes for shape in shapes))
        object.__setattr__(self, "_rows_before", rows)
        object.__setattr__(self, "_states_before", states)

    @property
    def layers(self) -> int:
        return len(self.shapes)

    @property
    def name(self) -> str:
        """The arrangement and its sizes, as an identity carries them."""
        groups = [(shape.name, len(list(alike))) for shape, alike in groupby(self.shapes)]
        if len(groups) == 1:
            return f"layer_major/l{self.layers}/{groups[0][0]}"
        return f"layer_major/l{self.layers}" + "".join(f"/{count}({name})" for name, count in groups)

    def shape(self, layer: int) -> LayerShape:
        """What a layer keeps.

        Raises:
            InputError: no such layer.
        """
        if not 0 <= layer < self.layers:
            raise InputError("layer", f"is {layer}", f"0 to {self.layers - 1}")
        return self.shapes[layer]

    def holds(self, layer: int) -> bool:
        """Whether a load brings anything for this layer: one that holds nothing is never awaited.

        Raises:
            InputError: no such layer.
        """
        shape = self.shape(layer)
        return bool(shape.bytes_per_token or shape.state_bytes)

    def shard(self, shard: TpShard) -> KvLayout:
        """The layout of one rank's heads of these.

        Raises:
            InputError: heads that cannot be divided so, or a state, which is one piece of bytes.
        """
        if self.has_states and shard.size > 1:
            raise InputError(
                "shard.size", f"is {shard.size} with a state", "1: a state is not divided by heads"
            )
        of_rank = {
            shape: replace(shape, kv_heads=len(shard.heads(shape.kv_heads))) if shape.kv_heads else shape
            for shape in set(self.shapes)
        }
        return KvLayout.of(of_rank[shape] for shape in self.shapes)

    @property
    def has_states(self) -> bool:
        """Whether a stored prefix can be used only where the layers' states were kept."""
        return self._states_before[-1] > 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's rows over all layers."""
        return self._rows_before[-1]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all layers."""
        return self._states_before[-1]

    def rows_before(self, layer: int) -> int:
        """Bytes of one token's rows in the layers before this one."""
        return self._rows_before[layer]

    def states_before(self, layer: int) -> int:
        """Bytes of the states of the layers before this one."""
        return self._states_before[layer]

    # Of layers that agree in it; each raises InputError where they do not.

    @property
    def kv_heads(self) -> int:
        return self._common("kv_heads")

    @property
    def k_width(self) -> int:
        return self._common("k_width")

    @property
    def v_width(self) -> int:
        return self._common("v_width")

    @property
    def itemsize(self) -> int:
        return self._common("itemsize")

    @property
    def k_bytes_per_token(self) -> int:
        """Bytes of one token's keys in one layer."""
        return self._common("k_bytes_per_token")

    @property
    def v_bytes_per_token(self) -> int:
        """Bytes of one token's values in one layer."""
        return self._common("v_bytes_per_token")

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        return self._common("bytes_per_token")

    def _common(self, name: str) -> int:
        values = {getattr(shape, name) for shape in self.shapes}
        if len(values) > 1:
            raise InputError(f"layout.{name}", "differs from layer to layer", "layers that agree in it")
        value: int = values.pop()
        return value


class Rows(NamedTuple):
    """Where the rows of keys, or of values, of one layer lie, from that layer's first byte.

    The row of token `t` and head `h` begins at `offset + blocks[t // block_tokens] * block_stride +
    t % block_tokens * token_stride + h * head_stride` and is `nbytes` long.
    """

    nbytes: int
    offset: int
    blocks: tuple[int, ...]
    block_tokens: int
    block_stride: int
    token_stride: int
    head_stride: int

    def at(self, token: int) -> int:
        """Byte at which a token's row of head 0 begins."""
        block, slot = divmod(token, self.block_tokens)
        return self.offset + self.blocks[block] * self.block_stride + slot * self.token_stride


class Region(Protocol):
    """Memory that holds one sequence's KV from token 0 on, and how it lies there."""

    @property
    def layout(self) -> KvLayout: ...
    @property
    def capacity_tokens(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Size of the block of memory that offsets count in."""

    def layer_offset(self, layer: int) -> int:
        """Byte at which a layer's rows begin."""

    def rows(self, layer: int) -> tuple[Rows, Rows]:
        """A layer's keys and values, from `layer_offset`; equal for layers of equal shape."""

    def state_offset(self, layer: int, tokens: int) -> int:
        """Byte of the layer's state after so many tokens."""


@dataclass(frozen=True, slots=True)
class KvRegion:
    """Memory for `capacity_tokens` tokens in a layout, starting at byte 0 of its block.

    Layers follow one another; a layer's keys come whole before its values, `[token][head][dim]` each, so that a run of
    tokens is one run of bytes for each. After all rows come the states, layer by layer.

    Attributes:
        checkpoints: token counts after which the states are kept; with none there is room for one state, that of
            whatever token was the last.

    Raises:
        InputError: a capacity below one token, or checkpoints that are not rising or beyond it.
    """

    layout: KvLayout
    capacity_tokens: int
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.capacity_tokens < 1:
            raise InputError("capacity_tokens", f"is {self.capacity_tokens}", "at least 1")
        points = (0, *self.checkpoints, self.capacity_tokens + 1)
        if any(low >= high for low, high in pairwise(points)):
            raise InputError("checkpoints", f"are {self.checkpoints}", f"rising, 1 to {self.capacity_tokens}")

    @property
    def nbytes(self) -> int:
        return self.capacity_tokens * self.layout.bytes_per_token + self._states * self.layout.state_bytes

    @property
    def _states(self) -> int:
        return max(1, len(self.checkpoints))

    def layer_offset(self, layer: int) -> int:
        return self.capacity_tokens * self.layout.rows_before(layer)

    def key_offset(self, layer: int, token: int = 0) -> int:
        """Byte at which a token's keys begin in a layer."""
        return self.layer_offset(layer) + token * self.layout.shapes[layer].k_bytes_per_token

    def value_offset(self, layer: int, token: int = 0) -> int:
        """Byte at which a token's values begin in a layer."""
        return (
            self.key_offset(layer, self.capacity_tokens) + token * self.layout.shapes[layer].v_bytes_per_token
        )

    def rows(self, layer: int) -> tuple[Rows, Rows]:
        shape, tokens = self.layout.shapes[layer], self.capacity_tokens
        k, v = shape.k_bytes_per_token, shape.v_bytes_per_token
        return (
            Rows(shape.k_row_bytes, 0, (0,), tokens, 0, k, shape.k_row_bytes),
            Rows(shape.v_row_bytes, tokens * k, (0,), tokens, 0, v, shape.v_row_bytes),
        )

    def state_offset(self, layer: int, tokens: int) -> int:
        """Byte of the layer's state after so many tokens.

        Raises:
            InputError: no state is kept there.
        """
        if self.checkpoints and tokens not in self.checkpoints:
            raise InputError("tokens", f"no state is kept after {tokens}", f"one of {self.checkpoints}")
        slot = self.checkpoints.index(tokens) if self.checkpoints else 0
        before = (
            self._states * self.layout.states_before(layer) + slot * self.layout.shapes[layer].state_bytes
        )
        return self.capacity_tokens * self.layout.bytes_per_token + before


class CopyDescriptor(NamedTuple):
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


def total_bytes(copies: Sequence[CopyDescriptor]) -> int:
    """Bytes the copies carry together."""
    return sum(copy.nbytes for copy in copies)
