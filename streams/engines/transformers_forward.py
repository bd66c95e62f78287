"""One prompt through a transformers model whose KV lies in a `DeviceKv`: each layer waits for its own stored KV.

Each decoder layer's `update` writes its new keys and values into the preallocated block and then waits for its own
stored ones, so the layers' copies run under the compute of the layers before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from kvlane.streams.device_kv import DeviceKv
from kvlane.streams.engines.transformers_model import cache_argument, decoder_layers, watched
from kvlane.streams.executor import LayerPass
from kvlane.transfer.identity import EncodedIds
from kvlane.transfer.layout import KvLayout
from kvlane.transfer.store import KvSafetyError


class ModelForward:
    """What does not change from prompt to prompt.

    Raises:
        InputError: a model without decoder layers, or one that takes no cache.
    """

    def __init__(self, model: PreTrainedModel, layout: KvLayout) -> None:
        self.model = model
        self.decoder_layers = decoder_layers(model, layout.layers)
        self.cache_argument = cache_argument(model)
        self.stateful = {layer for layer, shape in enumerate(layout.shapes) if shape.state_bytes}

    def cache_layers(
        self, block: DeviceKv, past: int, ready: Callable[[int], None]
    ) -> list[KvLayer | StateLayer]:
        """The layers of a cache that holds the first `past` tokens, or will once they have arrived."""
        return [
            StateLayer(block.state(layer), self.model.config.get_text_config().conv_L_cache, past)
            if layer in self.stateful
            else KvLayer(block, layer, past, ready)
            for layer in range(block.region.layout.layers)
        ]


class PromptForward:
    """Passes over one prompt. See `streams.prefill.Forward`; an answer is logits [vocabulary] and the token's id."""

    def __init__(self, forward: ModelForward, ids: EncodedIds) -> None:
        self._forward = forward
        self._ids = ids

    def extend(self, block: DeviceKv, start: int, end: int, steps: LayerPass) -> None:
        self._run(block, start, end, steps)

    def answer(self, block: DeviceKv, start: int, end: int, steps: LayerPass) -> tuple[torch.Tensor, int]:
        logits = self._run(block, start, end, steps)
        return logits, int(logits.argmax())

    def carry(self, source: DeviceKv, target: DeviceKv, tokens: int) -> None:
        target.take_from(source, tokens)

    def _run(self, block: DeviceKv, start: int, end: int, steps: LayerPass) -> torch.Tensor:
        forward = self._forward
        cache_layers = forward.cache_layers(block, start, steps.ready)
        arguments: dict[str, Any] = {forward.cache_argument: Cache(layers=list(cache_layers))}
        inputs = torch.from_numpy(self._ids[start:end].astype(np.int64)).unsqueeze(0)
        with torch.inference_mode(), watched(forward.decoder_layers, forward.stateful, steps):
            # No mask: without one the model derives causality from the cache's length, and may use a kernel for it.
            output = forward.model(
                input_ids=inputs.to(forward.model.device), use_cache=True, logits_to_keep=1, **arguments
            )
        for layer in cache_layers:
            if isinstance(layer, KvLayer):
                layer.check_visited(end)
        logits: torch.Tensor = output.logits[0, -1]
        return logits


class KvLayer(CacheLayerMixin):
    """One layer's KV in the block, as transformers wants it: `update` is where a layer's attention gets it.

    A layer with a sliding window is given the rows that the window of the first new token reaches, and those after.
    """

    is_sliding = False

    def __init__(self, kv: DeviceKv, layer: int, past: int, ready: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        window = kv.region.layout.shapes[layer].window
        self.is_sliding = window is not None
        self._keys = kv.keys(layer)
        self._values = kv.values(layer)
        self.is_initialized = True
        self._layer = layer
        self._first = 0 if window is None else max(0, past - window + 1)
        self._length = past
        self._ready = ready
        self._updates = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the block is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows [1, kv_heads, new, width] after the past ones; returns both, once the past ones are there."""
        if key_states.dtype != self._keys.dtype or value_states.dtype != self._values.dtype:
            # Assigning would convert it in silence, and what is stored would be no KV of the identity's.
            raise KvSafetyError(f"layer {self._layer} computed {key_states.dtype} KV, not {self._keys.dtype}")
        start, end = self._length, self._length + key_states.shape[-2]
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self._length = end
        self._updates += 1
        # As late as can be: the projections of this layer ran under its own copy.
        self._ready(self._layer)
        return self._keys[:, :, self._first : end], self._values[:, :, self._first : end]

    def get_seq_length(self) -> int:
        """Positions and masks come from it before any update: it counts tokens still on their way, too."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length - self._first, self._first

    def get_max_length(self) -> int:
        return int(self._keys.shape[-2])

    def check_visited(self, length: int) -> None:
        """Raises `KvSafetyError` unless the layer took its KV once, and all of it."""
        if self._updates != 1:
            raise KvSafetyError(f"layer {self._layer} asked for its KV {self._updates} times in one pass")
        if self._length != length:
            raise KvSafetyError(f"layer {self._layer} holds {self._length} of {length} tokens")


class StateLayer(LinearAttentionLayer):
    """One short convolution's state in the block: transformers reads it and writes it there.

    Args:
        state: [channels * kernel].
        past: tokens before it; without any there is no state yet, whatever lies there.
    """

    def __init__(self, state: torch.Tensor, kernel: int, past: int) -> None:
        super().__init__()
        self.conv_states[0] = state.view(1, -1, kernel)
        self.conv_kernel_size[0] = kernel
        self.is_conv_states_initialized[0] = True
        self.has_previous_state[0] = past > 0
