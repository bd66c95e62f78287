"""KV in blocks: a pool as engines keep it, and one sequence's share of it by a table of block numbers.

The same description serves a host pool whose chunks hold all layers of their tokens (a chunk-major store).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from kvlane.policy.errors import InputError
from kvlane.transfer.layout import KvLayout, Rows
from kvlane.transfer.shapes import LayerShape

First: TypeAlias = Literal["layer", "block"]
Order: TypeAlias = Literal["token", "head"]
Kv: TypeAlias = Literal["apart", "in_block", "packed"]


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How KV lies in an engine's blocks.

    Attributes:
        tokens: tokens of a block.
        first: what a pool is cut into: `layer`, a tensor per layer with every block in it; or `block`, every layer of a
            block together.
        order: what a block of one layer is cut into first: `token`, `[tokens][heads][width]`, or `head`,
            `[heads][tokens][width]`.
        kv: where values lie: `apart`, behind the keys of all the layer's blocks, `[2][blocks]...`; `in_block`, behind
            the keys of their block, `[blocks][2]...`; or `packed`, each in one row with its key, `[...][2 * width]`.

    Raises:
        InputError: a word that does not exist, blocks without tokens, or values apart from whole blocks.
    """

    tokens: int
    first: First = "layer"
    order: Order = "token"
    kv: Kv = "in_block"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError("form.tokens", f"is {self.tokens}", "at least 1")
        for name, words in (("first", get_args(First)), ("order", get_args(Order)), ("kv", get_args(Kv))):
            if getattr(self, name) not in words:
                raise InputError(f"form.{name}", f"is {getattr(self, name)!r}", " or ".join(words))
        if self.first == "block" and self.kv == "apart":
            raise InputError("form.kv", "is apart where blocks hold all layers", "in_block or packed")


@dataclass(frozen=True, slots=True)
class PagedRegion:
    """One sequence's KV in a pool of blocks, from token 0 on: token `t` lies in block `table[t // form.tokens]`.

    The pool begins at byte 0 of its memory. Behind its blocks come the states, layer by layer, one slot for each of the
    sequences that may be there at once.

    Attributes:
        layout: the KV of this rank.
        form: how it lies in a block.
        blocks: blocks of the pool.
        table: the sequence's blocks, in any order; no block twice.
        state_slots: sequences whose states the pool has room for.
        state_slot: this sequence's.

    Raises:
        InputError: a table that is empty, names a block twice or one the pool does not have; a slot it does not have.
    """

    layout: KvLayout
    form: BlockForm
    blocks: int
    table: Sequence[int]
    state_slots: int = 1
    state_slot: int = 0

    def __post_init__(self) -> None:
        try:
            table = tuple(operator.index(block) for block in self.table)
        except TypeError as error:
            raise InputError("table", f"is {str(self.table)[:40]}", "a list of block numbers") from error
        object.__setattr__(self, "table", table)
        if not table:
            raise InputError("table", "is empty", "at least one block")
        for block in table:
            if not 0 <= block < self.blocks:
                raise InputError("table", f"names block {block}", f"0 to {self.blocks - 1}")
        if len(set(table)) < len(table):
            twice = next(block for at, block in enumerate(table) if block in table[:at])
            raise InputError("table", f"names block {twice} twice", "each block once")
        if not 0 <= self.state_slot < self.state_slots:
            raise InputError("state_slot", f"is {self.state_slot}", f"0 to {self.state_slots - 1}")

    @property
    def capacity_tokens(self) -> int:
        return len(self.table) * self.form.tokens

    @property
    def nbytes(self) -> int:
        """Size of the whole pool, other sequences' blocks included."""
        return self.rows_nbytes + self.state_slots * self.layout.state_bytes

    @property
    def rows_nbytes(self) -> int:
        """Bytes of the blocks, behind which the states begin."""
        return self.blocks * self.form.tokens * self.layout.bytes_per_token

    def layer_offset(self, layer: int) -> int:
        """Byte at which a layer's rows begin: in the pool, or, where blocks hold all layers, in block 0."""
        before = self.form.tokens * self.layout.rows_before(layer)
        return before if self.form.first == "block" else self.blocks * before

    def rows(self, layer: int) -> tuple[Rows, Rows]:
        shape = self.layout.shape(layer)
        return _rows(self, shape, shape.k_row_bytes, 0), _rows(self, shape, shape.v_row_bytes, 1)

    def state_offset(self, layer: int, tokens: int) -> int:  # noqa: ARG002  one state, of whatever token was the last
        """Byte of the layer's state of this sequence."""
        before = self.state_slots * self.layout.states_before(layer)
        return self.rows_nbytes + before + self.state_slot * self.layout.shape(layer).state_bytes


def _rows(region: PagedRegion, shape: LayerShape, nbytes: int, part: int) -> Rows:
    """The keys (part 0) or values (part 1) of a layer; a row of theirs is `nbytes` long."""
    form, tokens = region.form, region.form.tokens
    keys = tokens * shape.k_bytes_per_token  # of a block
    row = shape.k_row_bytes + shape.v_row_bytes if form.kv == "packed" else nbytes
    if form.first == "block":
        block = tokens * region.layout.bytes_per_token
    elif form.kv == "apart":
        block = tokens * shape.kv_heads * nbytes
    else:
        block = tokens * shape.bytes_per_token
    values_at = {"apart": region.blocks * keys, "in_block": keys, "packed": shape.k_row_bytes}[form.kv]
    token, head = (shape.kv_heads * row, row) if form.order == "token" else (row, tokens * row)
    return Rows(nbytes, part * values_at, tuple(region.table), tokens, block, token, head)
