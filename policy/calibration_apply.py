"""Puts a calibration record in force: what it says takes the place of a profile's numbers, never of explicit ones.

Precedence is explicit > matching calibration > profile > assumption. A record that does not match what is asked
about is refused, not passed over: whoever names one wants it used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvlane.policy.calibrated_range import CalibratedRange
from kvlane.policy.calibration_record import LinkRecord, PassRecord, PrefillRecord, Record, check_match
from kvlane.policy.catalog import load_model
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Device, Link, Machine, Tier
from kvlane.policy.model import ModelSpec
from kvlane.policy.planner import Calibration
from kvlane.policy.prefill_cost import PassCost, PrefillCost


@dataclass(frozen=True, slots=True)
class Parameters:
    """What `Planner` plans with; the last four are its options."""

    model: ModelSpec
    machine: Machine
    engine: str
    tp: int
    kv_dtype: str | None
    calibration: Calibration | None


def calibrated(
    record: Record,
    *,
    model: ModelSpec | None = None,
    machine: Machine | None = None,
    engine: str | None = None,
    tp: int | None = None,
    kv_dtype: str | None = None,
) -> Parameters:
    """The record in force on a model and a machine, or on its own where they are None.

    The model must have the record's numbers, whatever it is called; the machine must be the record's device, by its
    own name or the device's. Links of the machine that the record does not name stay as they are.

    Raises `InputError` naming the field of the fingerprint, or the part of the record, that does not fit.
    """
    own = _model(record)
    if model is not None:
        check_match(record, {"dtype": model.weight_dtype})
    if model is not None and replace(model, name=own.name) != own:
        raise InputError(
            "calibration.fingerprint.model",
            f"is {own.name!r}, whose numbers are not those of {model.name!r}: a calibration of something else",
            "a record of the same model",
        )
    mark = record.fingerprint
    device = None
    if machine is not None:
        names = (machine.name, machine.device.name)
        device = mark.device if mark.device in names else machine.device.name
    check_match(record, {"device": device, "engine": engine, "tp": tp, "kv_dtype": kv_dtype})
    if own.weight_dtype != mark.dtype:
        raise InputError(
            "calibration.fingerprint.dtype",
            f"is {mark.dtype!r} of a model whose weights are {own.weight_dtype!r}",
            "the dtype of the model's weights",
        )
    where = _machine(record, machine)
    links = {name: link.relative_error for name, link in record.links.items()}
    prefill = None if record.prefill is None else _prefill(record.prefill, own)
    return Parameters(
        model=own if model is None else model,
        machine=where,
        engine=mark.engine,
        tp=mark.tp,
        kv_dtype=mark.kv_dtype,
        calibration=Calibration(
            prefill,
            0.0 if record.prefill is None else _error(record.prefill),
            _origin(record),
            link_errors=links,
            ranges=_ranges(record),
        ),
    )


def _model(record: Record) -> ModelSpec:
    if record.model_config is None:
        try:
            return load_model(record.fingerprint.model)
        except InputError as error:
            raise InputError(
                "calibration.fingerprint.model", error.problem, "a built-in model, or model_config"
            ) from None
    try:
        return ModelSpec.from_config(record.model_config, name=record.fingerprint.model)
    except InputError as error:
        raise InputError(f"calibration.model_config.{error.field}", error.problem, error.expected) from None


def _machine(record: Record, machine: Machine | None) -> Machine:
    links = {name: _link(record, name, link) for name, link in record.links.items()}
    if machine is None:
        tiers = {
            name: Tier(name, tier.link, tier.layout, tier.run_tokens, tier.runs_per_layer)
            for name, tier in record.tiers.items()
        }
        device = Device(record.fingerprint.device)
        return Machine(name=record.fingerprint.device, device=device, links=links, tiers=tiers, prefill=())
    for name in links:
        if name not in machine.links:
            raise InputError(
                f"calibration.links.{name}", f"{machine.name} has no such link", ", ".join(machine.links)
            )
    # What an event costs is not among what is measured.
    kept = {name: replace(link, per_event_s=machine.links[name].per_event_s) for name, link in links.items()}
    return replace(machine, links={**machine.links, **kept})


def _link(record: Record, name: str, link: LinkRecord) -> Link:
    notes = "".join(f"; {note}" for note in link.notes)
    return Link(
        name=name,
        rate_bytes_per_s=link.rate_bytes_per_s,
        per_copy_s=link.per_copy_s,
        latency_s=link.latency_s,
        rate_table=tuple(link.rate_table),
        ceiling_bytes_per_s=link.ceiling_bytes_per_s,
        first_use_s=link.first_use_s or 0.0,
        source="calibration",
        origin=f"{link.samples} transfers measured {record.date[:10]}{notes}",
    )


def _prefill(prefill: PrefillRecord, model: ModelSpec) -> PrefillCost:
    if prefill.layers != len(model.layers):
        raise InputError(
            "calibration.prefill.layers",
            f"is {prefill.layers}, and {model.name} has {len(model.layers)}",
            "the model's own number of layers",
        )
    return PrefillCost(
        layers=prefill.layers,
        fresh=_pass(prefill.fresh),
        extend=_pass(prefill.extend),
        head_s=prefill.head_s,
        floor_s=prefill.floor_s,
        floor_context_s=prefill.floor_context_s,
    )


def _pass(cost: PassRecord) -> PassCost:
    return PassCost(cost.overhead_s, cost.token_s, cost.pair_s, cost.context_s, cost.rectangle)


def _error(prefill: PrefillRecord) -> float:
    return max(prefill.fresh.relative_error, prefill.extend.relative_error)


def _origin(record: Record) -> str:
    prefill = record.prefill
    if prefill is None:
        return f"links only, {record.date[:10]}"
    count = prefill.fresh.samples + prefill.extend.samples
    notes = [f"; from token 0: {note}" for note in prefill.fresh.notes]
    notes += [f"; after a prefix: {note}" for note in prefill.extend.notes]
    return f"{count} prefills measured on {record.fingerprint.device}, {record.date[:10]}{''.join(notes)}"


def _ranges(record: Record) -> CalibratedRange:
    prefill = record.prefill
    return CalibratedRange(
        new_tokens=None if prefill is None else (prefill.new_tokens.low, prefill.new_tokens.high),
        resident_tokens=None
        if prefill is None
        else (prefill.resident_tokens.low, prefill.resident_tokens.high),
        link_bytes={name: (link.bytes.low, link.bytes.high) for name, link in record.links.items()},
        link_copy_bytes={
            name: (link.copy_bytes.low, link.copy_bytes.high) for name, link in record.links.items()
        },
    )


def model_config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json's fields that a record can hold: what is there, and JSON already."""
    kept: dict[str, Any] = {}
    for key, value in fields.items():
        try:
            again = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, msgspec.MsgspecError):
            continue
        if value is not None and again == value:
            kept[key] = value
    return kept
