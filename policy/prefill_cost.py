"""What it costs to compute tokens, given how many are cached before them.

One pass over all layers for `m` new tokens after `p` cached ones takes

    t0 + max(b*m + c*w(p, m), floor) + d*(p + m)

`w` being the attended pairs, or the rectangle `m*(p + m)` where the kernel computes masked entries too, and
`floor` the time to read the weights once and the KV (DESIGN, "What a path costs"). `d` is what goes over the
whole context once a pass whatever `m` is, such as copying K and V to all query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.policy.errors import InputError
from kvlane.policy.machine import Machine, PrefillEfficiency
from kvlane.policy.model import ModelSpec, attention_pairs


@dataclass(frozen=True, slots=True)
class PassCost:
    """Coefficients of one pass, in seconds: per pass, per new token, per attended pair, per context token."""

    overhead_s: float
    token_s: float
    pair_s: float
    context_s: float = 0.0
    rectangle: bool = False

    def work_s(self, resident: int, new: int) -> float:
        """The part that arithmetic takes: `b*m + c*w(p, m)`."""
        pairs = new * (resident + new) if self.rectangle else attention_pairs(resident, new)
        return self.token_s * new + self.pair_s * pairs

    def pass_s(self, resident: int, new: int, floor_s: float = 0.0) -> float:
        """Seconds of the pass, its work taking at least `floor_s`."""
        return self.overhead_s + max(self.work_s(resident, new), floor_s) + self.context_s * (resident + new)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The cost of prefill passes on one engine and device.

    `fresh` holds for a pass from token 0, `extend` for one after a cached prefix: some backends run
    different attention kernels for the two. `floor_s` is the time to read the weights once,
    `floor_context_s` that to read one token's KV. `head_s` is the LM head for one token, not in the passes.
    """

    layers: int
    fresh: PassCost
    extend: PassCost
    head_s: float = 0.0
    floor_s: float = 0.0
    floor_context_s: float = 0.0

    def coefficients(self, resident: int) -> PassCost:
        return self.extend if resident > 0 else self.fresh

    def floor_of(self, context: int) -> float:
        """Seconds below which no pass over `context` tokens of KV can go."""
        return self.floor_s + self.floor_context_s * context

    def pass_s(self, resident: int, new: int) -> float:
        """Seconds of one pass over all layers, LM head apart; no tokens cost nothing."""
        if new <= 0:
            return 0.0
        cost = self.extend if resident > 0 else self.fresh
        context = resident + new
        work = cost.work_s(resident, new)
        return (
            cost.overhead_s
            + max(work, self.floor_s + self.floor_context_s * context)
            + cost.context_s * context
        )

    def prefill_s(self, resident: int, new: int, chunk_tokens: int | None = None) -> float:
        """Seconds of all passes when the engine prefills at most `chunk_tokens` a pass (None: all in one)."""
        if chunk_tokens is None or new <= chunk_tokens:
            return self.pass_s(resident, new)
        total = self.pass_s(resident, chunk_tokens)
        resident += chunk_tokens
        full, rest = divmod(new - chunk_tokens, chunk_tokens)
        total += self._full_chunks_s(resident, full, chunk_tokens)
        return total + self.pass_s(resident + full * chunk_tokens, rest)

    def _full_chunks_s(self, resident: int, count: int, chunk: int) -> float:
        """Seconds of `count` whole chunks after `resident` > 0 tokens, in O(1).

        Work and floor are both linear in the chunk's number, so the larger of them changes sides at most once.
        """
        if count <= 0:
            return 0.0
        cost = self.extend
        work, work_step = cost.work_s(resident, chunk), cost.pair_s * chunk * chunk
        floor, floor_step = self.floor_of(resident + chunk), self.floor_context_s * chunk
        gap, gap_step = work - floor, work_step - floor_step
        work_first = gap > 0 or (gap == 0 and gap_step > 0)
        first, then = (work, work_step), (floor, floor_step)
        if not work_first:
            first, then = then, first
        turn = count
        if gap * gap_step < 0:
            turn = min(count, int(-gap / gap_step) + 1)  # chunks before the sides change

        def series(start: float, step: float, low: int, high: int) -> float:
            return (high - low) * start + step * (high * (high - 1) - low * (low - 1)) / 2

        passes = series(*first, 0, turn) + series(*then, turn, count)
        contexts = series(resident + chunk, chunk, 0, count)
        return count * cost.overhead_s + passes + cost.context_s * contexts

    @classmethod
    def from_profile(
        cls,
        model: ModelSpec,
        machine: Machine,
        *,
        engine: str = "vllm",
        tp: int = 1,
        kv_dtype: str | None = None,
    ) -> tuple[PrefillCost, PrefillEfficiency]:
        """The cost by FLOP over peak and bytes over memory rate, and the efficiency it rests on.

        Raises `InputError` when the device states no peak for the model's weight dtype, or no interconnect
        for `tp` > 1.
        """
        model.check_tp(tp)
        device = machine.device
        row = machine.efficiency_for(model.weight_dtype, engine)
        peak = _peak(machine, model.weight_dtype)
        # With 8-bit weights attention and LM head still compute in 16 bits.
        wide_peak = _peak(machine, "bf16") if model.weight_dtype.startswith("fp8") else peak
        if device.memory_bytes_per_s is None:
            raise InputError("device.memory_rate", f"{machine.name} states none", "a rate, or a calibration")
        memory = device.memory_bytes_per_s * device.memory_efficiency
        layers = len(model.layers)
        token_s = sum(layer.flop_per_token for layer in model.layers) / (peak * row.efficiency * tp)
        pair_s = sum(layer.flop_per_pair for layer in model.layers) / (
            wide_peak * row.attention_efficiency * tp
        )
        overhead_s = row.pass_overhead_s
        if tp > 1:
            if device.interconnect_bytes_per_s is None:
                raise InputError(
                    "device.interconnect", f"{machine.name} states none", "a rate, for tp above 1"
                )
            # Two all-reduces a layer, each moving 2(t-1)/t of the 16-bit activations over a ring.
            moved = 2 * layers * model.hidden * 2.0 * 2 * (tp - 1) / tp
            token_s += moved / device.interconnect_bytes_per_s
            overhead_s += 2 * layers * device.interconnect_latency_s
        cost = PassCost(overhead_s=overhead_s, token_s=token_s, pair_s=pair_s)
        head_s = max(
            model.head_flop / (wide_peak * row.efficiency * tp),
            model.head_weight_bytes / tp / memory,
        )
        return (
            cls(
                layers=layers,
                fresh=cost,
                extend=cost,
                head_s=head_s,
                floor_s=model.layer_weight_bytes / tp / memory,
                floor_context_s=model.kv_bytes_per_token(kv_dtype, tp) / memory,
            ),
            row,
        )


def _peak(machine: Machine, dtype: str) -> float:
    peaks = machine.device.peak_flops
    found = peaks.get(dtype) or peaks.get("fp8" if dtype.startswith("fp8") else dtype)
    if not found:
        raise InputError(f"device.peak.{dtype}", f"{machine.name} states no {dtype} peak", ", ".join(peaks))
    return found
