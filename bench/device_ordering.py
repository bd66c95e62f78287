"""Whether a load by layer is waited for on the device at hand, with every layer's copy coming late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kvlane.bench.lab import Ids, Lab
from kvlane.streams.backend import Event, Flag, Stream
from kvlane.streams.cuda import CudaBackend, CudaStream
from kvlane.streams.load import LayerLoad
from kvlane.transfer.host import HostStore
from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import HostBytes

# Some ten milliseconds on any device of today, far beyond a small layer's compute.
DELAY_CYCLES = 20_000_000


class LateBackend(CudaBackend):
    """Every layer's copies come after a wait on their stream."""

    def copy(
        self,
        stream: Stream,
        destination: torch.Tensor,
        source: HostBytes,
        copies: Sequence[CopyDescriptor],
        cancel: Flag,
        began: Event,
        done: Event,
    ) -> None:
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.lane.stream):
            torch.cuda._sleep(DELAY_CYCLES)
        super().copy(stream, destination, source, copies, cancel, began, done)


def _hasty(load: LayerLoad, layer: int) -> None:
    """Go on without waiting."""


def ordering(lab: Lab, ids: Ids) -> dict[str, Any]:
    """Loads a prompt in each mode and compares its logits with those of KV that never left the device, to the bit.

    `control` is the same load by layer with the waits left out: if its logits are right as well, the copies were not
    late, and nothing was shown. `problems` says what is not as it must be.
    """
    end = (len(ids) - 1) // 16 * 16
    lab.recompute(ids)
    store = HostStore(16, allocate=lab.backend.host_bytes)
    lab.keep(store, ids, end)
    expected = lab.engine.prefill(ids, resident=end).logits
    found: dict[str, Any] = {}
    for name, mode, start, group in (
        ("bulk", "bulk", 0, 1),
        ("layered", "layered", 0, 1),
        ("grouped", "layered", 0, 3),
    ):
        lab.poison()
        with store.open(store.lookup(lab.engine.identity, ids), start, end) as run:
            answer = lab.engine.prefill(
                ids,
                load=run,
                mode="bulk" if mode == "bulk" else "layered",
                group_layers=group,
                on_failure="raise",
            )
        found[name] = bool(np.array_equal(answer.logits, expected))
    lab.poison()
    with (
        store.open(store.lookup(lab.engine.identity, ids), 0, end) as run,
        patch.object(LayerLoad, "hold", _hasty),
    ):
        unguarded = lab.engine.prefill(ids, load=run, mode="layered", on_failure="raise").logits
    found["control"] = bool(np.array_equal(unguarded, expected))
    found["problems"] = [
        f"{name}: not the logits of resident KV" for name in list(found)[:3] if not found[name]
    ]
    if found["control"]:
        found["problems"].append("control: right without waiting, so the copies were not late")
    return found
