"""Answers given under a request id: the same again for the same body, for as long as they hold."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.types import DecideRequest

_MOST_BYTES = 64 << 20

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Promise:
    digest: bytes
    answer: bytes
    until_s: float


class Promises:
    """At most so many answers, and 64 MiB of them; beyond that the oldest go."""

    def __init__(self, most: int, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, _Promise] = OrderedDict()
        self._bytes = 0

    def kept(self, asked: DecideRequest, now: float) -> bytes | None:
        """What was answered under the request's id, if it still holds; raises `ProblemError` for another body."""
        assert asked.request_id is not None
        known = self._kept.get(asked.request_id)
        if known is None:
            return None
        if known.until_s <= now:
            self.forget(asked.request_id)
            return None
        if known.digest != _digest(asked):
            raise ProblemError(
                "request_id_conflict", f"{asked.request_id!r} was used with another body", "/request_id"
            )
        return known.answer

    def give(self, asked: DecideRequest, answer: bytes, until_s: float) -> None:
        """Answers the request's id so until then."""
        assert asked.request_id is not None
        self._kept[asked.request_id] = _Promise(_digest(asked), answer, until_s)
        self._bytes += len(answer)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[1].answer)

    def forget(self, request_id: str) -> None:
        """Frees the id."""
        known = self._kept.pop(request_id, None)
        if known is not None:
            self._bytes -= len(known.answer)


def _digest(asked: DecideRequest) -> bytes:
    """The body's meaning: neither the order of its fields nor its spaces count."""
    return blake2b(_encode(asked), digest_size=16).digest()
