"""What other clients notice of open pages: decisions with and without three pages beside them, in turns.

    python tests/policy/service/page/beside.py [--rounds 5] [--seconds 3] [--pages 3]

A real browser opens the page and goes to its live part, and what it asks for is noted with its time. In every second
round that is asked again, as by three pages that are opened at the same moment and stay, while one client asks for one
decision after the other on one connection, each another one. The browser itself is closed by then: on a machine with
few cores it would take the client's and the service's, which a page in somebody's own browser does not do. At the start
three real pages have the service to themselves, and its CPU time is what they cost. Of several rounds the least
disturbed counts.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
KVLANE = "from kvlane.policy.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Round:
    """Decisions a second, and how long they took, in seconds."""

    rate: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """The rounds without and with pages, and the share of a core that the pages alone cost the service."""

    without: list[Round]
    beside: list[Round]
    core_share: float

    def text(self) -> str:
        lines = ["                 decisions/s        p50        p99"]
        for name, rounds in (("without pages", self.without), ("beside pages", self.beside)):
            best = Round(
                max(each.rate for each in rounds),
                min(each.p50_s for each in rounds),
                min(each.p99_s for each in rounds),
            )
            lines.append(
                f"{name:15} {best.rate:12,.0f} {best.p50_s * 1e3:7.3f} ms {best.p99_s * 1e3:7.3f} ms"
            )
        lines.append(f"the pages alone take {self.core_share:.2%} of a core from the service")
        return "\n".join(lines)


def ask(port: int, seconds: float) -> Round:
    """One decision after the other for that long."""
    took: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun = time.perf_counter()
        number = 0
        while time.perf_counter() - begun < seconds:
            number += 1
            body = b'{"prompt_tokens": %d, "hits": [{"tier": "host", "tokens": %d}]}' % (
                2000 + number % 30_011,
                1900 + number % 29_989,
            )
            sent = time.perf_counter()
            connection.sendall(
                b"POST /v1/decide HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            _read(connection)
            took.append(time.perf_counter() - sent)
    took.sort()
    return Round(len(took) / seconds, took[len(took) // 2], took[len(took) * 99 // 100])


def _read(connection: socket.socket) -> None:
    got = connection.recv(1 << 16)
    head, _, body = got.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"answered {got[:300]!r}")
    left = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0]) - len(body)
    while left > 0:
        left -= len(connection.recv(1 << 16))


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a page, and how long after the first it was made."""

    after_s: float
    method: str
    path: str
    body: str | None


def record(browser: Browser, port: int, seconds: float) -> list[Asked]:
    """What a page asks for when it is opened and stays at its live part."""
    page = browser.new_page()
    found: list[Asked] = []
    begun = time.monotonic()

    def note(request: Request) -> None:
        path = urlsplit(request.url).path
        found.append(Asked(time.monotonic() - begun, request.method, path, request.post_data))

    page.on("request", note)
    _go(page, port)
    page.wait_for_timeout(seconds * 1e3)
    page.close()
    assert any(each.path == "/v1/live" for each in found)
    return found


def replay(port: int, asked: list[Asked], seconds: float) -> None:
    """Asks the same on a connection of its own, and then for the live part once a second, for that long."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    begun = time.monotonic()
    last = max(each.after_s for each in asked)
    more = [Asked(last + number, "GET", "/v1/live", None) for number in range(1, int(seconds) + 1)]
    for each in [*asked, *more]:
        if each.after_s > seconds:
            break
        time.sleep(max(0.0, begun + each.after_s - time.monotonic()))
        headers = {} if each.body is None else {"Content-Type": "application/json"}
        connection.request(each.method, each.path, each.body, headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"{each.path}: {answer.status}")
    connection.close()


def measure(port: int, process: int, browser: Browser, *, rounds: int, seconds: float, pages: int) -> Report:
    """Rounds in turns; clients and pages are processes of their own, so that none waits for another."""
    asked = record(browser, port, max(1.5, seconds))
    with open_pages(browser, port, pages) as first:
        begun, used = time.monotonic(), cpu_s(process)
        first.wait_for_timeout(max(1.5, seconds) * 1e3)
        share = (cpu_s(process) - used) / (time.monotonic() - begun)
    without: list[Round] = []
    beside: list[Round] = []
    fresh = multiprocessing.get_context("spawn")
    with fresh.Pool(1 + pages) as pool:
        pool.map(time.sleep, [0.1] * (1 + pages), 1)  # all of them have started
        for turn in range(2 * rounds):
            opened = [
                pool.apply_async(replay, (port, asked, seconds)) for _ in range(pages if turn % 2 else 0)
            ]
            found = pool.apply(ask, (port, seconds))
            for each in opened:
                each.get()
            (beside if turn % 2 else without).append(found)
    return Report(without, beside, share)


def _go(page: Page, port: int) -> None:
    page.goto(f"http://127.0.0.1:{port}/")
    page.evaluate("document.querySelector('#live').scrollIntoView({ behavior: 'instant' })")


@contextmanager
def open_pages(browser: Browser, port: int, count: int) -> Iterator[Page]:
    """So many real pages at their live part; the first of them, to wait with."""
    pages = [browser.new_page() for _ in range(count)]
    for page in pages:
        _go(page, port)
    try:
        yield pages[0]
    finally:
        for page in pages:
            page.close()


def cpu_s(process: int) -> float:
    """CPU seconds a process has used."""
    parts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; raises `LookupError` where there is none."""
    # Not needed, and slow to come in, in the processes that are clients.
    from playwright.sync_api import sync_playwright

    path = os.environ.get("KVLANE_CHROMIUM") or shutil.which("chromium")
    if path is None:
        raise LookupError("no Chromium: install Debian's chromium, or name one in KVLANE_CHROMIUM")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield launched
        launched.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--pages", type=int, default=3)
    options = parser.parse_args()
    command = [sys.executable, "-c", KVLANE, "serve", "--model", "llama-3.1-8b", "--machine", "h100-sxm"]
    served = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    try:
        assert served.stderr is not None
        port = 0
        for line in served.stderr:
            if "listens on" in line:
                port = int(line.rpartition(":")[2])
                break
        with chromium() as browser:
            report = measure(
                port,
                served.pid,
                browser,
                rounds=options.rounds,
                seconds=options.seconds,
                pages=options.pages,
            )
        print(report.text())
    finally:
        served.terminate()
        served.wait()


if __name__ == "__main__":
    main()
