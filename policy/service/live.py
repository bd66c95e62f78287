"""What goes on, as one snapshot: the page asks for it every second and shows the differences."""

from __future__ import annotations

import asyncio
from time import monotonic, perf_counter, time

import msgspec

from kvlane.policy.booking import Scope
from kvlane.policy.service.answers import (
    LiveAnswer,
    LiveCalibration,
    LiveDecisions,
    LiveDeployment,
    LiveLink,
)
from kvlane.policy.service.report import calibration_age_s, calibration_source
from kvlane.policy.service.service import Service

_encode = msgspec.json.Encoder().encode

# Whoever asks within so long of another is told the same: many pages open cost no more than a few.
_KEPT_S = 0.25
# Many queues are gone through for so long, then others have their turn.
_TURN_S = 0.001


class Live:
    """Answers `/v1/live`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_s = time()
        self._made = b""
        self._made_at = -_KEPT_S
        self._one = asyncio.Lock()

    async def snapshot(self) -> bytes:
        """The answer as JSON."""
        async with self._one:
            if monotonic() - self._made_at >= _KEPT_S:
                links = await self._links()
                self._made = _encode(self._answer(links))
                self._made_at = monotonic()
        return self._made

    def _answer(self, links: list[LiveLink]) -> LiveAnswer:
        service, now_s = self._service, time()
        recent = service.intake.recent
        return LiveAnswer(
            at_s=now_s,
            started_s=self._started_s,
            reservations=len(service.desk.ledger),
            deployments=[
                LiveDeployment(
                    name,
                    LiveDecisions(
                        **{
                            path: sum(cells.by_tier.values())
                            for path, cells in service.cells.deployment(name).paths.items()
                        }
                    ),
                    LiveCalibration(
                        calibration_source(learner.deployment),
                        calibration_age_s(learner.deployment, now_s),
                        learner.accepted,
                    ),
                )
                for name, learner in service.intake.learners.items()
            ],
            links=links,
            requests=list(recent.requests),
            refused=list(recent.refused),
        )

    async def _links(self) -> list[LiveLink]:
        """Every link configured, and those that something still waits for, as the metrics have them."""
        desk, now = self._service.desk, monotonic()
        found: dict[tuple[str, Scope], LiveLink] = {}

        def of(link: str, scope: Scope) -> LiveLink:
            return found.setdefault((link, scope), LiveLink(link, scope))

        for learner in self._service.intake.learners.values():
            for name, scope in learner.deployment.scopes.items():
                of(name, scope)
        until = perf_counter() + _TURN_S
        for key, queued_s, queued_bytes in desk.ledger.each_link(now):
            link = of(key.link, key.scope)
            link.queued_bytes += queued_bytes
            link.queued_s += queued_s
            link.longest_s = max(link.longest_s, queued_s)
            if perf_counter() >= until:
                await asyncio.sleep(0)
                until = perf_counter() + _TURN_S
        for key in desk.left_alone(now):
            of(key.link, key.scope).left_alone = True
        return list(found.values())
