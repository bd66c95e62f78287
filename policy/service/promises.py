"""Answers given under a request id: the same again for the same body, for as long as they hold."""

from __future__ import annotations

from asyncio import Future, get_running_loop
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.types import DecideRequest

_MOST_BYTES = 64 << 20

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Promise:
    """An answer, to whom asks with a body of that digest, until then."""

    digest: bytes
    answer: bytes
    until_s: float


class Promises:
    """At most so many answers, and 64 MiB of them; beyond that the oldest go."""

    def __init__(self, most: int, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, Promise] = OrderedDict()
        self._bytes = 0
        self._begun: dict[str, tuple[bytes, Future[bytes | None]]] = {}

    def kept(self, asked: DecideRequest, now: float) -> bytes | None:
        """What was answered under the request's id, if it still holds; raises `ProblemError` for another body."""
        assert asked.request_id is not None
        if self._begun and asked.request_id in self._begun:
            _same(self._begun[asked.request_id][0], asked)
        known = self._kept.get(asked.request_id)
        if known is None:
            return None
        if known.until_s <= now:
            self.forget(asked.request_id)
            return None
        _same(known.digest, asked)
        return known.answer

    def begun(self, asked: DecideRequest) -> Future[bytes | None] | None:
        """What is about to be answered under the request's id, while that is worked on; None comes of a failure."""
        assert asked.request_id is not None
        found = self._begun.get(asked.request_id)
        return None if found is None else found[1]

    def begin(self, asked: DecideRequest) -> Future[bytes | None]:
        """From now until `end` the request is worked on; the answer is to be put into what is returned."""
        assert asked.request_id is not None
        done: Future[bytes | None] = get_running_loop().create_future()
        self._begun[asked.request_id] = _digest(asked), done
        return done

    def end(self, asked: DecideRequest) -> None:
        """It is no longer worked on."""
        assert asked.request_id is not None
        del self._begun[asked.request_id]

    def give(self, asked: DecideRequest, answer: bytes, until_s: float) -> None:
        """Answers the request's id so until then."""
        assert asked.request_id is not None
        self.keep(asked.request_id, Promise(_digest(asked), answer, until_s))

    def all(self) -> Iterator[tuple[str, Promise]]:
        """All as they are now, the oldest first, those that are over among them; to be gone through in any thread."""
        return zip(list(self._kept), list(self._kept.values()), strict=True)

    def keep(self, request_id: str, promise: Promise) -> None:
        """Takes one as it is."""
        self.forget(request_id)
        self._kept[request_id] = promise
        self._bytes += len(promise.answer)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[1].answer)

    def withdraw(self, request_id: str, decision_id: str) -> None:
        """Frees the id, if it was that decision that was promised: the id may have been used again since."""
        known = self._kept.get(request_id)
        if known is not None and b'"decision_id":"%b"' % decision_id.encode() in known.answer:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Frees the id."""
        known = self._kept.pop(request_id, None)
        if known is not None:
            self._bytes -= len(known.answer)


def _same(digest: bytes, asked: DecideRequest) -> None:
    if digest != _digest(asked):
        raise ProblemError(
            "request_id_conflict", f"{asked.request_id!r} was used with another body", "/request_id"
        )


def _digest(asked: DecideRequest) -> bytes:
    """The body's meaning: neither the order of its fields nor its spaces count."""
    return blake2b(_encode(asked), digest_size=16).digest()
