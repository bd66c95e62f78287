"""The endpoint: which request is answered by what, and what every one of them must pass first."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import time
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import HttpVersion11, web
from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvlane.policy.service import answers, problems, report, types
from kvlane.policy.service.columns import LongBatches, decide_columns
from kvlane.policy.service.crowd import Crowds
from kvlane.policy.service.curves import Charts, curves
from kvlane.policy.service.explore import what_if
from kvlane.policy.service.known import KnownHeads
from kvlane.policy.service.live import Live
from kvlane.policy.service.metrics import count, registry
from kvlane.policy.service.openapi import Operation, document
from kvlane.policy.service.pages import Pages
from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.service import Service
from kvlane.policy.service.wire import JSON, Connection, Heads, Reply, fields

log = logging.getLogger("kvlane.serve")

# W3C trace context: version, trace id, parent id, flags.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 0x01

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode

EXAMPLE = {
    "prompt_tokens": 12370,
    "hits": [{"tier": "host", "tokens": 12368}],
    "state": {"device_busy_s": 0.02, "links": {"pcie5-x16": {"queued_bytes": 1e9}}},
}

DECIDE = Operation(
    "POST",
    "/v1/decide",
    "decide",
    "Say whether to load, recompute or split one request's prefix, on one instance or on the best of several.",
    takes=types.DecideRequest,
    gives=answers.Decision,
    problems=("unknown_deployment", "request_id_conflict"),
    example=EXAMPLE,
)
WHAT_IF = Operation(
    "POST",
    "/v1/what-if",
    "what_if",
    "Say what would be decided, were links as fast as supposed, and how it goes in time; nothing is counted or booked.",
    takes=types.WhatIfRequest,
    gives=answers.WhatIf,
    problems=("unknown_deployment",),
    example={**EXAMPLE, "link_bytes_per_s": {"pcie5-x16": 25e9}},
)
CURVES = Operation(
    "POST",
    "/v1/curves",
    "curves",
    "What load, recompute and split take by prefix length, and where they cross.",
    takes=types.CurvesRequest,
    gives=answers.Curves,
    problems=("unknown_deployment",),
    example={"longest_tokens": 16384, "link_bytes_per_s": 25e9, "device_busy_s": 0.02},
)
BATCH = Operation(
    "POST",
    "/v1/decide/batch",
    "decide_batch",
    "Decide many requests given as columns; nothing is reserved, and devices and links are taken to be idle.",
    takes=types.BatchRequest,
    gives=answers.Decisions,
    problems=("unknown_deployment",),
    example={"prompt_tokens": [12370, 800], "hits": {"host": [12368, 512]}},
)
RELEASE = Operation(
    "DELETE",
    "/v1/decisions/{id}",
    "release",
    "Release what a decision reserved.",
    status=204,
    problems=("unknown_decision",),
)
OBSERVE = Operation(
    "POST",
    "/v1/observe",
    "observe",
    "Say what transfers and prefills took, and what became of decisions.",
    takes=list[types.Observation],
    gives=answers.Observed,
    status=202,
    observes=True,
    problems=("not_ready",),
)
OPERATIONS = (
    DECIDE,
    WHAT_IF,
    CURVES,
    BATCH,
    RELEASE,
    OBSERVE,
    Operation("GET", "/v1/deployments", "deployments", "What is decided for.", gives=answers.Deployments),
    Operation("GET", "/v1/models", "models", "What the models served weigh.", gives=answers.Models),
    Operation("GET", "/v1/machines", "machines", "What the machines served can do.", gives=answers.Machines),
    Operation(
        "GET",
        "/v1/calibration",
        "calibration",
        "What the deployments are decided by, and how old it is.",
        gives=answers.Calibrations,
    ),
    Operation(
        "GET",
        "/v1/live",
        "live",
        "What goes on: decisions, outcomes, link queues, what was refused last.",
        gives=answers.LiveAnswer,
    ),
    Operation("GET", "/healthz", "healthz", "Whether the process answers.", gives=answers.Health, open=True),
    Operation(
        "GET",
        "/readyz",
        "readyz",
        "Whether it should be asked: it is neither starting nor stopping.",
        gives=answers.Health,
        open=True,
        problems=("not_ready",),
    ),
    Operation("GET", "/openapi.json", "openapi", "This document."),
    Operation("GET", "/metrics", "metrics", "Metrics for Prometheus.", content_type=CONTENT_TYPE_LATEST),
)


@dataclass(frozen=True, slots=True)
class _Route:
    """What answers one operation: `act` is given the body and makes the answer's, or begins to."""

    operation: Operation
    act: Callable[[bytes], bytes | Awaitable[bytes] | None]


