"""What the policy's tests share: the published inputs, the command run in-process, and random machines.

The random machines are registered with hypothesis by type, so that any test file draws them with
`st.from_type(Planner)`: every planner knows the tiers `host` and `disk`, every request's hits are among them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from kvlane.policy import (
    Calibration,
    Device,
    Estimate,
    LayerSpec,
    Link,
    Machine,
    ModelSpec,
    PassCost,
    Planner,
    PrefillCost,
    Request,
    Tier,
)
from kvlane.policy.cli import app, run_app
from kvlane.policy.plan import EXECUTORS
from kvlane.policy.transfer_cost import TransferCost

Kvlane = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of published configs and known answers, which lies beside the checkout where there is one."""
    folder = Path(__file__).resolve().parents[2].parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared (published model configs and known answers) beside the checkout")
    return folder


@pytest.fixture
def kvlane(capsys: pytest.CaptureFixture[str]) -> Kvlane:
    """Runs the `kvlane` command in this process: exit status, stdout and stderr as of a real one."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        texts = [str(argument) for argument in arguments]
        status = run_app(app, "kvlane", texts)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(texts, status, out, err)

    return run


class Replay:
    """What an estimate's plan comes to, layer by layer and pass by pass: the policy's prices without its formulas."""

    @staticmethod
    def transfer(planner: Planner, tier: str, request: Request) -> TransferCost:
        found = planner.machine.tier(tier)
        return TransferCost.of_tier(
            found,
            planner.machine.links[found.link],
            planner.layers,
            planner.layer_bytes_per_token,
            request.load_unit_tokens,
        )

    @staticmethod
    def arrivals(planner: Planner, request: Request, estimate: Estimate) -> list[float]:
        """When each layer has all of its KV, over as many links as the load uses."""
        layers, group = planner.layers, estimate.group_layers
        arrivals, busy_until = [0.0] * layers, dict[str, float]()
        for segment in estimate.load:
            transfer = Replay.transfer(planner, segment.tier, request)
            link = transfer.link
            # What is asked of a busy link comes after what it carries already.
            began = max(busy_until.get(link.name, 0.0), request.link_queue_s.get(segment.tier, 0.0))
            each = [began + transfer.total_s(segment.tokens)] * layers
            if planner.executor != "bulk" and transfer.layout == "layer_major":
                at, each = began + transfer.lead_s(segment.tokens), []
                for first in range(0, layers, group):
                    # Nobody knows of a layer before the event of its group.
                    count = min(group, layers - first)
                    at += count * transfer.layer_s(segment.tokens) + link.per_event_s
                    each += [at] * count
            busy_until[link.name] = each[-1]
            arrivals = [max(pair) for pair in zip(arrivals, each, strict=True)]
        return arrivals

    @staticmethod
    def passes_s(planner: Planner, request: Request, start: int, end: int) -> float:
        """Seconds to compute `[start, end)` pass by pass."""
        chunk = request.prefill_chunk_tokens or request.prompt_tokens
        return sum(
            planner.prefill.pass_s(at, min(chunk, end - at)) for at in range(start, max(start, end), chunk)
        )

    @staticmethod
    def front_s(planner: Planner, request: Request, estimate: Estimate) -> float:
        return Replay.passes_s(planner, request, request.resident_tokens, estimate.start)

    @staticmethod
    def ttft_s(planner: Planner, request: Request, estimate: Estimate) -> float:
        prompt, at = request.prompt_tokens, max(estimate.end, request.resident_tokens)
        first = min(request.prefill_chunk_tokens or prompt, prompt - at)
        # Passes wait for a busy device, copies do not.
        done = request.device_busy_s + Replay.front_s(planner, request, estimate)
        for arrival in Replay.arrivals(planner, request, estimate):
            done = max(done, arrival) + planner.prefill.pass_s(at, first) / planner.layers
        return done + Replay.passes_s(planner, request, at + first, prompt) + planner.prefill.head_s


@pytest.fixture(scope="session")
def replay() -> type[Replay]:
    """Replays what an estimate says."""
    return Replay


def _between(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers spread evenly over the magnitudes between two powers of ten."""
    return st.floats(low, high).map(lambda exponent: float(10.0**exponent))


def _maybe(low: float, high: float) -> st.SearchStrategy[float]:
    return st.just(0.0) | _between(low, high)


