"""What was seen of a ledger is what it said then, and stays so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.assignment import Place
from kvlane.policy.glimpse import Glimpse
from kvlane.policy.ledger import Booking, Ledger, Load, LoadKey

LINKS = {"host": "pcie", "disk": "nvme", "cxl": "pcie"}
PLACES = [
    Place("a", "n", {"nvme": "node"}),
    Place("b", "n", {"nvme": "node"}),
    Place("c", scopes={"pcie": "fleet"}),
]

amounts = st.floats(0.001, 30.0)


@given(
    booked=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(sorted(LINKS)), amounts, amounts)),
    later=st.floats(0.0, 60.0),
)
def test_it_says_what_the_ledger_said_whatever_is_booked_or_served_since(
    booked: list[tuple[Place, str, float, float]], later: float
) -> None:
    ledger = Ledger()
    for number, (place, tier, device, link) in enumerate(booked):
        load = Load(place.link(LINKS[tier]), link, 1.0, LoadKey(place.instance, tier, "p"), 0, 64)
        ledger.reserve(str(number), Booking(place.instance, 1.0, device, loads=(load,)), 0.0)

    def said(on: Ledger | Glimpse, now: float) -> object:
        return [
            len(on),
            [(on.device_busy_s(place.instance, now), on.waiting(place.instance, now)) for place in PLACES],
            [on.link_queue_s(place.link(link), now) for place in PLACES for link in LINKS.values()],
            [on.in_flight(LoadKey(place.instance, tier, "p"), now) for place in PLACES for tier in LINKS],
        ]

    glimpse = Glimpse(ledger, PLACES, LINKS, "p", 0.0)
    then = said(ledger, 0.0)
    assert said(glimpse, 0.0) == then
    ledger.reserve("after", Booking("a", 1.0, 5.0), later)
    assert said(glimpse, later) == then


def test_of_what_was_not_looked_at_it_knows_nothing() -> None:
    glimpse = Glimpse(Ledger(), PLACES[:1], LINKS, None, 0.0)
    with pytest.raises(KeyError):
        glimpse.device_busy_s("b", 0.0)
    with pytest.raises(KeyError):
        glimpse.in_flight(LoadKey("a", "host", "p"), 0.0)
