"""The OpenAPI 3.1 document, made of the types that decode requests and encode answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from kvlane.policy.service import answers, problems

_COMMON = (
    "malformed_request",
    "misdirected_host",
    "method_not_allowed",
    "too_many_requests",
    "internal_error",
)
_WITH_BODY = (
    "malformed_json",
    "body_too_large",
    "unsupported_media_type",
    "invalid_value",
    "unknown_field",
)
_WITH_TOKEN = ("unauthorized",)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path: what it takes and answers, and the problems of its own."""

    method: str
    path: str
    name: str
    summary: str
    takes: Any = None
    gives: Any = None
    status: int = 200
    content_type: str = "application/json"
    problems: tuple[str, ...] = ()
    open: bool = False
    observes: bool = False
    example: Mapping[str, Any] | None = None


def document(operations: Iterable[Operation], *, needs_token: bool) -> dict[str, Any]:
    """The document; tokens are in it only where they are asked for."""
    operations = list(operations)
    kinds = [kind for each in operations for kind in (each.takes, each.gives) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*kinds, answers.Problem], ref_template="#/components/schemas/{name}"
    )
    by_kind = {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=False)}
    problem = schemas[-1]
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, by_kind, problem, needs_token)
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "kvlane",
            "summary": "Load, recompute or split: where a prompt's KV cache should come from.",
            "description": (
                "Within /v1 fields, codes and paths are only ever added. Times are seconds, sizes bytes. Every"
                " refusal is an RFC 9457 problem with a stable `code`, and a JSON `pointer` to the field at fault."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "version": _version(),
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_token:
        whole["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return whole


def _operation(
    operation: Operation, by_kind: Mapping[str, Any], problem: Any, needs_token: bool
) -> dict[str, Any]:
    guarded = needs_token and not operation.open
    codes = [*_COMMON, *operation.problems]
    if operation.takes is not None:
        codes += _WITH_BODY
    if guarded:
        codes += _WITH_TOKEN
    if operation.observes:
        codes += ["unauthorized", "forbidden"]
    found: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary}
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0]
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if operation.takes is not None:
        content: dict[str, Any] = {"schema": by_kind[repr(operation.takes)]}
        if operation.example is not None:
            content["example"] = operation.example
        found["requestBody"] = {"required": True, "content": {"application/json": content}}
    answer: dict[str, Any] = {"description": operation.summary}
    if operation.status != 204:
        schema = by_kind[repr(operation.gives)] if operation.gives is not None else _schema_of(operation)
        answer["content"] = {operation.content_type: {"schema": schema}}
    responses = {str(operation.status): answer}
    for status, text in sorted(_by_status(codes).items()):
        responses[str(status)] = {
            "description": text,
            "content": {problems.CONTENT_TYPE: {"schema": problem}},
        }
    found["responses"] = responses
    if guarded:
        found["security"] = [{"token": []}]
    return found


def _schema_of(operation: Operation) -> dict[str, Any]:
    return {"type": "object"} if operation.content_type == "application/json" else {"type": "string"}


def _by_status(codes: Iterable[str]) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    for code in dict.fromkeys(codes):
        status, title = problems.CODES[code]
        found.setdefault(status, []).append(f"{title} (`{code}`)")
    return {status: "; ".join(titles) for status, titles in found.items()}


def _version() -> str:
    try:
        return version("kvlane")
    except PackageNotFoundError:
        return "0"
