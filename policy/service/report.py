"""What is served, told: deployments, models, machines and calibrations."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from kvlane.policy.catalog import machine_names, model_names
from kvlane.policy.machine_report import describe
from kvlane.policy.model_report import weigh
from kvlane.policy.service.answers import (
    CalibrationAnswer,
    Calibrations,
    DeploymentAnswer,
    Deployments,
    LinkAnswer,
    Machines,
    Models,
)
from kvlane.policy.service.deployments import Deployment
from kvlane.policy.service.learn import Learner

# Tokens that a model's bytes and FLOP are told for.
_TOKENS = 8192


def deployments(served: Iterable[Deployment]) -> Deployments:
    return Deployments([_deployment(each) for each in served])


def models(served: Iterable[Deployment]) -> Models:
    """Each model once for every number of ranks and KV dtype it is served with."""
    told = {
        (each.told.model.name, each.told.tp, each.told.kv_dtype): weigh(
            each.told.model, _TOKENS, tp=each.told.tp, kv_dtype=each.told.kv_dtype
        )
        for each in served
    }
    return Models(list(told.values()), model_names())


def machines(served: Iterable[Deployment]) -> Machines:
    """Each machine once, as the first deployment on it decides by it."""
    told = {each.told.machine.name: describe(each.in_force.planners["bulk"].machine) for each in served}
    return Machines(list(told.values()), machine_names())


def calibrations(learners: Iterable[Learner], now_s: float) -> Calibrations:
    return Calibrations([_calibration(each, now_s) for each in learners])


def calibration_age_s(deployment: Deployment, now_s: float) -> float | None:
    """Seconds since the calibration in force was measured, None where there is none."""
    record = deployment.in_force.record
    if record is None:
        return None
    return max(0.0, now_s - datetime.fromisoformat(record.date).timestamp())


def calibration_source(deployment: Deployment) -> str:
    """Where what a deployment is decided by comes from: `profile`, `file` or `observations`."""
    record = deployment.in_force.record
    if record is None:
        return "profile"
    return "file" if record is deployment.base else "observations"


def _deployment(deployment: Deployment) -> DeploymentAnswer:
    settings, told = deployment.settings, deployment.told
    planner = deployment.in_force.planners[deployment.executor]
    return DeploymentAnswer(
        name=deployment.name,
        aliases=list(settings.aliases),
        model=told.model.name,
        machine=told.machine.name,
        engine=told.engine,
        tensor_parallel_size=told.tp,
        kv_cache_dtype=told.model.form(told.kv_dtype).name,
        executor=deployment.executor,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        load_unit_tokens=settings.load_unit_tokens,
        recurrent=planner.model.recurrent,
        tiers={tier.name: tier.link for tier in told.machine.tiers.values()},
        links={
            name: LinkAnswer(deployment.scopes[name], link.rate_bytes_per_s, link.source)
            for name, link in planner.machine.links.items()
        },
    )


def _calibration(learner: Learner, now_s: float) -> CalibrationAnswer:
    deployment = learner.deployment
    record = deployment.in_force.record
    return CalibrationAnswer(
        deployment=deployment.name,
        source=calibration_source(deployment),
        age_s=calibration_age_s(deployment, now_s),
        observations=learner.accepted,
        refused=learner.refused,
        record=None if record is None else msgspec.to_builtins(record),
    )
