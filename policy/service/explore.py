"""Answering `/v1/what-if`: a decision asked out of curiosity, worked out by what decides, and put into time."""

from __future__ import annotations

from time import monotonic

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.service.decide import Desk
from kvlane.policy.service.problems import of_input_error
from kvlane.policy.service.types import DecideRequest, WhatIfRequest
from kvlane.policy.timeline import timeline

_encode = msgspec.json.Encoder().encode

_SHARED = tuple(name for name in WhatIfRequest.__struct_fields__ if name != "link_bytes_per_s")


def what_if(desk: Desk, asked: WhatIfRequest) -> bytes:
    """The answer as JSON; raises `ProblemError`."""
    now = monotonic()
    try:
        deployment = desk.deployment(asked.deployment).supposing(asked.link_bytes_per_s)
    except InputError as error:
        raise of_input_error(error, {error.field: (error.field,)}, ("link_bytes_per_s",)) from None
    request = DecideRequest(**{name: getattr(asked, name) for name in _SHARED})
    chosen, found = desk.weigh(request, deployment, now)
    plan = found.plan
    estimate = plan.estimates[plan.path]
    assert estimate is not None
    flights = [(key.tier, desk.ledger.in_flight(key, now)) for key in found.joins]
    told = timeline(
        deployment.in_force.planners[plan.executor],
        found.request,
        estimate,
        own=() if found.joins else plan.load,
        joined=[(tier, flight.remaining_s) for tier, flight in flights if flight is not None],
    )
    return b'%b,"timeline":%b}' % (chosen[:-1], _encode(told))
