"""From a published row to what ran: machine, engine, model, dtypes, cards, and the link a load came over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from kvlane.bench import validate_text as text
from kvlane.bench.validate_models import model_of
from kvlane.bench.validate_rows import Row
from kvlane.bench.validate_text import UnpredictableError
from kvlane.policy.catalog import load_machine
from kvlane.policy.machine import Device, Link, Machine
from kvlane.policy.machine_text import shared_links
from kvlane.policy.model import ModelSpec

# Most tokens that an engine family computes in one pass unless told otherwise, on devices of at least so many bytes
# of memory and on smaller ones. vLLM: `max_num_batched_tokens` of its API server (docs.vllm.ai, engine arguments);
# before version 0.8 it computed a whole prompt at once. SGLang: `chunked_prefill_size`. llama.cpp: `n_ubatch`.
# MLX: `prefill_step_size` of mlx-lm.
_LARGE_MEMORY = 70e9
_PASS_TOKENS: Mapping[str, tuple[int, int]] = {
    "vllm": (8192, 2048),
    "sglang": (8192, 4096),
    "llama_cpp": (512, 512),
    "mlx": (2048, 2048),
}
# What a load moves at a time where the row does not say: vLLM's block of 16 tokens, all layers together.
_BLOCK_TOKENS = 16
# The link of a device whose memory is the host's.
_UNIFIED = "unified-lpddr"
# vLLM's version where the text names one, and the first that computes a prompt in chunks unless told otherwise.
_VLLM = re.compile(r"vllm[ =_-]*v?(\d+)\.(\d+)", re.I)
_VLLM_CHUNKS = (0, 8)
# Beyond these a text that was read as a number says something else.
_MOST_CARDS, _MOST_PROMPTS, _MOST_DRIVES = 4096, 65536, 4096
_WATTS = (10.0, 1e5)
_RATE = (1e6, 1e15)


@dataclass(frozen=True, slots=True)
class Compute:
    """What computed: `sequences` prompts at once on `tp` ranks times `stages` of a pipeline."""

    machine: Machine
    engine: str
    model: ModelSpec
    weight_dtype: str
    kv_dtype: str
    tp: int
    stages: int
    sequences: int
    pass_tokens: int | None

    @property
    def cell(self) -> tuple[str, str, str]:
        """What fitted efficiencies are kept by: device, dtype the device computes weights in, engine family."""
        return self.machine.name, self.weight_dtype, self.engine


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moved: the link, and the size of one copy in bytes (None where nobody says).

    `shared` is whether all ranks draw on one link: a store or a network, where host memory gives each device a link
    of its own. `per_token_s` is the host's work for each loaded token.
    """

    link: Link
    copy_bytes: float | None
    shared: bool
    per_token_s: float


def compute_setup(row: Row) -> Compute:
    """What computed a row of kind A or B; raises `UnpredictableError` with what is not known."""
    machine = machine_of(row)
    model = model_of(row.model)
    if model is None:
        raise UnpredictableError(f"the model is not described: {row.model or 'none stated'}")
    engine = text.engine_family(row.engine)
    tp, stages = text.cards(row.gpu, row.n_gpus_tp)
    _within("cards", tp * stages, 1, _MOST_CARDS)
    prompts = text.prompts_at_once(row.batch)
    _within("prompts in a batch", prompts, 1, _MOST_PROMPTS)
    stored = text.look_up(text.WEIGHTS, f"{row.weight_dtype} {row.model}")
    kv_stored = text.look_up(text.KV, row.kv_dtype)
    weights = _as_computed(stored or model.weight_dtype, machine.device)
    return Compute(
        machine=machine,
        engine=engine,
        model=model,
        weight_dtype=weights,
        kv_dtype=kv_stored or "bf16",
        tp=tp,
        stages=stages,
        sequences=prompts,
        pass_tokens=_pass_tokens(engine, row.engine, machine.device),
    )


