"""A desk that decides what is plain in few steps answers, books and remembers what one does that never does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import Planner
from kvlane.policy.plain import PlainTier
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.decide import Desk
from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.service import Service
from kvlane.policy.service.types import DecideRequest

LINK = "pcie5-x16"


def desk(**options: Any) -> Desk:
    one = {"name": "d", "model": "llama-3.1-8b", "machine": "h100-sxm", **options}
    made = Service(from_fields({"deployments": [one]})).desk
    made._stem = "the same-"
    return made


def answers(at: Desk, asked: list[tuple[float, dict[str, Any]]]) -> list[object]:
    """What that desk answers, each so many seconds after the one before; then what it has booked and remembers."""
    now, told = 0.0, list[object]()
    with (
        mock.patch("kvlane.policy.service.decide.monotonic") as clock,
        # Where candidates are weighed in turns, which is when that takes long, queues are served in other steps.
        mock.patch("kvlane.policy.service.decide.TURN_S", 1e6),
    ):
        for later_s, fields in asked:
            clock.return_value = now = now + later_s
            try:
                told.append(at.decide(msgspec.convert(fields, DecideRequest)))
            except ProblemError as problem:
                told.append(problem.body())
    return [*told, at.ledger.snapshot(now), at.made]


amounts = st.floats(-5, 0).map(lambda exponent: float(10.0**exponent))
states = st.fixed_dictionaries(
    {},
    optional={
        "device_busy_s": amounts,
        "links": st.builds(lambda size: {LINK: {"queued_bytes": 1e11 * size}}, amounts),
        "queued_prefill_tokens": st.integers(0, 20_000),
    },
)


@st.composite
def instances(draw: st.DrawFn, prompt: int) -> dict[str, Any]:
    """What is said of one instance."""
    host: dict[str, Any] = {"tier": "host", "tokens": draw(st.integers(0, prompt) | st.just(prompt + 1))}
    hits = draw(
        st.sampled_from(([host], [host], [host], [], [host, {"tier": "nvme", "tokens": prompt // 2}]))
    )
    fields: dict[str, Any] = {"hits": hits, "instance": draw(st.sampled_from(("one", "two")))}
    if draw(st.booleans()):
        fields["resident_tokens"] = draw(st.sampled_from((16, 100, 512)))
    if draw(st.booleans()):
        fields["state"] = draw(states)
    return fields


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    prompt = draw(st.integers(1, 20_000) | st.integers(1, 600))
    fields: dict[str, Any] = {"prompt_tokens": prompt, "reserve": draw(st.booleans())}
    if draw(st.sampled_from((True, False, False))):
        fields["prefix_id"] = draw(st.sampled_from("pq"))
    if draw(st.sampled_from((True, False, False, False))):
        found = draw(st.lists(instances(prompt), min_size=1, max_size=3))
        return {**fields, "candidates": found}
    return {**fields, **draw(instances(prompt))}


@given(
    asked=st.lists(st.tuples(st.just(0.0) | amounts, requests()), min_size=1, max_size=8),
    executor=st.sampled_from(("bulk", "layered", "two_ended")),
    rate=st.sampled_from((None, "5 GB/s", "1 GB/s")),
    chunk=st.sampled_from((None, None, 8192)),
)
@settings(max_examples=150, deadline=None)
def test_answers_bookings_and_memories_are_the_same(
    asked: list[tuple[float, dict[str, Any]]], executor: str, rate: str | None, chunk: int | None
) -> None:
    options: dict[str, Any] = {"executor": executor, "prefill_chunk_tokens": chunk}
    if rate is not None:
        options["links"] = {LINK: {"rate": rate}}
    found = answers(desk(**options), asked)
    with mock.patch.object(Planner, "plain", return_value=None):
        assert answers(desk(**options), asked) == found


QUEUED = {"device_busy_s": 0.02, "links": {LINK: {"queued_bytes": 1e9}}}


@pytest.mark.parametrize(
    ("executor", "fields"),
    [
        ("bulk", {}),
        ("bulk", {"state": QUEUED}),
        ("bulk", {"reserve": True}),
        ("bulk", {"reserve": True, "prefix_id": "p", "state": QUEUED}),
        ("layered", {}),
        ("layered", {"reserve": True}),
        ("layered", {"state": {"device_busy_s": 0.02}}),
    ],
)
def test_the_commonest_take_few_steps(executor: str, fields: dict[str, Any]) -> None:
    """Were they to go the long way, all else here would hold too."""
    hits = [{"tier": "host", "tokens": 9000}]
    asked = [(60.0, {"prompt_tokens": 9000 + number, "hits": hits, **fields}) for number in range(3)]
    with (
        mock.patch.object(PlainTier, "decide", autospec=True, side_effect=PlainTier.decide) as plainly,
        mock.patch.object(Planner, "decide", autospec=True) as at_length,
    ):
        answers(desk(executor=executor), asked)
    assert (plainly.call_count, at_length.call_count) == (3, 0)


def test_what_may_join_a_load_in_flight_is_weighed_at_length() -> None:
    fields = {"prompt_tokens": 9000, "hits": [{"tier": "host", "tokens": 9000}], "prefix_id": "p"}
    first, second = ({**fields, "reserve": True}, fields)
    told = answers(desk(), [(0.0, first), (1e-4, second), (60.0, second)])
    assert [b'"joined":true' in answer for answer in told[:3] if isinstance(answer, bytes)] == [
        False,
        True,
        False,
    ]
