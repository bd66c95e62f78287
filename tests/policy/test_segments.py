"""Plans of several parts: the front computed while the rest loads, two tiers at once, events shared by layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlane.policy import (
    Calibration,
    Device,
    Estimate,
    LayerSpec,
    Link,
    LoadSegment,
    Machine,
    ModelSpec,
    PassCost,
    Planner,
    PrefillCost,
    Request,
    Tier,
)
from kvlane.policy.plan import Executor

# 1 ms a token whatever came before, 10 layers of 1,000 bytes a token: a load of 100 tokens at 1 MB/s takes 1 s.
PER_TOKEN = PassCost(overhead_s=0.0, token_s=1e-3, pair_s=0.0)
SIMPLE = ModelSpec("simple", (LayerSpec(1, 1, 250, 250, 1),) * 10, 250, 10, "bf16", "bf16")


def simple_planner(
    executor: Executor, host: Link, disk: Link | None = None, cost: PassCost = PER_TOKEN, **options: Any
) -> Planner:
    links = {link.name: link for link in (host, disk) if link is not None}
    machine = Machine(
        "simple",
        Device("simple"),
        links,
        {name: Tier(name, link.name) for name, link in (("host", host), ("disk", disk)) if link is not None},
        (),
    )
    calibration = Calibration(PrefillCost(10, cost, cost), 0.1, "a stopwatch")
    return Planner(SIMPLE, machine, executor=executor, calibration=calibration, **options)


def split_of(planner: Planner, request: Request) -> Estimate:
    estimate = planner.decide(request).estimates["split"]
    assert estimate is not None
    return estimate


@given(planner=st.from_type(Planner), request=st.from_type(Request))
@settings(max_examples=150)
def test_more_that_can_be_done_never_makes_the_plan_slower(planner: Planner, request: Request) -> None:
    def with_executor(executor: Executor, hits: dict[str, Any]) -> float:
        other = Planner(
            planner.model,
            planner.machine,
            executor=executor,
            calibration=Calibration(planner.prefill, 0.1, "drawn at random"),
            tie_margin=0.0,
        )
        return other.decide(replace(request, hits=hits)).ttft_s

    assert with_executor("two_ended", dict(request.hits)) <= with_executor("layered", dict(request.hits))
    for tier, hit in request.hits.items():
        for executor in ("bulk", "layered", "two_ended"):
            both = with_executor(executor, dict(request.hits))
            assert both <= with_executor(executor, {tier: hit})


class TestTwoEnded:
    REQUEST = Request(101, {"host": 101}, load_unit_tokens=10)

    def test_by_hand(self) -> None:
        # Computing a token takes 1 ms and loading one too. Of 100 tokens 50 are computed while 50 load: their last
        # layer is there after 50 ms, when the front is done, and one more token takes 1 ms.
        planner = simple_planner("two_ended", Link("slow", 10e6))
        plan = planner.decide(self.REQUEST)
        assert (plan.path, plan.load) == ("split", (LoadSegment("host", 50, 100, 500_000),))
        assert plan.ttft_s == pytest.approx(0.051)
        assert (plan.load_tokens, plan.recompute_tokens, plan.load_bytes) == (50, 51, 500_000)
        split = split_of(planner, self.REQUEST)
        assert (split.front_s, split.transfer_s) == pytest.approx((0.050, 0.050))
        assert split.compute_s == pytest.approx(0.051)
        assert split.exposed_s == pytest.approx(0.0)
        # Layered alone, the first of the loaded layers is always waited for.
        assert split_of(simple_planner("layered", Link("slow", 10e6)), self.REQUEST).ttft_s == pytest.approx(
            0.056
        )

    def test_a_second_pass_is_paid(self) -> None:
        # 3 ms a pass: the front pays them, and the rest again.
        cost = PassCost(overhead_s=3e-3, token_s=1e-3, pair_s=0.0)
        split = split_of(simple_planner("two_ended", Link("slow", 10e6), cost=cost), self.REQUEST)
        assert split.start == 50
        assert split.front_s == pytest.approx(0.003 + 0.050)
        assert split.ttft_s == split.compute_s == pytest.approx(split.front_s + 0.003 + 0.001)
        # At 20 ms a pass a second one costs more than the first loaded layer's wait.
        dear = replace(cost, overhead_s=0.02)
        assert split_of(simple_planner("two_ended", Link("slow", 10e6), cost=dear), self.REQUEST).start == 0

    def test_the_front_takes_several_chunks_and_only_the_first_after_it_waits(self) -> None:
        cost = PassCost(overhead_s=5e-3, token_s=1e-3, pair_s=0.0)
        request = Request(131, {"host": 101}, load_unit_tokens=10, prefill_chunk_tokens=15)
        split = split_of(simple_planner("two_ended", Link("slow", 8e6), cost=cost), request)
        assert (split.start, split.end) == (40, 100)
        # 40 tokens in three chunks, then 31 in three; the load of 60 tokens takes 75 ms, and its last layer is
        # needed 18 ms after the first of the 15 tokens that wait.
        assert split.front_s == pytest.approx(0.040 + 3 * 0.005)
        assert split.compute_s == pytest.approx(split.front_s + 0.031 + 3 * 0.005)
        assert split.exposed_s == pytest.approx(0.075 - 0.018 - split.front_s)

    def test_the_sentence_says_what_runs_beside_what(self) -> None:
        reason = simple_planner("two_ended", Link("slow", 10e6)).decide(self.REQUEST).reason
        assert reason.startswith(
            "split of 50 tokens (500 kB) from host 51.0 ms (copy 50.0 ms at 10 MB/s beside the 50 tokens before it"
            " computed in 50.0 ms, then 1 tokens computed in 1.00 ms) < "
        )
        assert reason.endswith("(two_ended executor)")

    def test_the_ties_are_those_of_loading_everything_by_layer(self) -> None:
        two, layered = (
            simple_planner(executor, Link("slow", 10e6)).decide(self.REQUEST)
            for executor in ("two_ended", "layered")
        )
        assert two.crossover_tokens == layered.crossover_tokens
        assert two.break_even_bytes_per_s == layered.break_even_bytes_per_s
        assert two.estimates["load"] == layered.estimates["load"]


class TestTwoTiers:
    HITS = Request(101, {"host": 101, "disk": 101}, load_unit_tokens=10)

    def test_by_hand(self) -> None:
        # 20 kB and 10 kB a millisecond: two thirds of 100 tokens from the one, a third from the other.
        planner = simple_planner("bulk", Link("slow", 20e6), Link("slower", 10e6))
        plan = planner.decide(self.HITS)
        assert plan.path == "load"
        assert plan.load == (LoadSegment("host", 0, 70, 700_000), LoadSegment("disk", 70, 100, 300_000))
        assert plan.ttft_s == pytest.approx(0.035 + 0.001)
        assert plan.exposed_s == pytest.approx(0.035)
        assert (plan.load_tokens, plan.load_bytes, plan.recompute_tokens) == (100, 1_000_000, 1)
        # From one tier alone it takes 50 ms.
        assert planner.decide(replace(self.HITS, hits={"host": 101})).ttft_s == pytest.approx(0.051)

    def test_what_the_answer_rests_on_is_about_the_better_tier_alone(self) -> None:
        planner = simple_planner("bulk", Link("slow", 20e6), Link("slower", 10e6))
        plan, alone = (
            planner.decide(replace(self.HITS, hits=hits)) for hits in (self.HITS.hits, {"host": 101})
        )
        assert plan.link_bytes_per_s == 20e6
        assert plan.break_even_bytes_per_s == alone.break_even_bytes_per_s == pytest.approx(10e6)
        assert plan.crossover_tokens == alone.crossover_tokens
        assert set(plan.parameters_from) == {"prefill", "link.slow", "link.slower"}
        assert "from host (70) and disk (30)" in plan.reason
        assert "host's link at 20 MB/s is above the break-even rate of 10 MB/s" in plan.reason
        assert "from it alone" in plan.reason

    def test_a_longer_hit_that_is_slower_brings_what_the_faster_lacks(self) -> None:
        planner = simple_planner("bulk", Link("slow", 100e6), Link("slower", 20e6))
        plan = planner.decide(Request(101, {"host": 61, "disk": 101}, load_unit_tokens=10))
        assert plan.load == (LoadSegment("host", 0, 60, 600_000), LoadSegment("disk", 60, 100, 400_000))
        assert plan.usable_tokens == 100
        assert plan.ttft_s == pytest.approx(0.020 + 0.001)

    def test_over_one_link_the_second_run_follows_the_first(self) -> None:
        shared = Link("shared", 20e6, latency_s=1e-3)
        planner = simple_planner("bulk", shared, shared)
        plan = planner.decide(Request(101, {"host": 61, "disk": 101}, load_unit_tokens=10))
        # Two transfers over one link are only one more latency.
        assert [segment.tier for segment in plan.load] == ["disk"]
        load = plan.estimates["load"]
        assert load is not None
        assert load.ttft_s == pytest.approx(0.001 + 0.050 + 0.001)
        # With the disk's tokens in small pieces the host's part pays: 3 ms of them are saved for one latency.
        paged = replace(planner.machine.tiers["disk"], run_tokens=1, per_token_s=1e-4)
        machine = replace(planner.machine, tiers={**planner.machine.tiers, "disk": paged})
        calibration = Calibration(planner.prefill, 0.1, "a stopwatch")
        mixed = Planner(SIMPLE, machine, calibration=calibration).decide(
            Request(101, {"host": 61, "disk": 101}, load_unit_tokens=10)
        )
        assert [(part.tier, part.tokens) for part in mixed.load] == [("host", 60), ("disk", 40)]
        assert mixed.ttft_s == pytest.approx((0.001 + 0.030) + (0.001 + 0.004 + 0.020) + 0.001)

    def test_a_second_link_that_hardly_helps_is_left_alone(self) -> None:
        planner = simple_planner("bulk", Link("slow", 20e6), Link("slowest", 0.4e6))
        plan = planner.decide(replace(self.HITS, load_unit_tokens=1))
        assert [segment.tier for segment in plan.load] == ["host"]
        strict = simple_planner("bulk", Link("slow", 20e6), Link("slowest", 0.4e6), tie_margin=0.0)
        assert [part.tier for part in strict.decide(replace(self.HITS, load_unit_tokens=1)).load] == [
            "host",
            "disk",
        ]

    def test_a_queue_on_one_link_moves_the_boundary(self) -> None:
        planner = simple_planner("bulk", Link("slow", 20e6), Link("other", 20e6))
        even = planner.decide(self.HITS)
        queued = planner.decide(replace(self.HITS, link_queue_s={"host": 0.020}))
        assert [segment.tokens for segment in even.load] == [50, 50]
        assert [segment.tokens for segment in queued.load] == [30, 70]
        assert queued.ttft_s == pytest.approx(0.035 + 0.001)

    def test_with_the_front_computed_meanwhile_three_share_the_prefix(self) -> None:
        planner = simple_planner("two_ended", Link("slow", 10e6), Link("other", 10e6))
        plan = planner.decide(replace(self.HITS, prompt_tokens=91, hits={"host": 91, "disk": 91}))
        assert [(part.tier, part.start, part.end) for part in plan.load] == [
            ("host", 30, 60),
            ("disk", 60, 90),
        ]
        assert plan.ttft_s == pytest.approx(0.030 + 0.001)


class TestGroups:
    @given(
        planner=st.from_type(Planner).filter(lambda planner: planner.executor != "bulk"),
        request=st.from_type(Request),
    )
    @settings(max_examples=60, deadline=None)
    def test_no_other_number_of_layers_to_an_event_is_faster(
        self, replay: Any, planner: Planner, request: Request
    ) -> None:
        assume(planner.layers <= 32)
        for estimate in planner.decide(request).estimates.values():
            if estimate is None or not estimate.load:
                continue
            times = [
                replay.ttft_s(planner, request, msgspec.structs.replace(estimate, group_layers=group))
                for group in range(1, planner.layers + 1)
            ]
            assert estimate.ttft_s <= min(times) * (1 + 1e-9)
            assert math.isclose(estimate.ttft_s, times[estimate.group_layers - 1], rel_tol=1e-9)

    def test_by_hand(self) -> None:
        # 30 tokens: a layer takes 3 ms to load and 7.1 ms to compute. With an event of 2 ms a layer
        # is there every 5 ms; with one of 8 ms every 11, which is waited for, and two layers every 14, which is not.
        request = Request(101, {"host": 30}, load_unit_tokens=30)
        plan = simple_planner("layered", Link("slow", 10e6, per_event_s=2e-3)).decide(request)
        load = plan.estimates["load"]
        assert load is not None
        assert load.group_layers == 1
        assert load.ttft_s == pytest.approx(0.005 + 0.071)
        dearer = simple_planner("layered", Link("slow", 10e6, per_event_s=8e-3)).decide(request)
        load = dearer.estimates["load"]
        assert load is not None
        assert load.group_layers == 2
        assert load.ttft_s == pytest.approx(2 * 0.003 + 0.008 + 0.071)
        assert load.transfer_s == pytest.approx(0.030 + 5 * 0.008)
        assert "in groups of 2 layers" in dearer.reason

    @pytest.mark.parametrize(
        ("executor", "event_s", "layout"),
        [("bulk", 1e-3, "layer_major"), ("layered", 0.0, "layer_major"), ("layered", 1e-3, "chunk_major")],
    )
    def test_without_events_to_save_there_are_no_groups(
        self, executor: Executor, event_s: float, layout: Any
    ) -> None:
        planner = simple_planner(executor, Link("slow", 20e6, per_event_s=event_s))
        tiers = {"host": replace(planner.machine.tiers["host"], layout=layout)}
        calibration = Calibration(planner.prefill, 0.1, "a stopwatch")
        same = Planner(
            SIMPLE, replace(planner.machine, tiers=tiers), executor=executor, calibration=calibration
        )
        free = Planner(
            SIMPLE,
            replace(planner.machine, tiers=tiers, links={"slow": Link("slow", 20e6)}),
            executor=executor,
            calibration=calibration,
        )
        request = Request(101, {"host": 101}, load_unit_tokens=10)
        assert same.decide(request) == free.decide(request)
        assert same.decide(request).group_layers == 1


class TestWhatComesBesidesTheBytes:
    REQUEST = Request(101, {"host": 101}, load_unit_tokens=50)

    def load_s(self, planner: Planner, request: Request) -> float:
        load = planner.decide(request).estimates["load"]
        assert load is not None
        return load.ttft_s

    def test_the_host_s_work_for_each_loaded_token_comes_before_the_copies(self) -> None:
        planner = simple_planner("bulk", Link("slow", 20e6))
        plain = self.load_s(planner, self.REQUEST)
        slow_host = replace(planner.machine.tiers["host"], per_token_s=1e-4)
        machine = replace(planner.machine, tiers={"host": slow_host})
        calibration = Calibration(planner.prefill, 0.1, "a stopwatch")
        working = Planner(SIMPLE, machine, calibration=calibration)
        assert self.load_s(working, self.REQUEST) == pytest.approx(plain + 100 * 1e-4)
        # A stated achieved rate stands for all of it.
        stated = Planner(SIMPLE, machine.with_link_rate(20e6), calibration=calibration)
        assert self.load_s(stated, self.REQUEST) == pytest.approx(plain)

    def test_the_first_use_of_a_peer_is_paid_while_it_is_cold(self) -> None:
        planner = simple_planner("bulk", Link("slow", 20e6, first_use_s=0.3))
        warm = self.load_s(planner, self.REQUEST)
        assert self.load_s(planner, replace(self.REQUEST, cold=("host",))) == pytest.approx(warm + 0.3)
        assert self.load_s(planner, replace(self.REQUEST, cold=("disk",))) == pytest.approx(warm)

    def test_counted_copies_take_the_place_of_the_average(self) -> None:
        link = Link("slow", 20e6, per_copy_s=1e-4)
        planner = simple_planner("layered", link)
        transfer = planner.transfer("host", 50)
        assert transfer.copies(100) == 1
        counted = replace(transfer, counted=(100, 7))
        assert [counted.copies(tokens) for tokens in (100, 50, 15, 14, 1)] == [7, 4, 2, 1, 1]
        assert counted.total_s(100) == pytest.approx(0.050 + 7 * 10 * 1e-4)
        plan = planner.decide(replace(self.REQUEST, resident_tokens=40, copies={"host": 7}))
        load = plan.estimates["load"]
        assert load is not None
        # The count is of what is loaded, the resident tokens apart.
        assert load.transfer_s == pytest.approx(60 * 10e3 / 20e6 + 7 * 10 * 1e-4)
        assert "7 copies a layer" in plan.parameters_from["link.slow"].text
