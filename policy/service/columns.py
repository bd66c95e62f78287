"""Answering `/v1/decide/batch`: columns in, columns out, with idle devices and links taken for granted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from time import perf_counter

import msgspec

from kvlane.policy.batch import PATHS, begin_batch
from kvlane.policy.errors import InputError
from kvlane.policy.plan import Executor
from kvlane.policy.service.answers import Decisions
from kvlane.policy.service.decide import Desk
from kvlane.policy.service.problems import ProblemError, of_input_error
from kvlane.policy.service.types import BatchRequest

_encode = msgspec.json.Encoder().encode

_ROW = re.compile(r"(.*)\[(\d+)\]")

# Rows that cannot be priced together are decided one by one: for so long, then others have their turn.
_TURN_S = 0.005
# So many such batches may wait for each other.
_MOST_LONG = 8


class LongBatches:
    """Those that take more than a turn: worked on one at a time, so that they take one turn between them."""

    def __init__(self) -> None:
        self.count = 0
        self._one = asyncio.Lock()

    async def finish(self, rest: Iterator[None]) -> None:
        """Goes through what is left in turns; raises `ProblemError` where too many wait."""
        if self.count >= _MOST_LONG:
            raise ProblemError(
                "too_many_requests",
                "too many batches are decided row by row",
                headers={"Retry-After": "1"},
            )
        self.count += 1
        try:
            async with self._one:
                until = 0.0
                for _ in rest:
                    if perf_counter() >= until:
                        await asyncio.sleep(0)
                        until = perf_counter() + _TURN_S
        finally:
            self.count -= 1


async def decide_columns(desk: Desk, asked: BatchRequest, long: LongBatches) -> bytes:
    """The answer as JSON; raises `ProblemError` with a pointer to the cell."""
    most = desk.limits.batch
    if len(asked.prompt_tokens) > most:
        raise ProblemError(
            "invalid_value", f"{len(asked.prompt_tokens)} rows are more than {most}", "/prompt_tokens"
        )
    deployment = desk.deployment(asked.deployment)
    settings = deployment.settings
    executor: Executor = asked.executor or deployment.executor
    try:
        found, rest = begin_batch(
            deployment.in_force.planners[executor],
            asked.prompt_tokens,
            asked.hits,
            asked.resident_tokens,
            load_unit_tokens=asked.load_unit_tokens or settings.load_unit_tokens,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
        )
        until = perf_counter() + _TURN_S
        for _ in rest:
            if perf_counter() >= until:
                await long.finish(rest)
    except InputError as error:
        row = _ROW.fullmatch(error.field)
        if row is not None:
            error = InputError(f"{row[1]}.{row[2]}", error.problem, error.expected)
        raise of_input_error(error, {"hit": ("hits",)}) from None
    tiers: list[str | None] = [*found.tiers, None]  # -1 stands for none
    return _encode(
        Decisions(
            deployment=deployment.name,
            executor=executor,
            path=[PATHS[code] for code in found.path.tolist()],
            load_tokens=found.load_tokens.tolist(),
            recompute_tokens=found.recompute_tokens.tolist(),
            ttft_s=found.ttft_s.tolist(),
            tier=[tiers[place] for place in found.tier.tolist()],
        )
    )