def transfer_setup(row: Row) -> Transfer:
    """What carried a load or a plain copy; raises `UnpredictableError` with what is not known."""
    link = _link_of(row)
    rate = text.stated_rate(row.link_rate)
    if rate is not None:
        _within("bytes per second of the stated link", rate, *_RATE)
        ceiling = link.ceiling_bytes_per_s
        rate = min(rate, ceiling) if ceiling else rate
        link = replace(link, rate_bytes_per_s=rate, rate_table=(), source="explicit", origin="stated")
    kind = text.look_up(text.TIERS, row.tier)
    device = text.look_up(text.DEVICES, row.gpu)
    return Transfer(
        link=link,
        copy_bytes=row.copy_bytes or text.block_bytes(row.notes),
        shared=kind != "host" and not (kind == "drives" and device is not None and alone_in_box(device)),
        per_token_s=_machine(device).tiers["host"].per_token_s if device and kind == "host" else 0.0,
    )


def alone_in_box(device: str) -> bool:
    """Whether each box holds one such device, and so has drives of its own: one that shares the host's memory."""
    return _machine(device).tiers["host"].link == _UNIFIED


def block_tokens_bytes(model: ModelSpec, kv_dtype: str, tp: int) -> float:
    """Bytes of one block of a paged store, all layers of one rank."""
    return model.kv_bytes_per_token(kv_dtype, tp) * _BLOCK_TOKENS


def machine_of(row: Row) -> Machine:
    """The machine whose device a row names, held to the power it states."""
    name = text.look_up(text.DEVICES, row.gpu)
    if name is None:
        raise UnpredictableError(f"the device is not described: {row.gpu or 'none stated'}")
    machine = _machine(name)
    limit = text.watts(row.gpu)
    if limit is not None:
        _within("watts", limit, *_WATTS)
    return machine if limit is None else replace(machine, device=machine.device.limited_to(limit))


@cache
def _machine(name: str) -> Machine:
    return load_machine(name)


def _as_computed(stored: str, device: Device) -> str:
    """16-bit formats are one, named as the device names its peak."""
    if stored in ("bf16", "fp16"):
        return "bf16" if "bf16" in device.peak_flops else "fp16"
    return stored


def _pass_tokens(family: str, engine: str, device: Device) -> int | None:
    version = _VLLM.search(engine)
    if family == "vllm" and version and (int(version[1]), int(version[2])) < _VLLM_CHUNKS:
        return None
    large, small = _PASS_TOKENS.get(family, (None, None))
    return large if (device.memory_bytes or 0) >= _LARGE_MEMORY else small


def _host_link(row: Row) -> Link:
    name = text.look_up(text.DEVICES, row.gpu)
    if name is not None:
        return _machine(name).links[_machine(name).tiers["host"].link]
    stated = text.look_up(text.HOST_LINKS, f"{row.gpu} {row.tier} {row.notes}")
    if stated is None:
        raise UnpredictableError(f"the host link is not known: {row.gpu or 'no device stated'}")
    return shared_links()[stated]


def _link_of(row: Row) -> Link:
    links = shared_links()
    kind = text.look_up(text.TIERS, row.tier)
    if kind is None:
        raise UnpredictableError(f"the tier is not described: {row.tier or 'none stated'}")
    words = f"{row.tier} {row.notes}"
    if kind == "drives" or (kind == "network" and "nvme" in row.tier.lower()):
        return _drives(text.drives(words), row)
    if kind == "network":
        return _network(words)
    if kind != "host":
        return links[kind]
    host = _host_link(row)
    method = text.look_up(text.COPY_METHODS, f"{row.engine} {row.notes}")
    if row.method == "store" and method is None:
        method = "store"
    return links.get(f"{host.name}-{method}", host) if method else host


def _within(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UnpredictableError(f"{value:.6g} {what}: not from {least:.6g} to {most:.6g}")


def _drives(count: int, row: Row) -> Link:
    _within("drives", count, 1, _MOST_DRIVES)
    one = shared_links()["nvme-1"]
    rate = count * one.rate_bytes_per_s
    with suppress(UnpredictableError):
        rate = min(rate, _host_link(row).rate_bytes_per_s)
    return replace(one, name=f"nvme-{count}", rate_bytes_per_s=rate, ceiling_bytes_per_s=None)


def _network(words: str) -> Link:
    stated = text.line_rate(words)
    if stated is None:
        raise UnpredictableError("the rate of the network is not stated")
    _within("bytes per second of the network", stated, *_RATE)
    known = shared_links()["net-400"]
    share = known.rate_bytes_per_s / (known.ceiling_bytes_per_s or known.rate_bytes_per_s)
    return replace(known, name="network", rate_bytes_per_s=share * stated, ceiling_bytes_per_s=stated)
