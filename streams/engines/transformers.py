"""transformers: prefills one prompt on a decoder whose KV lies in a `DeviceKv`, loading part of it meanwhile.

Run against transformers 5.17 and 5.24.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend, Flag
from kvlane.streams.cuda_setup import check_not_capturing
from kvlane.streams.device_kv import DeviceKv
from kvlane.streams.engines.transformers_forward import ModelForward, PromptForward
from kvlane.streams.engines.transformers_model import MODEL_TYPES, identity_of, layout_of
from kvlane.streams.executor import (
    DEFAULT_DEADLINE_S,
    LayerExecutor,
    LayerTiming,
    LoadFailure,
    Mode,
    PartTiming,
    PassTiming,
)
from kvlane.streams.prefill import Job, OnFailure, Prefiller, SequenceKv
from kvlane.streams.quarantine import BlockPool
from kvlane.transfer.identity import EncodedIds, TokenIds, encode_token_ids
from kvlane.transfer.store import KvSafetyError, LayerKv, Store, StoredRun

__all__ = ["MODEL_TYPES", "PrefillResult", "TransformersEngine", "identity_of", "layout_of"]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """One prompt answered.

    Attributes:
        first_token: the id of largest logit.
        logits: of the first new token, float32 [vocabulary].
        mode: how the load was to run, None without one.
        resident_tokens: were on the device already.
        loaded_tokens: came from a store.
        loaded_bytes: bytes of the copies that brought them.
        computed_tokens: went through the model.
        total_s: from the submission until the token's id was on the host.
        head_s: from the end of the last layer to the same moment.
        passes: the passes the answer comes from, each with a row per layer.
        parts: every run's copies; those of a failed load as far as they arrived.
        failures: the load that failed, if one did: what it was to bring was computed.
        refused: why a load was not even started, None where it was or there was none.
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
    passes: tuple[PassTiming, ...]
    parts: tuple[PartTiming, ...] = ()
    failures: tuple[LoadFailure, ...] = ()
    refused: str | None = None

    @property
    def layers(self) -> tuple[LayerTiming, ...]:
        """The rows of the pass that the answer came out of."""
        return self.passes[-1].layers

    @property
    def fell_back(self) -> bool:
        """Whether tokens were computed that a load was to bring."""
        return bool(self.failures) or self.refused is not None


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
        quarantine_blocks: most blocks that may wait for the copies of failed loads to end, each as large as the
            engine's own; made when a load fails, and used again.

    Raises:
        InputError: a kind of model this adapter does not run, one in training mode, or a quarantine for no block.
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
        quarantine_blocks: int = 2,
    ) -> None:
        self.layout = layout_of(model)
        self.identity = identity_of(model, name, weights_revision, adapter)
        self.model = model
        self.backend = backend
        self.pool = BlockPool(
            lambda: DeviceKv(backend, self.layout, model.dtype, capacity_tokens), quarantine_blocks
        )
        self._executor = LayerExecutor(backend, ring_sets=quarantine_blocks + 1)
        self._prefiller = Prefiller(backend, self._executor, self.pool, self.layout.layers)
        self._forward = ModelForward(model, self.layout)
        self._modules = tuple(model.modules())
        self._check_model()
        self._sequence = SequenceKv(self.pool.take())
        self._held: EncodedIds = np.empty(0, np.uint32)
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
    def kv(self) -> DeviceKv:
        """The block. Another one after a load failed with a copy still under way."""
        return self._sequence.block

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
        """Overwrite the block's KV from token `start` on with NaN and forget it; all of it where layers have states.

        Raises:
            KvSafetyError: the engine is in use, or there was no memory for a block without a stuck copy.
        """
        with self._alone("poison"):
            if self._sequence.stuck is not None:
                raise KvSafetyError("a copy of a load that failed may still write to the block")
            # A state is of all the tokens held: without some of them it is of no prefix.
            left = 0 if self.layout.has_states and start < self.held_tokens else start
            self._keep(left)
            self._sequence.tokens = self._held.size
            self.kv.poison(left)

    def save(self, store: Store, token_ids: TokenIds, tokens: int) -> int:
        """Store the KV of a prompt's first tokens; returns how many of them `Store.put` stored.

        Where layers have states, all tokens held are stored or none: that is what the states are of.

        Raises:
            InputError: the block does not hold the KV of these tokens in every layer.
            KvSafetyError: the engine is in use.
            StoreFullError: see `Store.put`.
        """
        with self._alone("save"):
            if not self.holds(token_ids, tokens):
                raise InputError("tokens", f"the first {tokens} of this prompt are not held")
            # The ids that the KV was computed from: what the caller does to its own while this runs is no matter.
            rows = self.layer_bytes(0, tokens)
            return store.put(self.identity, self._held[:tokens], self.layout, rows, (tokens,))

    def layer_bytes(self, start: int, end: int) -> Iterator[LayerKv]:
        """For every layer the bytes of tokens `[start, end)` as `Store.put` takes them.

        They are read one layer at a time, on some backends as views: copy a layer before the next is asked for, and
        ask until there is none, since it is only then that the last one is known to be good. `save` ties them to ids.

        Raises:
            InputError: tokens whose KV the block does not hold, in every layer.
            KvSafetyError: while reading, the block was changed since this was called.
        """
        generation = self._generation
        if not 0 <= start <= end <= self.held_tokens:
            raise InputError("tokens", f"[{start}, {end}) are not held", f"at most {self.held_tokens}")
        if start < self._sequence.sparse_until:
            raise InputError("tokens", f"[{start}, {end}) are not held in layers with a window")
        if self.layout.has_states and end < self.held_tokens:
            raise InputError("tokens", f"end at {end}", f"{self.held_tokens}, where the states are")
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
        load: StoredRun | Sequence[StoredRun] | None = None,
        *,
        mode: Mode = "layered",
        group_layers: int = 1,
        submitted_s: float | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        cancel: Flag | None = None,
        on_failure: OnFailure = "recompute",
    ) -> PrefillResult:
        """The prompt's first new token: `resident` tokens reused, `load` loaded, the rest computed.

        A load that fails is not an error: what it was to bring is computed, and the result says what failed.

        Args:
            token_ids: the whole prompt, shape [tokens].
            resident: leading tokens whose KV the block holds.
            load: stored tokens of this prompt, one run or several that follow one another, ending below its length; see
                `Store.open`. Where the first begins after the resident tokens, those between are computed meanwhile.
                The caller's handles may be closed as soon as this returns or raises.
            mode: what the compute waits for: `layered` for each layer's own KV, `bulk` for all of it at the start.
            group_layers: layers that share one event.
            submitted_s: when the request arrived, on the backend's clock, if before this call (a lookup and a decision
                count as part of the time to the first token).
            deadline_s: from now; a load that is not done by then is given up.
            cancel: a flag of the backend's; set, it calls the request off.
            on_failure: `raise` to be told of a load that failed by an error. The block then holds the resident tokens.

        Raises:
            InputError: a prompt that is empty or does not fit, resident tokens that are not there, a run of another
                model, prompt or range, a model in training mode, autocast, a deadline that cannot be waited for, or a
                CUDA graph being captured, whose replay would wait for no layer.
            LoadError: with `raise`, a layer did not arrive.
            LoadRefusedError: with `raise`, too many earlier loads have not ended.
            PrefillCancelledError: the request was called off.
            KvSafetyError: the engine is in use.
        """
        began = self.backend.now()
        # A copy: the caller's array may change while the model runs, and what is held must not.
        ids = encode_token_ids(token_ids).copy()
        runs = () if load is None else tuple(load) if isinstance(load, Sequence) else (load,)
        with self._alone("prefill"):
            self._check_model()
            self._check_prompt(ids, resident, runs)
            job = Job(
                tokens=ids.size,
                resident=resident,
                parts=runs,
                submitted_s=began if submitted_s is None else submitted_s,
                mode=mode,
                group_layers=group_layers,
                deadline_s=deadline_s,
                cancel=cancel,
                on_failure=on_failure,
            )
            return self._prefill(ids, job)

    def _prefill(self, ids: EncodedIds, job: Job) -> PrefillResult:
        self._keep(job.resident)
        try:
            outcome = self._prefiller.run(PromptForward(self._forward, ids), self._sequence, job)
        finally:
            self._held = ids[: self._sequence.tokens]
        logits, token = outcome.answer
        return PrefillResult(
            first_token=token,
            logits=logits.float().cpu().numpy(),
            mode=job.mode if job.parts else None,
            resident_tokens=job.resident,
            loaded_tokens=outcome.loaded_tokens,
            loaded_bytes=outcome.loaded_bytes,
            computed_tokens=outcome.computed_tokens,
            total_s=outcome.total_s,
            head_s=outcome.head_s,
            passes=outcome.passes,
            parts=outcome.parts,
            failures=outcome.failures,
            refused=outcome.refused,
        )

    def _check_model(self) -> None:
        """That a forward would compute the identity's KV: what was set may have been set otherwise since."""
        if any(module.training for module in self._modules):
            raise InputError("model", "is in training mode", "model.eval()")
        kind = self.model.device.type
        check_not_capturing(kind)
        if torch.is_autocast_enabled(kind):
            raise InputError("autocast", f"is enabled for {kind}", "off: its KV would be of another type")

    def _check_prompt(self, ids: EncodedIds, resident: int, runs: Sequence[StoredRun]) -> None:
        """That everything is this prompt's; whether it adds up is for `Job` to say."""
        if not 1 <= ids.size <= self.capacity_tokens:
            raise InputError("token_ids", f"holds {ids.size} tokens", f"1 to {self.capacity_tokens}")
        if not self.holds(ids, resident):
            raise InputError("resident", f"{resident} tokens of this prompt are not on the device")
        for run in runs:
            if run.identity != self.identity:
                raise InputError("load", "was stored under another identity", "this engine's KV")
            if not np.array_equal(run.token_ids[: run.end], ids[: run.end]):
                raise InputError("load", "was stored for another prompt", "the same token ids")
