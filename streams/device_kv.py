"""The device's KV of one sequence: a preallocated region that attention reads and copies write."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend
from kvlane.transfer.layout import KvLayout, KvRegion
from kvlane.transfer.store import LayerKv


class DeviceKv:
    """Keys and values of up to `capacity_tokens` tokens, and a state where layers have one, in one block of memory.

    Layers with a sliding window have room for every token, too: what moves is bounded by the window, not what is kept.

    Attributes:
        region: how the block is arranged.
        memory: the block, uint8 [region.nbytes].

    Raises:
        InputError: an element type whose size is not the layout's, or no capacity.
    """

    def __init__(self, backend: Backend, layout: KvLayout, dtype: torch.dtype, capacity_tokens: int) -> None:
        self.region = KvRegion(layout, capacity_tokens)
        self.memory = backend.device_bytes(self.region.nbytes)
        self._backend = backend
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}
        for layer, shape in enumerate(layout.shapes):
            if shape.kv_heads:
                if dtype.itemsize != shape.itemsize:
                    raise InputError("dtype", f"{dtype} has {dtype.itemsize} bytes", f"{shape.itemsize}")
                keys, values = self._bytes(layer, 0, capacity_tokens)
                self._keys[layer] = _rows(keys, dtype, shape.kv_heads, shape.k_width)
                self._values[layer] = _rows(values, dtype, shape.kv_heads, shape.v_width)
            if shape.state_bytes:
                self._states[layer] = self._state_bytes(layer).view(dtype)

    def keys(self, layer: int) -> torch.Tensor:
        """A layer's keys as attention takes them, a view of shape [1, kv_heads, capacity_tokens, k_width]."""
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        """A layer's values as attention takes them, a view of shape [1, kv_heads, capacity_tokens, v_width]."""
        return self._values[layer]

    def state(self, layer: int) -> torch.Tensor:
        """A layer's state, a view of shape [elements]."""
        return self._states[layer]

    def poison(self, start: int = 0) -> None:
        """Overwrite every token from `start` on with NaN, so that a read of what was not written shows.

        States, too, if no token is left.
        """
        for rows in (*self._keys.values(), *self._values.values()):
            rows[:, :, start:].fill_(float("nan"))
        if start == 0:
            for state in self._states.values():
                state.fill_(float("nan"))

    def take_from(self, other: DeviceKv, tokens: int) -> None:
        """Copy the first tokens' keys and values from a block of the same layout, in order on the compute stream."""
        for mine, its in ((self._keys, other._keys), (self._values, other._values)):
            for layer, rows in mine.items():
                rows[:, :, :tokens] = its[layer][:, :, :tokens]

    def layer_bytes(self, start: int, end: int) -> Iterator[LayerKv]:
        """For every layer the flat bytes of tokens `[start, end)`, keys and values, and its state, on the host.

        On a backend where that is free they are views, good until the next pass.
        """
        for layer, shape in enumerate(self.region.layout.shapes):
            keys, values = map(self._backend.read, self._bytes(layer, start, end))
            yield (
                (keys, values, self._backend.read(self._state_bytes(layer)))
                if shape.state_bytes
                else (keys, values)
            )

    def _bytes(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        region = self.region
        return (
            self.memory[region.key_offset(layer, start) : region.key_offset(layer, end)],
            self.memory[region.value_offset(layer, start) : region.value_offset(layer, end)],
        )

    def _state_bytes(self, layer: int) -> torch.Tensor:
        at = self.region.state_offset(layer, 0)
        return self.memory[at : at + self.region.layout.shapes[layer].state_bytes]


def _rows(block: torch.Tensor, dtype: torch.dtype, heads: int, width: int) -> torch.Tensor:
    # Tokens first in memory, so that a run of tokens is one copy; heads first in the view, as attention wants them.
    return block.view(dtype).view(1, -1, heads, width).transpose(1, 2)