def _pass_costs() -> st.SearchStrategy[PassCost]:
    return st.builds(
        PassCost,
        overhead_s=_maybe(-5, -1),
        token_s=_maybe(-6, -3),
        pair_s=_maybe(-12, -7),
        context_s=_maybe(-9, -5),
        rectangle=st.booleans(),
    )


def _prefill_costs() -> st.SearchStrategy[PrefillCost]:
    return st.builds(
        PrefillCost,
        layers=st.sampled_from((1, 2, 3, 16, 32, 80)),
        fresh=_pass_costs(),
        extend=_pass_costs(),
        head_s=_maybe(-5, -2),
        floor_s=_maybe(-4, 0),
        floor_context_s=_maybe(-9, -5),
    )


@st.composite
def _links(draw: st.DrawFn) -> Link:
    latency, event = draw(_maybe(-6, -2)), draw(st.just(0.0) | _maybe(-6, -3))
    if draw(st.booleans()):
        return Link(
            "link",
            draw(_between(7, 11)),
            per_copy_s=draw(_maybe(-7, -4)),
            latency_s=latency,
            per_event_s=event,
        )
    # A larger copy is never done sooner, and never moves at a lower rate: a table of a real link.
    size, rate = draw(_between(2, 6)), draw(_between(7, 10))
    rows = [(size, rate)]
    for _ in range(draw(st.integers(0, 4))):
        growth = draw(_between(0.1, 2))
        size, rate = size * growth, rate * growth ** draw(st.floats(0, 1))
        rows.append((size, rate))
    return Link("link", rows[-1][1], rate_table=tuple(rows), latency_s=latency, per_event_s=event)


@st.composite
def _planners(draw: st.DrawFn) -> Planner:
    prefill = draw(st.from_type(PrefillCost))
    width = draw(st.sampled_from((16, 64, 128)))
    layer = LayerSpec(
        heads=8, kv_heads=draw(st.sampled_from((1, 2, 8))), k_width=width, v_width=width, weights=1_000_000
    )
    model = ModelSpec("random", (layer,) * prefill.layers, 8 * width, 1000, "bf16", "bf16")
    # Now and then both tiers lie at the end of one link.
    shared = draw(st.sampled_from((False, False, False, True)))
    tiers = {
        name: Tier(
            name,
            "to_host" if shared else f"to_{name}",
            layout=draw(st.sampled_from(("layer_major", "chunk_major"))),
            run_tokens=draw(st.sampled_from((None, 0, 16, 100))),
            runs_per_layer=draw(st.sampled_from((1, 2))),
            per_token_s=draw(st.just(0.0) | _maybe(-8, -6)),
        )
        for name in ("host", "disk")
    }
    machine = Machine(
        name="random",
        device=Device("random"),
        links={
            name: replace(draw(st.from_type(Link)), name=name)
            for name in dict.fromkeys(tier.link for tier in tiers.values())
        },
        tiers=tiers,
        prefill=(),
    )
    return Planner(
        model,
        machine,
        executor=draw(st.sampled_from(EXECUTORS)),
        calibration=Calibration(prefill, draw(st.floats(0, 0.5)), "drawn at random"),
        tie_margin=draw(st.sampled_from((0.0, 0.03, 0.2))),
    )


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    unit = draw(st.sampled_from((1, 16, 64, 784)))
    # Few enough load units that a test can try each of them as a split point.
    most = 400 * min(unit, 64)
    prompt = draw(st.integers(1, most) | st.integers(2 * unit, most))
    hits: dict[str, int | tuple[int, ...]] = {}
    for tier in draw(st.sampled_from((("host",), ("disk", "host"), ("host",), ("disk", "host"), ()))):
        fewest = prompt - draw(st.just(0) | st.integers(0, prompt))
        shapes: list[int | tuple[int, ...]] = [fewest, (fewest,), (prompt, fewest, prompt)]
        hits[tier] = draw(st.sampled_from(shapes))
    return Request(
        prompt_tokens=prompt,
        hits=hits,
        resident_tokens=draw(st.just(0) | st.integers(0, (prompt - 1) // 4) | st.integers(0, prompt - 1)),
        load_unit_tokens=unit,
        prefill_chunk_tokens=draw(st.none() | st.integers(max(1, prompt // 30), prompt)),
        tail_tokens=draw(st.sampled_from((1, 1, 4))),
    )


st.register_type_strategy(PassCost, _pass_costs())
st.register_type_strategy(PrefillCost, _prefill_costs())
st.register_type_strategy(Link, _links())
st.register_type_strategy(Planner, _planners())
st.register_type_strategy(Request, _requests())
