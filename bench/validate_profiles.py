"""From fitted efficiencies to the `[[prefill]]` tables of the machine profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvlane.bench.validate_fit import Fit, fit
from kvlane.bench.validate_predict import Task
from kvlane.policy.machine import Device, Machine, PrefillEfficiency

# Families with kernels of their own: their efficiencies are fitted apart, and say nothing about the others'.
APART = ("llama_cpp",)
# Their attention was several kernels when it was measured.
_UNFUSED_SPREAD = 1.0

_BY_MAKER = (
    ("NVIDIA", ("vllm", "tensorrt_llm", "sglang", "llama_cpp")),
    ("AMD", ("vllm", "sglang")),
    ("Apple", ("mlx",)),
    ("", ("vllm",)),
)
_STORED = ("bf16", "fp16", "fp8", "fp4", "int8", "int4")


class Fits:
    """The fit of most engines and those of the engines apart, as one source of efficiencies."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._common = fit([task for task in tasks if task.engine not in APART])
        self._apart = {
            engine: fit([task for task in tasks if task.engine == engine], _UNFUSED_SPREAD)
            for engine in APART
        }

    def efficiency(self, machine: Machine, dtype: str, engine: str) -> PrefillEfficiency:
        """The fitted efficiency, rounded as profiles state it."""
        row = self.of(engine).efficiency(machine, dtype, engine)
        return replace(
            row,
            efficiency=round(row.efficiency, 3),
            attention_efficiency=round(row.attention_efficiency, 3),
            expert_efficiency=round(row.expert_efficiency, 3),
            layer_overhead_s=round(row.layer_overhead_s, 6),
        )

    def device(self, device: Device) -> Device:
        """The device with the fitted share of its interconnect."""
        return replace(device, interconnect_efficiency=round(self._common.exchange(device)[0], 3))

    def of(self, engine: str) -> Fit:
        """The fit that an engine belongs to."""
        return self._apart.get(engine, self._common)


def cells(machine: Machine) -> Iterator[tuple[str, str]]:
    """Engines and weight dtypes that a machine's profile speaks of."""
    device = machine.device
    engines = next(names for maker, names in _BY_MAKER if device.name.startswith(maker))
    wide = "bf16" if "bf16" in device.peak_flops else "fp16"
    for engine in engines:
        for dtype in _STORED:
            if engine in APART and dtype not in (wide, "int4"):
                continue
            if dtype in ("bf16", "fp16") and dtype != wide:
                continue
            if dtype in ("fp8", "fp4") and dtype not in device.peak_flops:
                continue
            if dtype == "int8" and device.name.startswith("NVIDIA"):
                continue
            yield engine, dtype


def _covered(engine: str, dtype: str, named: Sequence[tuple[str, str]]) -> bool:
    wide = ("bf16", "fp16")
    same = wide if dtype in wide else (dtype,)
    return any((engine, other) in named for other in same)


def profile_text(fits: Fits, machine: Machine) -> str:
    """The `[[prefill]]` tables of one machine."""
    blocks = []
    named = list(cells(machine))
    for engine in sorted({key[1].rsplit("/", 1)[1] for key in fits.of("vllm").rows if key[0] == "cell"}):
        named += [
            (engine, dtype)
            for dtype in _STORED
            if not _covered(engine, dtype, named) and fits.efficiency(machine, dtype, engine).rows
        ]
    for engine, dtype in named:
        row = fits.efficiency(machine, dtype, engine)
        lines = [
            "[[prefill]]",
            f'engine = "{engine}"',
            f'dtype = "{dtype}"',
            f"efficiency = {row.efficiency}",
            f"attention_efficiency = {row.attention_efficiency}",
            f"expert_efficiency = {row.expert_efficiency}",
            f'layer_overhead = "{row.layer_overhead_s * 1e6:.0f} us"',
        ]
        if row.rows:
            lines.append(f"rows = {row.rows}")
        else:
            lines.append('basis = "assumption"')
        lines.append(f'source = "{row.origin}"')
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
