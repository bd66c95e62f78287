"""transformers: prefills one prompt on a decoder whose KV lies in a `DeviceKv`, loading part of it meanwhile.

Run against transformers 5.17 and 5.24. Each decoder layer's `update` writes its new keys and values into the
preallocated block and then waits for its own stored ones, so the layers' copies run under the compute of the layers
before them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend
from kvlane.streams.device_kv import DeviceKv
from kvlane.streams.engines.transformers_model import (
    MODEL_TYPES,
    cache_argument,
    decoder_layers,
    identity_of,
    layout_of,
    watched,
)
from kvlane.streams.executor import (
    DEFAULT_DEADLINE_S,
    LayerExecutor,
    LayerLoad,
    LayerPass,
    LayerTiming,
    LoadError,
    Mode,
    check_deadline,
)
from kvlane.transfer.identity import EncodedIds, TokenIds, encode_token_ids
from kvlane.transfer.store import KvSafetyError, LayerKv, Store, StoredRun

__all__ = ["MODEL_TYPES", "PrefillResult", "TransformersEngine", "identity_of", "layout_of"]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """One prompt answered.

    Attributes:
        first_token: the id of largest logit.
        logits: of the first new token, float32 [vocabulary].
        mode: how the load ran, None without one.
        resident_tokens: were on the device already.
        loaded_tokens: came from the store.
        loaded_bytes: bytes of the finished copies.
        computed_tokens: went through the model.
        total_s: from the submission until the token's id was on the host.
        head_s: from the end of the last layer to the same moment.
        layers: one row per layer, seconds after the submission.
    """

    first_token: int
    logits: npt.NDArray[np.float32]
    mode: Mode | None
    resident_tokens: int
    loaded_tokens: int
    loaded_bytes: int
    computed_tokens: int
    total_s: float
    head_s: float
    layers: tuple[LayerTiming, ...]


class TransformersEngine:
    """Prefills one prompt at a time on a model whose KV it holds.

    The block remembers which token ids its KV was computed from, so `resident` can only name what is really there,
    and `save` can store it only under the ids that it belongs to. One call at a time: `prefill`, `poison`, `save` and
    `close` raise `KvSafetyError` while another of them runs.

    Args:
        model: a decoder in eval mode; it is not changed, apart from hooks while a prefill runs.
        backend: the device it computes on.
        capacity_tokens: longest prompt.
        name: see `identity_of`.
        weights_revision: see `identity_of`.
        adapter: see `identity_of`.

    Raises:
        InputError: a kind of model this adapter does not run, or one in training mode.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: Backend,
        capacity_tokens: int,
        *,
        name: str,
        weights_revision: str,
        adapter: str | None = None,
    ) -> None:
        self.layout = layout_of(model)
        self.identity = identity_of(model, name, weights_revision, adapter)
        self.model = model
        self.backend = backend
        self.kv = DeviceKv(backend, self.layout, model.dtype, capacity_tokens)
        self._executor = LayerExecutor(backend)
        self._modules = tuple(model.modules())
        self._decoder_layers = decoder_layers(model, self.layout.layers)
        self._cache_argument = cache_argument(model)
        self._check_model()
        self._held: EncodedIds = np.empty(0, np.uint32)
        self._load: LayerLoad | None = None
        self._busy = threading.Lock()
        self._generation = 0  # goes up before the block is written

    def close(self) -> None:
        """Give the copy stream back; loads are refused from then on. The backend stays open.

        Raises:
            KvSafetyError: the engine is in use.
        """
        with self._alone("close"):
            self._executor.close()

    @property
    def capacity_tokens(self) -> int:
        return self.kv.region.capacity_tokens

    @property
    def held_tokens(self) -> int:
        """How many tokens' KV the block holds, from token 0."""
        return self._held.size

    def holds(self, token_ids: TokenIds, tokens: int) -> bool:
        """Whether the block holds the KV of a prompt's first tokens."""
        ids = encode_token_ids(token_ids)
        return tokens <= self.held_tokens and np.array_equal(self._held[:tokens], ids[:tokens])

    def poison(self, start: int = 0) -> None:
        """Overwrite the block's KV from token `start` on with NaN and forget it.

        Raises:
            LoadError: an earlier load still writes to the block.
            KvSafetyError: the engine is in use.
        """
        with self._alone("poison"):
            self._settle(DEFAULT_DEADLINE_S)
            self._keep(start)
            self.kv.poison(start)

    def save(self, store: Store, token_ids: TokenIds, tokens: int) -> int:
        """Store the KV of a prompt's first tokens; returns how many of them `Store.put` stored.

        Raises:
            InputError: the block does not hold the KV of these tokens.
            KvSafetyError: the engine is in use.
            StoreFullError: see `Store.put`.
        """
        with self._alone("save"):
            if not self.holds(token_ids, tokens):
                raise InputError("tokens", f"the first {tokens} of this prompt are not held")
            # The ids that the KV was computed from: what the caller does to its own while this runs is no matter.
            return store.put(self.identity, self._held[:tokens], self.layout, self.layer_bytes(0, tokens))

    def layer_bytes(self, start: int, end: int) -> Iterator[LayerKv]:
        """For every layer the bytes of tokens `[start, end)` as `Store.put` takes them.

        They are read one layer at a time, on some backends as views: copy a layer before the next is asked for, and
        ask until there is none, since it is only then that the last one is known to be good. `save` ties them to ids.

        Raises:
            InputError: tokens whose KV the block does not hold.
            KvSafetyError: while reading, the block was changed since this was called.
        """
        generation = self._generation
        if not 0 <= start <= end <= self.held_tokens:
            raise InputError("tokens", f"[{start}, {end}) are not held", f"at most {self.held_tokens}")
        return self._unchanged_layers(start, end, generation)

    def _unchanged_layers(self, start: int, end: int, generation: int) -> Iterator[LayerKv]:
        for rows in self.kv.layer_bytes(start, end):
            self._check_unchanged(generation)
            yield rows
            # Asked for more: the reader has copied what it was given.
            self._check_unchanged(generation)

    def _check_unchanged(self, generation: int) -> None:
        if self._generation != generation:
            raise KvSafetyError(
                "the block was changed while its KV was read: the bytes may be another prompt's"
            )

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise KvSafetyError(
                f"{what}: the engine is in use, and its block holds one prompt: one call at a time, or an engine each"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _keep(self, tokens: int) -> None:
        """Nothing after these tokens is what the block said it was; call before it is written."""
        # In this order, and read in the other: whoever still saw the old ids has the old generation, too.
        self._held = self._held[:tokens]
        self._generation += 1

    def prefill(
        self,
        token_ids: TokenIds,
        resident: int = 0,
        load: StoredRun | None = None,
        *,
        mode: Mode = "layered",
        submitted_s: float | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> PrefillResult:
        """The prompt's first new token: `resident` tokens reused, `load` loaded after them, the rest computed.

        Args:
            token_ids: the whole prompt, shape [tokens].
            resident: leading tokens whose KV the block holds.
            load: stored tokens `[resident, end)` of this prompt, `end` below its length; see `Store.open`. The
                caller's handle may be closed as soon as this returns or raises.
            mode: what the compute waits for: `layered` for each layer's own KV, `bulk` for all of it at the start.
            submitted_s: when the request arrived, on the backend's clock, if before this call (a lookup and a decision
                count as part of the time to the first token).
            deadline_s: from now; a load that is not done by then is given up.

        Raises:
            InputError: a prompt that is empty or does not fit, resident tokens that are not there, a run of another
                model, prompt or range, a model in training mode, autocast, a deadline that cannot be waited for.
            LoadError: a layer did not arrive. The block then holds the resident tokens only.
            KvSafetyError: the engine is in use.
        """
        began = self.backend.now()
        # A copy: the caller's array may change while the model runs, and what is held must not.
        ids = encode_token_ids(token_ids).copy()
        with self._alone("prefill"):
            return self._prefill(
                ids, resident, load, mode, began if submitted_s is None else submitted_s, deadline_s
            )

    def _prefill(
        self,
        ids: EncodedIds,
        resident: int,
        load: StoredRun | None,
        mode: Mode,
        submitted_s: float,
        deadline_s: float,
    ) -> PrefillResult:
        self._check_model()
        check_deadline(deadline_s)
        past = self._check_request(ids, resident, load)
        self._settle(deadline_s)
        self._keep(resident)
        if load is not None:
            self._load = self._executor.submit(
                load, self.kv.memory, self.kv.region, mode=mode, deadline_s=deadline_s
            )
        steps = LayerPass(self.backend, self.layout.layers, self._load, submitted_s)
        try:
            logits, token, done = self._forward(ids[past:], past, steps)
            layers = steps.finish()
        except BaseException:
            if self._load is not None:
                self._load.give_up()
            raise
        self._load = None
        self._held = ids
        total_s = done - submitted_s
        return PrefillResult(
            first_token=token,
            logits=logits.float().cpu().numpy(),
            mode=None if load is None else mode,
            resident_tokens=resident,
            loaded_tokens=past - resident,
            loaded_bytes=sum(row.bytes for row in layers),
            computed_tokens=ids.size - past,
            total_s=total_s,
            head_s=total_s - layers[-1].compute_end_s,
            layers=layers,
        )

    def _check_model(self) -> None:
        """That a forward would compute the identity's KV: what was set may have been set otherwise since."""
        if any(module.training for module in self._modules):
            raise InputError("model", "is in training mode", "model.eval()")
        kind = self.model.device.type
        if torch.is_autocast_enabled(kind):
            raise InputError("autocast", f"is enabled for {kind}", "off: its KV would be of another type")

    def _check_request(self, ids: EncodedIds, resident: int, load: StoredRun | None) -> int:
        """The number of tokens that are not computed."""
        if not 1 <= ids.size <= self.capacity_tokens:
            raise InputError("token_ids", f"holds {ids.size} tokens", f"1 to {self.capacity_tokens}")
        if not 0 <= resident < ids.size:
            raise InputError("resident", f"is {resident} of {ids.size}", "leaving one token to compute")
        if not self.holds(ids, resident):
            raise InputError("resident", f"{resident} tokens of this prompt are not on the device")
        if load is None:
            return resident
        if load.identity != self.identity:
            raise InputError("load", "was stored under another identity", "this engine's KV")
        if load.start != resident or not load.start < load.end < ids.size:
            raise InputError("load", f"is [{load.start}, {load.end})", f"[{resident}, below {ids.size})")
        if not np.array_equal(load.token_ids[: load.end], ids[: load.end]):
            raise InputError("load", "was stored for another prompt", "the same token ids")
        return load.end

    def _settle(self, timeout_s: float) -> None:
        # A load that failed may have left a copy under way: until it is done the block is not ours to write.
        if self._load is not None and not self._load.settle(timeout_s):
            raise LoadError(self.layout.layers - 1, "a copy of an earlier load is still under way")
        self._load = None

    def _forward(self, new_ids: EncodedIds, past: int, steps: LayerPass) -> tuple[torch.Tensor, int, float]:
        """Logits [vocabulary], the token's id and the time it was on the host."""
        cache_layers = [_CacheLayer(self.kv, layer, past, steps.ready) for layer in range(self.layout.layers)]
        arguments: dict[str, Any] = {self._cache_argument: Cache(layers=list(cache_layers))}
        inputs = torch.from_numpy(new_ids.astype(np.int64)).unsqueeze(0).to(self.model.device)
        with torch.inference_mode(), watched(self._decoder_layers, steps):
            steps.before()
            # No mask: without one the model derives causality from the cache's length, and may use a kernel for it.
            output = self.model(input_ids=inputs, use_cache=True, logits_to_keep=1, **arguments)
            logits = output.logits[0, -1]
            token = int(logits.argmax())
        done = self.backend.now()
        for layer in cache_layers:
            layer.check_visited(past + new_ids.size)
        return logits, token, done


class _CacheLayer(CacheLayerMixin):
    """One layer's KV in the block, as transformers wants it: `update` is where a layer's attention gets it."""

    is_sliding = False

    def __init__(self, kv: DeviceKv, layer: int, past: int, ready: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys = kv.keys(layer)
        self._values = kv.values(layer)
        self.is_initialized = True
        self._layer = layer
        self._length = past
        self._ready = ready
        self._updates = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the block is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows [1, kv_heads, new, width] after the past ones; returns all of them once they are there."""
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
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_seq_length(self) -> int:
        """Positions and masks come from it before any update: it counts tokens still on their way, too."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return int(self._keys.shape[-2])

    def check_visited(self, length: int) -> None:
        """Raises `KvSafetyError` unless the layer took its KV once, and all of it."""
        if self._updates != 1:
            raise KvSafetyError(f"layer {self._layer} asked for its KV {self._updates} times in one pass")
        if self._length != length:
            raise KvSafetyError(f"layer {self._layer} holds {self._length} of {length} tokens")
