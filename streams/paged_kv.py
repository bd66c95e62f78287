"""The device's KV in blocks: one pool, from which sequences hold blocks in any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend
from kvlane.transfer.layout import KvLayout
from kvlane.transfer.paged import BlockForm, PagedRegion


class PagedPool:
    """Device memory for `blocks` blocks of a layout, and for the states of `state_slots` sequences.

    Attributes:
        memory: all of it, uint8 [nbytes].

    Raises:
        InputError: an element type whose size is not the layers', or no blocks.
    """

    def __init__(
        self,
        backend: Backend,
        layout: KvLayout,
        form: BlockForm,
        dtype: torch.dtype,
        blocks: int,
        *,
        state_slots: int = 1,
    ) -> None:
        for shape in layout.shapes:
            if shape.kv_heads and shape.itemsize != dtype.itemsize:
                raise InputError("dtype", f"{dtype} has {dtype.itemsize} bytes", f"{shape.itemsize}")
        self.dtype = dtype
        self._whole = PagedRegion(layout, form, blocks, range(blocks), state_slots)
        self.memory = backend.device_bytes(self._whole.nbytes)

    def sequence(self, table: Sequence[int], state_slot: int = 0) -> PagedKv:
        """The KV of a sequence that holds these blocks, which is for the caller to see to.

        Raises:
            InputError: a table or slot that the pool cannot have.
        """
        whole = self._whole
        region = PagedRegion(whole.layout, whole.form, whole.blocks, table, whole.state_slots, state_slot)
        return PagedKv(self, region)


class PagedKv:
    """One sequence's blocks of a pool.

    Attributes:
        memory: the pool's memory.
        region: how the sequence lies in it.
    """

    def __init__(self, pool: PagedPool, region: PagedRegion) -> None:
        self.memory = pool.memory
        self.region = region
        self._dtype = pool.dtype
        self._table = torch.tensor(region.table, device=pool.memory.device)

    def blocks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values in all blocks of the pool, views of shape [blocks, kv_heads, tokens, width].

        Raises:
            InputError: a layer that keeps no rows.
        """
        if not self.region.layout.shape(layer).kv_heads:
            raise InputError("layer", f"{layer} keeps no rows", "one that does")
        shape, base = self.region.layout.shape(layer), self.region.layer_offset(layer)
        keys, values = (
            self.memory[: self.region.rows_nbytes]
            .view(self._dtype)
            .as_strided(
                (self.region.blocks, shape.kv_heads, rows.block_tokens, width),
                (
                    rows.block_stride // shape.itemsize,
                    rows.head_stride // shape.itemsize,
                    rows.token_stride // shape.itemsize,
                    1,
                ),
                (base + rows.offset) // shape.itemsize,
            )
            for rows, width in zip(self.region.rows(layer), (shape.k_width, shape.v_width), strict=True)
        )
        return keys, values

    def gather(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the first tokens' keys and values as attention takes them, shape [1, kv_heads, tokens, width]."""
        keys, values = (
            pool[self._table].transpose(0, 1).flatten(1, 2)[None, :, :tokens] for pool in self.blocks(layer)
        )
        return keys, values

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of tokens from `start` on, shape [1, kv_heads, tokens, width].

        Raises:
            InputError: more tokens than the sequence's blocks hold.
        """
        end = start + keys.shape[2]
        if not 0 <= start <= end <= self.region.capacity_tokens:
            raise InputError("tokens", f"[{start}, {end}) do not fit", f"{self.region.capacity_tokens}")
        at = torch.arange(start, end, device=self.memory.device)
        blocks, slots = self._table[at // self.region.form.tokens], at % self.region.form.tokens
        for pool, new in zip(self.blocks(layer), (keys, values), strict=True):
            pool[blocks, :, slots] = new[0].transpose(0, 1)

    def state(self, layer: int) -> torch.Tensor:
        """A layer's state of this sequence, a view of its bytes, uint8 [state_bytes]."""
        at = self.region.state_offset(layer, self.region.capacity_tokens)
        return self.memory[at : at + self.region.layout.shape(layer).state_bytes]
