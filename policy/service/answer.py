"""A plan in the words of the answer, as JSON: put together of pieces, so that none is encoded twice."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from kvlane.policy.assignment import Assignment
from kvlane.policy.model import usable_tokens
from kvlane.policy.plan import Estimate, Path
from kvlane.policy.service.answers import (
    Advice,
    Estimates,
    PathEstimate,
    TransferParams,
)
from kvlane.policy.service.types import Hit

_encode = msgspec.json.Encoder().encode


class Gist(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a plan for whoever asks the same again: the `Advice` as JSON, and what is counted of it.

    Neither this nor `Made` is looked at by the garbage collector: there are many, and they hold no cycles.
    """

    told: bytes
    path: Path
    ttft_s: float
    load_tokens: int
    unit: int
    tiers: tuple[str, ...]
    rejected: Path | None
    rejected_s: float


def gist_of(found: Assignment, listed: list[Hit], slo_s: float | None) -> Gist:
    """A plan's gist; `listed` is what was said to be stored, loadable or not."""
    plan = found.plan
    rejected: Estimate | None = None
    for path, estimate in plan.estimates.items():
        if estimate is None or path == plan.path:
            continue
        if rejected is None or estimate.ttft_s < rejected.ttft_s:
            rejected = estimate
    return Gist(
        _advice(found, listed, slo_s),
        plan.path,
        plan.ttft_s,
        plan.load_tokens,
        found.request.load_unit_tokens,
        tuple(dict.fromkeys([segment.tier for segment in plan.load])),
        None if rejected is None else rejected.path,
        0.0 if rejected is None else rejected.ttft_s,
    )


def _advice(found: Assignment, listed: list[Hit], slo_s: float | None) -> bytes:
    plan = found.plan
    estimates = plan.estimates
    load_tokens = plan.load_tokens
    told = Advice(
        path=plan.path,
        load=plan.load,
        load_tokens=load_tokens,
        group_layers=plan.group_layers,
        recompute_tokens=plan.prompt_tokens - plan.resident_tokens - load_tokens,
        executor=plan.executor,
        ttft_s=plan.ttft_s,
        exposed_s=plan.exposed_s,
        joined=found.joined,
        device_busy_s=found.request.device_busy_s,
        meets_slo=None if slo_s is None else plan.ttft_s <= slo_s,
        estimates=Estimates(
            _estimate(estimates["load"]), _estimate(estimates["recompute"]), _estimate(estimates["split"])
        ),
        unavailable=plan.unavailable,
        crossover_tokens=plan.crossover_tokens,
        crossover_note=plan.crossover_note,
        break_even_bytes_per_s=plan.break_even_bytes_per_s,
        break_even_note=plan.break_even_note,
        calibrated=plan.calibrated,
        parameters_from=plan.parameters_from,
        notes=plan.notes,
        reason=found.reason,
        kv_transfer_params=TransferParams(load_tokens) if _needs_cap(found, listed) else UNSET,
        joined_tokens=found.joined_tokens,
    )
    return _encode(told)


def _needs_cap(found: Assignment, listed: list[Hit]) -> bool:
    """Whether less is to be loaded than an engine would find stored."""
    request, plan = found.request, found.plan
    if plan.load and plan.load[0].start > request.resident_tokens:
        return False  # a cap counts from the resident prefix: it cannot say that the front is computed
    planned = request.resident_tokens + plan.load_tokens
    for hit in listed:
        tokens = min(hit.tokens) if isinstance(hit.tokens, list) else hit.tokens
        if planned < usable_tokens(
            tokens, request.prompt_tokens, request.load_unit_tokens, request.tail_tokens
        ):
            return True
    return False


def _estimate(estimate: Estimate | None) -> PathEstimate | None:
    if estimate is None:
        return None
    ttft = estimate.ttft_s
    return PathEstimate(
        ttft,
        ttft * max(0.0, 1 - estimate.band),
        ttft * (1 + estimate.band),
        max(0.0, ttft - estimate.compute_s),
        estimate.transfer_s,
        estimate.compute_s,
        estimate.front_s,
        estimate.load,
        estimate.load_tokens,
        estimate.load_bytes,
        estimate.group_layers,
    )


def choice(told: bytes, deployment: str, instance: str) -> bytes:
    """A `Choice` as JSON: the advice with whom it is for."""
    return b'%b,"deployment":%b,"instance":%b}' % (told[:-1], _encode(deployment), _encode(instance))


def decision(
    chosen: bytes, decision_id: str, expires_in_s: float | None, ranked: list[bytes] | None
) -> bytes:
    """A `Decision` as JSON: the choice, what it is called, and all the candidates' where there were any."""
    listed = b"" if ranked is None else b',"candidates":[%b]' % b",".join(ranked)
    return b'%b,"decision_id":"%b","expires_in_s":%b%b}' % (
        chosen[:-1],
        decision_id.encode("ascii"),
        _encode(expires_in_s),
        listed,
    )
