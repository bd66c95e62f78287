"""What a plan rests on, worked out when it is asked for: a decision alone does not need it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from kvlane.policy.calibrated_range import CalibratedRange
from kvlane.policy.lane import Lane
from kvlane.policy.machine import Link
from kvlane.policy.plan import Estimate, Parameter, Path, Request
from kvlane.policy.transfer_cost import TransferCost
from kvlane.policy.units import show_rate, show_seconds

_NOTHING = "no stored prefix to load"


def parameter(link: Link, transfer: TransferCost, tokens: int) -> Parameter:
    """A link's rate and cost of copies, and how many of them a layer takes to load so many tokens."""
    text = _said(link.rate_bytes_per_s, link.per_copy_s, link.origin)
    if link.per_copy_s:
        text = f"{transfer.copies(tokens or 1)} copies a layer, each {text}"
    return Parameter(link.source, text)


@lru_cache(256)
def _said(rate_bytes_per_s: float, per_copy_s: float, origin: str) -> str:
    """A link's parameters in words, the number of copies apart."""
    text = f"{show_rate(rate_bytes_per_s)}: {origin}"
    return f"{show_seconds(per_copy_s)} beside its bytes at {text}" if per_copy_s else text


class Basis:
    """Ties, sources and limits of one decision.

    Args:
        lanes: the request's choices, by tier.
        tier: the tier that crossover and break-even are about: the one the plan loads from, or the one that
            loads best alone where it loads from none or from several. None without anything to load.
        chosen: what the plan does.
        estimates: what it was weighed against.
        prefill: where the prefill cost comes from.
        ranges: where a calibration was measured, None without one.
    """

    # Each is asked for more than once: by whoever wants it, and by the reason. (`cached_property` takes a lock.)
    __slots__ = (
        "_break_even",
        "_chosen",
        "_crossover",
        "_estimates",
        "_lanes",
        "_link_rate",
        "_parameters",
        "_prefill",
        "_ranges",
        "_request",
        "tier",
    )

    def __init__(
        self,
        request: Request,
        lanes: Mapping[str, Lane],
        tier: str | None,
        chosen: Estimate,
        estimates: Mapping[Path, Estimate | None],
        prefill: Parameter,
        ranges: CalibratedRange | None,
    ) -> None:
        self.tier = tier
        self._request, self._lanes = request, lanes
        self._chosen, self._estimates = chosen, estimates
        self._prefill, self._ranges = prefill, ranges
        self._link_rate: float | None = None
        self._crossover: tuple[int | None, str] | None = None
        self._break_even: tuple[float | None, str] | None = None
        self._parameters: dict[str, Parameter] | None = None

    def of(self, chosen: Estimate) -> Basis:
        """The same for another choice among the estimates."""
        tier = chosen.load[0].tier if len(chosen.load) == 1 else self.tier
        return Basis(self._request, self._lanes, tier, chosen, self._estimates, self._prefill, self._ranges)

    @property
    def link_rate(self) -> float | None:
        """Bytes per second achieved in loading everything usable from the tier."""
        if self._link_rate is None and self.tier is not None:
            self._link_rate = self._lanes[self.tier].link_rate()
        return self._link_rate

    @property
    def crossover(self) -> tuple[int | None, str]:
        """The prefix length from which on loading is not slower, and a word on it."""
        found = self._crossover
        if found is None:
            found = self._crossover = self._find_crossover()
        return found

    def _find_crossover(self) -> tuple[int | None, str]:
        if self.tier is None:
            return None, _NOTHING
        lane = self._lanes[self.tier]
        tokens, note = lane.crossover()
        if self._ranges is None:
            return tokens, note
        request, transfer = self._request, lane.transfer
        beyond = self._ranges.of_prefix(
            tokens,
            transfer.link.name if transfer.link.source == "calibration" else None,
            request.resident_tokens,
            request.prompt_tokens - lane.usable,
            transfer.layer_bytes_per_token * transfer.layers,
        )
        return tokens, note if beyond is None else f"{note}; {beyond}"

    @property
    def break_even(self) -> tuple[float | None, str]:
        """The link rate at which load and recompute tie, and a word on it."""
        found = self._break_even
        if found is None:
            found = (None, _NOTHING) if self.tier is None else self._lanes[self.tier].break_even()
            self._break_even = found
        return found

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Where the parameters of prefill and of the links come from."""
        found = self._parameters
        if found is None:
            found = self._parameters = {"prefill": self._prefill}
            used = [segment.tier for segment in self._chosen.load] or (
                [] if self.tier is None else [self.tier]
            )
            for tier in used:
                lane = self._lanes[tier]
                link = lane.transfer.link
                found["link." + link.name] = parameter(link, lane.transfer, lane.gain)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the estimates leave what was calibrated."""
        if self._ranges is None:
            return ()
        request, notes = self._request, []
        for path, estimate in self._estimates.items():
            if estimate is not None:
                notes += [f"{path}: {note}" for note in self._beyond(self._ranges, request, estimate)]
        return tuple(notes)

    def _beyond(self, ranges: CalibratedRange, request: Request, estimate: Estimate) -> list[str]:
        said = []
        if self._prefill.source == "calibration":
            resident, chunk = request.resident_tokens, request.prefill_chunk_tokens
            begin = estimate.end or resident
            if estimate.front_s:
                said += ranges.of_pass(resident, estimate.start - resident, chunk)
            said += ranges.of_pass(begin, request.prompt_tokens - begin, chunk)
        for segment in estimate.load:
            transfer = self._lanes[segment.tier].transfer
            if transfer.link.source == "calibration":
                moved = segment.bytes
                copies = transfer.copies(segment.tokens) * (transfer.layers if transfer.by_layer else 1)
                said += ranges.of_load(transfer.link.name, moved, moved / copies)
        return said
