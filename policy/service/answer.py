"""A plan in the words of the answer, as JSON: put together of pieces, so that none is encoded twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from kvlane.policy.assignment import Assignment
from kvlane.policy.model import usable_tokens
from kvlane.policy.plain import NO_SPLIT, Told
from kvlane.policy.plan import Estimate, Executor, LoadSegment, Parameter, Path
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
    plan, request, basis = found.plan, found.request, found.plan.basis
    chosen = plan.estimates[plan.path]
    assert chosen is not None
    return _gist(
        chosen,
        plan.estimates,
        plan.prompt_tokens,
        plan.resident_tokens,
        request.load_unit_tokens,
        listed,
        plan.executor,
        found.joined,
        found.joined_tokens,
        request.device_busy_s,
        None if slo_s is None else plan.ttft_s <= slo_s,
        plan.unavailable,
        basis.crossover,
        basis.break_even,
        plan.calibrated,
        basis.parameters,
        plan.notes,
        found.reason,
    )


def gist_of_plain(told: Told, prompt: int, resident: int, unit: int, listed: list[Hit]) -> Gist:
    """The same of a plan that was told at once."""
    return _gist(
        told.chosen,
        {"load": told.load, "recompute": told.recompute, "split": told.split},
        prompt,
        resident,
        unit,
        listed,
        told.executor,
        False,
        0,
        told.busy_s,
        None,
        {} if told.split is not None else {"split": NO_SPLIT},
        told.crossover,
        told.break_even,
        told.calibrated,
        told.parameters,
        (),
        told.reason,
    )


def _gist(
    chosen: Estimate,
    estimates: Mapping[Path, Estimate | None],
    prompt: int,
    resident: int,
    unit: int,
    listed: list[Hit],
    executor: Executor,
    joined: bool,
    joined_tokens: int,
    busy_s: float,
    meets_slo: bool | None,
    unavailable: dict[Path, str],
    crossover: tuple[int | None, str],
    break_even: tuple[float | None, str],
    calibrated: bool,
    parameters: dict[str, Parameter],
    notes: tuple[str, ...],
    reason: str,
) -> Gist:
    path, load, ttft_s = chosen.path, chosen.load, chosen.ttft_s
    rejected: Estimate | None = None
    for estimate in estimates.values():
        if estimate is None or estimate.path == path:
            continue
        if rejected is None or estimate.ttft_s < rejected.ttft_s:
            rejected = estimate
    # The runs of a load follow each other without a gap.
    load_tokens = load[-1].end - load[0].start if load else 0
    # By place, in the order of `Advice`: names would cost as much as all else here.
    told = Advice(
        path,
        load,
        load_tokens,
        chosen.group_layers,
        prompt - resident - load_tokens,
        executor,
        ttft_s,
        chosen.exposed_s,
        joined,
        busy_s,
        meets_slo,
        Estimates(
            _estimate(estimates["load"]), _estimate(estimates["recompute"]), _estimate(estimates["split"])
        ),
        unavailable,
        crossover[0],
        crossover[1],
        break_even[0],
        break_even[1],
        calibrated,
        parameters,
        notes,
        reason,
        TransferParams(load_tokens)
        if _needs_cap(load, resident, load_tokens, prompt, unit, listed)
        else UNSET,
        joined_tokens,
    )
    return Gist(
        _encode(told)[:-1],
        path,
        ttft_s,
        load_tokens,
        unit,
        tuple(dict.fromkeys([segment.tier for segment in load])) if load else (),
        None if rejected is None else rejected.path,
        0.0 if rejected is None else rejected.ttft_s,
    )


def _needs_cap(
    load: Sequence[LoadSegment], resident: int, load_tokens: int, prompt: int, unit: int, listed: list[Hit]
) -> bool:
    """Whether less is to be loaded than an engine would find stored."""
    if load and load[0].start > resident:
        return False  # a cap counts from the resident prefix: it cannot say that the front is computed
    planned = resident + load_tokens
    for hit in listed:
        tokens = min(hit.tokens) if isinstance(hit.tokens, list) else hit.tokens
        if planned < usable_tokens(tokens, prompt, unit):
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


def choice(gist: Gist, whom: bytes) -> bytes:
    """A `Choice` as JSON: the advice with whom it is for."""
    return b"%b%b}" % (gist.told, whom)


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
        listed = b',"candidates":[%b]}' % b",".join([choice(each, of) for each, of in ranked])
    name = decision_id.encode("ascii")
    expires = b"null" if expires_in_s is None else _encode(expires_in_s)
    return b"".join((gist.told, whom, b',"decision_id":"', name, b'","expires_in_s":', expires, listed))
