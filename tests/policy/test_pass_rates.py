"""What a prefill takes by rates: never less than physics allows, the same by both ways of adding it up, TP priced."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy.catalog import load_machine, load_model, machine_names
from kvlane.policy.errors import InputError
from kvlane.policy.machine import PrefillEfficiency
from kvlane.policy.model import ModelSpec
from kvlane.policy.pass_rates import PassRates
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.workload import pass_workload, prefill_workload

MODELS = ["llama-3.1-8b", "qwen3-32b", "mixtral-8x7b", "qwen3.5-27b", "gpt-oss-20b", "deepseek-v3.2"]
SHARES = st.floats(0.01, 1.0)


def h100_efficiency(name: str, tp: int, tokens: int = 16_000) -> float:
    """Share of the peak that a whole prefill reaches on H100s."""
    machine, model = load_machine("h100-sxm"), load_model(name)
    cost, _ = PrefillCost.from_profile(model, machine, tp=tp)
    seconds = cost.prefill_s(0, tokens, 8192) + cost.head_s
    return model.prefill_flop(0, tokens) / (machine.device.peak("bf16") * tp) / seconds


class TestPhysics:
    @settings(deadline=None, max_examples=60)
    @given(
        st.sampled_from(machine_names()),
        st.sampled_from(MODELS),
        st.sampled_from([1, 2, 4]),
        st.integers(0, 100_000),
        st.integers(1, 50_000),
        SHARES,
        SHARES,
        SHARES,
    )
    def test_no_pass_beats_peak_memory_or_interconnect(
        self, name, model_name, tp, resident, new, dense, attention, expert
    ):
        machine, model = load_machine(name), load_model(model_name)
        device = machine.device
        if tp > 1 and device.interconnect_bytes_per_s is None:
            return
        row = PrefillEfficiency("e", "bf16", dense, attention, 0.0, "explicit", "", expert)
        work = pass_workload(model, resident, new, weight_dtype="bf16")
        seconds = PassRates.of(machine, row, "bf16", tp=tp).seconds(work)
        assert seconds >= work.flop / (device.peak("bf16") * tp)
        assert seconds >= (work.weight_bytes + work.kv_bytes) / (device.memory_bytes_per_s * tp)
        if tp > 1:
            assert seconds >= work.all_reduce_bytes * 2 * (tp - 1) / tp / device.interconnect_bytes_per_s

    @settings(deadline=None, max_examples=40)
    @given(st.sampled_from(machine_names()), st.sampled_from(MODELS), st.integers(1, 40_000))
    def test_no_profile_beats_physics(self, name, model_name, tokens):
        machine, model = load_machine(name), load_model(model_name)
        cost, _ = PrefillCost.from_profile(model, machine)
        seconds = cost.prefill_s(0, tokens) + cost.head_s
        peak = max(machine.device.peak_flops.values())
        assert seconds >= model.prefill_flop(0, tokens) / peak
        assert machine.device.memory_bytes_per_s is not None
        assert seconds >= model.touched_weight_bytes(tokens) / machine.device.memory_bytes_per_s


class TestOneFormula:
    @pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "falcon-180b", "qwen3-32b-fp8"])
    @pytest.mark.parametrize("tp", [1, 2])
    @pytest.mark.parametrize(("resident", "new"), [(0, 2048), (12_000, 500), (0, 20_000)])
    def test_the_planner_prices_a_prefill_as_the_work_says(self, name, tp, resident, new):
        machine, model = load_machine("h100-sxm"), load_model(name)
        cost, row = PrefillCost.from_profile(model, machine, tp=tp)
        rates = PassRates.of(machine, row, model.weight_dtype, tp=tp)
        work = prefill_workload(model, resident, new, 8192, tp=tp)
        assert cost.prefill_s(resident, new, 8192) + cost.head_s == pytest.approx(
            rates.seconds(work), rel=1e-3
        )


class TestBatches:
    def test_prompts_in_one_batch_share_the_weights_and_no_pairs(self):
        model = load_model("llama-3.1-8b")
        one, batch = pass_workload(model, 0, 1024), pass_workload(model, 0, 1024, sequences=16)
        alone = pass_workload(model, 0, 16 * 1024)
        assert batch.dense_flop == 16 * one.dense_flop == alone.dense_flop
        assert batch.attention_flop == 16 * one.attention_flop < alone.attention_flop
        assert batch.weight_bytes == one.weight_bytes

    def test_chunks_read_the_weights_again_and_attend_no_fewer_pairs(self):
        model = load_model("llama-3.1-8b")
        whole, parts = prefill_workload(model, 0, 10_000), prefill_workload(model, 0, 10_000, 4096)
        assert parts.passes == 3
        assert parts.attention_flop == pytest.approx(whole.attention_flop)
        assert parts.weight_bytes > 2.5 * whole.weight_bytes
        assert parts.wide_flop == whole.wide_flop  # the LM head runs in the last pass only

    def test_a_batch_that_fits_no_pass_goes_in_several(self):
        model = load_model("llama-3.1-8b")
        work = prefill_workload(model, 0, 1024, 8192, sequences=20)
        assert work.passes == 3
        assert work.dense_flop == 20 * pass_workload(model, 0, 1024).dense_flop


class TestTensorParallelism:
    def test_published_efficiency_falls_from_one_card_to_two(self):
        assert h100_efficiency("llama-3.1-8b", 1) == pytest.approx(0.60, abs=0.03)
        assert h100_efficiency("qwq-32b", 2) == pytest.approx(0.52, abs=0.03)

    @pytest.mark.parametrize("name", ["qwq-32b", "llama-3.1-70b"])
    def test_and_further_with_more_cards(self, name):
        shares = [h100_efficiency(name, tp) for tp in (1, 2, 4, 8)]
        assert shares == sorted(shares, reverse=True)
        assert shares[-1] < 0.75 * shares[0]

    def test_bytes_and_launches_are_both_paid(self):
        machine, model = load_machine("h100-sxm"), load_model("qwen3-32b")
        row = machine.efficiency_for("bf16", "vllm")
        work = pass_workload(model, 0, 8192)
        rates = PassRates.of(machine, row, "bf16", tp=2)
        assert rates.exchange_bytes_per_s is not None
        slow_link = replace(rates, exchange_bytes_per_s=rates.exchange_bytes_per_s / 2)
        slow_start = replace(rates, exchange_s=2 * rates.exchange_s)
        assert slow_link.seconds(work) > rates.seconds(work)
        assert slow_start.seconds(work) - rates.seconds(work) == pytest.approx(2 * 64 * rates.exchange_s)

    def test_a_device_without_an_interconnect_says_so(self):
        machine = load_machine("m5-max")
        row = machine.efficiency_for("fp16", "mlx")
        with pytest.raises(InputError, match="interconnect"):
            PassRates.of(machine, row, "fp16", tp=2)


def test_an_unknown_weight_dtype_is_named():
    model: ModelSpec = load_model("llama-3.1-8b")
    with pytest.raises(InputError, match="weight_dtype"):
        pass_workload(model, 0, 1, weight_dtype="fp3")
