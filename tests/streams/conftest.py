"""Small random models, and backends whose copies are slow, fail or stand still."""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvlane.streams.cpu import CpuBackend
from kvlane.streams.engines.transformers import TransformersEngine
from kvlane.transfer.host import HostStore
from kvlane.transfer.store import StaleHitError

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    # A head width that is not hidden / heads.
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}

LAYERS = 4
UNIT = 8


@pytest.fixture(autouse=True)
def one_compute_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_thread_stays_behind():
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("kvlane")]
    assert not left


def make_model(kind="llama", dtype=torch.float32, kv_heads=2, attention="sdpa", **changes):
    config_class, model_class, extra = KINDS[kind]
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 96,
        "vocab_size": 160,
        "max_position_embeddings": 1024,
        # Wider than the default, so that attention is not nearly uniform and a wrong row of KV shows.
        "initializer_range": 0.2,
    }
    config = config_class(**{**sizes, **extra, **changes})
    config._attn_implementation = attention
    torch.manual_seed(0)
    return model_class(config).to(dtype).eval()


def make_ids(tokens, seed=1):
    return torch.randint(0, 160, (tokens,), generator=torch.Generator().manual_seed(seed)).numpy()


class SlowBackend(CpuBackend):
    """Every copy begins late, which widens a race until it is always lost; notes the threads that copy."""

    delay_s = 0.004

    def __init__(self, *args):
        super().__init__(*args)
        self.copy_threads = set()

    def _copy_piece(self, destination, source, piece):
        self.copy_threads.add(threading.get_ident())
        time.sleep(self.delay_s)
        super()._copy_piece(destination, source, piece)


class FailingBackend(CpuBackend):
    """The first copy of one layer raises, once."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def _copy_piece(self, destination, source, piece):
        if piece.layer == self.layer:
            self.layer = None
            raise OSError("link down")
        super()._copy_piece(destination, source, piece)


class StuckBackend(CpuBackend):
    """The copies of one layer stand still, from when `reached` is set until `go` is."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.reached = threading.Event()
        self.go = threading.Event()

    def _copy_piece(self, destination, source, piece):
        if piece.layer == self.layer:
            self.reached.set()
            self.go.wait()
        super()._copy_piece(destination, source, piece)

    def close(self):
        self.go.set()
        super().close()


def make_engine(model, backend, tokens=128):
    return TransformersEngine(model, backend, tokens, name="tiny", weights_revision="seed-0")


def stored(model, ids, unit=UNIT, kind=HostStore):
    """A store that holds the prompt's KV as a real prefill wrote it, and that prefill's result."""
    store = kind(unit)
    with CpuBackend() as backend:
        engine = make_engine(model, backend, len(ids))
        result = engine.prefill(ids)
        store.put(engine.identity, ids, engine.layout, engine.layer_bytes(0, len(ids)))
    return store, result


def at_once(model, engine, ids, past, states=None):
    """The reference: logits of the same KV and states, filled at once into the cache transformers itself would use."""
    cache = DynamicCache(config=model.config)
    for layer, shape in enumerate(engine.layout.shapes):
        if shape.state_bytes:
            kernel = model.config.conv_L_cache
            cache.update_conv_state(states[layer].view(1, -1, kernel), layer, conv_kernel_size=kernel)
        else:
            keys, values = engine.kv.keys(layer)[:, :, :past], engine.kv.values(layer)[:, :, :past]
            cache.update(keys.clone(), values.clone(), layer)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        inputs = torch.tensor(ids[past:][None])
        output = model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{argument: cache})
    return output.logits[0, -1].float().numpy()


class FaultyStore:
    """A store of which something goes wrong: a call raises, the runs come short or rot, or stand still until `go`.

    Args:
        how: see `LOAD_FAULTS` and `STALLS`; `lookup`, `open` and `close` raise; `stale`, which is no fault.
        layer: where it goes wrong, if at a layer.
    """

    def __init__(self, store, how, layer=0):
        self.store = store
        self.asked = 0  # lookups
        self.arm(how, layer)

    def __getattr__(self, name):
        return getattr(self.store, name)

    def arm(self, how, layer=0):
        """From now on this goes wrong; what stands still goes on doing so until its own `go`, which is returned."""
        self.how, self.layer, self.go = how, layer, threading.Event()
        return self.go

    def stand(self, call):
        if self.how == f"{call} standing still":
            # A minute, or a test that fails would never end.
            assert self.go.wait(60)

    def lookup(self, *args):
        self.asked += 1
        self.stand("lookup")
        if self.how == "lookup":
            raise OSError("no index")
        return self.store.lookup(*args)

    def open(self, *args, **kwargs):
        self.stand("open")
        if self.how == "open":
            raise OSError("no such file")
        if self.how == "stale":
            raise StaleHitError("evicted")
        return FaultyRun(self.store.open(*args, **kwargs), self)


class FaultyRun:
    def __init__(self, run, store, *, retained=False):
        self._run, self._store, self._retained = run, store, retained

    def __getattr__(self, name):
        return getattr(self._run, name)

    def retain(self):
        self._store.stand("pin")
        if self._store.how == "pin":
            raise OSError("gone")
        return FaultyRun(self._run.retain(), self._store, retained=True)

    def close(self):
        self._store.stand("close")
        self._run.close()
        if self._store.how == "close" and not self._retained:
            raise OSError("cannot close")

    def verify(self, layer):
        if layer == self._store.layer and self._store.how == "rotten":
            at = self.region.key_offset(layer, self.end - 1)
            self.memory[at] ^= 1
            try:
                self._run.verify(layer)
            finally:
                self.memory[at] ^= 1
            return
        self._run.verify(layer)

    def copies(self, layer, destination):
        copies = self._run.copies(layer, destination)
        if layer != self._store.layer:
            return copies
        if self._store.how == "raising":
            raise OSError("unreadable")
        if self._store.how == "standing still":
            self._store.go.wait()
        return copies[:-1] if self._store.how == "short" else copies


LOAD_FAULTS = {
    "pin": "not pinned: gone",
    "rotten": "checksum",
    "raising": "unreadable",
    "standing still": "deadline",
    "short": "bytes of",
}
"""What goes wrong in a store once there is a load, and a word of what is said of it."""


STALLS = tuple(f"{call} standing still" for call in ("lookup", "open", "pin", "close"))
"""Calls of a store that do not come back before `go`."""


def freed(store, timeout_s=10.0):
    """Whether nothing of a store is pinned any more, which a load that was given up need not have come to yet."""
    until = time.monotonic() + timeout_s
    while store.clear():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


class Kit:
    """What tests of this folder share; a fixture, because test folders are not importable."""

    layers = LAYERS
    unit = UNIT
    kinds = tuple(KINDS)
    load_faults = LOAD_FAULTS
    stalls = STALLS
    FaultyStore = FaultyStore
    SlowBackend = SlowBackend
    FailingBackend = FailingBackend
    StuckBackend = StuckBackend
    model = staticmethod(make_model)
    ids = staticmethod(make_ids)
    engine = staticmethod(make_engine)
    stored = staticmethod(stored)
    freed = staticmethod(freed)
    at_once = staticmethod(at_once)


@pytest.fixture
def kit():
    return Kit
