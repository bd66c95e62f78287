"""A plan in the words of the answer, as JSON: put together of pieces, so that none is encoded twice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from kvlane.policy.assignment import Assignment
from kvlane.policy.model import usable_tokens
from kvlane.policy.plan import Estimate, LoadSegment, Path, Request
from kvlane.policy.service.answers import (
    Advice,
    Estimates,
    PathEstimate,
    TransferParams,
)
from kvlane.policy.service.types import Hit

_encode = msgspec.json.Encoder().encode


class Gist(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a plan for whoever asks the same again: the `Advice` as JSON but for the brace that ends it, and
    what is counted of it.

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
    plan, request = found.plan, found.request
    path, load, estimates, ttft_s = plan.path, plan.load, plan.estimates, plan.ttft_s
    rejected: Estimate | None = None
    for other, estimate in estimates.items():
        if estimate is None or other == path:
            continue
        if rejected is None or estimate.ttft_s < rejected.ttft_s:
            rejected = estimate
    # The runs of a load follow each other without a gap.
    load_tokens = load[-1].end - load[0].start if load else 0
    basis = plan.basis
    crossover_tokens, crossover_note = basis.crossover
    break_even, break_even_note = basis.break_even
    # By place, in the order of `Advice`: names cost as much as all else here.
    told = Advice(
        path,
        load,
        load_tokens,
        plan.group_layers,
        plan.prompt_tokens - plan.resident_tokens - load_tokens,
        plan.executor,
        ttft_s,
        plan.exposed_s,
        bool(found.joins),
        request.device_busy_s,
        None if slo_s is None else ttft_s <= slo_s,
        Estimates(
            _estimate(estimates["load"]), _estimate(estimates["recompute"]), _estimate(estimates["split"])
        ),
        plan.unavailable,
        crossover_tokens,
        crossover_note,
        break_even,
        break_even_note,
        plan.calibrated,
        basis.parameters,
        plan.notes,
        found.reason,
        TransferParams(load_tokens) if _needs_cap(request, load, load_tokens, listed) else UNSET,
    )
    return Gist(
        _encode(told)[:-1],
        path,
        ttft_s,
        load_tokens,
        request.load_unit_tokens,
        tuple([segment.tier for segment in load]) if load else (),
        None if rejected is None else rejected.path,
        0.0 if rejected is None else rejected.ttft_s,
    )


def _needs_cap(request: Request, load: Sequence[LoadSegment], load_tokens: int, listed: list[Hit]) -> bool:
    """Whether less is to be loaded than an engine would find stored."""
    if load and load[0].start > request.resident_tokens:
        return False  # a cap counts from the resident prefix: it cannot say that the front is computed
    planned = request.resident_tokens + load_tokens
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
    ttft_s, band, compute_s, load = estimate.ttft_s, estimate.band, estimate.compute_s, estimate.load
    tokens = size = 0
    if load:
        tokens = load[-1].end - load[0].start
        size = load[0].bytes if len(load) == 1 else estimate.load_bytes
    return PathEstimate(
        ttft_s,
        ttft_s * (1 - band if band < 1 else 0.0),
        ttft_s * (1 + band),
        ttft_s - compute_s if ttft_s > compute_s else 0.0,
        estimate.transfer_s,
        compute_s,
        estimate.front_s,
        load,
        tokens,
        size,
        estimate.group_layers,
    )


def whose(deployment: str, instance: str) -> bytes:
    """Whom an advice is for: what a `Choice` holds beside it."""
    return b',"deployment":%b,"instance":%b' % (_encode(deployment), _encode(instance))


def decision(
    gist: Gist,
    whom: bytes,
    decision_id: str,
    expires_in_s: float | None,
    ranked: list[tuple[Gist, bytes]] | None,
) -> bytes:
    """A `Decision` as JSON: the advice, whom it is for, what it is called, and all the candidates' where there were
    any."""
    listed = b"}"
    if ranked is not None:
        listed = b',"candidates":[%b]}' % b",".join([b"%b%b}" % (each.told, of) for each, of in ranked])
    name = decision_id.encode("ascii")
    expires = b"null" if expires_in_s is None else _encode(expires_in_s)
    return b"".join((gist.told, whom, b',"decision_id":"', name, b'","expires_in_s":', expires, listed))
