"""Answering `/v1/curves`: the paths of one deployment against prefix length, and where they cross.

Every point is a decision as the planner makes it, for a prompt that consists of the prefix and the same few tokens
after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.plan import Executor, Plan, Request
from kvlane.policy.planner import Planner
from kvlane.policy.service.answers import Curves
from kvlane.policy.service.decide import Desk
from kvlane.policy.service.deployments import Deployment
from kvlane.policy.service.line import Line
from kvlane.policy.service.problems import ProblemError, of_input_error
from kvlane.policy.service.types import LONGEST_PROMPT, CurvesRequest
from kvlane.policy.units import LONGEST_S

_encode = msgspec.json.Encoder().encode

# A chart is nobody's request: whoever asks for a decision meanwhile waits for a point at most, and as a chart leaves
# others as much time as it takes, more often for none.
_TURN_S = 0.0005
# So many charts may wait for each other.
_MOST = 8


class Charts:
    """Charts are worked on one at a time, so that all of them together take one turn."""

    def __init__(self) -> None:
        self._line = Line(_MOST, "charts are drawn at once")

    async def finish(self, points: Iterator[None]) -> None:
        """Goes through the points in turns; raises `ProblemError` where too many charts wait."""
        async with self._line.place():
            began = perf_counter()
            for _ in points:
                worked_s = perf_counter() - began
                if worked_s >= _TURN_S:
                    await asyncio.sleep(worked_s)
                    began = perf_counter()


async def curves(desk: Desk, asked: CurvesRequest, charts: Charts) -> bytes:
    """The answer as JSON; raises `ProblemError` with a pointer to the field."""
    deployment = desk.deployment(asked.deployment)
    tier = _tier(deployment, asked.tier)
    link = deployment.told.machine.tiers[tier].link
    if asked.link_bytes_per_s is not None:
        deployment = deployment.supposing({link: asked.link_bytes_per_s})
    executor: Executor = asked.executor or deployment.executor
    planner = deployment.in_force.planners[executor]
    unit = asked.load_unit_tokens or deployment.settings.load_unit_tokens
    queued_s = min(asked.queued_bytes * deployment.in_force.byte_s[link], LONGEST_S)
    found = Curves(
        deployment=deployment.name,
        tier=tier,
        link=link,
        executor=executor,
        link_bytes_per_s=planner.machine.links[link].rate_bytes_per_s,
        queued_s=queued_s,
        tokens=_lengths(asked, unit),
        recompute_ttft_s=[],
        load_ttft_s=[],
        split_ttft_s=[],
        break_even_bytes_per_s=[],
        crossover_tokens=None,
        crossover_note="",
    )
    chunk = deployment.settings.prefill_chunk_tokens
    await charts.finish(_points(found, planner, asked, unit, chunk))
    return _encode(found)


def _tier(deployment: Deployment, name: str | None) -> str:
    tiers = deployment.told.machine.tiers
    found = next(iter(tiers), None) if name is None else name
    if found is None or found not in tiers:
        problem = "the deployment has no tiers" if not tiers else f"{found!r} is no tier of the deployment"
        raise ProblemError("invalid_value", f"{problem} (expected {', '.join(tiers) or 'one'})", "/tier")
    return found


def _lengths(asked: CurvesRequest, unit: int) -> list[int]:
    """Prefix lengths that rise evenly to the longest, all of them whole load units of which something is not resident;
    fewer than asked for where there are not so many."""
    if asked.longest_tokens + asked.suffix_tokens > LONGEST_PROMPT:
        raise ProblemError(
            "invalid_value",
            f"{asked.longest_tokens} tokens and the {asked.suffix_tokens} after them are more than {LONGEST_PROMPT}",
            "/longest_tokens",
        )
    first, last = asked.resident_tokens // unit + 1, asked.longest_tokens // unit
    if first > last:
        raise ProblemError(
            "invalid_value",
            f"{asked.longest_tokens} tokens hold no whole load unit of {unit} beyond the"
            f" {asked.resident_tokens} resident",
            "/longest_tokens",
        )
    steps = asked.points - 1
    return list(
        dict.fromkeys((first + (last - first) * step // steps) * unit for step in range(asked.points))
    )


def _points(
    found: Curves, planner: Planner, asked: CurvesRequest, unit: int, chunk: int | None
) -> Iterator[None]:
    """Works the points out one by one, and then the crossover, as the decision for the longest prefix has it."""
    plan: Plan | None = None
    for prefix in found.tokens:
        try:
            plan = planner.decide(
                Request(
                    prompt_tokens=prefix + asked.suffix_tokens,
                    hits={found.tier: prefix},
                    resident_tokens=asked.resident_tokens,
                    load_unit_tokens=unit,
                    prefill_chunk_tokens=chunk,
                    # Recurrent state is taken to be stored where the prefix ends, and nowhere else.
                    state_checkpoints=(prefix,) if planner.model.recurrent else (),
                    link_queue_s={found.tier: found.queued_s},
                    device_busy_s=asked.device_busy_s,
                )
            )
        except InputError as error:
            raise of_input_error(error, {"prompt_tokens": ("longest_tokens",)}) from None
        estimates = plan.estimates
        recompute, load, split = estimates["recompute"], estimates["load"], estimates["split"]
        assert recompute is not None
        assert load is not None
        found.recompute_ttft_s.append(recompute.ttft_s)
        found.load_ttft_s.append(load.ttft_s)
        best_s = min(recompute.ttft_s, load.ttft_s)
        found.split_ttft_s.append(None if split is None or split.ttft_s >= best_s else split.ttft_s)
        found.break_even_bytes_per_s.append(plan.break_even_bytes_per_s)
        yield
    assert plan is not None
    found.crossover_tokens, found.crossover_note = plan.crossover_tokens, plan.crossover_note
    yield
