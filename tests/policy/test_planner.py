"""Single decisions one can follow by hand: ties, what there is to load, and where the numbers came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy import (
    Calibration,
    Device,
    InputError,
    LayerSpec,
    Link,
    LoadSegment,
    Machine,
    ModelSpec,
    PassCost,
    Plan,
    Planner,
    PrefillCost,
    Request,
    Tier,
    decide,
    load_machine,
    load_model,
)

MODEL, H100 = load_model("llama-3.1-8b"), load_machine("h100-sxm")
# 1 ms a token whatever came before, 10 layers of 1,000 bytes a token: a load of 100 tokens at 1 MB/s takes 1 s.
PER_TOKEN = PassCost(overhead_s=0.0, token_s=1e-3, pair_s=0.0)
SIMPLE = ModelSpec("simple", (LayerSpec(1, 1, 250, 250, 1),) * 10, 250, 10, "bf16", "bf16")


def simple_planner(mb_per_s: float, *, band: float = 0.1, **options: Any) -> Planner:
    machine = Machine(
        name="simple",
        device=Device("simple"),
        links={"slow": Link("slow", mb_per_s * 1e6), "slower": Link("slower", mb_per_s * 0.5e6)},
        tiers={"host": Tier("host", "slow"), "disk": Tier("disk", "slower")},
        prefill=(),
    )
    calibration = Calibration(PrefillCost(10, PER_TOKEN, PER_TOKEN), band, "a stopwatch")
    return Planner(SIMPLE, machine, calibration=calibration, **options)


def seconds(plan: Plan) -> dict[str, float | None]:
    return {path: estimate.ttft_s if estimate else None for path, estimate in plan.estimates.items()}


def test_the_numbers_of_a_bulk_decision_by_hand() -> None:
    # Of 101 tokens 100 are stored: computing one takes 1 ms, loading one (10 kB) half of that.
    plan = simple_planner(20).decide(Request(101, {"host": 101}, load_unit_tokens=50))
    assert seconds(plan) == pytest.approx({"load": 0.051, "recompute": 0.101, "split": 0.076})
    assert (plan.path, plan.load) == ("load", (LoadSegment("host", 0, 100, 1_000_000),))
    assert (plan.load_tokens, plan.load_bytes, plan.recompute_tokens) == (100, 1_000_000, 1)
    assert (plan.usable_tokens, plan.kv_bytes_per_token) == (100, 10_000)
    assert plan.exposed_s == pytest.approx(0.05)
    # The tie is where a token loads as fast as it computes: 10 kB in 1 ms.
    assert plan.break_even_bytes_per_s == pytest.approx(10e6)
    assert plan.link_bytes_per_s == 20e6


def test_the_numbers_of_a_layered_decision_by_hand() -> None:
    # Ten layers: one takes 0.1 ms a token to compute and 0.1 ms a token to load. Loading 48 of 101 tokens,
    # the first layer's 4.8 ms are exposed and the rest of the copy runs under the 53 ms of compute.
    plan = simple_planner(10, executor="layered").decide(Request(101, {"host": 101}, load_unit_tokens=16))
    split = plan.estimates["split"]
    assert split is not None
    assert (plan.path, split.load_tokens) == ("split", 48)
    assert plan.ttft_s == pytest.approx(0.0048 + 0.053)
    assert plan.exposed_s == pytest.approx(0.0048)
    load = plan.estimates["load"]
    assert load is not None
    assert load.ttft_s == pytest.approx(0.096 + 0.0005)
    assert load.compute_s == pytest.approx(0.005)
    assert load.transfer_s == pytest.approx(0.096)


@pytest.mark.parametrize(
    ("faster_by", "tie_margin", "path"),
    [
        (0.02, 0.03, "recompute"),
        (0.04, 0.03, "load"),
        (0.04, 0.05, "recompute"),
        (0.001, 0.0, "load"),
        (-0.001, 0.0, "recompute"),
        (-0.5, 0.9, "recompute"),
    ],
)
@pytest.mark.parametrize("band", [0.0, 2.0])
def test_a_near_tie_goes_to_recompute_whatever_the_bands(
    faster_by: float, tie_margin: float, path: str, band: float
) -> None:
    # One load unit, so no split: 100 tokens load in the time that makes the whole faster by that share.
    load_s = 0.101 / (1 + faster_by) - 0.001
    planner = simple_planner(1.0 / load_s, tie_margin=tie_margin, band=band)
    plan = planner.decide(Request(101, {"host": 101}, load_unit_tokens=100))
    assert plan.path == path
    assert plan.estimates["split"] is None
    assert ("near-tie" in plan.reason) == (faster_by > 0 and path == "recompute")


def test_a_load_is_preferred_to_a_split_that_is_hardly_faster() -> None:
    request = Request(12370, {"host": 12368})
    # Computing fewer than 200 tokens takes as long as reading the weights, so a split saves copy time.
    cost = PassCost(0.0, 25e-6, 0.0)
    floored = Calibration(PrefillCost(32, cost, cost, floor_s=5e-3), 0.02, "made up")
    plan = decide(MODEL, H100, request, calibration=floored)
    load, split = plan.estimates["load"], plan.estimates["split"]
    assert load is not None
    assert split is not None
    assert split.ttft_s < load.ttft_s < split.ttft_s * 1.03
    assert plan.path == "load"
    assert "within 3%" in plan.reason
    strict = decide(MODEL, H100, request, calibration=floored, tie_margin=0.0)
    assert strict.path == "split"
    assert strict.ttft_s == split.ttft_s


@pytest.mark.parametrize(
    ("hits", "resident", "word"),
    [
        ({}, 0, "no stored prefix"),
        ({"host": 0}, 0, "0 stored tokens"),
        ({"host": 15}, 0, "no whole load unit of 16"),
        ({"host": 64}, 64, "resident already"),
        ({"host": 64}, 80, "resident already"),
        # The minimum over the ranks is below a unit.
        ({"host": (96, 8, 96)}, 0, "8 stored tokens"),
        ({"disk": 8}, 0, "disk"),
    ],
)
def test_with_nothing_to_load_it_recomputes_and_says_why(
    hits: dict[str, int | tuple[int, ...]], resident: int, word: str
) -> None:
    plan = simple_planner(1000).decide(Request(100, hits, resident_tokens=resident))
    assert (plan.path, plan.load, plan.load_tokens, plan.exposed_s) == ("recompute", (), 0, 0.0)
    assert plan.ttft_s == pytest.approx((100 - resident) * 1e-3)
    assert word in plan.unavailable["load"]
    assert word in plan.unavailable["split"]
    assert word in plan.reason
    assert plan.crossover_tokens is plan.break_even_bytes_per_s is plan.link_bytes_per_s is None


@pytest.mark.parametrize(("stored", "usable"), [(99, 96), (64, 64), (40, 32), (15, 0)])
@pytest.mark.parametrize("resident", [0, 40, 64, 90])
def test_usable_tokens_are_those_of_the_hit_whether_they_gain_anything_or_not(
    stored: int, usable: int, resident: int
) -> None:
    plan = simple_planner(1000).decide(Request(100, {"host": stored}, resident_tokens=resident))
    assert plan.usable_tokens == usable
    assert plan.load_tokens == max(0, usable - resident)


def test_a_single_load_unit_leaves_nothing_to_split() -> None:
    plan = simple_planner(1000).decide(Request(100, {"host": 31}))
    assert plan.path == "load"
    assert plan.load_tokens == 16
    assert "single load unit" in plan.unavailable["split"]
    assert "load" not in plan.unavailable


def test_the_last_token_is_always_computed() -> None:
    planner = simple_planner(1000)
    assert planner.decide(Request(96, {"host": 96})).load_tokens == 80
    assert planner.decide(Request(97, {"host": 97})).load_tokens == 96
    # Speculative tokens lengthen the tail.
    assert planner.decide(Request(97, {"host": 97}, tail_tokens=2)).load_tokens == 80
    # A prompt shorter than the tail has nothing usable, rather than less than nothing.
    short = planner.decide(Request(2, {"host": 2}, load_unit_tokens=1, tail_tokens=4))
    assert (short.path, short.usable_tokens) == ("recompute", 0)


def test_resident_tokens_are_neither_loaded_nor_computed() -> None:
    plan = simple_planner(1000).decide(Request(101, {"host": 101}, resident_tokens=30, load_unit_tokens=50))
    assert plan.load == (LoadSegment("host", 30, 100, 700_000),)
    assert plan.ttft_s == pytest.approx(70 * 10e3 / 1e9 + 1e-3)


def test_the_tier_that_serves_this_request_best_is_taken() -> None:
    planner = simple_planner(1000, tie_margin=0.1)
    for hits, tier in (
        # The same tokens come from the faster link; many more tokens from the slower one still win.
        ({"disk": 96, "host": 96}, "host"),
        ({"disk": 96, "host": 16}, "disk"),
        # A tier without gain is passed over.
        ({"disk": 96, "host": 3}, "disk"),
    ):
        assert [segment.tier for segment in planner.decide(Request(101, hits)).load] == [tier]


def test_a_later_chunk_waits_for_no_layer() -> None:
    # Layered, 8 tokens loaded, chunks of 10: only the first chunk's layers are held up by the copy.
    plan = simple_planner(1, executor="layered").decide(
        Request(28, {"host": 8}, load_unit_tokens=8, prefill_chunk_tokens=10)
    )
    load = plan.estimates["load"]
    assert load is not None
    # The copy takes 80 ms, the last layer of the first chunk then 1 ms, and the second chunk its 10 ms.
    assert load.ttft_s == pytest.approx(0.080 + 0.001 + 0.010)


def test_a_planner_keeps_the_prices_of_few_transfers_whatever_load_units_it_is_asked_about() -> None:
    planner = simple_planner(1000)
    kept = planner.transfer("host", 16)
    assert planner.transfer("host", 16) is kept
    for unit in range(17, 1017):
        planner.decide(Request(101, {"host": 96}, load_unit_tokens=unit))
    assert planner.transfer("host", 16) is not kept
    assert planner.transfer("host", 16) == kept


def test_parameters_say_the_best_source_there_is() -> None:
    request = Request(12370, {"host": 12368})
    profile = decide(MODEL, H100, request)
    assert {name: parameter.source for name, parameter in profile.parameters_from.items()} == {
        "prefill": "profile",
        "link.pcie5-x16": "profile",
    }
    assert "published rows" in profile.parameters_from["prefill"].text
    assert "https://" in profile.parameters_from["link.pcie5-x16"].text
    assert not profile.calibrated

    stated = decide(MODEL, H100.with_link_rate(50e9), request)
    assert stated.parameters_from["link.pcie5-x16"].source == "explicit"
    assert stated.parameters_from["prefill"].source == "profile"
    assert not stated.calibrated

    assumed = decide(MODEL, H100, request, engine="sglang")
    assert assumed.parameters_from["prefill"].source == "assumption"

    # Measured here goes before what the profile says, whatever the profile says.
    fit = Calibration(PrefillCost(32, PER_TOKEN, PER_TOKEN), 0.02, "fitted to 12 passes")
    measured = decide(MODEL, H100, request, calibration=fit, engine="sglang")
    assert measured.parameters_from["prefill"].source == "calibration"
    assert "12 passes" in measured.parameters_from["prefill"].text
    assert not measured.calibrated, "the link's rate is still the profile's"
    both = decide(MODEL, H100.with_link_rate(50e9), request, calibration=fit)
    assert both.calibrated
    recomputed = both.estimates["recompute"]
    assert recomputed is not None
    assert recomputed.ttft_s == pytest.approx(12.370)


def test_the_less_sure_the_source_the_wider_the_band() -> None:
    request = Request(12370, {"host": 12368})

    def width(machine: Machine, **options: Any) -> float:
        recompute = decide(MODEL, machine, request, **options).estimates["recompute"]
        assert recompute is not None
        return (recompute.high_s - recompute.low_s) / recompute.ttft_s

    fit = Calibration(PrefillCost(32, PER_TOKEN, PER_TOKEN), 0.02, "fitted")
    assert width(H100, calibration=fit) == pytest.approx(0.04)
    assert width(H100, calibration=fit) < width(H100) < width(H100, engine="sglang")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("executor", {"executor": "two-ended"}),
        ("tie_margin", {"tie_margin": -0.1}),
        ("tie_margin", {"tie_margin": 1.0}),
        ("tie_margin", {"tie_margin": float("nan")}),
        ("tp", {"tp": 3}),
        ("kv_dtype", {"kv_dtype": "int3"}),
        ("calibration", {"calibration": Calibration(PrefillCost(16, PER_TOKEN, PER_TOKEN), 0.1, "x")}),
    ],
)
def test_a_planner_refuses_what_it_cannot_do_by_field(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        Planner(MODEL, H100, **options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt_tokens", {"prompt_tokens": 0}),
        ("prompt_tokens", {"prompt_tokens": -5}),
        ("prompt_tokens", {"prompt_tokens": 100.0}),
        ("prompt_tokens", {"prompt_tokens": True}),
        ("prompt_tokens", {"prompt_tokens": "100"}),
        ("load_unit_tokens", {"load_unit_tokens": 0}),
        ("tail_tokens", {"tail_tokens": 0}),
        ("prefill_chunk_tokens", {"prefill_chunk_tokens": 0}),
        ("resident_tokens", {"resident_tokens": -1}),
        ("resident_tokens", {"resident_tokens": 100}),
        ("hits.host", {"hits": {"host": -1}}),
        ("hits.host", {"hits": {"host": 101}}),
        ("hits.host", {"hits": {"host": (5, 101)}}),
        ("hits.host", {"hits": {"host": (5, None)}}),
        ("hits.host", {"hits": {"host": ()}}),
        ("hits.disk", {"hits": {"host": 5, "disk": 5.5}}),
        ("copies.host", {"hits": {"host": 5}, "copies": {"host": 0}}),
        ("copies.host", {"hits": {"host": 5}, "copies": {"host": 1.5}}),
        ("cold", {"cold": "host"}),
        ("cold", {"cold": (5,)}),
    ],
)
def test_a_request_that_cannot_be_names_its_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        Request(**{"prompt_tokens": 100, **changes})
    assert caught.value.field == field


def test_a_hit_in_an_unknown_tier_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="host") as caught:
        decide(MODEL, H100, Request(100, {"tape": 96}))
    assert caught.value.field == "hit"


@given(planner=st.from_type(Planner), request=st.from_type(Request))
def test_a_planner_over_links_at_other_rates_is_one_made_for_them(planner: Planner, request: Request) -> None:
    links = {name: link.at_rate(3 * link.rate_bytes_per_s) for name, link in planner.machine.links.items()}
    before = planner.decide(request)
    made = Planner(
        planner.model,
        replace(planner.machine, links=links),
        executor=planner.executor,
        tp=planner.tp,
        kv_dtype=planner.kv_dtype,
        calibration=Calibration(planner.prefill, 0.1, "the same"),
        tie_margin=planner.tie_margin,
    ).decide(request)
    over = planner.over(links).decide(request)
    assert (over.path, over.load, over.ttft_s) == (made.path, made.load, made.ttft_s)
    # The one it was made of is as it was.
    assert planner.decide(request) == before
