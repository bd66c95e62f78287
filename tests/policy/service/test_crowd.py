"""Decisions among many candidates: weighed in turns with what others ask, and booked on the ledger as it is then."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvlane.policy.service import crowd as crowds
from kvlane.policy.service import decide
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.crowd import Crowds
from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.service import Service
from kvlane.policy.service.types import DecideRequest

SMALL = {"prompt_tokens": 1000, "hits": [{"tier": "host", "tokens": 992}]}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(decide, "monotonic", found)
    monkeypatch.setattr(crowds, "monotonic", found)
    return found


@pytest.fixture
def service() -> Service:
    one = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
    return Service(from_fields({"deployments": [one]}))


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each candidate others have their turn."""
    monkeypatch.setattr(decide, "TURN_S", -1.0)


def fields(count: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    drawn = random.Random(seed)
    spots = [
        {
            "instance": f"i{number}",
            "hits": [
                {"tier": tier, "tokens": drawn.randrange(4_000, 20_000)}
                for tier in ("host", "nvme", "remote")
            ],
        }
        for number in range(count)
    ]
    return {"prompt_tokens": 20_000, "candidates": spots, **more}


def request(**asked: Any) -> DecideRequest:
    return msgspec.convert(asked, DecideRequest)


def crowd(count: int, seed: int = 0, **more: Any) -> DecideRequest:
    return request(**fields(count, seed, **more))


def without_ids(answer: bytes) -> Any:
    told = json.loads(answer)
    del told["decision_id"]
    return told


def finish(turns: Any) -> bytes:
    while True:
        try:
            next(turns)
        except StopIteration as last:
            return bytes(last.value)


def book_some(service: Service) -> None:
    """Queues on devices and links, and loads in flight."""
    for number in range(12):
        where = {"instance": f"i{number % 5}", "prefix_id": "p" if number % 2 else f"p{number}"}
        hits = [{"tier": "host", "tokens": 12_000}]
        service.desk.decide(request(prompt_tokens=12_370, hits=hits, reserve=True, **where))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prefix_id", [None, "p"])
def test_in_turns_or_at_once_the_answer_is_the_same(
    service: Service, clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int, prefix_id: str | None
) -> None:
    book_some(service)
    asked = crowd(12, seed, prefix_id=prefix_id, objective=["ttft", "blend"][seed % 2])
    monkeypatch.setattr(decide, "TURN_S", 1e9)
    turns = service.desk.turns(asked)
    at_once = finish(turns)
    monkeypatch.setattr(decide, "TURN_S", -1.0)
    turns = service.desk.turns(asked)
    for _ in range(12):
        next(turns)
    assert without_ids(finish(turns)) == without_ids(at_once)


def test_a_small_decision_is_answered_before_a_large_one_that_was_asked_first(service: Service) -> None:
    async def order(large: Any) -> list[str]:
        done: list[str] = []

        async def small() -> None:
            service.desk.decide(request(**SMALL))
            done.append("small")

        async def first() -> None:
            await large()
            done.append("large")

        tasks = [asyncio.create_task(first())]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(small()) for _ in range(3)]
        await asyncio.gather(*tasks)
        return done

    crowded = Crowds()
    asked = crowd(256)
    assert asyncio.run(order(lambda: crowded.decide(service.desk, asked))) == ["small"] * 3 + ["large"]

    # The control: without turns the large one goes first.
    async def at_once() -> None:
        service.desk.decide(asked)

    assert asyncio.run(order(at_once)) == ["large"] + ["small"] * 3


def test_small_ones_are_answered_over_http_while_a_large_one_is_worked_on(serve: Callable[..., Any]) -> None:
    served = serve({})
    large = fields(256, executor="two_ended")
    answered = threading.Event()
    answers: list[Any] = []

    def ask_large() -> None:
        answers.append(served.ask("POST", "/v1/decide", large))
        answered.set()

    thread = threading.Thread(target=ask_large)
    thread.start()
    between = 0
    while not answered.is_set():
        served.decide(**SMALL)
        between += not answered.is_set()
    thread.join()
    assert answers[0].status == 200
    assert len(answers[0].body["candidates"]) == 256
    assert between >= 5


