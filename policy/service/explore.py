"""Answering `/v1/what-if`: a decision asked out of curiosity, worked out by what decides, and put into time."""

from __future__ import annotations

from time import monotonic

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.service.decide import Desk
from kvlane.policy.service.problems import of_input_error
from kvlane.policy.service.types import DecideRequest, Question, WhatIfRequest
from kvlane.policy.timeline import timeline

_encode = msgspec.json.Encoder().encode


def what_if(desk: Desk, asked: WhatIfRequest) -> bytes:
    """The answer as JSON; raises `ProblemError`."""
    now = monotonic()
    try:
        deployment = desk.deployment(asked.deployment).supposing(asked.link_bytes_per_s)
    except InputError as error:
        raise of_input_error(error, {error.field: (error.field,)}, ("link_bytes_per_s",)) from None
    request = DecideRequest(**{name: getattr(asked, name) for name in Question.__struct_fields__})
    chosen, found = desk.weigh(request, deployment, now)
    plan = found.plan
    estimate = plan.estimates[plan.path]
    assert estimate is not None
    flights = [
        (join.key.tier, flight.remaining_s)
        for join in found.joins
        for flight in desk.ledger.in_flight(join.key, now)
        if (flight.start, flight.end) == (join.start, join.end)
    ]
    told = timeline(
        deployment.in_force.planners[plan.executor],
        found.request,
        estimate,
        own=found.own,
        joined=flights,
    )
    return b'%b,"timeline":%b}' % (chosen[:-1], _encode(told))
