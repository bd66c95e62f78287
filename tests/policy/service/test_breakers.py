"""A link that keeps failing is left alone, then tried with one load."""

from __future__ import annotations

from kvlane.policy.booking import LinkKey
from kvlane.policy.service.breakers import Breakers

LINK, OTHER = LinkKey("device", "a", "pcie"), LinkKey("device", "b", "pcie")


def test_it_shuts_after_some_failures_in_a_row_and_only_then() -> None:
    breakers = Breakers(failures=3, probe_after_s=10)
    for now in (0.0, 1.0):
        breakers.failed(LINK, now)
        assert breakers.would_admit(LINK, now)
    breakers.succeeded(LINK)
    for now in (2.0, 3.0, 4.0):
        assert breakers.would_admit(LINK, now)
        breakers.failed(LINK, now)
    assert not breakers.would_admit(LINK, 5.0)
    assert breakers.would_admit(OTHER, 5.0)
    assert breakers.shut(5.0) == [LINK]


def test_one_probe_goes_through_an_interval_later_and_its_outcome_decides() -> None:
    breakers = Breakers(failures=1, probe_after_s=10)
    breakers.failed(LINK, 0.0)
    assert not breakers.would_admit(LINK, 9.9)
    assert breakers.would_admit(LINK, 10.0)
    breakers.admit(LINK, 10.0)
    assert not breakers.would_admit(LINK, 10.1)
    assert breakers.would_admit(LINK, 20.0)  # nobody said what became of it
    breakers.admit(LINK, 20.0)
    breakers.failed(LINK, 21.0)
    assert not breakers.would_admit(LINK, 30.9)
    breakers.succeeded(LINK)
    assert breakers.would_admit(LINK, 21.0)
    assert breakers.shut(21.0) == []


def test_a_load_decided_over_a_sound_link_is_no_probe() -> None:
    breakers = Breakers(failures=2)
    breakers.admit(LINK, 0.0)
    breakers.failed(LINK, 0.0)
    breakers.admit(LINK, 0.0)
    assert breakers.would_admit(LINK, 0.0)


def test_no_more_links_are_remembered_than_a_bound() -> None:
    breakers = Breakers(failures=1)
    for number in range(10_050):
        breakers.failed(LinkKey("device", str(number), "pcie"), 0.0)
    assert len(breakers.shut(0.0)) == 10_000