@pytest.mark.usefixtures("short_turns")
class TestConsistency:
    def test_all_are_weighed_on_the_ledger_as_it_was_at_the_beginning(
        self, service: Service, clock: Clock
    ) -> None:
        """Equal candidates stay equal, though the queue of their common link drains and grows meanwhile."""
        service.desk.deployment("chat").scopes["pcie5-x16"] = "fleet"  # type: ignore[index]
        hits = [{"tier": "host", "tokens": 16_000}]
        for number in range(10):
            service.desk.decide(request(prompt_tokens=16_100, hits=hits, reserve=True, instance=f"b{number}"))
        spots = [{"instance": f"i{number}", "hits": hits} for number in range(10)]
        turns = service.desk.turns(request(prompt_tokens=16_100, candidates=spots))
        for number in range(10):
            next(turns)
            clock.now += 0.05
            if number == 4:
                long = {"prompt_tokens": 100_000, "hits": [{"tier": "host", "tokens": 99_984}]}
                service.desk.decide(request(**long, reserve=True, instance="b"))
        told = json.loads(finish(turns))["candidates"]
        assert len({each["ttft_s"] for each in told[1:]}) == 1

    def test_what_is_booked_was_decided_on_the_ledger_as_it_was_booked(
        self, service: Service, clock: Clock
    ) -> None:
        asked = crowd(8, reserve=True)
        idle = json.loads(service.desk.decide(crowd(8)))["candidates"]
        turns = service.desk.turns(asked)
        for _ in range(7):
            next(turns)
        # Meanwhile somebody else is sent to the best instance, and the second best.
        for best in idle[:2]:
            service.desk.decide(
                request(prompt_tokens=500_000, instance=best["instance"], reserve=True, deployment="chat")
            )
        answer = json.loads(finish(turns))
        assert answer["instance"] == idle[2]["instance"]
        assert answer["ttft_s"] == idle[2]["ttft_s"]
        assert answer["candidates"][0]["instance"] == answer["instance"]
        ttfts = [each["ttft_s"] for each in answer["candidates"]]
        assert ttfts == sorted(ttfts)
        assert answer["decision_id"] in service.desk.ledger
        assert service.desk.ledger.device_busy_s(answer["instance"], clock.now) > 0

    def test_where_all_that_were_best_are_taken_the_best_of_those_decided_again_is_booked(
        self, service: Service, clock: Clock
    ) -> None:
        idle = json.loads(service.desk.decide(crowd(8)))["candidates"]
        turns = service.desk.turns(crowd(8, reserve=True))
        for _ in range(7):
            next(turns)
        for number, best in enumerate(idle):
            busy = 500_000 - 10_000 * number
            service.desk.decide(request(prompt_tokens=busy, instance=best["instance"], reserve=True))
        answer = json.loads(finish(turns))
        # Four are decided again, and the least busy of them is the fourth.
        assert answer["instance"] == idle[3]["instance"]
        assert answer["device_busy_s"] > 1
        assert answer["candidates"][0]["instance"] == answer["instance"]

    def test_a_load_that_is_in_flight_by_the_time_it_is_booked_is_joined(
        self, service: Service, clock: Clock
    ) -> None:
        hits = [{"tier": "host", "tokens": 12_000}]
        spots = [{"instance": "a", "hits": hits}, {"instance": "b"}]
        turns = service.desk.turns(
            request(prompt_tokens=12_370, candidates=spots, prefix_id="p", reserve=True)
        )
        next(turns)
        first = request(prompt_tokens=12_370, hits=hits, prefix_id="p", reserve=True, instance="a")
        assert json.loads(service.desk.decide(first))["joined"] is False
        answer = json.loads(finish(turns))
        assert (answer["instance"], answer["joined"]) == ("a", True)
        assert service.desk.ledger.counts.joins == 1

    def test_what_is_learnt_meanwhile_is_for_those_who_ask_next(self, service: Service, clock: Clock) -> None:
        deployment = service.desk.deployment("chat")
        spots = [{"instance": f"i{number}", "hits": SMALL["hits"]} for number in range(4)]
        turns = service.desk.turns(request(prompt_tokens=1000, candidates=spots))
        next(turns)
        other = {"name": "chat", "model": "llama-3.1-70b", "machine": "h100-sxm"}
        slower = Service(from_fields({"deployments": [other]})).desk.deployment("chat")
        deployment.in_force = slower.in_force
        told = json.loads(finish(turns))["candidates"]
        assert len({each["ttft_s"] for each in told}) == 1
        after = json.loads(service.desk.decide(request(prompt_tokens=1000, candidates=spots)))
        assert after["ttft_s"] > told[0]["ttft_s"]

    def test_a_reload_meanwhile_is_for_those_who_ask_next(self, service: Service, clock: Clock) -> None:
        """What one deployment was is not taken for what another of its name is: not its tiers, not who shares links."""
        spots = [{"instance": f"i{number}", "node": "n", "hits": SMALL["hits"]} for number in range(4)]
        turns = service.desk.turns(request(prompt_tokens=1000, candidates=spots))
        next(turns)
        links = {"nvlink-c2c": {"scope": "node"}}
        other = {"name": "chat", "model": "llama-3.1-8b", "machine": "gh200", "links": links}
        service.reload(from_fields({"deployments": [other]}))
        assert json.loads(finish(turns))["candidates"]
        booked = request(**SMALL, instance="i3", node="n", reserve=True)
        service.desk.decide(booked)
        assert [(key.link, key.scope) for key in service.desk.ledger.links(clock.now)] == [
            ("nvlink-c2c", "node")
        ]


