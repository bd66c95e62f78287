"""Load, recompute, or part of each: every candidate's TTFT, and the choice.

A planner holds everything that does not change between requests; `decide` is pure arithmetic on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvlane.policy.calibrated_range import CalibratedRange
from kvlane.policy.errors import InputError
from kvlane.policy.lane import Lane
from kvlane.policy.layer_lane import LayerwiseLane
from kvlane.policy.layer_transfer import LayerBytes, LayerwiseTransfer, layer_bytes
from kvlane.policy.machine import Link, Machine, Source
from kvlane.policy.model import KvFormat, ModelSpec
from kvlane.policy.path_cost import LoadCost, PathCost
from kvlane.policy.plan import EXECUTORS, Estimate, Executor, LoadSegment, Parameter, Path, Plan, Request
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.transfer_cost import TransferCost
from kvlane.policy.units import show_rate, show_seconds

# Half-widths of an estimate's error band by where its least certain parameter came from. Declared, not
# measured: a calibrated estimate brings the residual of its own fit instead.
BAND: Mapping[Source, float] = {"explicit": 0.05, "calibration": 0.10, "profile": 0.25, "assumption": 0.50}

# Transfers remembered, by tier and load unit.
_MOST_TRANSFERS = 256

_STEADIEST_FIRST: tuple[Path, ...] = ("recompute", "load", "split")


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

    `executor` is what the engine can do: `bulk` (all layers, then compute) or `layered` (each layer waits for
    its own KV). `calibration` replaces the profile's prefill cost. `tie_margin` is the relative difference
    under which two candidates are a near-tie.

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
        self._parameters: dict[str, Parameter] = {}
        self._known_bytes: dict[int, tuple[LayerBytes, ...]] = {}
        self._transfers: dict[tuple[str, int], TransferCost] = {}
        self._arrives: dict[tuple[str, int, int | None], LoadCost] = {}
        self._plain = model.uniform and model.layers[0].plain
        self._kv_bytes_per_token = model.kv_bytes_per_token(self.kv_dtype, tp)
        self.layer_bytes_per_token = self._kv_bytes_per_token / self.layers
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
            self._parameters["prefill"] = Parameter("calibration", calibration.origin)
        else:
            self.prefill, row = PrefillCost.from_profile(
                model, machine, engine=engine, tp=tp, kv_dtype=self.kv_dtype
            )
            self._compute_band = BAND[row.source]
            text = f"{row.engine} {row.dtype} reaches {row.efficiency:.1%} of peak: {row.origin}"
            self._parameters["prefill"] = Parameter(row.source, text)
        self.cost = PathCost(self.prefill, executor)

    def decide(self, request: Request) -> Plan:
        """The plan for one request; raises `InputError` naming `hit` for a tier the machine does not have."""
        lanes = {tier: self._lane(tier, request) for tier in request.hits}
        useful = [lane for lane in lanes.values() if lane.gain > 0]
        load = min((lane.estimate(lane.usable) for lane in useful), key=_ttft, default=None)
        splits = [split for lane in useful if (split := lane.best_split()) is not None]
        split = min(splits, key=_ttft, default=None)
        recompute = self._recompute(request)
        estimates: dict[Path, Estimate | None] = {"load": load, "recompute": recompute, "split": split}
        nothing = "; ".join(lane.no_gain() for lane in lanes.values()) or "no stored prefix"
        unavailable: dict[Path, str] = {}
        if load is None:
            unavailable["load"] = nothing
        if split is None:
            unavailable["split"] = nothing if load is None else self._no_split
        return self._plan(request, lanes, estimates, unavailable)

    @property
    def _no_split(self) -> str:
        if self.model.recurrent:
            return "no state checkpoint lies inside the usable prefix"
        return "the usable prefix is a single load unit"

    def _plan(
        self,
        request: Request,
        lanes: Mapping[str, Lane],
        estimates: dict[Path, Estimate | None],
        unavailable: dict[Path, str],
    ) -> Plan:
        chosen = self._choose(estimates, request.device_busy_s)
        load = estimates["load"]
        tier = chosen.tier or (load.tier if load else None)
        crossover, crossover_note = None, "no stored prefix to load"
        rate, rate_note = None, "no stored prefix to load"
        link_rate = None
        usable = max((lane.usable for lane in lanes.values()), default=0)
        parameters = self._parameters
        if tier is not None:
            lane = lanes[tier]
            usable = lane.usable
            crossover, crossover_note = lane.crossover()
            crossover_note += self._crossover_range_note(crossover, lane, request)
            rate, rate_note = lane.break_even()
            link = lane.transfer.link
            link_rate = lane.link_rate()
            text = f"{show_rate(link.rate_bytes_per_s)}: {link.origin}"
            if link.per_copy_s:
                copies = lane.transfer.copies(max(1, lane.gain))
                text = f"{copies} copies a layer, each {show_seconds(link.per_copy_s)} beside its bytes at {text}"
            parameters = {**parameters, f"link.{link.name}": Parameter(link.source, text)}
        segments: tuple[LoadSegment, ...] = ()
        if chosen.tier is not None:
            segments = (LoadSegment(chosen.tier, chosen.start, chosen.end, chosen.load_bytes),)
        return Plan(
            model=self.model.name,
            machine=self.machine.name,
            executor=self.executor,
            prompt_tokens=request.prompt_tokens,
            resident_tokens=request.resident_tokens,
            path=chosen.path,
            load=segments,
            ttft_s=chosen.ttft_s,
            exposed_s=chosen.exposed_s,
            estimates=estimates,
            unavailable=unavailable,
            tie_margin=self.tie_margin,
            kv_bytes_per_token=self._kv_bytes_per_token,
            tp=self.tp,
            usable_tokens=usable,
            link_bytes_per_s=link_rate,
            crossover_tokens=crossover,
            crossover_note=crossover_note,
            break_even_bytes_per_s=rate,
            break_even_note=rate_note,
            calibrated=all(
                parameter.source in ("calibration", "explicit") for parameter in parameters.values()
            ),
            parameters_from=parameters,
            notes=self._range_notes(request, estimates),
        )

    def _choose(self, estimates: Mapping[Path, Estimate | None], busy_s: float) -> Estimate:
        """The fastest candidate, or the steadier one of a near-tie.

        Recompute depends on the device alone, a load on the link and little compute, a split on both being
        as predicted at once. Any two candidates share their parameters, so no error band is consulted here. They
        share the device's queue too, so a near-tie is one of what comes after it: a share of a long queue would
        send every request to the path that makes it longer.
        """
        best = min(estimate.ttft_s for estimate in estimates.values() if estimate is not None)
        within = busy_s + (best - busy_s) * (1 + self.tie_margin)
        for path in _STEADIEST_FIRST:
            estimate = estimates[path]
            if estimate is not None and (estimate.ttft_s == best or estimate.ttft_s < within):
                return estimate
        raise AssertionError("recompute is always a candidate")

    def transfer(self, tier: str, load_unit_tokens: int) -> TransferCost:
        """What transfers from `tier` cost; raises `InputError` naming `hit` for a tier the machine lacks."""
        known = self._transfers.get((tier, load_unit_tokens))
        if known is not None:
            return known
        found = self.machine.tier(tier)
        link = self.machine.links[found.link]
        of = self._layer_bytes(found.runs_per_layer)
        if of is not None:
            transfer: TransferCost = LayerwiseTransfer.over(found, link, of, load_unit_tokens)
        else:
            transfer = TransferCost.of_tier(
                found, link, self.layers, self.layer_bytes_per_token, load_unit_tokens
            )
        if len(self._transfers) >= _MOST_TRANSFERS:
            self._transfers.clear()  # load units come with requests
        self._transfers[tier, load_unit_tokens] = transfer
        return transfer

    def _lane(self, tier: str, request: Request) -> Lane:
        unit, chunk = request.load_unit_tokens, request.prefill_chunk_tokens
        transfer = self.transfer(tier, unit)
        arrives = self._arrives.get((tier, unit, chunk))
        if arrives is None:
            if len(self._arrives) >= _MOST_TRANSFERS:
                self._arrives.clear()
            arrives = self._arrives[tier, unit, chunk] = self.cost.bound(transfer, chunk)
        band = max(self._compute_band, self._link_band(transfer.link))
        if isinstance(transfer, LayerwiseTransfer):
            recurrent = self.model.recurrent
            return LayerwiseLane(self.cost, transfer, tier, request, band, arrives, recurrent=recurrent)
        return Lane(self.cost, transfer, tier, request, band, arrives)

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

    def _crossover_range_note(self, crossover: int | None, lane: Lane, request: Request) -> str:
        if self._ranges is None:
            return ""
        link = lane.transfer.link
        note = self._ranges.of_prefix(
            crossover,
            link.name if link.source == "calibration" else None,
            request.resident_tokens,
            request.prompt_tokens - lane.usable,
            self.layer_bytes_per_token * self.layers,
        )
        return "" if note is None else f"; {note}"

    def _range_notes(self, request: Request, estimates: Mapping[Path, Estimate | None]) -> tuple[str, ...]:
        """Where the estimates leave what was calibrated."""
        if self._ranges is None:
            return ()
        chunk = request.prefill_chunk_tokens
        notes: list[str] = []
        for path, estimate in estimates.items():
            if estimate is None:
                continue
            begin = estimate.end if estimate.load_tokens else request.resident_tokens
            said = []
            if self._parameters["prefill"].source == "calibration":
                said += self._ranges.of_pass(begin, request.prompt_tokens - begin, chunk)
            if estimate.tier is not None:
                transfer = self.transfer(estimate.tier, request.load_unit_tokens)
                if transfer.link.source == "calibration":
                    count = transfer.bytes(estimate.load_tokens)
                    copies = transfer.copies(estimate.load_tokens) * (self.layers if transfer.by_layer else 1)
                    said += self._ranges.of_load(transfer.link.name, count, count / copies)
            notes += [f"{path}: {note}" for note in said]
        return tuple(notes)

    def _recompute(self, request: Request) -> Estimate:
        resident, prompt, chunk = request.resident_tokens, request.prompt_tokens, request.prefill_chunk_tokens
        seconds = self.cost.recompute_s(resident, prompt, chunk)
        return Estimate(
            path="recompute",
            ttft_s=request.device_busy_s + seconds,
            compute_s=seconds,
            band=self._compute_band,
        )


def _ttft(estimate: Estimate) -> float:
    return estimate.ttft_s


def decide(model: ModelSpec, machine: Machine, request: Request, **options: Any) -> Plan:
    """The plan for one request; `options` are those of `Planner`. For many requests keep a `Planner`."""
    return Planner(model, machine, **options).decide(request)
