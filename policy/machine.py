"""A machine as the policy sees it: one device, its links, and the tiers they reach.

Profiles are TOML with units in the text; each number stands beside the address it came from.
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.model import BYTES_PER_ELEMENT
from kvlane.policy.units import parse_bytes, parse_flops, parse_rate, parse_seconds

# Where a parameter came from, best first.
Source = Literal["explicit", "calibration", "profile", "assumption"]
Layout = Literal["layer_major", "chunk_major"]


@dataclass(frozen=True, slots=True)
class Link:
    """What carries KV into the device.

    Either `rate_bytes_per_s` with `per_copy_s` (the asymptotic rate and what each copy costs on top), or
    `rate_table`, achieved rates by copy size `((copy_bytes, bytes_per_s), ...)`, which already hold the
    per-copy cost; never both. `latency_s` is paid once a transfer.
    """

    name: str
    rate_bytes_per_s: float
    per_copy_s: float = 0.0
    latency_s: float = 0.0
    rate_table: tuple[tuple[float, float], ...] = ()
    ceiling_bytes_per_s: float | None = None
    source: Source = "explicit"
    origin: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.rate_bytes_per_s < math.inf:
            raise InputError(
                f"links.{self.name}.rate", f"{self.rate_bytes_per_s!r} is not a rate", "a rate above zero"
            )
        for part, value in (("per_copy", self.per_copy_s), ("latency", self.latency_s)):
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
        """The same link with another cost per transfer."""
        return replace(self, latency_s=latency_s)

    def rate_at(self, copy_bytes: float) -> float:
        """Achieved bytes per second at this copy size, linear in time per copy between table rows."""
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


@dataclass(frozen=True, slots=True)
class Tier:
    """Where KV is stored, and how it lies there.

    `run_tokens` is how many tokens of one layer lie in one run of memory on both sides, so that one copy
    moves them: None for a contiguous prefix, 0 for one run a load unit (paged KV). `runs_per_layer` is 2
    where K and V lie apart.
    """

    name: str
    link: str
    layout: Layout = "layer_major"
    run_tokens: int | None = None
    runs_per_layer: int = 1


@dataclass(frozen=True, slots=True)
class PrefillEfficiency:
    """Share of the dense peak that an engine reaches in prefill: in projections and MLP, and in attention."""

    engine: str
    dtype: str
    efficiency: float
    attention_efficiency: float
    pass_overhead_s: float
    source: Source
    origin: str


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `peak_flops` are dense, by dtype; `memory_efficiency` is the share of the memory rate
    that a bandwidth-bound pass reaches. What nobody stated is None, and needed only without a calibration."""

    name: str
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    memory_efficiency: float = 1.0
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    interconnect_bytes_per_s: float | None = None
    interconnect_latency_s: float = 0.0
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, the links that reach it, and the tiers at their far ends."""

    name: str
    device: Device
    links: Mapping[str, Link]
    tiers: Mapping[str, Tier]
    prefill: tuple[PrefillEfficiency, ...]

    def tier(self, name: str) -> Tier:
        """The tier of that name; raises `InputError` naming `hit` and listing the known ones."""
        try:
            return self.tiers[name]
        except KeyError:
            raise InputError("hit", f"{self.name} has no tier {name!r}", ", ".join(self.tiers)) from None

    def with_link_rate(self, rate_bytes_per_s: float, tier: str | None = None) -> Machine:
        """This machine with the link of `tier` (of every tier when None) at an explicit achieved rate.

        The rate stands for everything: a stated achieved rate already holds the cost of its copies.
        """
        names = [self.tier(tier).link] if tier else list(self.links)
        links = dict(self.links)
        for name in names:
            links[name] = Link(
                name=name, rate_bytes_per_s=rate_bytes_per_s, source="explicit", origin="--link"
            )
        return replace(self, links=links)

    def efficiency_for(self, dtype: str, engine: str) -> PrefillEfficiency:
        """The efficiency of `engine` at `dtype`; another row of the machine, as an assumption, if it has none."""
        same_dtype = [row for row in self.prefill if row.dtype == dtype]
        for row in same_dtype:
            if row.engine == engine:
                return row
        if not self.prefill:
            raise InputError("machine.prefill", f"{self.name} states no prefill efficiency", "at least one")
        nearest = (same_dtype or list(self.prefill))[0]
        origin = f"the {nearest.engine} {nearest.dtype} efficiency, assumed for {engine} {dtype}"
        return replace(nearest, engine=engine, dtype=dtype, source="assumption", origin=origin)

    @classmethod
    def from_toml(cls, path: str | Path) -> Machine:
        """Reads a machine profile; raises `InputError` naming the field for anything amiss."""
        path = Path(path)
        try:
            raw = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise InputError("machine", f"{path}: {reason}", "a readable machine profile (TOML)") from None
        return cls.from_text(raw, str(path))

    @classmethod
    def from_text(cls, text: str, where: str) -> Machine:
        """The same from TOML text; `where` names it in errors."""
        try:
            fields = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError("machine", f"{where} is not TOML: {error}", "a machine profile (TOML)") from None
        try:
            return _machine(msgspec.convert(fields, _MachineText))
        except msgspec.ValidationError as error:
            problem, _, at = str(error).partition(" - at `$.")
            raise InputError(
                f"machine.{at.rstrip('`')}" if at else "machine", f"{where}: {problem}"
            ) from None


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _InterconnectText(_Strict):
    rate: str
    latency: str = "0 s"
    source: str = ""


class _DeviceText(_Strict):
    name: str
    memory: str
    memory_rate: str
    peak: dict[str, str]
    memory_efficiency: float = 1.0
    interconnect: _InterconnectText | None = None
    source: str = ""


class _LinkText(_Strict):
    rate: str = ""
    per_copy: str = "0 s"
    latency: str = "0 s"
    rate_table: list[tuple[str, str]] = []
    ceiling: str | None = None
    basis: Literal["profile", "assumption", "calibration"] = "profile"
    source: str = ""


class _TierText(_Strict):
    link: str
    layout: Layout = "layer_major"
    run: int | Literal["contiguous", "load_unit"] = "contiguous"
    runs_per_layer: int = 1


class _PrefillText(_Strict):
    engine: str
    dtype: str
    efficiency: float
    attention_efficiency: float | None = None
    pass_overhead: str = "0 s"
    basis: Literal["profile", "assumption", "calibration"] = "profile"
    source: str = ""


class _MachineText(_Strict):
    name: str
    device: _DeviceText
    prefill: list[_PrefillText]
    links: dict[str, _LinkText]
    tiers: dict[str, _TierText]


def _share(value: float, field: str) -> float:
    if not 0 < value <= 1:
        raise InputError(field, f"is {value!r}", "a share above 0 and at most 1")
    return value


def _link(name: str, text: _LinkText) -> Link:
    at = f"links.{name}"
    table = tuple(
        (parse_bytes(size, f"{at}.rate_table"), parse_rate(rate, f"{at}.rate_table"))
        for size, rate in text.rate_table
    )
    if bool(text.rate) == bool(table):
        raise InputError(f"{at}.rate", "a link gives either a rate or a rate_table", "exactly one of the two")
    rate = parse_rate(text.rate, f"{at}.rate") if text.rate else table[-1][1]
    ceiling = parse_rate(text.ceiling, f"{at}.ceiling") if text.ceiling is not None else None
    if ceiling is not None and max(rate, *(row_rate for _, row_rate in table), 0.0) > ceiling:
        raise InputError(
            f"{at}.rate", f"{text.rate!r} is above the link's ceiling {text.ceiling!r}", "at most the ceiling"
        )
    return Link(
        name=name,
        rate_bytes_per_s=rate,
        per_copy_s=parse_seconds(text.per_copy, f"{at}.per_copy"),
        latency_s=parse_seconds(text.latency, f"{at}.latency"),
        rate_table=table,
        ceiling_bytes_per_s=ceiling,
        source=text.basis,
        origin=text.source,
    )


def _tier(name: str, text: _TierText, links: Mapping[str, Link]) -> Tier:
    at = f"tiers.{name}"
    if text.link not in links:
        raise InputError(
            f"{at}.link", f"there is no link {text.link!r}", ", ".join(links) or "a link of this machine"
        )
    if isinstance(text.run, int) and text.run < 1:
        raise InputError(f"{at}.run", f"is {text.run}", 'tokens of 1 or more, "contiguous" or "load_unit"')
    if text.runs_per_layer not in (1, 2):
        raise InputError(
            f"{at}.runs_per_layer", f"is {text.runs_per_layer}", "1 (K and V packed) or 2 (apart)"
        )
    run = {"contiguous": None, "load_unit": 0}[text.run] if isinstance(text.run, str) else text.run
    return Tier(
        name=name, link=text.link, layout=text.layout, run_tokens=run, runs_per_layer=text.runs_per_layer
    )


def _prefill(row: int, text: _PrefillText) -> PrefillEfficiency:
    at = f"prefill[{row}]"
    if text.dtype not in BYTES_PER_ELEMENT:
        raise InputError(f"{at}.dtype", f"unknown dtype {text.dtype!r}", ", ".join(BYTES_PER_ELEMENT))
    efficiency = _share(text.efficiency, f"{at}.efficiency")
    attention = text.attention_efficiency
    return PrefillEfficiency(
        engine=text.engine,
        dtype=text.dtype,
        efficiency=efficiency,
        attention_efficiency=efficiency
        if attention is None
        else _share(attention, f"{at}.attention_efficiency"),
        pass_overhead_s=parse_seconds(text.pass_overhead, f"{at}.pass_overhead"),
        source=text.basis,
        origin=text.source,
    )


def _machine(text: _MachineText) -> Machine:
    device = text.device
    for dtype in device.peak:
        if dtype not in BYTES_PER_ELEMENT:
            raise InputError(f"device.peak.{dtype}", "is not a known dtype", ", ".join(BYTES_PER_ELEMENT))
    links = {name: _link(name, link) for name, link in text.links.items()}
    between = device.interconnect
    return Machine(
        name=text.name,
        device=Device(
            name=device.name,
            memory_bytes=parse_bytes(device.memory, "device.memory"),
            memory_bytes_per_s=parse_rate(device.memory_rate, "device.memory_rate"),
            memory_efficiency=_share(device.memory_efficiency, "device.memory_efficiency"),
            peak_flops={
                dtype: parse_flops(peak, f"device.peak.{dtype}") for dtype, peak in device.peak.items()
            },
            interconnect_bytes_per_s=parse_rate(between.rate, "device.interconnect.rate")
            if between
            else None,
            interconnect_latency_s=parse_seconds(between.latency, "device.interconnect.latency")
            if between
            else 0.0,
            origin=device.source,
        ),
        links=links,
        tiers={name: _tier(name, tier, links) for name, tier in text.tiers.items()},
        prefill=tuple(_prefill(row, entry) for row, entry in enumerate(text.prefill)),
    )
