"""Load, recompute, or part of each: every candidate's TTFT, and the choice.

A planner holds everything that does not change between requests; `decide` is pure arithmetic on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from kvlane.policy.basis import Basis
from kvlane.policy.calibrated_range import CalibratedRange
from kvlane.policy.errors import InputError
from kvlane.policy.lane import Lane
from kvlane.policy.layer_lane import LayerwiseLane
from kvlane.policy.layer_transfer import LayerBytes, LayerwiseTransfer, layer_bytes
from kvlane.policy.machine import Link, Machine, Source
from kvlane.policy.model import KvFormat, ModelSpec
from kvlane.policy.onset import Onset
from kvlane.policy.path_cost import Part, PathCost
from kvlane.policy.plain import NO_SPLIT, PlainTier
from kvlane.policy.plan import EXECUTORS, Estimate, Executor, LoadSegment, Parameter, Path, Plan, Request
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.transfer_cost import TransferCost
from kvlane.policy.two_tiers import TwoTiers
from kvlane.policy.waits import Ends

# Half-widths of an estimate's error band by where its least certain parameter came from. Declared, not
# measured: a calibrated estimate brings the residual of its own fit instead.
BAND: Mapping[Source, float] = {"explicit": 0.05, "calibration": 0.10, "profile": 0.25, "assumption": 0.50}


# Routes kept between requests, by tier and load unit, which a request may choose.
_KEPT_ROUTES = 64


class Route:
    """What is the same for all loads from one tier in load units of one size.

    `band` is the half-width of their error bands, `onset` finds their crossovers, and `plain` decides loads from it
    alone in few steps, each where they are plain enough.
    """

    __slots__ = ("band", "onset", "plain", "transfer")

    def __init__(self, transfer: TransferCost, band: float, onset: Onset | None) -> None:
        self.transfer, self.band, self.onset = transfer, band, onset
        self.plain: PlainTier | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Prefill cost fitted to measurements of this machine, with the relative error of the fit.

    `prefill` is None where only links were measured. `link_errors` are the relative errors of calibrated links by
    name, and `ranges` says where all of it was measured.
    """

    prefill: PrefillCost | None
    relative_error: float
    origin: str
    link_errors: Mapping[str, float] = field(default_factory=dict)
    ranges: CalibratedRange | None = None


