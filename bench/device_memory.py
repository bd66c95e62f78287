"""Whether a model fits on a CUDA device, looked at before minutes go into it, and which one would."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from kvlane.policy.catalog import load_model
from kvlane.policy.errors import InputError
from kvlane.policy.model import ModelSpec
from kvlane.policy.units import show_bytes

# What is offered in place of a model that does not fit, largest first.
SHAPES = ("qwen3-32b", "llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b")
_ITEM_BYTES = 2  # of bf16, which all of these are in
# The CUDA context, the libraries' workspaces and the staging buffers of copies.
_SPARE_BYTES = 3e9
# Page-locked on the host: the prompt that is measured, the one that is calibrated on, and probes.
_HOST_COPIES, _HOST_SPARE_BYTES = 2, 2e9


def device_bytes(spec: ModelSpec, tokens: int) -> float:
    """Device memory that it takes to measure prompts of so many tokens.

    Weights, a block of KV, and what one layer holds at its widest: some hidden states, its projections and MLP, which
    are no wider together than its weights over the hidden size, and the mask of half the prompt after the other half.
    """
    weights = spec.layer_weight_bytes + 2 * spec.head_weight_bytes
    width = 8 * spec.hidden + max(layer.weights for layer in spec.layers) / spec.hidden
    mask = tokens * tokens / 2 * (1 + _ITEM_BYTES)
    return weights + kv_bytes(spec, tokens) + _ITEM_BYTES * tokens * width + mask + _SPARE_BYTES


def kv_bytes(spec: ModelSpec, tokens: int) -> float:
    """Bytes of a prompt's KV in the dtype of the weights."""
    return tokens * spec.kv_bytes_per_token(spec.weight_dtype)


def check_device_memory(
    spec: ModelSpec, tokens: int, device: torch.device, *, host_grows: bool = False
) -> None:
    """Raises `InputError` naming `--model` where device or host have too little memory, with a shape that fits.

    Args:
        host_grows: the host is not looked at: what a virtual machine has at first may grow as it is used.
    """
    free, _ = torch.cuda.mem_get_info(device)
    refuse_memory(spec, tokens, free, float("inf") if host_grows else host_free_bytes())


def refuse_memory(spec: ModelSpec, tokens: int, device_free: float, host_free: float) -> None:
    """Raises `InputError` naming `--model` for a model that needs more than is free, with a shape that fits."""
    for where, needed, free in (
        ("the device", device_bytes(spec, tokens), device_free),
        ("page-locked host memory", _host_bytes(spec, tokens), host_free),
    ):
        if needed > free:
            smaller = [name for name in SHAPES if fits(load_model(name), tokens, device_free, host_free)]
            raise InputError(
                "--model",
                f"{spec.name} with {tokens:,} tokens needs about {show_bytes(needed)} of {where},"
                f" {show_bytes(free)} are free",
                f"{smaller[0]}, which fits" if smaller else "fewer --tokens",
            )


def fits(spec: ModelSpec, tokens: int, device_free: float, host_free: float) -> bool:
    """Whether there is enough of both memories."""
    return device_bytes(spec, tokens) <= device_free and _host_bytes(spec, tokens) <= host_free


def _host_bytes(spec: ModelSpec, tokens: int) -> float:
    return _HOST_COPIES * kv_bytes(spec, tokens) + _HOST_SPARE_BYTES


def host_free_bytes() -> float:
    """Memory that can be had, what only caches files included; as much as anybody asks for where nobody says."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return float("inf")