@pytest.mark.usefixtures("short_turns")
class TestRequestIds:
    def test_who_asks_the_same_meanwhile_is_given_the_same_decision(self, service: Service) -> None:
        async def ask() -> list[bytes]:
            crowded = Crowds()
            asked = crowd(20, request_id="r", reserve=True)
            return await asyncio.gather(*(crowded.decide(service.desk, asked) for _ in range(5)))

        answers = asyncio.run(ask())
        assert len(set(answers)) == 1
        assert len(service.desk.ledger) == service.desk.ledger.counts.reserved == 1
        assert (
            asyncio.run(Crowds().decide(service.desk, crowd(20, request_id="r", reserve=True))) == answers[0]
        )

    @pytest.mark.parametrize("other", [fields(20, 1), fields(2), SMALL])
    def test_another_body_is_refused_while_the_first_is_worked_on(
        self, service: Service, other: dict[str, Any]
    ) -> None:
        async def ask() -> None:
            crowded = Crowds()
            first = asyncio.create_task(crowded.decide(service.desk, crowd(20, request_id="r")))
            await asyncio.sleep(0)
            asked = request(**other, request_id="r")

            async def answer() -> bytes:
                if "candidates" in other:
                    return await crowded.decide(service.desk, asked)
                return service.desk.decide(asked)

            with pytest.raises(ProblemError) as refused:
                await answer()
            assert (refused.value.status, refused.value.pointer) == (409, "/request_id")
            assert not first.done()
            await first

        asyncio.run(ask())

    def test_after_a_failure_who_waited_asks_by_themselves_and_the_id_is_free(self, service: Service) -> None:
        bad = fields(20, request_id="r")
        bad["candidates"][19] = {"instance": "x", "hits": [{"tier": "colour", "tokens": 1}]}

        async def ask() -> list[Any]:
            crowded = Crowds()
            asked = request(**bad)
            both = (crowded.decide(service.desk, asked) for _ in range(2))
            return await asyncio.gather(*both, return_exceptions=True)

        assert [error.pointer for error in asyncio.run(ask())] == ["/candidates/19/hits/0/tier"] * 2
        assert asyncio.run(Crowds().decide(service.desk, crowd(20, request_id="r")))

    @pytest.mark.parametrize("cut_off", [0, 1])
    def test_who_is_cut_off_keeps_nobody_waiting(self, service: Service, cut_off: int) -> None:
        async def ask() -> bytes:
            crowded = Crowds()
            asked = crowd(20, request_id="r")
            both = [asyncio.create_task(crowded.decide(service.desk, asked)) for _ in range(2)]
            await asyncio.sleep(0)
            both[cut_off].cancel()
            return await both[1 - cut_off]

        assert json.loads(asyncio.run(ask()))["instance"]


@pytest.mark.usefixtures("short_turns")
class TestLine:
    def test_beyond_so_many_it_is_refused_with_a_time_to_ask_again(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(crowds, "_MOST_LONG", 3)

        async def ask() -> list[Any]:
            crowded = Crowds()
            many = (crowded.decide(service.desk, crowd(20, seed)) for seed in range(5))
            found = await asyncio.gather(*many, return_exceptions=True)
            # And there is room again afterwards.
            assert await crowded.decide(service.desk, crowd(20))
            return found

        refused = [each for each in asyncio.run(ask()) if isinstance(each, ProblemError)]
        assert [each.status for each in refused] == [429, 429]
        assert all(each.headers == {"Retry-After": "1"} for each in refused)

    def test_who_had_to_wait_is_decided_on_what_is_so_after_the_wait(
        self, service: Service, clock: Clock
    ) -> None:
        """Routers that ask at once are not all sent to the same instance: each sees what was booked before it."""

        async def ask() -> list[str]:
            crowded = Crowds()
            spots = [{"instance": f"i{number}"} for number in range(20)]
            many = [request(prompt_tokens=12_370, candidates=spots, reserve=True) for _ in range(20)]
            answers = await asyncio.gather(*(crowded.decide(service.desk, asked) for asked in many))
            return [json.loads(answer)["instance"] for answer in answers]

        assert len(set(asyncio.run(ask()))) == 20