class Endpoint:
    """Answers requests. `draining` says that connections are not kept any longer."""

    def __init__(self, service: Service, heads: Heads) -> None:
        self.service = service
        self.draining = False
        self._heads = heads
        self._known = KnownHeads()
        self._in_flight = 0
        self._long = LongBatches()
        self._crowds = Crowds()
        self._charts = Charts()
        self._pages = Pages()
        self._live = Live(service)
        self._registry = registry(service.cells, service.gauges)
        self._decide = msgspec.json.Decoder(types.DecideRequest)
        self._what_if = msgspec.json.Decoder(types.WhatIfRequest)
        self._curves = msgspec.json.Decoder(types.CurvesRequest)
        self._batch = msgspec.json.Decoder(types.BatchRequest)
        self._observe = msgspec.json.Decoder(list[types.Observation])
        acts: dict[str, Callable[[bytes], bytes | Awaitable[bytes] | None]] = {
            "decide": self._on_decide,
            "what_if": self._on_what_if,
            "curves": self._on_curves,
            "decide_batch": self._on_batch,
            "observe": self._on_observe,
            "deployments": lambda _: _encode(report.deployments(self._served())),
            "models": lambda _: _encode(report.models(self._served())),
            "machines": lambda _: _encode(report.machines(self._served())),
            "calibration": lambda _: _encode(report.calibrations(service.intake.learners.values(), time())),
            "live": lambda _: self._live.snapshot(),
            "healthz": lambda _: b'{"status":"ok"}',
            "readyz": self._on_ready,
            "openapi": lambda _: _encode(document(OPERATIONS, needs_token=service.gate.needs_token)),
            "metrics": lambda _: generate_latest(self._registry),
        }
        self._routes = {
            (each.method, each.path): _Route(each, acts[each.name])
            for each in OPERATIONS
            if each.name in acts
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to one request, a problem like any other."""
        extra = body = b""
        status, content_type = 200, JSON
        connection = cast(Connection, request.protocol)
        answer: bytes | None
        passed = False
        gate = self.service.gate
        self._in_flight += 1
        try:
            gate.check_host(request)
            route = self._routes.get((request.method, request.raw_path))
            if route is None:
                page = self._pages.reply(request, self._heads, keep_alive=self._stays(request))
                if page is not None:
                    return page
                route = self._find(request)
            operation = route.operation
            if operation.observes:
                gate.check_observer(request)
            elif not operation.open:
                gate.check_token(request)
            if operation.takes is not None:
                if self._in_flight > self.service.settings.limits.in_flight:
                    raise ProblemError(
                        "too_many_requests",
                        "too many requests are on their way",
                        headers={"Retry-After": "1"},
                    )
                body = await self._body(request)
                # It is whole: what it takes from here on is not the client's slowness.
                connection.heard_at = None
            made = route.act(body)
            answer = made if made is None or isinstance(made, bytes) else await made
            status, content_type = operation.status, operation.content_type
            passed = operation is DECIDE
            trace = request.headers.get("traceparent")
            if trace is not None:
                extra = self._trace(trace, operation, answer)
        except ProblemError as problem:
            answer, extra = self._refused(problem)
            status, content_type = problem.status, problems.CONTENT_TYPE
        except ConnectionError:
            # The client has gone before its request was whole: nobody reads this, and nothing is wrong here.
            answer, status, content_type = b"", 400, problems.CONTENT_TYPE
        except Exception:
            log.exception("request failed", extra={"path": request.raw_path[:200]})
            failure = ProblemError("internal_error", "the endpoint failed; its log says why")
            answer, extra = self._refused(failure)
            status, content_type = failure.status, problems.CONTENT_TYPE
        finally:
            self._in_flight -= 1
            connection.heard_at = None
        stays = self._stays(request)
        head = connection.head(body) if stays else None
        # Where the gate was changed while the body came or candidates were weighed, it passed the one before.
        if head is not None and passed and gate is self.service.gate:
            self._known.learn(head, request, gate)
        return Reply(self._heads.head(status, content_type), answer, extra, keep_alive=stays)

    def at_once(self, data: bytes) -> bytes | None:
        """The whole answer, head and all, to a request to decide whose head is known; None for everything else."""
        if self.draining or self._in_flight >= self.service.settings.limits.in_flight:
            return None
        body = self._known.body(data, self.service.gate)
        if body is None:
            return None
        extra = b""
        status, content_type = 200, JSON
        try:
            asked = _decoded(self._decide, body)
            if asked.candidates is not UNSET:
                return None  # these are weighed in turns
            answer = self.service.desk.decide(asked)
        except ProblemError as problem:
            answer, extra = self._refused(problem)
            status, content_type = problem.status, problems.CONTENT_TYPE
        except Exception:
            log.exception("request failed", extra={"path": DECIDE.path})
            failure = ProblemError("internal_error", "the endpoint failed; its log says why")
            answer, extra = self._refused(failure)
            status, content_type = failure.status, problems.CONTENT_TYPE
        head = self._heads.head(status, content_type)
        return b"".join((head, b"%d" % len(answer), extra, b"\r\n\r\n", answer))

    def _stays(self, request: web.BaseRequest) -> bool:
        """Whether the connection stays for another request."""
        return request.keep_alive and request.version >= HttpVersion11 and not self.draining

    def _refused(self, problem: ProblemError) -> tuple[bytes, bytes]:
        """A refusal's body and its header lines."""
        count(self.service.cells.problems, problem.code)
        return problem.body(), fields(problem.headers)

    def _served(self) -> list[Any]:
        return [learner.deployment for learner in self.service.intake.learners.values()]

    def _find(self, request: web.BaseRequest) -> _Route:
        """The route of a path that holds a parameter or a query; raises `ProblemError` where there is none."""
        path = request.raw_path.partition("?")[0]
        if path.startswith("/v1/decisions/") and path.count("/") == 3 and not path.endswith("/"):
            if request.method != "DELETE":
                raise _not_allowed(request.method, ["DELETE"])
            decision_id = path.rpartition("/")[2]
            return _Route(RELEASE, lambda _: self._on_release(decision_id))
        found = self._routes.get((request.method, path))
        if found is not None:
            return found
        allowed = [method for method, known in self._routes if known == path]
        if allowed:
            raise _not_allowed(request.method, allowed)
        raise ProblemError("not_found", f"{path[:200]!r} is none of /openapi.json's paths")

    async def _body(self, request: web.BaseRequest) -> bytes:
        """The body, declared as plain JSON and within the limit; raises `ProblemError`.

        JSON must be declared: a browser asks first before it sends that to another origin, and is told nothing.
        """
        headers = request.headers
        declared = headers.get("Content-Type", "")
        if declared != JSON and declared.partition(";")[0].strip().lower() != JSON:
            raise ProblemError("unsupported_media_type", f"Content-Type is {declared[:80]!r}, not {JSON}")
        content = request.content
        most = self.service.settings.limits.body_bytes
        if content.is_eof():
            body = content.read_nowait()
        else:
            if (request.content_length or 0) > most:
                raise _too_large(most)
            if headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            parts: list[bytes] = []
            size = 0
            try:
                while not content.at_eof():
                    part = await content.readany()
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    parts.append(part)
            except web.RequestPayloadError as error:
                raise ProblemError("malformed_request", f"the body breaks off: {error}") from None
            body = b"".join(parts)
        if len(body) > most:
            raise _too_large(most)
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ProblemError("unsupported_media_type", "a body is taken as it is, not compressed")
        return body

    def _on_decide(self, body: bytes) -> bytes | Awaitable[bytes]:
        asked = _decoded(self._decide, body)
        if asked.candidates is UNSET:
            return self.service.desk.decide(asked)
        return self._crowds.decide(self.service.desk, asked)

    def _on_what_if(self, body: bytes) -> bytes:
        return what_if(self.service.desk, _decoded(self._what_if, body))

    async def _on_curves(self, body: bytes) -> bytes:
        return await curves(self.service.desk, _decoded(self._curves, body), self._charts)

    async def _on_batch(self, body: bytes) -> bytes:
        return await decide_columns(self.service.desk, _decoded(self._batch, body), self._long)

    def _on_observe(self, body: bytes) -> bytes:
        records = _decoded(self._observe, body)
        most = self.service.settings.limits.observations
        if len(records) > most:
            raise ProblemError("invalid_value", f"{len(records)} records are more than {most}", "")
        if self.service.unwritten:
            raise ProblemError(
                "not_ready", "what is observed cannot be written at the moment", headers={"Retry-After": "5"}
            )
        return self.service.intake.observe(records)

    def _on_release(self, decision_id: str) -> None:
        if not self.service.desk.release(decision_id):
            raise ProblemError("unknown_decision", "it has been released, observed, or has expired")

    def _on_ready(self, _: bytes) -> bytes:
        if self.draining:
            raise ProblemError("not_ready", "it is stopping")
        return b'{"status":"ready"}'

    def _trace(self, trace: str, operation: Operation, answer: bytes | None) -> bytes:
        """Logs the ids of a request that is traced, and gives its traceparent back; one that is none is ignored."""
        found = _TRACEPARENT.fullmatch(trace)
        if found is None:
            return b""
        level = logging.INFO if int(found[3], 16) & _SAMPLED else logging.DEBUG
        if log.isEnabledFor(level):
            ids = {"trace_id": found[1], "parent_id": found[2]}
            if operation is DECIDE and answer is not None:
                ids["decision_id"] = msgspec.json.decode(answer, type=_Id).decision_id
            log.log(level, operation.name, extra=ids)
        return fields({"traceparent": trace})


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as the decoder's type; raises `ProblemError`."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise problems.of_decode_error(error, body, decoder.type) from None


class _Id(msgspec.Struct):
    decision_id: str


def _not_allowed(method: str, allowed: list[str]) -> ProblemError:
    listed = ", ".join(allowed)
    return ProblemError(
        "method_not_allowed", f"it takes {listed}, not {method[:20]}", headers={"Allow": listed}
    )


def _too_large(most: int) -> ProblemError:
    return ProblemError("body_too_large", f"the body is larger than {most} bytes")
