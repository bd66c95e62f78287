"""A machine in plain values: peaks, memory, links, tiers and efficiencies, with their sources."""

from __future__ import annotations

from typing import Any

from kvlane.policy.catalog import machine_aliases
from kvlane.policy.machine import Link, Machine


def describe(machine: Machine) -> dict[str, Any]:
    """A machine as plain values, in bytes, seconds and FLOP a second, each group with its source."""
    device = machine.device
    return {
        "name": machine.name,
        "aliases": machine_aliases(machine.name),
        "device": {
            "name": device.name,
            "family": device.family,
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_s": device.memory_bytes_per_s,
            "memory_efficiency": device.memory_efficiency,
            "power_w": device.power_w,
            "peak_flops": dict(device.peak_flops),
            "interconnect_bytes_per_s": device.interconnect_bytes_per_s,
            "interconnect_latency_s": device.interconnect_latency_s,
            "interconnect_efficiency": device.interconnect_efficiency,
            "sources": dict(device.sources),
        },
        "links": {name: _link(link) for name, link in machine.links.items()},
        "tiers": {
            name: {
                "link": tier.link,
                "layout": tier.layout,
                "run_tokens": tier.run_tokens,
                "runs_per_layer": tier.runs_per_layer,
                "per_token_s": tier.per_token_s,
            }
            for name, tier in machine.tiers.items()
        },
        "prefill": [
            {
                "engine": row.engine,
                "dtype": row.dtype,
                "efficiency": row.efficiency,
                "attention_efficiency": row.attention_efficiency,
                "expert_efficiency": row.expert_efficiency,
                "pass_overhead_s": row.pass_overhead_s,
                "layer_overhead_s": row.layer_overhead_s,
                "from": row.source,
                "rows": row.rows,
                "source": row.origin,
            }
            for row in machine.prefill
        ],
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "rate_bytes_per_s": link.rate_bytes_per_s,
        "per_copy_s": link.per_copy_s,
        "latency_s": link.latency_s,
        "per_event_s": link.per_event_s,
        "first_use_s": link.first_use_s,
        "rate_table": [list(row) for row in link.rate_table],
        "ceiling_bytes_per_s": link.ceiling_bytes_per_s,
        "from": link.source,
        "rows": link.rows,
        "source": link.origin,
    }