class Planner:
    """Decides requests for one model on one machine with one executor.

    `executor` is what the engine can do: `bulk` (all layers, then compute), `layered` (each layer waits for its own
    KV) or `two_ended` (layered, and the front of the prefix may be computed while the rest of it loads; not where
    layers are recurrent).
    `calibration` replaces the profile's prefill cost. `tie_margin` is the relative difference under which two
    candidates are a near-tie.

    Raises `InputError` naming the field for anything unknown or out of range.
    """

    def __init__(
        self,
        model: ModelSpec,
        machine: Machine,
        *,
        executor: Executor = "bulk",
        tp: int = 1,
        kv_dtype: str | KvFormat | None = None,
        engine: str = "vllm",
        calibration: Calibration | None = None,
        tie_margin: float = 0.03,
    ) -> None:
        if executor not in EXECUTORS:
            raise InputError("executor", f"unknown executor {executor!r}", " or ".join(EXECUTORS))
        if not 0 <= tie_margin < 1:
            raise InputError("tie_margin", f"is {tie_margin!r}", "a share of at least 0 and below 1")
        model.check_tp(tp)
        self.model, self.machine, self.executor, self.tp = model, machine, executor, tp
        self.tie_margin = tie_margin
        self.kv_dtype = kv_dtype or model.kv_dtype
        self.layers = len(model.layers)
        self._plain = model.uniform and model.layers[0].plain
        # The front would leave its states where the load brings those of its end: there is one place for them.
        self._two_ended = executor == "two_ended" and not model.recurrent
        self.kv_bytes_per_token = model.kv_bytes_per_token(self.kv_dtype, tp)
        self.layer_bytes_per_token = self.kv_bytes_per_token / self.layers
        self._transfers: dict[tuple[str, int], Route] = {}
        self._known_bytes: dict[int, tuple[LayerBytes, ...]] = {}
        self._link_errors = calibration.link_errors if calibration is not None else {}
        self._ranges = calibration.ranges if calibration is not None else None
        if calibration is not None and calibration.prefill is not None:
            if calibration.prefill.layers != self.layers:
                raise InputError(
                    "calibration", f"is of {calibration.prefill.layers} layers", f"{self.layers} layers"
                )
            self.prefill = calibration.prefill
            if not model.uniform:
                # What was measured is the whole pass; the model's FLOP say how it divides.
                self.prefill = replace(self.prefill, unlike=model.layers)
            self._compute_band = max(calibration.relative_error, 0.01)
            self._prefill_from = Parameter("calibration", calibration.origin)
        else:
            self.prefill, row = PrefillCost.from_profile(
                model, machine, engine=engine, tp=tp, kv_dtype=self.kv_dtype
            )
            self._compute_band = BAND[row.source]
            text = f"{row.engine} {row.dtype} reaches {row.efficiency:.1%} of peak: {row.origin}"
            self._prefill_from = Parameter(row.source, text)
        self.cost = PathCost(self.prefill, executor)

    def over(self, links: Mapping[str, Link]) -> Planner:
        """The same planner on the same machine, but for these links, which replace those of their names."""
        other = copy(self)
        other.machine = replace(self.machine, links={**self.machine.links, **links})
        other._transfers = {}
        return other

    def decide(self, request: Request) -> Plan:
        """The plan for one request; raises `InputError` naming `hit` for a tier the machine does not have."""
        lanes = {tier: self._lane(tier, request) for tier in request.hits}
        useful = [lane for lane in lanes.values() if lane.gain > 0]
        candidates = [self._recompute(request)]
        if len(useful) == 1:
            # Each way has one candidate at most.
            lane = useful[0]
            lane.recompute_s = candidates[0].compute_s
            ways = [lane.load(), lane.best_split(), lane.two_ended() if self._two_ended else None]
            candidates += [estimate for estimate in ways if estimate is not None]
        elif useful:
            self._weigh(useful, candidates)
        alone = candidates[1] if len(candidates) > 1 else None
        chosen = self._choose(candidates, request.device_busy_s)
        estimates: dict[Path, Estimate | None] = {"load": None, "recompute": None, "split": None}
        for candidate in candidates:
            best = estimates[candidate.path]
            if best is None or candidate.ttft_s < best.ttft_s:
                estimates[candidate.path] = candidate
        estimates[chosen.path] = chosen
        unavailable: dict[Path, str] = {}
        if alone is None:
            nothing = "; ".join([lane.no_gain() for lane in lanes.values()]) or "no stored prefix"
            unavailable = {"load": nothing, "split": nothing}
        elif estimates["split"] is None:
            unavailable = {"split": self._no_split}
        return self._plan(request, lanes, chosen, estimates, unavailable, alone)

    def _weigh(self, lanes: Sequence[Lane], candidates: list[Estimate]) -> None:
        """Adds what can be done with several tiers that have something to give: the fastest of each way, the steadiest
        way first. Loading all of a tier's comes first.

        What two tiers do later than the fastest before it of the same path is left out: it would not be chosen, nor be
        that path's estimate.
        """
        request = lanes[0].request
        ends = Ends(self.cost, request)
        for lane in lanes:
            lane.share(ends)
        both, shorter = self._pairs(lanes, ends)

        def add(way: Iterable[Estimate | None]) -> None:
            found = [estimate for estimate in way if estimate is not None]
            if found:
                candidates.append(min(found, key=_ttft))

        def of_pairs(
            pairs: Sequence[TwoTiers], path: Path, choice: Callable[[TwoTiers, float], Estimate | None]
        ) -> None:
            beyond = min((known.ttft_s for known in candidates if known.path == path), default=math.inf)
            found: list[Estimate | None] = []
            for pair in pairs:
                estimate = choice(pair, beyond)
                found.append(estimate)
                if estimate is not None and estimate.ttft_s < beyond:
                    beyond = estimate.ttft_s
            add(found)

        add([lane.load() for lane in lanes])
        of_pairs(both, "load", TwoTiers.load)
        add([lane.best_split() for lane in lanes])
        of_pairs(both, "split", TwoTiers.best_split)
        if self._two_ended:
            add([lane.two_ended() for lane in lanes])
            of_pairs((*both, *shorter), "split", TwoTiers.two_ended)

    @property
    def _no_split(self) -> str:
        if self.model.recurrent:
            return "no state checkpoint lies inside the usable prefix"
        return NO_SPLIT

    def _pairs(self, lanes: Sequence[Lane], ends: Ends) -> tuple[list[TwoTiers], list[TwoTiers]]:
        """Two tiers at once: all that differ, and those that only loads as far as the shorter hit tell apart.

        As long as layers and load units are all alike, it is all one which tier brings which end; over one link it is
        not where one of them delivers whole chunks, under which no layer is computed.
        """
        alike = self._plain and all(lane.start % lane.unit == 0 for lane in lanes)
        both, shorter = [], []
        for one, other in combinations(sorted(lanes, key=lambda lane: lane.usable), 2):
            both.append(TwoTiers(one, other, ends))
            follows = one.transfer.link.name == other.transfer.link.name
            if not alike or (follows and one.transfer.by_layer != other.transfer.by_layer):
                both.append(TwoTiers(other, one, ends))
            elif one.usable < other.usable:
                shorter.append(TwoTiers(other, one, ends))
        return both, shorter

    def _plan(
        self,
        request: Request,
        lanes: Mapping[str, Lane],
        chosen: Estimate,
        estimates: dict[Path, Estimate | None],
        unavailable: dict[Path, str],
        alone: Estimate | None,
    ) -> Plan:
        tier = None
        if alone is not None:
            tier = (chosen.load if len(chosen.load) == 1 else alone.load)[0].tier
        # A load from several tiers goes as far as the last of them reaches.
        furthest = chosen.load[-1].tier if chosen.load else tier
        # By place, in the order of `Plan`: names would cost a tenth of a decision.
        return Plan(
            self.model.name,
            self.machine.name,
            self.executor,
            request.prompt_tokens,
            request.resident_tokens,
            chosen.path,
            chosen.load,
            chosen.group_layers,
            chosen.ttft_s,
            chosen.exposed_s,
            estimates,
            unavailable,
            self.tie_margin,
            self.kv_bytes_per_token,
            self.tp,
            max((lane.usable for lane in lanes.values()), default=0)
            if furthest is None
            else lanes[furthest].usable,
            Basis(request, lanes, tier, chosen, estimates, self._prefill_from, self._ranges),
        )

    def _choose(self, candidates: Sequence[Estimate], busy_s: float) -> Estimate:
        """The fastest candidate, or the steadier one of a near-tie; the candidates come steadiest first.

        Recompute depends on the device alone, a load on the link and little compute, a split on both being
        as predicted at once, two tiers on both their links. Any two candidates share their parameters, so no error
        band is consulted here. They share the device's queue too, so a near-tie is one of what comes after it: a
        share of a long queue would send every request to the path that makes it longer.
        """
        fastest = candidates[0]
        for candidate in candidates:
            if candidate.ttft_s < fastest.ttft_s:
                fastest = candidate
        near = busy_s + (fastest.ttft_s - busy_s) * (1 + self.tie_margin)
        for candidate in candidates:
            if candidate.ttft_s < near:
                return candidate
        return fastest

    def transfer(self, tier: str, load_unit_tokens: int) -> TransferCost:
        """What transfers from `tier` cost; raises `InputError` naming `hit` for a tier the machine lacks."""
        return self._route(tier, load_unit_tokens).transfer

    def _route(self, tier: str, load_unit_tokens: int) -> Route:
        key = tier, load_unit_tokens
        known = self._transfers.get(key)
        if known is None:
            if len(self._transfers) >= _KEPT_ROUTES:
                self._transfers.clear()
            found = self.machine.tier(tier)
            link = self.machine.links[found.link]
            of = self._layer_bytes(found.runs_per_layer)
            transfer = (
                TransferCost.of_tier(found, link, self.layers, self.layer_bytes_per_token, load_unit_tokens)
                if of is None
                else LayerwiseTransfer.over(found, link, of, load_unit_tokens)
            )
            band = max(self._compute_band, self._link_band(link))
            onset = Onset.of(self.prefill, transfer, self.executor)
            known = self._transfers[key] = Route(transfer, band, onset)
            if (
                onset is not None
                and self._ranges is None
                and PlainTier.fits(self, transfer, load_unit_tokens)
            ):
                known.plain = PlainTier(
                    self,
                    tier,
                    load_unit_tokens,
                    transfer,
                    band,
                    onset,
                    self._prefill_from,
                    self._compute_band,
                )
        return known

    def plain(self, tier: str, load_unit_tokens: int) -> PlainTier | None:
        """What decides in few steps requests with a hit in that tier alone, prefilled in one pass; None where there are
        no such steps."""
        return self._route(tier, load_unit_tokens).plain

    def parts(self, request: Request, load: Sequence[LoadSegment], load_end: int) -> tuple[Part, ...]:
        """The runs of a load that ends at `load_end`, each priced as it was when a plan for `request` was decided."""
        parts: list[Part] = []
        for segment in load:
            part = self._lane(segment.tier, request).part(segment.start, segment.end, load_end)
            follows = any(part.transfer.link.name == other.transfer.link.name for other in parts)
            parts.append(part._replace(follows=follows))
        return tuple(parts)

    def _lane(self, tier: str, request: Request) -> Lane:
        route = self._route(tier, request.load_unit_tokens)
        transfer = route.transfer
        queued_s = request.link_queue_s.get(tier, 0.0)
        if tier in request.cold:
            queued_s += transfer.link.first_use_s
        if queued_s:
            transfer = transfer.behind(queued_s)
        if isinstance(transfer, LayerwiseTransfer):
            recurrent = self.model.recurrent
            lane: Lane = LayerwiseLane(self.cost, transfer, tier, request, route.band, recurrent=recurrent)
        else:
            lane = Lane(self.cost, transfer, tier, request, route.band, route.onset)
        if tier in request.copies and lane.gain:
            lane.transfer = replace(lane.transfer, counted=(lane.gain, request.copies[tier]))
            lane.onset = None
        return lane

    def _layer_bytes(self, runs_per_layer: int) -> tuple[LayerBytes, ...] | None:
        """What each layer moves, None where all are plain and alike, which takes no list to say."""
        if self._plain:
            return None
        if runs_per_layer not in self._known_bytes:
            form = self.model.form(self.kv_dtype)
            self._known_bytes[runs_per_layer] = layer_bytes(self.model, form, self.tp, runs_per_layer)
        return self._known_bytes[runs_per_layer]

    def _link_band(self, link: Link) -> float:
        """A calibrated link brings its own error, as long as nothing explicit has taken its place."""
        if link.source == "calibration" and link.name in self._link_errors:
            return max(self._link_errors[link.name], 0.01)
        return BAND[link.source]

    def _recompute(self, request: Request) -> Estimate:
        resident, prompt, chunk = request.resident_tokens, request.prompt_tokens, request.prefill_chunk_tokens
        seconds = self.cost.recompute_s(resident, prompt, chunk)
        ttft_s = request.device_busy_s + seconds
        return Estimate("recompute", ttft_s, seconds, band=self._compute_band)


def _ttft(estimate: Estimate) -> float:
    return estimate.ttft_s


def decide(model: ModelSpec, machine: Machine, request: Request, **options: Any) -> Plan:
    """The plan for one request; `options` are those of `Planner`. For many requests keep a `Planner`."""
    return Planner(model, machine, **options).decide(request)
