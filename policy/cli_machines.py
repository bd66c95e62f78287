"""`kvlane machines`: the built-in machines, and what one can do, with the address of every number."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from kvlane.policy.catalog import load_machine, machine_aliases, machine_names
from kvlane.policy.machine import Link, Machine, PrefillEfficiency
from kvlane.policy.machine_report import describe
from kvlane.policy.units import show_bytes, show_rate, show_seconds


def machines(
    machine: Annotated[
        str | None,
        typer.Argument(help="A built-in machine, another name of its device, or a TOML profile."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """List the built-in machines, or show one: peaks, memory, links, tiers and efficiencies, with their sources."""
    if machine is None:
        known = [load_machine(name) for name in machine_names()]
        print(_json([_brief(each) for each in known]) if as_json else "\n".join(map(_line, known)))
        return
    found = load_machine(machine)
    print(_json(describe(found)) if as_json else _in_words(found))


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _brief(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "aliases": machine_aliases(machine.name),
        "device": machine.device.name,
        "tiers": {name: tier.link for name, tier in machine.tiers.items()},
        "measured_rows": sum(row.rows for row in machine.prefill),
    }


def _line(machine: Machine) -> str:
    tiers = ", ".join(
        f"{tier.name} over {tier.link} at {show_rate(machine.links[tier.link].rate_bytes_per_s)}"
        for tier in machine.tiers.values()
    )
    rows = sum(row.rows for row in machine.prefill)
    stands = f"{rows} prefills measured" if rows else "prefill assumed"
    return f"{machine.name:16} {machine.device.name} ({stands}): {tiers}"


def _stands(source: str, rows: int) -> str:
    return f"{source}, {rows} rows" if rows else source


def _in_words(machine: Machine) -> str:
    device = machine.device
    others = machine_aliases(machine.name)
    lines = [
        f"{machine.name}  {device.name}" + (f" (also {', '.join(others)})" if others else ""),
        "",
        f"memory          {show_bytes(device.memory_bytes or 0)} at {show_rate(device.memory_bytes_per_s or 0)},"
        f" {device.memory_efficiency:.0%} of it reached",
        f"                {device.sources.get('memory', '')}",
        "peak, dense     "
        + ", ".join(f"{dtype} {peak / 1e12:g} TFLOP/s" for dtype, peak in device.peak_flops.items()),
        f"                {device.sources.get('peak', '')}",
    ]
    if device.power_w is not None:
        lines.append(f"power           {device.power_w:g} W")
    if device.interconnect_bytes_per_s is not None:
        lines += [
            f"between ranks   {show_rate(device.interconnect_bytes_per_s)}, {device.interconnect_efficiency:.0%} of it"
            f" reached, {show_seconds(device.interconnect_latency_s)} an all-reduce",
            f"                {device.sources.get('interconnect', '')}",
        ]
    for tier in machine.tiers.values():
        link = machine.links[tier.link]
        host = f", {show_seconds(tier.per_token_s)} a loaded token" if tier.per_token_s else ""
        lines += [
            f"tier {tier.name:11}{tier.link}: {_link_in_words(link)}; {tier.layout}{host}",
            f"                {_stands(link.source, link.rows)}: {link.origin}",
        ]
    lines += ["", "prefill         share of peak in matrices, attention, experts; cost of a layer and pass"]
    lines += [_efficiency(row) for row in machine.prefill]
    return "\n".join(lines)


def _link_in_words(link: Link) -> str:
    parts = [show_rate(link.rate_bytes_per_s)]
    if link.per_copy_s:
        parts.append(f"{show_seconds(link.per_copy_s)} a copy")
    if link.latency_s:
        parts.append(f"{show_seconds(link.latency_s)} a transfer")
    if link.first_use_s:
        parts.append(f"{show_seconds(link.first_use_s)} more for the first from a peer")
    if link.per_event_s:
        parts.append(f"{show_seconds(link.per_event_s)} a group of layers")
    if link.ceiling_bytes_per_s:
        parts.append(f"at most {show_rate(link.ceiling_bytes_per_s)}")
    return ", ".join(parts)


def _efficiency(row: PrefillEfficiency) -> str:
    shares = f"{row.efficiency:.3f}  {row.attention_efficiency:.3f}  {row.expert_efficiency:.3f}"
    cost = show_seconds(row.layer_overhead_s)
    stands = _stands(row.source, row.rows)
    return f"  {row.engine:13} {row.dtype:5} {shares}  {cost:>9}  {stands}: {row.origin}"
