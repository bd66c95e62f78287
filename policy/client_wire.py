"""What the endpoint's clients say and hear, whatever carries it: requests as bytes, answers out of bytes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.plan import Path

T = TypeVar("T")

URL = "http://127.0.0.1:8780"
DEADLINE_MS = 50.0

# Why there is no answer: it came too late; the service could not be reached, or hung up; it has too much to do (429);
# it refused what was asked (another 4xx); it failed (any other status); what came was no answer.
Failure = Literal["timeout", "unreachable", "busy", "refused", "failed", "garbage"]
FAILURES: tuple[Failure, ...] = get_args(Failure)

# An answer of more bytes is none.
MOST_BYTES = 16 << 20
TOO_LONG = f"the answer is longer than {MOST_BYTES:,} bytes"
# Half of what the service leaves a connection idle for, so that it is not hung up on as it is used again.
IDLE_S = 30.0


class NoAnswerError(Exception):
    """There is no answer: why, as a kind to count and in words."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure: Failure = failure
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do about one request. None stands for what was not said: no cap in `kv_transfer_params`, for one.

    With a `failure` it is the client's default, and `detail` says what happened. `raw` is the service's own answer as
    JSON, `body` the same decoded.
    """

    path: Path | None = None
    load_tokens: int | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    ttft_s: float | None = None
    decision_id: str | None = None
    failure: Failure | None = None
    detail: str = ""
    raw: bytes = field(default=b"", repr=False)

    @property
    def body(self) -> dict[str, Any]:
        """All that the service answered, `candidates` among it; empty where it did not."""
        return msgspec.json.decode(self.raw, type=dict[str, Any]) if self.raw else {}


# The engine does what it does without a service: nothing caps what it loads.
UNADVISED = Answer()
RECOMPUTE = Answer(path="recompute", load_tokens=0, kv_transfer_params={"max_load_tokens": 0})


@dataclass(frozen=True, slots=True)
class Columns:
    """What to do about many requests: one row for each. With a `failure` every row is the client's default."""

    path: Sequence[Path | None]
    load_tokens: Sequence[int | None]
    failure: Failure | None = None
    detail: str = ""
    raw: bytes = field(default=b"", repr=False)

    @property
    def body(self) -> dict[str, Any]:
        """All columns that the service answered; empty where it did not."""
        return msgspec.json.decode(self.raw, type=dict[str, Any]) if self.raw else {}


