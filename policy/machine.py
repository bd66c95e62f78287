"""A machine as the policy sees it: one device, its links, and the tiers they reach.

Profiles are TOML with units in the text; each number stands beside the address it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvlane.policy import machine_text
from kvlane.policy.errors import InputError
from kvlane.policy.machine_parts import Device, Layout, Link, PrefillEfficiency, Source, Tier

__all__ = ["Device", "Layout", "Link", "Machine", "PrefillEfficiency", "Source", "Tier"]


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

        The rate stands for everything: a stated achieved rate already holds the cost of its copies, and of what the
        host does for them.
        """
        names = [self.tier(tier).link] if tier else list(self.links)
        links = dict(self.links)
        for name in names:
            links[name] = Link(
                name=name, rate_bytes_per_s=rate_bytes_per_s, source="explicit", origin="--link"
            )
        tiers = {
            name: replace(each, per_token_s=0.0) if each.link in names else each
            for name, each in self.tiers.items()
        }
        return replace(self, links=links, tiers=tiers)

    def efficiency_for(self, dtype: str, engine: str) -> PrefillEfficiency:
        """The efficiency of `engine` at `dtype`; another row of the machine, as an assumption, if it has none.

        The same engine at another dtype is nearer than another engine at the same dtype only where the
        device has no row of that dtype at all. Raises `InputError` where the machine states nothing.
        """
        # 16-bit formats multiply at one rate.
        alike = ("bf16", "fp16") if dtype in ("bf16", "fp16") else (dtype,)
        same_dtype = [row for row in self.prefill if row.dtype in alike]
        for row in same_dtype:
            if row.engine == engine:
                return row
        if not self.prefill:
            raise InputError("machine.prefill", f"{self.name} states no prefill efficiency", "at least one")
        same_engine = [row for row in self.prefill if row.engine == engine]
        nearest = (same_dtype or same_engine or list(self.prefill))[0]
        origin = f"the {nearest.engine} {nearest.dtype} efficiency, assumed for {engine} {dtype}"
        return replace(nearest, engine=engine, dtype=dtype, source="assumption", origin=origin, rows=0)

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
        parts = machine_text.read(text, where)
        return cls(parts.name, parts.device, parts.links, parts.tiers, parts.prefill)
