"""Loads over two links at once, and loads that begin after tokens computed meanwhile: from request to metrics."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvlane.policy.booking import SavedLedger
from kvlane.policy.ledger import Ledger, LinkKey
from kvlane.policy.service import decide, observe
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.service import Service
from kvlane.policy.service.types import DecideRequest, RequestObservation

BOTH = {
    "prompt_tokens": 16_100,
    "hits": [{"tier": "host", "tokens": 8_000}, {"tier": "remote", "tokens": 16_000}],
}
LINKS = {"pcie5-x16", "net-400"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (decide, observe):
        monkeypatch.setattr(module, "monotonic", found)
    return found


@pytest.fixture
def service() -> Service:
    one = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
    return Service(from_fields({"deployments": [one]}))


def decided(service: Service, **fields: Any) -> Any:
    asked = msgspec.convert({**BOTH, **fields}, DecideRequest)
    return msgspec.json.decode(service.desk.decide(asked))


def tell(
    service: Service, answer: Any, outcome: Any = "ok", ttft_s: float | None = None, tier: str | None = None
) -> Any:
    told = RequestObservation(
        f"of {answer['decision_id']}",
        answer["decision_id"],
        answer["path"],
        answer["load_tokens"],
        ttft_s,
        outcome,
        tier,
    )
    return msgspec.json.decode(service.intake.observe([told]))


def queued(service: Service, clock: Clock) -> dict[str, float]:
    return {key.link: seconds for key, (seconds, _) in service.desk.ledger.links(clock.now).items()}


@pytest.mark.parametrize("executor", ["bulk", "layered", "two_ended"])
def test_both_links_are_booked_and_both_are_free_again(service: Service, clock: Clock, executor: str) -> None:
    answer = decided(service, executor=executor, reserve=True, instance="a")
    assert [part["tier"] for part in answer["load"]] == ["host", "remote"]
    assert answer["load"][0]["end"] == answer["load"][1]["start"]
    assert (answer["load"][0]["start"] > 0) is (executor == "two_ended")
    assert set(queued(service, clock)) == LINKS
    assert max(queued(service, clock).values()) == pytest.approx(
        answer["estimates"][answer["path"]]["transfer_s"]
    )
    assert service.desk.release(answer["decision_id"])
    assert set(queued(service, clock).values()) == {0.0}


def test_a_load_over_both_is_joined_as_one(service: Service, clock: Clock) -> None:
    first = decided(service, reserve=True, prefix_id="p", instance="a")
    before = queued(service, clock)
    second = decided(service, reserve=True, prefix_id="p", instance="a")
    assert (second["joined"], second["load"]) == (True, first["load"])
    assert queued(service, clock) == before
    assert decided(service, prefix_id="p", instance="b")["joined"] is False


def test_what_a_load_in_flight_lacks_is_loaded_beside_it_and_said_so(clock: Clock) -> None:
    """Behind a longer queue more is worth loading: each moves what those before it left out."""
    slow = {"links": {"net-400": {"rate": "3 GB/s"}}}
    chat = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm", **slow}
    service = Service(from_fields({"deployments": [chat]}))
    one = {"executor": "layered", "instance": "a", "prefix_id": "p", "reserve": True}
    hits = [{"tier": "remote", "tokens": 16_000}]
    alone, first, *others = [decided(service, **one, hits=hits) for _ in range(10)]
    assert alone["path"] == "recompute"
    assert (first["joined"], first["joined_tokens"]) == (False, 0)
    assert 0 < first["load_tokens"] < 16_000
    known = first["load_tokens"]
    for answer in others:
        assert answer["joined"]
        assert answer["joined_tokens"] == known
        known = max(known, answer["load_tokens"])
        (part,) = answer["load"]
        assert (part["tier"], part["start"], part["end"]) == ("remote", 0, answer["load_tokens"])
        if answer["load_tokens"] > answer["joined_tokens"]:
            assert f"{answer['joined_tokens']} of the tokens join" in answer["reason"]
    assert known == 16_000
    assert set(service.cells.deployment("chat").paths["load"].by_tier) == {"remote"}
    moved = sum(nbytes for _, nbytes in service.desk.ledger.links(clock.now).values())
    assert moved == pytest.approx(
        decided(service, hits=hits, executor="bulk")["estimates"]["load"]["load_bytes"]
    )


def test_it_is_counted_once_under_both_tiers_and_scored_as_one(service: Service, clock: Clock) -> None:
    answer = decided(service)
    load = service.cells.deployment("chat").paths["load"]
    assert load.by_tier == {"host+remote": 1}
    assert tell(service, answer, ttft_s=2 * answer["ttft_s"])["accepted"] == 1
    assert sum(load.error.counts) == sum(load.actual_s.counts) == 1
    assert load.error.total == pytest.approx(0.5)


def test_a_cap_counts_all_parts_and_there_is_none_for_a_load_that_begins_later(service: Service) -> None:
    assert "kv_transfer_params" not in decided(service)  # all that is stored is loaded
    more = [{"tier": "nvme", "tokens": 16_096, "state": "pending"}]
    capped = decided(service, hits=[*BOTH["hits"], *more])  # type: ignore[misc]
    assert capped["kv_transfer_params"] == {"max_load_tokens": capped["load_tokens"]}
    later = decided(service, executor="two_ended", hits=[*BOTH["hits"], *more])  # type: ignore[misc]
    assert later["load"][0]["start"] > 0
    assert "kv_transfer_params" not in later


def test_links_left_alone_are_tried_by_one_load_which_brings_both_back(
    service: Service, clock: Clock
) -> None:
    for _ in range(3):
        tell(service, decided(service), "load_failed")
    assert decided(service)["path"] == "recompute"
    assert {link.link for link in service.desk.left_alone(clock.now)} == LINKS
    clock.now += 10.0
    probe = decided(service)
    assert {part["tier"] for part in probe["load"]} == {"host", "remote"}
    assert decided(service)["path"] == "recompute"  # one tries, the others wait for what becomes of it
    tell(service, probe)
    assert service.desk.left_alone(clock.now) == []
    assert decided(service)["load"] == probe["load"]


def test_only_the_link_of_the_tier_that_failed_is_left_alone(service: Service, clock: Clock) -> None:
    for _ in range(3):
        assert tell(service, decided(service), "load_failed", tier="remote")["accepted"] == 1
    assert [link.link for link in service.desk.left_alone(clock.now)] == ["net-400"]
    answer = decided(service)
    assert [part["tier"] for part in answer["load"]] == ["host"]
    assert any("net-400 keep failing" in note for note in answer["notes"])
    # The try after a while fails over the same link again; the other has nothing to answer for.
    clock.now += 10.0
    probe = decided(service)
    assert {part["tier"] for part in probe["load"]} == {"host", "remote"}
    tell(service, probe, "load_failed", tier="remote")
    assert [link.link for link in service.desk.left_alone(clock.now)] == ["net-400"]
    assert service.desk.breakers.counts(LinkKey("device", "chat", "pcie5-x16")).failures == 0


@pytest.mark.parametrize(
    ("fields", "tier", "expected"),
    [
        ({}, "cxl", "host, remote"),
        ({}, "colour", "host, remote"),
        ({"hits": [{"tier": "host", "tokens": 8_000}]}, "remote", "host"),
        ({"hits": []}, "host", "none"),
    ],
)
def test_a_tier_that_the_decision_does_not_load_from_is_refused_and_nothing_is_settled(
    service: Service, clock: Clock, fields: dict[str, Any], tier: str, expected: str
) -> None:
    answer = decided(service, **fields, reserve=True)
    said = tell(service, answer, "load_failed", tier=tier)
    assert said["accepted"] == 0
    (refused,) = said["refused"]
    assert refused["field"] == "tier"
    assert tier in refused["reason"]
    assert refused["reason"].endswith(f"loads from {expected}")
    assert answer["decision_id"] in service.desk.ledger
    assert service.desk.breakers.known() == ()
    # Said again and right, under the same id, it is taken.
    assert tell(service, answer, "cancelled")["accepted"] == 1
    assert answer["decision_id"] not in service.desk.ledger


def test_a_failed_try_is_followed_by_a_longer_wait(service: Service, clock: Clock) -> None:
    for _ in range(3):
        tell(service, decided(service), "load_failed")
    clock.now += 10.0
    tell(service, decided(service), "load_failed")
    clock.now += 10.0
    assert decided(service)["path"] == "recompute"
    clock.now += 10.0
    assert decided(service)["path"] == "load"


def test_links_are_left_alone_by_instance(service: Service, clock: Clock) -> None:
    for _ in range(3):
        tell(service, decided(service, instance="a"), "load_failed")
    assert decided(service, instance="b")["path"] == "load"
    assert LinkKey("device", "a", "net-400") in service.desk.left_alone(clock.now)


def test_a_load_over_both_is_joined_and_released_after_a_restart_too(service: Service, clock: Clock) -> None:
    first = decided(service, reserve=True, prefix_id="p", instance="a")
    before = queued(service, clock)
    kept = msgspec.json.encode(service.desk.ledger.snapshot(clock.now))
    service.desk.ledger = Ledger.restore(msgspec.json.decode(kept, type=SavedLedger), clock.now)
    assert queued(service, clock) == before
    second = decided(service, reserve=True, prefix_id="p", instance="a")
    assert (second["joined"], second["load"]) == (True, first["load"])
    service.desk.release(first["decision_id"])
    assert queued(service, clock) == before  # the second waits for it still
    service.desk.release(second["decision_id"])
    assert set(queued(service, clock).values()) == {0.0}


@pytest.mark.parametrize("executor", ["bulk", "layered", "two_ended"])
def test_a_state_of_one_link_replaces_its_queue_and_leaves_the_other_s(
    service: Service, clock: Clock, executor: str
) -> None:
    decided(service, executor=executor, reserve=True, instance="a")
    other = queued(service, clock)["net-400"]
    state = {"links": {"pcie5-x16": {"queued_bytes": 0}}}
    answer = decided(service, executor=executor, instance="a", reserve=True, state=state)
    own = {part["tier"]: part["bytes"] for part in answer["load"]}
    after = queued(service, clock)
    rate_s = service.desk.deployment("chat").in_force.byte_s
    assert after["pcie5-x16"] == pytest.approx(own.get("host", 0) * rate_s["pcie5-x16"], rel=0.01)
    assert after["net-400"] == pytest.approx(other + own.get("remote", 0) * rate_s["net-400"], rel=0.01)
