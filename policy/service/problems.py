"""Refusals as RFC 9457 problems: a stable `code`, and a JSON pointer to the field at fault."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvlane.policy.errors import InputError

CONTENT_TYPE = "application/problem+json"

# Every code the endpoint answers with, its status and what it is called; codes are part of /v1 and never change.
CODES: dict[str, tuple[int, str]] = {
    "malformed_json": (400, "The body is not JSON"),
    "malformed_request": (400, "The request is not HTTP as this endpoint speaks it"),
    "unauthorized": (401, "A token is needed"),
    "forbidden": (403, "This is not for the caller"),
    "not_found": (404, "There is no such resource"),
    "unknown_deployment": (404, "There is no such deployment"),
    "unknown_decision": (404, "There is no such decision, or it has expired"),
    "method_not_allowed": (405, "The resource does not take this method"),
    "request_id_conflict": (409, "The request id was used with another body"),
    "body_too_large": (413, "The body is larger than the limit"),
    "unsupported_media_type": (415, "The body is not declared to be plain JSON"),
    "misdirected_host": (421, "The Host is none this endpoint is known by"),
    "invalid_value": (422, "A value is not one that can be answered"),
    "unknown_field": (422, "A field is not known"),
    "too_many_requests": (429, "More is asked than can be answered now"),
    "internal_error": (500, "The endpoint failed"),
    "not_ready": (503, "The endpoint is starting or stopping"),
}

Path = tuple[str | int, ...]


class ProblemError(Exception):
    """A refusal: its code, a sentence about this case, the field, and headers that go with it."""

    def __init__(
        self,
        code: str,
        detail: str,
        pointer: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.status, self.title = CODES[code]
        self.detail = detail
        self.pointer = pointer
        self.headers = headers or {}

    def body(self) -> bytes:
        """The problem as JSON; `pointer` only where a field is at fault."""
        fields: dict[str, Any] = {
            "type": "about:blank",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
        }
        if self.pointer is not None:
            fields["pointer"] = self.pointer
        return msgspec.json.encode(fields)


def pointer(*path: str | int) -> str:
    """The JSON pointer (RFC 6901) to a member."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def of_input_error(error: InputError, fields: dict[str, Path], base: Path = ()) -> ProblemError:
    """The policy's own refusal, its field looked up as a member of the body.

    `fields` says where a field stands whose name in the body is another; the longest known beginning counts.
    """
    parts = error.field.split(".")
    for count in range(len(parts), 0, -1):
        found = fields.get(".".join(parts[:count]))
        if found is not None:
            return ProblemError("invalid_value", _sentence(error), pointer(*base, *found))
    return ProblemError("invalid_value", _sentence(error), pointer(*base, *parts))


def _sentence(error: InputError) -> str:
    return f"{error.problem} (expected {error.expected})" if error.expected else error.problem


_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+)\]|(\[\.\.\.\])")
_MEMBER = re.compile(r"(?:unknown|required) field `([^`]*)`")
_MOST_KEYS = 64


def of_decode_error(error: Exception, raw: bytes, kind: Any) -> ProblemError:
    """What a decoder of `kind` found wrong with the body `raw`."""
    if not isinstance(error, msgspec.ValidationError):
        text = str(error) if isinstance(error, msgspec.DecodeError) else type(error).__name__
        return ProblemError("malformed_json", _one_line(text))
    text, _, at = str(error).rpartition(" - at `")
    if not text:
        text, at = str(error), ""
    at = at.rstrip("`")
    path = _resolve(raw, kind, at.removeprefix("$"), str(error))
    member = _MEMBER.search(text)
    if member is not None:
        path = (*path, member[1])
    code = "unknown_field" if "unknown field" in text else "invalid_value"
    return ProblemError(code, _one_line(text), pointer(*path))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _resolve(raw: bytes, kind: Any, at: str, said: str) -> Path:
    """The path msgspec names, with the key it leaves out of a mapping found by trying the mapping's keys.

    Only what leads to the fault is kept for that, so that a large body costs no more than its decoding.
    """
    path: list[str | int] = []
    steps = list(_STEP.finditer(at))
    if not any(step[3] for step in steps):
        return tuple(int(step[2]) if step[2] else step[1] for step in steps)
    said = _fault(said)
    try:
        whole = node = msgspec.json.decode(raw)
        for step in steps:
            key: Any = int(step[2]) if step[2] else step[1]
            if step[3]:
                key = _faulty_key(whole, node, kind, said)
                if key is None:
                    return tuple(path)
            path.append(key)
            found = node[key]
            if isinstance(node, list):
                node[:] = [found]
            else:
                node.clear()
                node[key] = found
            node = found
    except (msgspec.DecodeError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        pass
    return tuple(path)


def _fault(said: str) -> str:
    """What is said to be wrong, without where: places in a list change as others are left out."""
    return said.rpartition(" - at `")[0]


def _faulty_key(whole: Any, node: dict[str, Any], kind: Any, said: str) -> str | None:
    """The key of `node` with which alone `whole` has the same fault; leaves `node` to be overwritten."""
    everything = dict(node)
    for key in list(everything)[:_MOST_KEYS]:
        node.clear()
        node[key] = everything[key]
        try:
            msgspec.convert(whole, kind)
        except msgspec.ValidationError as error:
            if _fault(str(error)) == said:
                return key
    return None
