"""Instances as decisions name them: what follows from the names is worked out once, not for every decision."""

from __future__ import annotations

from kvlane.policy.assignment import Place
from kvlane.policy.booking import LinkKey
from kvlane.policy.service.answer import whose
from kvlane.policy.service.deployments import Deployment
from kvlane.policy.service.metrics import DeploymentCells


class Spot:
    """One instance of a deployment: its place in the ledger, its name in answers, its links, what is counted of it."""

    __slots__ = ("_links", "_of_tier", "cells", "place", "told", "whom")

    def __init__(
        self, deployment: Deployment, instance: str, node: str | None, cells: DeploymentCells
    ) -> None:
        self.cells = cells
        self.told = deployment.told
        self.place = Place(instance, node, deployment.scopes)
        self.whom = whose(deployment.name, instance)
        self._of_tier = {name: tier.link for name, tier in deployment.told.machine.tiers.items()}
        self._links: dict[tuple[str, ...], tuple[LinkKey, ...]] = {(): ()}

    def links(self, tiers: tuple[str, ...]) -> tuple[LinkKey, ...]:
        """The link that each of these tiers is loaded over."""
        found = self._links.get(tiers)
        if found is None:
            found = tuple([self.place.link(self._of_tier[tier]) for tier in tiers])
            self._links[tiers] = found
        return found
