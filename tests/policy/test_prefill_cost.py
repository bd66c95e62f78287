"""What computing tokens costs: pass by pass, in O(1), and against what physics and measurements allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import (
    InputError,
    PassCost,
    PrefillCost,
    load_machine,
    load_model,
)

costs = st.from_type(PrefillCost)
tokens = st.integers(0, 20_000)
# Ten prefills of Llama-3.1-8B bf16 on one H100 with vLLM, in ms by tokens:
# https://blog.vllm.ai/2026/01/08/kv-offloading-connector.html
MEASURED_MS = {
    10_000: 271,
    20_000: 640,
    30_000: 1103,
    40_000: 1657,
    50_000: 2296,
    60_000: 3019,
    70_000: 3851,
    80_000: 4791,
    90_000: 5744,
    100_000: 6853,
}


def loop_s(cost: PrefillCost, resident: int, new: int, chunk: int) -> float:
    """Every pass priced on its own, as an engine runs them."""
    total = 0.0
    while new > 0:
        now = min(chunk, new)
        total += cost.pass_s(resident, now)
        resident, new = resident + now, new - now
    return total


@given(cost=costs, resident=st.just(0) | tokens, new=tokens, chunk=st.integers(1, 5000), few=st.booleans())
@settings(max_examples=200)
def test_chunked_prefill_is_the_sum_of_its_passes(
    cost: PrefillCost, resident: int, new: int, chunk: int, few: bool
) -> None:
    if few:
        new = min(new, 20 * chunk)
    assert cost.prefill_s(resident, new, chunk) == pytest.approx(
        loop_s(cost, resident, new, chunk), rel=1e-9, abs=1e-15
    )


@given(
    chunk=st.integers(1, 512),
    turn=st.floats(0.5, 40.0),
    count=st.integers(1, 60),
    slope=st.floats(0.01, 0.99),
    work_rises_faster=st.booleans(),
)
def test_the_sum_holds_where_attention_overtakes_the_memory_floor_midway(
    chunk: int, turn: float, count: int, slope: float, work_rises_faster: bool
) -> None:
    # Built so that work and floor cross about `turn` chunks in, in either direction, and count goes past it.
    pair_s = 1e-9
    rise = pair_s * chunk * (slope if work_rises_faster else 1 / slope)  # of the floor, a context token
    token_s = 1e-5
    probe = PassCost(overhead_s=1e-4, token_s=token_s, pair_s=pair_s, context_s=1e-8)
    at = int(chunk * (1 + turn))
    floor_s = probe.work_s(at, chunk) - rise * (at + chunk)
    cost = PrefillCost(4, probe, probe, floor_s=floor_s, floor_context_s=rise)
    new = chunk * count + chunk // 2
    assert cost.prefill_s(0, new, chunk) == pytest.approx(loop_s(cost, 0, new, chunk), rel=1e-9)


@pytest.mark.parametrize("work_rises", [True, False])
def test_the_sum_holds_where_work_and_floor_tie_at_its_very_start(work_rises: bool) -> None:
    # From the tie on the faster rising of the two counts, though neither is larger at first.
    probe = PassCost(overhead_s=0.0, token_s=2.0**-10, pair_s=2.0**-20)
    rise = 0.0 if work_rises else 2.0**-10
    floor_s = probe.work_s(16, 16) - rise * 32
    cost = PrefillCost(4, probe, probe, floor_s=floor_s, floor_context_s=rise)
    assert cost.floor_of(32) == probe.work_s(16, 16)
    assert cost.prefill_s(0, 160, 16) == pytest.approx(loop_s(cost, 0, 160, 16), rel=1e-12)


@given(cost=costs, resident=tokens, new=tokens)
def test_a_chunk_as_long_as_the_tokens_is_no_chunking(cost: PrefillCost, resident: int, new: int) -> None:
    whole = cost.prefill_s(resident, new)
    assert cost.prefill_s(resident, new, max(1, new)) == whole == cost.pass_s(resident, new)


@given(
    cost=costs, resident=tokens, new=tokens, more=st.integers(1, 5000), chunk=st.none() | st.integers(1, 5000)
)
def test_more_new_tokens_never_take_less(
    cost: PrefillCost, resident: int, new: int, more: int, chunk: int | None
) -> None:
    fewer = cost.prefill_s(resident, new, chunk)
    assert fewer <= cost.prefill_s(resident, new + more, chunk) * (1 + 1e-9)


@given(cost=costs, resident=st.integers(1, 20_000), new=tokens, more=tokens)
def test_a_longer_cached_prefix_never_makes_the_same_tokens_cheaper(
    cost: PrefillCost, resident: int, new: int, more: int
) -> None:
    assert cost.pass_s(resident, new) <= cost.pass_s(resident + more, new) * (1 + 1e-9)


@given(cost=costs, resident=tokens, new=st.integers(1, 20_000))
def test_no_pass_goes_below_the_memory_floor(cost: PrefillCost, resident: int, new: int) -> None:
    assert cost.pass_s(resident, new) >= cost.floor_of(resident + new)


@given(cost=costs, resident=tokens, chunk=st.none() | st.integers(1, 100))
def test_no_tokens_cost_nothing(cost: PrefillCost, resident: int, chunk: int | None) -> None:
    assert cost.prefill_s(resident, 0, chunk) == 0
    assert cost.pass_s(resident, 0) == 0


def test_a_pass_adds_up_its_terms() -> None:
    triangle = PassCost(overhead_s=1.0, token_s=0.1, pair_s=0.01, context_s=0.001)
    rectangle = replace(triangle, rectangle=True)
    cost = PrefillCost(2, fresh=triangle, extend=rectangle)
    # Fresh: 4 tokens attend 1 + 2 + 3 + 4 pairs. Extending by 4 after 6, masked entries are computed too.
    assert cost.pass_s(0, 4) == pytest.approx(1 + 0.4 + 0.10 + 0.004)
    assert cost.pass_s(6, 4) == pytest.approx(1 + 0.4 + 0.01 * 4 * 10 + 0.010)
    assert cost.coefficients(0) is triangle
    assert cost.coefficients(6) is rectangle


@pytest.mark.parametrize("tokens_measured", MEASURED_MS)
def test_the_h100_profile_predicts_the_published_prefills_within_ten_percent(tokens_measured: int) -> None:
    cost, row = PrefillCost.from_profile(load_model("llama-3.1-8b"), load_machine("h100-sxm"))
    predicted = cost.prefill_s(0, tokens_measured) + cost.head_s
    assert predicted * 1e3 == pytest.approx(MEASURED_MS[tokens_measured], rel=0.1)
    assert row.source == "profile"


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_more_ranks_are_faster_and_never_by_their_number(tp: int) -> None:
    model, machine = load_model("llama-3.1-70b"), load_machine("h100-sxm")
    alone, _ = PrefillCost.from_profile(model, machine)
    ranks, _ = PrefillCost.from_profile(model, machine, tp=tp)
    # All-reduces of the activations, two a layer, are what the ranks pay on top.
    for new in (1, 512, 12_370):
        assert alone.pass_s(0, new) / tp < ranks.pass_s(0, new)
    assert ranks.pass_s(0, 12_370) < alone.pass_s(0, 12_370)
    # Two ring all-reduces a layer of the 16-bit activations, at the interconnect's rate at the very best.
    bytes_a_token = 2 * 80 * 8192 * 2 * 2 * (tp - 1) / tp
    assert ranks.fresh.token_s - alone.fresh.token_s / tp >= bytes_a_token / 450e9 * 0.999
    assert ranks.fresh.pair_s == pytest.approx(alone.fresh.pair_s / tp)


def test_replicated_kv_heads_are_read_by_every_rank() -> None:
    model, machine = load_model("llama-3.1-70b"), load_machine("h100-sxm")
    eight, _ = PrefillCost.from_profile(model, machine, tp=8)
    sixteen, _ = PrefillCost.from_profile(model, machine, tp=16)
    assert sixteen.floor_context_s == eight.floor_context_s
    assert sixteen.floor_s == pytest.approx(eight.floor_s / 2)


def test_eight_bit_weights_double_the_projections_and_leave_attention_alone() -> None:
    machine = load_machine("h100-sxm")
    wide, _ = PrefillCost.from_profile(load_model("qwen3-32b"), machine)
    narrow, row = PrefillCost.from_profile(load_model("qwen3-32b-fp8"), machine)
    # Twice the peak, of which fp8 reaches the smaller share.
    assert wide.fresh.token_s * 989 / 1979 <= narrow.fresh.token_s < wide.fresh.token_s
    assert narrow.fresh.pair_s == pytest.approx(wide.fresh.pair_s, rel=0.2)
    assert row.dtype == "fp8"


def test_kv_in_eight_bits_halves_what_a_pass_reads_of_it() -> None:
    model, machine = load_model("llama-3.1-8b"), load_machine("h100-sxm")
    wide, _ = PrefillCost.from_profile(model, machine)
    narrow, _ = PrefillCost.from_profile(model, machine, kv_dtype="fp8")
    assert narrow.floor_context_s == wide.floor_context_s / 2


def test_a_machine_that_cannot_price_a_model_names_what_it_lacks() -> None:
    model, machine = load_model("llama-3.1-8b"), load_machine("h100-sxm")
    no_peak = replace(machine, device=replace(machine.device, peak_flops={"fp32": 67e12}))
    with pytest.raises(InputError) as caught:
        PrefillCost.from_profile(model, no_peak)
    assert caught.value.field == "device.peak.bf16"
    no_memory = replace(machine, device=replace(machine.device, memory_bytes_per_s=None))
    with pytest.raises(InputError) as caught:
        PrefillCost.from_profile(model, no_memory)
    assert caught.value.field == "device.memory_rate"
    alone = replace(machine, device=replace(machine.device, interconnect_bytes_per_s=None))
    PrefillCost.from_profile(model, alone)
    with pytest.raises(InputError) as caught:
        PrefillCost.from_profile(model, alone, tp=2)
    assert caught.value.field == "device.interconnect"
    with pytest.raises(InputError) as caught:
        PrefillCost.from_profile(model, machine, tp=3)
    assert caught.value.field == "tp"
