"""The page's shell: public, from memory, with headers that let nothing from elsewhere in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlane.policy import service

FOLDER = Path(str(service.__file__)).parent / "page"
NAMES = sorted(each.name for each in FOLDER.iterdir())


def paths() -> list[str]:
    return ["/", *(f"/page/{name}" for name in NAMES)]


def file_of(path: str) -> bytes:
    return (FOLDER / (path.removeprefix("/page/") if path != "/" else "index.html")).read_bytes()


@pytest.mark.parametrize("path", paths())
def test_every_file_is_served_as_it_lies_there(server: Any, path: str) -> None:
    answer = server.ask("GET", path)
    assert (answer.status, answer.raw) == (200, file_of(path))
    kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    suffix = "html" if path == "/" else path.rpartition(".")[2]
    assert answer.headers["Content-Type"].partition(";")[0] == kinds[suffix]


@pytest.mark.parametrize("path", paths())
def test_nothing_from_elsewhere_may_run_or_be_shown(server: Any, path: str) -> None:
    headers = server.ask("GET", path).headers
    allowed = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    own = {"script-src", "style-src", "img-src", "connect-src"}
    assert {name: value for name, value in allowed.items() if name in own} == dict.fromkeys(own, "'self'")
    assert set(allowed) - own == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert {allowed[name] for name in set(allowed) - own} == {"'none'"}
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-cache"


def test_head_says_the_length_and_sends_nothing(server: Any) -> None:
    answer = server.ask("HEAD", "/")
    assert (answer.status, answer.raw) == (200, b"")
    assert int(answer.headers["Content-Length"]) == len(file_of("/"))


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_has_it_is_told_so(server: Any, form: str, method: str) -> None:
    first = server.ask("GET", "/")
    again = server.ask(method, "/", headers={"If-None-Match": form.format(first.headers["ETag"])})
    assert (again.status, again.raw) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    assert "Content-Length" not in again.headers


@pytest.mark.parametrize("form", ['"other"', "", "W/", "nonsense, , W"])
def test_who_has_another_version_is_given_this_one(server: Any, form: str) -> None:
    answer = server.ask("GET", "/", headers={"If-None-Match": form})
    assert (answer.status, answer.raw) == (200, file_of("/"))


def test_a_query_changes_nothing(server: Any) -> None:
    assert server.ask("GET", "/?deployment=chat").raw == file_of("/")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_takes_no_other_method(server: Any, method: str) -> None:
    answer = server.ask(method, "/")
    assert (answer.status, answer.body["code"]) == (405, "method_not_allowed")
    assert answer.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/nothing.js",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/..%2fapp.py",
        "/index.html",
    ],
)
def test_there_is_nothing_else(server: Any, path: str) -> None:
    answer = server.ask("GET", path)
    assert (answer.status, answer.body["code"]) == (404, "not_found")


def test_the_shell_is_public_and_asked_for_by_a_known_name_only(serve: Callable[..., Any]) -> None:
    served = serve({}, environment={"KVLANE_TOKEN": "s3cret"})
    assert served.ask("GET", "/").status == 200
    assert served.ask("GET", "/v1/deployments").status == 401
    assert served.ask("GET", "/", headers={"Host": "elsewhere.example"}).status == 421


def test_a_connection_stays_for_the_next_request(server: Any) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        for method, status in (("GET", 200), ("HEAD", 200), ("GET", 304), ("GET", 200)):
            headers = {"If-None-Match": "*"} if status == 304 else {}
            connection.request(method, "/", headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == status
            assert (len(body) > 0) == (method == "GET" and status == 200)
            assert not answer.will_close
    finally:
        connection.close()
