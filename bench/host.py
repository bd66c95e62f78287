"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvlane.policy.calibration_record import Fingerprint


def machine() -> dict[str, Any]:
    """This machine and the versions here, JSON-ready; `date` is now."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "compute_threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "kvlane": version("kvlane"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def fingerprint(host: dict[str, Any], model: str, dtype: str, device: str | None = None) -> Fingerprint:
    """What a calibration of a model is of, on a device or on one thread of this machine; weights and KV are of one
    dtype."""
    facts = {name: str(value) for name, value in host.items() if name != "date"}
    return Fingerprint(
        model=model,
        device=device or f"{facts['processor']}, one thread",
        engine="transformers",
        dtype=dtype,
        kv_dtype=dtype,
        tp=1,
        host=facts,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