@dataclass(frozen=True, slots=True)
class Observed:
    """What became of records: how many the service took, and which it did not. With a `failure` none is known to be
    taken; an `observation_id` makes it safe to send them again."""

    accepted: int = 0
    refused: Sequence[Mapping[str, Any]] = ()
    failure: Failure | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request as it goes over the wire, and what is made of status and body that come back.

    `heard` raises `NoAnswerError`, from which `instead` makes what stands in. `again` says that it may be sent twice.
    """

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    again: bool
    heard: Callable[[int, bytes], T]
    instead: Callable[[NoAnswerError], T]


class _Decision(msgspec.Struct):
    decision_id: str
    path: Path
    load_tokens: Annotated[int, msgspec.Meta(ge=0)]
    ttft_s: float | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Columns(msgspec.Struct):
    path: list[Path]
    load_tokens: list[int]


class _Observed(msgspec.Struct):
    accepted: int
    refused: list[dict[str, Any]] = []


class _Problem(msgspec.Struct):
    code: str = ""
    detail: str = ""
    pointer: str = ""


class Wire:
    """Where the service is, how to ask it, and how often it did not answer. Safe to share between threads.

    Raises `InputError` naming `url` or `deadline_ms`.
    """

    def __init__(
        self,
        url: str,
        deadline_ms: float,
        default: Answer,
        token: str | None,
        observe_token: str | None,
    ) -> None:
        self.url = _parse(url)
        self.deadline_s = seconds(deadline_ms)
        self.default = default
        ask = token if token is not None else os.environ.get("KVLANE_TOKEN")
        observe = observe_token if observe_token is not None else os.environ.get("KVLANE_OBSERVE_TOKEN")
        self._ask = _headers(ask)
        self._observe = _headers(observe or ask)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._prefix = self.url.path.rstrip("/")

    @property
    def counts(self) -> dict[str, int]:
        """Calls so far: `answered`, and by the kind of failure those that were not."""
        with self._lock:
            return {name: self._counts[name] for name in ("answered", *FAILURES)}

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def decide(self, request: Mapping[str, Any]) -> Call[Answer]:
        def instead(error: NoAnswerError) -> Answer:
            return replace(self.default, failure=error.failure, detail=error.detail)

        again = not request.get("reserve") or "request_id" in request
        return self._post("/v1/decide", request, _decided, instead, again=again)

    def decide_batch(self, columns: Mapping[str, Any]) -> Call[Columns]:
        prompts = columns.get("prompt_tokens")
        if not isinstance(prompts, Sequence) or isinstance(prompts, (str, bytes)):
            raise InputError("prompt_tokens", f"is {str(prompts)[:40]}", "a list of numbers")
        rows = len(prompts)

        def heard(status: int, raw: bytes) -> Columns:
            found = _decode(status, raw, _Columns)
            if not len(found.path) == len(found.load_tokens) == rows:
                raise NoAnswerError("garbage", f"the columns have {len(found.path)} rows, not {rows}")
            return Columns(found.path, found.load_tokens, raw=raw)

        def instead(error: NoAnswerError) -> Columns:
            default = self.default
            return Columns([default.path] * rows, [default.load_tokens] * rows, error.failure, error.detail)

        return self._post("/v1/decide/batch", columns, heard, instead)

    def observe(self, records: Sequence[Mapping[str, Any]]) -> Call[Observed]:
        def instead(error: NoAnswerError) -> Observed:
            return Observed(failure=error.failure, detail=error.detail)

        call = self._post("/v1/observe", records, _observed, instead)
        return replace(call, headers=self._observe)

    def release(self, decision_id: str) -> Call[bool]:
        path = f"{self._prefix}/v1/decisions/{quote(decision_id, safe='')}"
        return Call("DELETE", path, None, self._ask, True, _released, lambda _: False)

    def _post(
        self,
        path: str,
        value: Any,
        heard: Callable[[int, bytes], T],
        instead: Callable[[NoAnswerError], T],
        *,
        again: bool = True,
    ) -> Call[T]:
        body = msgspec.json.encode(value)
        return Call("POST", self._prefix + path, body, self._ask, again, heard, instead)


def _decided(status: int, raw: bytes) -> Answer:
    found = _decode(status, raw, _Decision)
    return Answer(
        found.path, found.load_tokens, found.kv_transfer_params, found.ttft_s, found.decision_id, raw=raw
    )


def _observed(status: int, raw: bytes) -> Observed:
    found = _decode(status, raw, _Observed)
    return Observed(found.accepted, found.refused)


def _released(status: int, raw: bytes) -> bool:
    if not 200 <= status < 300 and status != 404:
        raise _problem(status, raw)
    return status != 404


def seconds(deadline_ms: float) -> float:
    """A deadline in seconds; raises `InputError` naming `deadline_ms`."""
    if (
        isinstance(deadline_ms, bool)
        or not isinstance(deadline_ms, (int, float))
        or not 0 < deadline_ms <= 1e8
    ):
        raise InputError("deadline_ms", f"is {str(deadline_ms)[:40]}", "milliseconds above zero")
    return deadline_ms / 1e3


def _decode(status: int, raw: bytes, kind: Any) -> Any:
    if not 200 <= status < 300:
        raise _problem(status, raw)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise NoAnswerError("garbage", str(error)[:200]) from None


def _problem(status: int, raw: bytes) -> NoAnswerError:
    try:
        problem = msgspec.json.decode(raw, type=_Problem)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        problem = _Problem()
    said = ": ".join(part[:200] for part in (problem.code, problem.pointer, problem.detail) if part)
    failure: Failure = "busy" if status == 429 else "refused" if 400 <= status < 500 else "failed"
    return NoAnswerError(failure, f"{status} {said}".strip())


def _headers(token: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token:
        if any(letter <= " " or letter > "~" for letter in token):
            raise InputError("token", "holds what a header cannot", "visible ASCII letters, no spaces")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        known = (
            parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        known = False
    if not known or parts.username or parts.query or parts.fragment:
        raise InputError("url", f"is {url[:100]!r}", "http://host:port or https://host:port")
    return parts
