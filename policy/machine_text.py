"""Machine profiles as text: TOML with units, checked field by field.

A tier may name a link of the shared profile `links.toml` (PCIe, NVLink-C2C, CXL, NVMe, networks) instead of one
that the machine's own file describes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.machine_parts import Device, Layout, Link, PrefillEfficiency, Tier
from kvlane.policy.units import parse_bytes, parse_flops, parse_rate, parse_seconds

# What devices compute in, and what weights are stored in.
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "fp4", "int4")

_Basis = Literal["profile", "assumption", "calibration"]
_Text = TypeVar("_Text", bound="_Strict")


class Parts(NamedTuple):
    """What a profile describes."""

    name: str
    device: Device
    links: dict[str, Link]
    tiers: dict[str, Tier]
    prefill: tuple[PrefillEfficiency, ...]


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _InterconnectText(_Strict):
    rate: str
    latency: str = "0 s"
    efficiency: float = 1.0
    source: str = ""


class _DeviceText(_Strict):
    name: str
    memory: str
    memory_rate: str
    peak: dict[str, str]
    memory_efficiency: float = 1.0
    interconnect: _InterconnectText | None = None
    power: str | None = None
    family: str = ""
    source: str = ""
    peak_source: str = ""


class _LinkText(_Strict):
    rate: str = ""
    per_copy: str = "0 s"
    latency: str = "0 s"
    per_event: str = "0 s"
    first_use: str = "0 s"
    rate_table: list[tuple[str, str]] = []
    ceiling: str | None = None
    basis: _Basis = "profile"
    rows: int = 0
    source: str = ""


class _TierText(_Strict):
    link: str
    layout: Layout = "layer_major"
    run: int | Literal["contiguous", "load_unit"] = "contiguous"
    runs_per_layer: int = 1
    per_token: str = "0 s"


class _PrefillText(_Strict):
    engine: str
    dtype: str
    efficiency: float
    attention_efficiency: float | None = None
    expert_efficiency: float | None = None
    pass_overhead: str = "0 s"
    layer_overhead: str = "0 s"
    basis: _Basis = "profile"
    rows: int = 0
    source: str = ""


class _MachineText(_Strict):
    name: str
    device: _DeviceText
    prefill: list[_PrefillText]
    tiers: dict[str, _TierText]
    links: dict[str, _LinkText] = {}
    aliases: list[str] = []


def read(text: str, where: str) -> Parts:
    """The parts of a machine profile; raises `InputError` naming the field, `where` naming the file."""
    return _machine(_converted(_parsed(text, where), _MachineText, "machine", where))


def aliases(text: str, where: str) -> list[str]:
    """Other names of the machine that a profile describes."""
    return _converted(_parsed(text, where), _MachineText, "machine", where).aliases


@cache
def shared_links() -> Mapping[str, Link]:
    """The links that machines refer to, by name."""
    where = "links.toml"
    text = resources.files("kvlane.policy").joinpath("profiles", where).read_text(encoding="utf-8")
    return {
        name: _link(name, _converted(fields, _LinkText, f"links.{name}", where))
        for name, fields in _parsed(text, where).items()
    }


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError("machine", f"{where} is not TOML: {error}", "a machine profile (TOML)") from None


def _converted(fields: Any, kind: type[_Text], field: str, where: str) -> _Text:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$.")
        raise InputError(f"{field}.{at.rstrip('`')}" if at else field, f"{where}: {problem}") from None


def _share(value: float, field: str) -> float:
    if not 0 < value <= 1:
        raise InputError(field, f"is {value!r}", "a share above 0 and at most 1")
    return value


def _known_dtype(dtype: str, field: str) -> str:
    if dtype not in DTYPES:
        raise InputError(field, f"unknown dtype {dtype!r}", ", ".join(DTYPES))
    return dtype


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
    fastest = max([rate, *(row_rate for _, row_rate in table)])
    if ceiling is not None and fastest > ceiling:
        raise InputError(f"{at}.rate", f"is above the link's ceiling {text.ceiling!r}", "at most the ceiling")
    return Link(
        name=name,
        rate_bytes_per_s=rate,
        per_copy_s=parse_seconds(text.per_copy, f"{at}.per_copy"),
        latency_s=parse_seconds(text.latency, f"{at}.latency"),
        per_event_s=parse_seconds(text.per_event, f"{at}.per_event"),
        first_use_s=parse_seconds(text.first_use, f"{at}.first_use"),
        rate_table=table,
        ceiling_bytes_per_s=ceiling,
        source=text.basis,
        origin=text.source,
        rows=text.rows,
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
        name=name,
        link=text.link,
        layout=text.layout,
        run_tokens=run,
        runs_per_layer=text.runs_per_layer,
        per_token_s=parse_seconds(text.per_token, f"{at}.per_token"),
    )


def _prefill(row: int, text: _PrefillText) -> PrefillEfficiency:
    at = f"prefill[{row}]"

    def share(name: str, value: float | None) -> float:
        return text.efficiency if value is None else _share(value, f"{at}.{name}")

    return PrefillEfficiency(
        engine=text.engine,
        dtype=_known_dtype(text.dtype, f"{at}.dtype"),
        efficiency=_share(text.efficiency, f"{at}.efficiency"),
        attention_efficiency=share("attention_efficiency", text.attention_efficiency),
        expert_efficiency=share("expert_efficiency", text.expert_efficiency),
        pass_overhead_s=parse_seconds(text.pass_overhead, f"{at}.pass_overhead"),
        layer_overhead_s=parse_seconds(text.layer_overhead, f"{at}.layer_overhead"),
        source=text.basis,
        origin=text.source,
        rows=text.rows,
    )


def _power(text: str | None) -> float | None:
    if text is None:
        return None
    number, _, unit = text.strip().partition(" ")
    try:
        watts = float(number)
    except ValueError:
        watts = 0.0
    if unit != "W" or not 0 < watts < float("inf"):
        raise InputError("device.power", f"{text!r} is not a power", 'watts above zero, such as "700 W"')
    return watts


def _device(text: _DeviceText) -> Device:
    between = text.interconnect
    rate = latency = None
    if between is not None:
        rate = parse_rate(between.rate, "device.interconnect.rate")
        latency = parse_seconds(between.latency, "device.interconnect.latency")
    return Device(
        name=text.name,
        memory_bytes=parse_bytes(text.memory, "device.memory"),
        memory_bytes_per_s=parse_rate(text.memory_rate, "device.memory_rate"),
        memory_efficiency=_share(text.memory_efficiency, "device.memory_efficiency"),
        peak_flops={
            _known_dtype(dtype, f"device.peak.{dtype}"): parse_flops(peak, f"device.peak.{dtype}")
            for dtype, peak in text.peak.items()
        },
        interconnect_bytes_per_s=rate,
        interconnect_latency_s=latency or 0.0,
        interconnect_efficiency=_share(between.efficiency, "device.interconnect.efficiency")
        if between is not None
        else 1.0,
        origin=text.source,
        power_w=_power(text.power),
        family=text.family,
        sources={
            "memory": text.source,
            "peak": text.peak_source or text.source,
            **({"interconnect": between.source or text.source} if between is not None else {}),
        },
    )


def _machine(text: _MachineText) -> Parts:
    own = {name: _link(name, link) for name, link in text.links.items()}
    known = {**shared_links(), **own}
    tiers = {name: _tier(name, tier, known) for name, tier in text.tiers.items()}
    links = {**own, **{tier.link: known[tier.link] for tier in tiers.values()}}
    return Parts(
        name=text.name,
        device=_device(text.device),
        links=links,
        tiers=tiers,
        prefill=tuple(_prefill(row, entry) for row, entry in enumerate(text.prefill)),
    )
