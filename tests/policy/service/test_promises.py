"""Answers under a request id: the same for the same body, for as long as they hold, and never too many of them."""

from __future__ import annotations

import json

import pytest

from kvlane.policy.service import decide
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.promises import Promises
from kvlane.policy.service.service import Service
from kvlane.policy.service.types import DecideRequest


def asked(request_id: str, prompt: int = 100) -> DecideRequest:
    return DecideRequest(prompt, request_id=request_id)


def test_the_same_body_is_answered_the_same_until_its_time_is_over() -> None:
    promises = Promises(10)
    assert promises.kept(asked("a"), 0.0) is None
    promises.give(asked("a"), b"answer", 5.0)
    assert promises.kept(asked("a"), 4.9) == b"answer"
    with pytest.raises(ProblemError) as caught:
        promises.kept(asked("a", 101), 4.9)
    assert (caught.value.status, caught.value.pointer) == (409, "/request_id")
    assert promises.kept(asked("a", 101), 5.0) is None


def test_an_id_that_was_freed_takes_another_body() -> None:
    promises = Promises(10)
    promises.give(asked("a"), b"answer", 5.0)
    promises.forget("a")
    promises.forget("never given")
    assert promises.kept(asked("a", 101), 0.0) is None


def test_the_oldest_go_when_there_are_too_many_or_too_much_of_them() -> None:
    few = Promises(2)
    for name in "abc":
        few.give(asked(name), name.encode(), 5.0)
    assert [few.kept(asked(name), 0.0) for name in "abc"] == [None, b"b", b"c"]
    small = Promises(100, most_bytes=100)
    for name in "abc":
        small.give(asked(name), name.encode() * 40, 5.0)
    assert [small.kept(asked(name), 0.0) is None for name in "abc"] == [True, False, False]
    # What went, expired or was freed no longer counts.
    small.forget("b")
    assert small.kept(asked("c"), 6.0) is None
    small.give(asked("d"), b"d" * 60, 9.0)
    small.give(asked("e"), b"e" * 40, 9.0)
    assert small.kept(asked("d"), 6.0) == b"d" * 60


def test_who_releases_a_decision_late_does_not_free_an_id_that_was_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(decide, "monotonic", lambda: now)
    one = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
    desk = Service(from_fields({"deployments": [one]})).desk
    again = DecideRequest(100, request_id="a", reserve=True)
    first = json.loads(desk.decide(again))
    now = first["expires_in_s"] + 1
    second = desk.decide(again)
    assert json.loads(second)["decision_id"] != first["decision_id"]
    assert desk.release(first["decision_id"])
    assert desk.decide(again) == second
    assert desk.release(json.loads(second)["decision_id"])
    assert desk.decide(again) != second
