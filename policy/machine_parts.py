"""What a machine is made of: its device, its links, the tiers they reach, and how well engines use it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kvlane.policy.errors import InputError

# Where a parameter came from, best first.
Source = Literal["explicit", "calibration", "profile", "assumption"]
Layout = Literal["layer_major", "chunk_major"]


@dataclass(frozen=True, slots=True)
class Link:
    """What carries KV into the device.

    Either `rate_bytes_per_s` with `per_copy_s` (the asymptotic rate and what each copy costs on top), or
    `rate_table`, achieved rates by copy size `((copy_bytes, bytes_per_s), ...)`, which already hold the
    per-copy cost; never both. `latency_s` is paid once a transfer, `first_use_s` on top of it when the peer is
    cold. `per_event_s` is what it costs, when layers are loaded one after another, to enqueue one group of them
    and record its event. `ceiling_bytes_per_s` is what the wire carries at most; `rows` counts the published
    measurements a fitted link stands on.

    Raises `InputError` naming the field for a rate, time or table that cannot be.
    """

    name: str
    rate_bytes_per_s: float
    per_copy_s: float = 0.0
    latency_s: float = 0.0
    rate_table: tuple[tuple[float, float], ...] = ()
    ceiling_bytes_per_s: float | None = None
    source: Source = "explicit"
    origin: str = ""
    rows: int = 0
    per_event_s: float = 0.0
    first_use_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.rate_bytes_per_s < math.inf:
            raise InputError(
                f"links.{self.name}.rate", f"{self.rate_bytes_per_s!r} is not a rate", "a rate above zero"
            )
        for part, value in (
            ("per_copy", self.per_copy_s),
            ("latency", self.latency_s),
            ("per_event", self.per_event_s),
            ("first_use", self.first_use_s),
        ):
            if not 0 <= value < math.inf:
                raise InputError(
                    f"links.{self.name}.{part}", f"{value!r} is not a time", "zero or more seconds"
                )
        if self.rate_table and self.per_copy_s:
            raise InputError(
                f"links.{self.name}.per_copy",
                "stands beside a rate table, which already holds it",
                "one of the two",
            )
        sizes = [size for size, _ in self.rate_table]
        finite = all(0 < number < math.inf for row in self.rate_table for number in row)
        if not finite or sizes != sorted(set(sizes)):
            raise InputError(
                f"links.{self.name}.rate_table", "is not rising in copy size", "rows (size, rate), rising"
            )

    def with_latency(self, latency_s: float) -> Link:
        """The same link with another cost per transfer, in seconds."""
        return replace(self, latency_s=latency_s)

    def at_rate(self, rate_bytes_per_s: float) -> Link:
        """The same link, its bytes at another rate: what each copy, event and transfer costs beside them stays.

        In a table, that is what a copy takes longer than its bytes at the link's own rate.
        """
        own, table = self.rate_bytes_per_s, []
        for size, rate in self.rate_table:
            beside_s = max(0.0, size / rate - size / own)
            table.append((size, size / (beside_s + size / rate_bytes_per_s)))
        return replace(
            self,
            rate_bytes_per_s=rate_bytes_per_s,
            rate_table=tuple(table),
            ceiling_bytes_per_s=None,
            source="explicit",
            origin="supposed",
            rows=0,
        )

    def rate_at(self, copy_bytes: float) -> float:
        """Bytes per second of the wire at this copy size, `per_copy_s` apart; linear in time per copy between
        table rows."""
        table = self.rate_table
        if not table:
            return self.rate_bytes_per_s
        at = bisect_left(table, (copy_bytes, 0.0))
        if at == 0:
            return table[0][1] * copy_bytes / table[0][0]  # the call overhead dominates below the first row
        if at == len(table):
            return table[-1][1]
        (low, low_rate), (high, high_rate) = table[at - 1], table[at]
        share = (copy_bytes - low) / (high - low)
        return copy_bytes / ((1 - share) * low / low_rate + share * high / high_rate)

    def achieved(self, copy_bytes: float) -> float:
        """Bytes per second that copies of this size come to one after another, their own cost included."""
        return copy_bytes / (self.per_copy_s + copy_bytes / self.rate_at(copy_bytes))


@dataclass(frozen=True, slots=True)
class Tier:
    """Where KV is stored, and how it lies there.

    `run_tokens` is how many tokens of one layer lie in one run of memory on both sides, so that one copy
    moves them: None for a contiguous prefix, 0 for one run a load unit (paged KV). `runs_per_layer` is 2
    where K and V lie apart. `per_token_s` is what the engine does on the host for every token it loads: look-up,
    block tables, bookkeeping of copies.
    """

    name: str
    link: str
    layout: Layout = "layer_major"
    run_tokens: int | None = None
    runs_per_layer: int = 1
    per_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillEfficiency:
    """What an engine family makes of one device in prefill.

    Shares of the dense peak, each above 0 and at most 1: `efficiency` in projections and dense MLP,
    `attention_efficiency` in attention, `expert_efficiency` in the experts of a mixture (their GEMMs are
    many and small). `pass_overhead_s` is paid once a pass, `layer_overhead_s` once a layer and pass (kernel
    launches and the small kernels between the large ones). `rows` counts the published measurements the
    shares were fitted to: 0 for an assumption.
    """

    engine: str
    dtype: str
    efficiency: float
    attention_efficiency: float
    pass_overhead_s: float
    source: Source
    origin: str
    expert_efficiency: float = 0.0
    layer_overhead_s: float = 0.0
    rows: int = 0

    def __post_init__(self) -> None:
        if self.expert_efficiency == 0.0:
            object.__setattr__(self, "expert_efficiency", self.efficiency)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `peak_flops` are dense, by dtype; `memory_efficiency` is the share of the memory rate
    that a bandwidth-bound pass reaches, `interconnect_efficiency` that of the interconnect's rate that an
    all-reduce reaches. `family` names the architecture, whose devices share fitted constants; `sources` gives
    the address of each group of numbers. What nobody stated is None, and needed only without a calibration."""

    name: str
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    memory_efficiency: float = 1.0
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    interconnect_bytes_per_s: float | None = None
    interconnect_latency_s: float = 0.0
    origin: str = ""
    interconnect_efficiency: float = 1.0
    power_w: float | None = None
    family: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Dense FLOP per second at `dtype`, or at the nearest wider one the device computes in.

        Weights stored narrower than anything the device multiplies (4-bit integers, say) are widened before
        they are multiplied. Raises `InputError` naming `device.peak` where nothing serves.
        """
        for known in _COMPUTED_AS.get(dtype, (dtype,)):
            if known in self.peak_flops:
                return self.peak_flops[known]
        raise InputError(
            f"device.peak.{dtype}", f"{self.name} states no {dtype} peak", ", ".join(self.peak_flops) or "one"
        )

    def limited_to(self, watts: float) -> Device:
        """This device held to a power below its own: its peaks fall with the cube root of it.

        Dynamic power goes with the clock and the square of a voltage that follows the clock. A limit at or above
        the device's own, or one on a device whose power nobody states, changes nothing.
        """
        if self.power_w is None or watts >= self.power_w:
            return self
        share = (watts / self.power_w) ** (1 / 3)
        peaks = {dtype: peak * share for dtype, peak in self.peak_flops.items()}
        return replace(self, peak_flops=peaks, power_w=watts)


# What a device without units for a dtype computes it in, nearest first.
_COMPUTED_AS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("fp8", "bf16", "fp16"),
    "fp8_e4m3": ("fp8", "bf16", "fp16"),
    "fp8_e5m2": ("fp8", "bf16", "fp16"),
    "fp4": ("fp4", "fp8", "bf16", "fp16"),
    "int8": ("int8", "bf16", "fp16"),
    "int4": ("bf16", "fp16"),  # weight-only: dequantised before they are multiplied
    "bf16": ("bf16", "fp16"),
    "fp16": ("fp16", "bf16"),
}
