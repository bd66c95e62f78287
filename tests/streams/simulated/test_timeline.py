"""On exclusive links the virtual clock shows what the policy predicts, layer by layer; neither knows of the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import Link, pipeline
from kvlane.policy.layer_transfer import LayerBytes, LayerwiseTransfer
from kvlane.policy.machine import Tier
from kvlane.policy.transfer_cost import TransferCost
from kvlane.streams.executor import Mode
from kvlane.streams.prefill import Job, SequenceKv
from kvlane.streams.simulated.backend import HostCosts, SimulatedBackend
from kvlane.streams.simulated.engine import SimulatedBlock, SimulatedEngine
from kvlane.streams.simulated.kv import PromptKv
from kvlane.streams.simulated.links import SimulatedLink
from kvlane.streams.simulated.tier import SimulatedTier
from kvlane.transfer.identity import KvIdentity, encode_token_ids
from kvlane.transfer.layout import KvLayout, KvRegion
from kvlane.transfer.shapes import LayerShape

UNIT = 4
TOKENS = 40
"""Of the prompt; all but the last unit are stored."""

CLOSE = 1e-9
FREE = HostCosts()


def simulated(link: Link) -> SimulatedLink:
    return SimulatedLink(link.rate_bytes_per_s, link.per_copy_s, link.latency_s, link.per_event_s)


@dataclass(frozen=True)
class Case:
    """A plan and the machine it runs on: tokens `[begin, seam)` from one tier, `[seam, end)` from another."""

    computes: tuple[float, ...]
    host: Link
    disk: Link
    begin: int
    seam: int
    end: int
    group: int
    windows: tuple[int | None, ...]
    compute: Literal["thread", "stream"]
    mode: Mode = "layered"
    costs: HostCosts = FREE

    @property
    def layout(self) -> KvLayout:
        return KvLayout.of(LayerShape(1, 2, 2, 4, window=window) for window in self.windows)

    def transfer(self, link: Link) -> TransferCost:
        """What the policy makes of this layout on a link: keys and values are two runs."""
        tier = Tier("tier", link.name, runs_per_layer=2)
        if all(window is None for window in self.windows):
            return TransferCost.of_tier(tier, link, len(self.windows), 16.0, UNIT)
        of = [LayerBytes(16.0, window, runs=2) for window in self.windows]
        return LayerwiseTransfer.over(tier, link, of, UNIT)

    @property
    def parts(self) -> list[tuple[str, Link, int, int]]:
        runs = [("host", self.host, self.begin, self.seam), ("disk", self.disk, self.seam, self.end)]
        return [run for run in runs if run[2] < run[3]]

    def front_s(self) -> float:
        return sum(self.computes) * self.begin / TOKENS

    def arrivals(self) -> list[float]:
        """When the policy has each layer arrive."""
        groups = len(self.computes) if self.mode == "bulk" else self.group
        every = [
            self.transfer(link).before(self.end - end).arrivals(end - start, groups)
            for _, link, start, end in self.parts
        ]
        return [max(one) for one in zip(*every, strict=True)] or [0.0] * len(self.computes)

    def pass_computes(self) -> list[float]:
        return [one * (TOKENS - self.end) / TOKENS for one in self.computes]


def run(case: Case, shared: SimulatedLink | None = None):
    """The same on the simulated device, by the real executor and driver; returns the driver's report.

    Both tiers come over `shared` if there is one.
    """
    layout = case.layout
    identity = KvIdentity("simulated", "r0", None, "bytes", layout.name, 0, 1, "none", "none")
    apart = {"copy-host": simulated(case.host), "copy-disk": simulated(case.disk)}
    links = apart if shared is None else {"*": shared}
    prompt = PromptKv(encode_token_ids(range(TOKENS)), layout)
    region = KvRegion(layout, TOKENS)
    with SimulatedBackend(links, compute=case.compute, costs=case.costs) as backend:
        tiers = {name: SimulatedTier(backend, name, UNIT, identity) for name in ("host", "disk")}
        for tier in tiers.values():
            tier.put(prompt)
        engine = SimulatedEngine(
            backend,
            layout,
            lambda: SimulatedBlock(backend.device_bytes(region.nbytes), region),
            lambda layer, start, end: case.computes[layer] * (end - start) / TOKENS,
        )
        sequence: SequenceKv[SimulatedBlock] = engine.sequence()
        runs = [
            tiers[name].open(tiers[name].lookup(prompt), start, end, case.end)
            for name, _, start, end in case.parts
        ]
        job = Job(
            TOKENS,
            0,
            tuple(runs),
            backend.now(),
            mode=case.mode,
            group_layers=case.group,
            deadline_s=1e6,
        )
        outcome = engine.prefill(sequence, prompt, job)
        for one in runs:
            one.close()
        engine.executor.close()
    return outcome


times = st.floats(1e-4, 1e-1)
costs = st.just(0.0) | st.floats(1e-6, 1e-3)


@st.composite
def links(draw, name):
    return Link(
        name,
        draw(st.floats(1e3, 1e7)),
        per_copy_s=draw(costs),
        latency_s=draw(costs),
        per_event_s=draw(costs),
    )


@st.composite
def cases(draw, most_layers=24):
    count = draw(st.integers(1, most_layers))
    cuts = sorted(draw(st.lists(st.integers(0, TOKENS // UNIT - 1), min_size=3, max_size=3)))
    begin, seam, end = (UNIT * cut for cut in cuts) if cuts[0] < cuts[2] else (0, 0, 0)
    begin = draw(st.sampled_from((0, begin)))
    window = st.none() if draw(st.booleans()) else st.none() | st.integers(1, TOKENS)
    windows = tuple(draw(st.lists(window, min_size=count, max_size=count)))
    return Case(
        tuple(draw(st.lists(times, min_size=count, max_size=count))),
        draw(links("host")),
        draw(links("disk")),
        begin,
        seam,
        end,
        draw(st.integers(1, count)),
        windows,
        draw(st.sampled_from(("thread", "stream"))),
    )


class TestEveryLayer:
    @given(case=cases())
    @settings(max_examples=150)
    def test_arrives_and_ends_when_the_policy_says(self, case):
        """Layered and grouped loads, prefix splits, two-ended ones, from one tier and from two at once."""
        rows = run(case).passes[-1].layers
        arrivals = case.arrivals()
        predicted = pipeline.recurrence(arrivals, case.pass_computes(), case.front_s())
        assert [row.compute_end_s for row in rows] == pytest.approx(predicted, rel=CLOSE)
        for row, arrival in zip(rows, arrivals, strict=True):
            # A run that brings nothing of a layer has it "arrive" after its layers before.
            if row.arrive_s is not None and all(window is None for window in case.windows):
                assert row.arrive_s == pytest.approx(arrival, rel=CLOSE)

    @given(case=cases(12))
    @settings(max_examples=50)
    def test_waits_for_all_in_bulk(self, case):
        whole = replace(case, mode="bulk", group=len(case.computes))
        rows = run(whole).passes[-1].layers
        last = max(whole.arrivals())
        predicted = pipeline.recurrence([last] * len(rows), whole.pass_computes(), whole.front_s())
        assert [row.compute_end_s for row in rows] == pytest.approx(predicted, rel=CLOSE)

    @given(case=cases(12))
    @settings(max_examples=30)
    def test_of_the_front_waits_for_nothing(self, case):
        outcome = run(case)
        if len(outcome.passes) == 2:
            done = 0.0
            for row, compute in zip(outcome.passes[0].layers, case.computes, strict=True):
                done += compute * case.begin / TOKENS
                assert row.compute_end_s == pytest.approx(done, rel=CLOSE)
                assert row.reached_s is None


PLAIN = Case(
    computes=(1e-3,) * 32,
    host=Link("host", 16 * 36 / 1e-3),
    disk=Link("disk", 16 * 36 / 1e-3),
    begin=0,
    seam=36,
    end=36,
    group=1,
    windows=(None,) * 32,
    compute="thread",
)


class TestOverlap:
    @pytest.mark.parametrize(
        ("ratio", "group", "compute"), [*product((0.25, 0.5, 1.0, 2.0, 4.0), (1, 4), ("thread", "stream"))]
    )
    def test_is_within_a_hundredth_of_the_bound_and_the_declared_cost_of_events(
        self, ratio, group, compute, monkeypatch
    ):
        """`ratio` is a layer's copies over its compute in this pass."""
        costs = HostCosts(event_s=3e-7, copy_s=1e-6, descriptor_s=1e-7)
        each = PLAIN.pass_computes()[0]
        link = Link("host", 16 * 36 / (ratio * each))
        case = replace(PLAIN, host=link, group=group, compute=compute, costs=costs)
        calls = dict.fromkeys(("record", "synchronize"), 0)
        for name in calls:
            call = getattr(SimulatedBackend, name)

            def counted(self, *given, _call=call, _name=name):
                calls[_name] += self.host.current is self.host.main
                return _call(self, *given)

            monkeypatch.setattr(SimulatedBackend, name, counted)
        outcome = run(case)
        bound = pipeline.closed_form(case.arrivals(), case.pass_computes())
        # The first group's copies are handed over before anything moves; all others while something does.
        handed_over = costs.copy_s + 2 * group * costs.descriptor_s + costs.event_s
        declared = sum(calls.values()) * costs.event_s + handed_over
        assert bound <= outcome.total_s <= (bound + declared) / 0.99
        assert declared < 0.2 * bound
        if compute == "stream":
            # The host runs ahead of the device: its own time does not add up.
            assert outcome.total_s <= (bound + 10 * costs.event_s + handed_over) / 0.99

    def test_is_less_than_the_bound_where_the_pass_waits_for_all_of_it(self):
        """The control: bulk, held against the layered bound, is far off."""
        bound = pipeline.closed_form(PLAIN.arrivals(), PLAIN.pass_computes())
        outcome = run(replace(PLAIN, mode="bulk"))
        assert bound / outcome.total_s < 0.95


