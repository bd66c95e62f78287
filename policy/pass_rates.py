"""How fast one machine does the work of a prefill, by peak rates and what an engine reaches of them.

    seconds = FLOP of each kind / (peak * efficiency * ranks)
            + (weights + KV) / (memory rate * share * ranks)
            + layers * per-layer cost + passes * per-pass cost
            + all-reduced bytes * 2(t-1)/t / (interconnect rate * share) + all-reduces * latency

Every term adds to the others, so no prediction is faster than FLOP over peak or bytes over memory rate. That the
reading of weights adds instead of hiding behind compute is what short prompts show: at 128 tokens the GEMMs fill
too few of the device's units to keep both busy.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.policy.errors import InputError
from kvlane.policy.machine import Machine, PrefillEfficiency
from kvlane.policy.workload import Workload


@dataclass(frozen=True, slots=True)
class PassRates:
    """Rates of `tp` ranks together (FLOP and bytes per second) and fixed costs (seconds)."""

    dense_flops: float
    wide_flops: float
    expert_flops: float
    attention_flops: float
    memory_bytes_per_s: float
    exchange_bytes_per_s: float | None
    exchange_s: float
    layer_s: float
    pass_s: float

    @classmethod
    def of(cls, machine: Machine, row: PrefillEfficiency, weight_dtype: str, *, tp: int = 1) -> PassRates:
        """The rates of `tp` devices of `machine` at the efficiencies of `row`.

        With weights of 8 or fewer bits, attention still multiplies in 16. Raises `InputError` when the device states
        no peak or memory rate, or no interconnect for `tp` above 1.
        """
        device = machine.device
        peak = device.peak(weight_dtype)
        wide = peak if weight_dtype in ("fp32", "bf16", "fp16") else device.peak("bf16")
        if device.memory_bytes_per_s is None:
            raise InputError("device.memory_rate", f"{machine.name} states none", "a rate, or a calibration")
        exchange = None
        if tp > 1:
            if device.interconnect_bytes_per_s is None:
                raise InputError(
                    "device.interconnect", f"{machine.name} states none", "a rate, for tp above 1"
                )
            # A ring moves 2(t-1)/t of each tensor through every rank.
            exchange = device.interconnect_bytes_per_s * device.interconnect_efficiency * tp / (2 * (tp - 1))
        return cls(
            dense_flops=peak * row.efficiency * tp,
            wide_flops=wide * row.efficiency * tp,
            expert_flops=peak * row.expert_efficiency * tp,
            attention_flops=wide * row.attention_efficiency * tp,
            memory_bytes_per_s=device.memory_bytes_per_s * device.memory_efficiency * tp,
            exchange_bytes_per_s=exchange,
            exchange_s=device.interconnect_latency_s if tp > 1 else 0.0,
            layer_s=row.layer_overhead_s,
            pass_s=row.pass_overhead_s,
        )

    def seconds(self, work: Workload) -> float:
        """Seconds for all of `work`, one part after another."""
        exchange = 0.0
        if self.exchange_bytes_per_s is not None:
            exchange = work.all_reduce_bytes / self.exchange_bytes_per_s + work.all_reduces * self.exchange_s
        return (
            work.dense_flop / self.dense_flops
            + work.wide_flop / self.wide_flops
            + work.expert_flop / self.expert_flops
            + work.attention_flop / self.attention_flops
            + (work.weight_bytes + work.kv_bytes) / self.memory_bytes_per_s
            + work.layers * self.layer_s
            + work.passes * self.pass_s
            + exchange
        )
