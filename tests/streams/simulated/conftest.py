"""Small schedules to take guards away from, and threads to run them on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlane.streams.executor import DEFAULT_DEADLINE_S
from kvlane.streams.simulated.backend import HostCosts
from kvlane.streams.simulated.draw import LAYER_S, MOST_TOKENS, RequestDraw, Schedule
from kvlane.streams.simulated.links import SimulatedLink
from kvlane.streams.simulated.threads import HostThreads
from kvlane.transfer.layout import KvLayout

LAYOUT = KvLayout(layers=4, kv_heads=1, k_width=1, v_width=1, itemsize=4)
LINK = SimulatedLink(LAYOUT.layer_bytes_per_token * MOST_TOKENS / LAYER_S)
"""A layer's copies take as long as its compute, for the longest prompt."""

REQUEST = RequestDraw(
    prompt=0,
    plan="load",
    mode="layered",
    group_layers=1,
    resident=0.0,
    loaded=1.0,
    seam=0.5,
    tiers=("host", "disk"),
    deadline_s=DEFAULT_DEADLINE_S,
    fault=None,
    cancel_after=None,
    on_failure="recompute",
    store_first=True,
)

SCHEDULE = Schedule(
    seed=0,
    layout=LAYOUT,
    paged=None,
    unit_tokens=2,
    prompts=(tuple(range(MOST_TOKENS)), (*range(10), *range(100, 108))),
    checkpoints=(),
    links={"copy-host": LINK, "copy-disk": LINK},
    compute="thread",
    timed=True,
    switch=0.3,
    stall=0.0,
    costs=HostCosts(),
    compute_s=(LAYER_S,) * LAYOUT.layers,
    before_share=0.0,
    ring_sets=3,
    quarantine_blocks=2,
    requests=((REQUEST,),),
    evictions=(),
)


class Sim:
    """A fixture, because test folders are not importable."""

    layout = LAYOUT
    link = LINK
    layer_s = LAYER_S

    @staticmethod
    def request(**changes):
        return replace(REQUEST, **changes)

    @staticmethod
    def schedule(*requests, **changes):
        """A small schedule of one sequence with these requests."""
        return replace(SCHEDULE, **{"requests": (requests or (REQUEST,),), **changes})


@pytest.fixture
def sim():
    return Sim


@pytest.fixture
def host_threads():
    with HostThreads() as threads:
        yield threads
