"""Deployments as they are served: their planners, their links' scopes, and what was learnt of them meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvlane.policy import calibration_record
from kvlane.policy.booking import Scope
from kvlane.policy.calibration_apply import Parameters, calibrated
from kvlane.policy.calibration_record import Record
from kvlane.policy.catalog import load_machine, load_model
from kvlane.policy.errors import InputError
from kvlane.policy.plan import EXECUTORS, Executor
from kvlane.policy.planner import Planner
from kvlane.policy.service.answer import Gist
from kvlane.policy.service.config import DeploymentSettings, Settings
from kvlane.policy.service.types import PrefillObservation, TransferObservation
from kvlane.policy.units import parse_rate

Sample = TransferObservation | PrefillObservation

# The rate that bytes queued by others drain at is that of a transfer of so many tokens.
_QUEUE_TOKENS = 8192
# Of each deployment so many of the newest samples are kept to start again from.
KEPT_SAMPLES = 1024


@dataclass(frozen=True, slots=True)
class InForce:
    """What requests are decided with, replaced as a whole when something was learnt.

    `planners` has one for each thing an executor can do; `byte_s` says how long one queued byte keeps each link.
    `worked` remembers answers by all that they follow from.
    """

    planners: Mapping[Executor, Planner]
    byte_s: Mapping[str, float]
    record: Record | None
    worked: dict[tuple[object, ...], Gist] = field(default_factory=dict)


@dataclass(slots=True)
class Deployment:
    """One deployment: what it was told to be, and what it is served with."""

    name: str
    settings: DeploymentSettings
    told: Parameters
    model_name: str
    base: Record | None
    in_force: InForce
    scopes: Mapping[str, Scope]
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

    @property
    def executor(self) -> Executor:
        return self.settings.executor

    def put_in_force(self, record: Record | None) -> None:
        """Decides by that record from now on, by what was told where it is None; raises `InputError`."""
        self.in_force = _in_force(self.settings, self.told, record)

    def supposing(self, rates: Mapping[str, float]) -> Deployment:
        """This deployment as it is now, its links at other rates in bytes per second, and no answers worked out.

        It is for one question: what is learnt meanwhile does not reach it. Raises `InputError` for a link there is none
        of.
        """
        known = self.in_force.planners["bulk"].machine.links
        for name in rates:
            if name not in known:
                raise InputError(name, f"{name!r} is no link of the deployment", ", ".join(known))
        links = {name: known[name].at_rate(rate) for name, rate in rates.items()}
        planners: Mapping[Executor, Planner] = self.in_force.planners
        byte_s = self.in_force.byte_s
        if links:
            planners = {executor: planner.over(links) for executor, planner in planners.items()}
            byte_s = _byte_s(planners["bulk"], self.settings.load_unit_tokens)
        return replace(self, in_force=InForce(planners, byte_s, self.in_force.record))


def build(settings: Settings) -> dict[str, Deployment]:
    """Every deployment by each name it goes by; raises `InputError` naming the deployment's field."""
    found: dict[str, Deployment] = {}
    for index, each in enumerate(settings.deployments):
        try:
            deployment = _build(each)
        except InputError as error:
            raise InputError(
                f"deployments[{index}].{error.field}", f"({each.name}) {error.problem}", error.expected
            ) from None
        for name in (each.name, *each.aliases):
            found[name] = deployment
    return found


def _build(settings: DeploymentSettings) -> Deployment:
    model = None if settings.model is None else load_model(settings.model)
    machine = None if settings.machine is None else load_machine(settings.machine)
    record = None
    if settings.calibration is not None:
        record = calibration_record.read(Path(settings.calibration))
        given = calibrated(
            record,
            model=model,
            machine=machine,
            engine=settings.engine,
            tp=settings.tensor_parallel_size,
            kv_dtype=settings.kv_cache_dtype,
        )
        # The record's numbers are put in force below, after what is explicit.
        told = replace(given, machine=machine or given.machine, calibration=None)
    else:
        if model is None:
            raise InputError("model", "is missing", "a model, or a calibration that carries one")
        if machine is None:
            raise InputError("machine", "is missing", "a machine, or a calibration of one")
        told = Parameters(
            model,
            machine,
            settings.engine or "vllm",
            settings.tensor_parallel_size or 1,
            settings.kv_cache_dtype,
            None,
        )
    for name in settings.links:
        if name not in told.machine.links:
            raise InputError(
                f"links.{name}", f"{told.machine.name} has no such link", ", ".join(told.machine.links)
            )
    scopes: dict[str, Scope] = {
        name: settings.links[name].scope if name in settings.links else "device"
        for name in told.machine.links
    }
    if settings.model is not None:
        model_name = settings.model
    else:
        assert record is not None
        model_name = record.fingerprint.model
    return Deployment(
        settings.name, settings, told, model_name, record, _in_force(settings, told, record), scopes
    )


def _in_force(settings: DeploymentSettings, told: Parameters, record: Record | None) -> InForce:
    found = told
    if record is not None:
        found = calibrated(
            record,
            model=told.model,
            machine=told.machine if settings.machine is not None else None,
            engine=told.engine,
            tp=told.tp,
        )
    machine = found.machine
    for name, link in settings.links.items():
        if link.rate is not None:
            rate = parse_rate(link.rate, f"links.{name}.rate")
            stated = replace(
                machine.links[name],
                rate_bytes_per_s=rate,
                per_copy_s=0.0,
                latency_s=0.0,
                rate_table=(),
                source="explicit",
                origin="the deployment's own rate",
                rows=0,
            )
            machine = replace(machine, links={**machine.links, name: stated})
    planners: dict[Executor, Planner] = {
        executor: Planner(
            found.model,
            machine,
            executor=executor,
            tp=found.tp,
            kv_dtype=found.kv_dtype,
            engine=found.engine,
            calibration=found.calibration,
        )
        for executor in EXECUTORS
    }
    return InForce(planners, _byte_s(planners["bulk"], settings.load_unit_tokens), record)


def _byte_s(planner: Planner, load_unit_tokens: int) -> dict[str, float]:
    """Seconds that one queued byte keeps each link that a tier is reached over."""
    byte_s: dict[str, float] = {}
    for tier in planner.machine.tiers.values():
        transfer = planner.transfer(tier.name, load_unit_tokens)
        moved = transfer.bytes(_QUEUE_TOKENS)
        seconds = transfer.total_s(_QUEUE_TOKENS) - transfer.link.latency_s
        byte_s[tier.link] = seconds / moved if moved else 0.0
    return byte_s
