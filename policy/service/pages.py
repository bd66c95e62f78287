"""The page for people: its few files, read once and answered from memory.

The shell is public, as it says nothing: what it shows it asks for, with the token where there is one. Nothing that it
runs or shows may come from elsewhere, which its own headers make the browser see to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

from aiohttp import web

from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.wire import Heads, Reply, fields

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_METHODS = ("GET", "HEAD")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    # Kept, and asked about each time: after an upgrade nobody runs an old script against the new endpoint.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content_type: str
    content: bytes
    tag: str
    extra: bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> _File:
        tag = f'"{sha256(content).hexdigest()[:32]}"'
        kind = _TYPES[name[name.rindex(".") :]]
        return cls(kind, content, tag, fields({**_HEADERS, "ETag": tag}))


class Pages:
    """Every file of the page by its path; raises `OSError` where the installation lacks them."""

    def __init__(self) -> None:
        self._files: Mapping[str, _File] = _read()

    def reply(self, request: web.BaseRequest, heads: Heads, *, keep_alive: bool) -> Reply | None:
        """The answer where the path is one of the page's, else None; raises `ProblemError` for other methods."""
        found = self._files.get(request.raw_path.partition("?")[0])
        if found is None:
            return None
        if request.method not in _METHODS:
            allowed = ", ".join(_METHODS)
            raise ProblemError(
                "method_not_allowed",
                f"it takes {allowed}, not {request.method[:20]}",
                headers={"Allow": allowed},
            )
        if _known(request.headers.get("If-None-Match", ""), found.tag):
            return Reply(heads.head(304, found.content_type), None, found.extra, keep_alive=keep_alive)
        head = heads.head(200, found.content_type)
        return Reply(head, found.content, found.extra, keep_alive=keep_alive)


def _read() -> dict[str, _File]:
    folder = files("kvlane.policy.service") / "page"
    found = {
        f"/page/{each.name}": _File.of(each.name, each.read_bytes())
        for each in folder.iterdir()
        if each.name.endswith(tuple(_TYPES))
    }
    return {"/": found["/page/index.html"], **found}


def _known(listed: str, tag: str) -> bool:
    """Whether the client has that version (RFC 9110, 13.1.2): tags are compared weakly."""
    given = [each.strip().removeprefix("W/") for each in listed.split(",")]
    return tag in given or given == ["*"]
