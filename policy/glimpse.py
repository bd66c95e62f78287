"""What a ledger held at one moment, of some places: many are weighed on it while the ledger goes on being booked."""

from __future__ import annotations

from collections.abc import Iterable

from kvlane.policy.assignment import Place
from kvlane.policy.booking import InFlight, LinkKey, LoadKey
from kvlane.policy.ledger import Ledger


class Glimpse:
    """The queues of places and their links at `now`, and the loads of a prefix in flight there; `links` names the links
    by tier.

    It answers for those only (KeyError otherwise), and as of then, whatever the time it is asked at.
    """

    def __init__(
        self,
        ledger: Ledger,
        places: Iterable[Place],
        links: dict[str, str],
        prefix_id: str | None,
        now: float,
    ) -> None:
        self._reservations = len(ledger)
        self._busy_s: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._queued_s: dict[LinkKey, float] = {}
        self._flying: dict[LoadKey, tuple[InFlight, ...]] = {}
        names = set(links.values())
        for place in places:
            instance = place.instance
            self._busy_s[instance] = ledger.device_busy_s(instance, now)
            self._waiting[instance] = ledger.waiting(instance, now)
            for link in map(place.link, names):
                if link not in self._queued_s:
                    self._queued_s[link] = ledger.link_queue_s(link, now)
            if prefix_id is not None:
                for tier in links:
                    key = LoadKey(instance, tier, prefix_id)
                    self._flying[key] = ledger.in_flight(key, now)

    def __len__(self) -> int:
        """Live reservations, of all places."""
        return self._reservations

    def device_busy_s(self, instance: str, now: float) -> float:  # noqa: ARG002
        """Seconds of booked work ahead of a new request on that instance's device."""
        return self._busy_s[instance]

    def link_queue_s(self, link: LinkKey, now: float) -> float:  # noqa: ARG002
        """Seconds of booked copies ahead of a new load on that link."""
        return self._queued_s[link]

    def waiting(self, instance: str, now: float) -> int:  # noqa: ARG002
        """Reservations whose work on that instance's device is not done."""
        return self._waiting[instance]

    def in_flight(self, key: LoadKey, now: float) -> tuple[InFlight, ...]:  # noqa: ARG002
        """The loads in flight under that key."""
        return self._flying[key]