class TestOneLinkForTwoTiers:
    """Tokens `[0, seam)` and `[seam, 32)`, layer by layer, over a link that a whole layer takes 1 ms on."""

    RATE = 16 * 32 / 1e-3

    def arrivals(self, seam, sharing):
        outcome = run(replace(PLAIN, seam=seam, end=32), SimulatedLink(self.RATE, sharing=sharing))
        return [[row.arrive_s for row in part.layers] for part in outcome.parts]

    def test_shared_fairly_equal_parts_arrive_together(self):
        together = [1e-3 * (layer + 1) for layer in range(32)]
        assert self.arrivals(16, "fair") == [pytest.approx(together, rel=CLOSE)] * 2

    @pytest.mark.parametrize("seam", [4, 12])
    def test_shared_fairly_the_smaller_part_has_half_the_rate(self, seam):
        smaller, larger = self.arrivals(seam, "fair")
        each = 1e-3 * seam / 32
        assert smaller == pytest.approx([2 * each * (layer + 1) for layer in range(32)], rel=CLOSE)
        # Until the smaller one is through; then all of it.
        through = 2 * each * 32
        alone = (each, 1e-3 - each)
        expected = []
        for layer in range(32):
            half = 2 * alone[1] * (layer + 1)
            expected.append(half if half <= through else through + (half - through) / 2)
        assert larger == pytest.approx(expected, rel=CLOSE)
        assert larger[-1] == pytest.approx(32e-3, rel=CLOSE)

    @pytest.mark.parametrize("seam", [4, 12, 16])
    def test_one_after_another_they_take_turns(self, seam):
        first, second = self.arrivals(seam, "exclusive")
        each = 1e-3 * seam / 32
        assert second == pytest.approx([1e-3 * (layer + 1) for layer in range(32)], rel=CLOSE)
        assert first == pytest.approx([1e-3 * layer + each for layer in range(32)], rel=CLOSE)
