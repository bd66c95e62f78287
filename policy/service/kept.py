"""What is kept of decisions over a restart: those whose outcome is still to come, and answers promised to request ids.

They follow the snapshot in small parts. Each is put into words by itself, so that who asks meanwhile waits for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import blake2b
from itertools import islice
from typing import Annotated, TypeVar

import msgspec

from kvlane.policy.service.decide import Desk, Made
from kvlane.policy.service.promises import Promise
from kvlane.policy.service.types import DecideRequest

_MADE_IN_ONE = 250
_PROMISES_IN_ONE = 25

T = TypeVar("T")


class Promised(msgspec.Struct, frozen=True, array_like=True):
    """An answer promised to a request id for `left_s` from when it was kept; `digest` stands for the body."""

    request_id: str
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
    left_s: float
    answer: msgspec.Raw


class Part(msgspec.Struct, frozen=True):
    """Some decisions by their ids, or some answers promised; `asked` stands for what a body could be at the time."""

    made: dict[str, Made] = {}
    promised: list[Promised] = []
    asked: str = ""


def taken(desk: Desk, now: float) -> Iterator[Part]:
    """All there is at `now`, to be gone through in any thread."""
    return _parts(zip(list(desk.made), list(desk.made.values()), strict=True), desk.promises.all(), now)


def restore(desk: Desk, parts: Iterable[Part], now: float, elapsed_s: float) -> None:
    """Remembers what was kept `elapsed_s` before `now`, without what belongs to no deployment or is over."""
    names = {deployment.name for deployment in desk.deployments.values()}
    for part in parts:
        for decision_id, made in part.made.items():
            if made.deployment in names:
                desk.keep(decision_id, made)
        for each in part.promised if part.asked == _asked() else ():
            until_s = now + each.left_s - elapsed_s
            if until_s > now:
                promise = Promise(bytes.fromhex(each.digest), bytes(each.answer), until_s)
                desk.promises.keep(each.request_id, promise)


def _parts(
    made: Iterable[tuple[str, Made]], promises: Iterable[tuple[str, Promise]], now: float
) -> Iterator[Part]:
    for decisions in _so_many(made, _MADE_IN_ONE):
        yield Part(made=dict(decisions))
    holding = (each for each in promises if each[1].until_s > now)
    for held in _so_many(holding, _PROMISES_IN_ONE):
        promised = [
            Promised(request_id, each.digest.hex(), each.until_s - now, msgspec.Raw(each.answer))
            for request_id, each in held
        ]
        yield Part(promised=promised, asked=_asked())


def _so_many(found: Iterable[T], count: int) -> Iterator[list[T]]:
    each = iter(found)
    while some := list(islice(each, count)):
        yield some


@cache
def _asked() -> str:
    """Another version may know more fields of a body, and tell other digests of it."""
    return blake2b(msgspec.json.encode(msgspec.json.schema(DecideRequest)), digest_size=8).hexdigest()
