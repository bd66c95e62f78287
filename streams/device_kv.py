"""The device's KV of one sequence: a preallocated region that attention reads and copies write."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend
from kvlane.transfer.layout import KvLayout, KvRegion
from kvlane.transfer.store import LayerKv


class DeviceKv:
    """Keys and values of up to `capacity_tokens` tokens, one block of device memory.

    Attributes:
        region: how the block is arranged.
        memory: the block, uint8 [region.nbytes].

    Raises:
        InputError: an element type whose size is not the layout's, or no capacity.
    """

    def __init__(self, backend: Backend, layout: KvLayout, dtype: torch.dtype, capacity_tokens: int) -> None:
        if dtype.itemsize != layout.itemsize:
            raise InputError("dtype", f"{dtype} has {dtype.itemsize} bytes", f"{layout.itemsize}")
        self.region = KvRegion(layout, capacity_tokens)
        self.memory = backend.device_bytes(self.region.nbytes)
        self._backend = backend
        self._keys = []
        self._values = []
        for layer in range(layout.layers):
            at, split = self.region.key_offset(layer), self.region.value_offset(layer)
            after = split + capacity_tokens * layout.v_bytes_per_token
            self._keys.append(_rows(self.memory[at:split], dtype, layout.kv_heads, layout.k_width))
            self._values.append(_rows(self.memory[split:after], dtype, layout.kv_heads, layout.v_width))

    def keys(self, layer: int) -> torch.Tensor:
        """A layer's keys as attention takes them, a view of shape [1, kv_heads, capacity_tokens, k_width]."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """A layer's values as attention takes them, a view of shape [1, kv_heads, capacity_tokens, v_width]."""
        return self._values[layer]

    def poison(self, start: int = 0) -> None:
        """Overwrite every token from `start` on with NaN, so that a read of what was not written shows."""
        for rows in (*self._keys, *self._values):
            rows[:, :, start:].fill_(float("nan"))

    def take_from(self, other: DeviceKv, tokens: int) -> None:
        """Copy the first tokens' keys and values from a block of the same layout, in order on the compute stream."""
        for mine, its in zip((*self._keys, *self._values), (*other._keys, *other._values), strict=True):
            mine[:, :, :tokens] = its[:, :, :tokens]

    def layer_bytes(self, start: int, end: int) -> Iterator[LayerKv]:
        """For every layer the flat bytes of tokens `[start, end)`, keys and values, on the host.

        On a backend where that is free they are views, good until the next pass.
        """
        layout = self.region.layout
        for layer in range(layout.layers):
            keys, values = self.region.key_offset(layer, start), self.region.value_offset(layer, start)
            yield (
                self._backend.read(self.memory[keys : keys + (end - start) * layout.k_bytes_per_token]),
                self._backend.read(self.memory[values : values + (end - start) * layout.v_bytes_per_token]),
            )


def _rows(block: torch.Tensor, dtype: torch.dtype, heads: int, width: int) -> torch.Tensor:
    # Tokens first in memory, so that a run of tokens is one copy; heads first in the view, as attention wants them.
    return block.view(dtype).view(1, -1, heads, width).transpose(1, 2)
