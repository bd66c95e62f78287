"""The page in a real headless Chromium, beside a real `kvlane serve`; what no test of it may ever see is looked for in
each: errors on the console, violations of the content security policy, requests to another host."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# Kept by the browser itself, so that nothing of the page's can be forgotten in a test.
WATCH = """
window.seen = { violations: [], shifts: [] };
document.addEventListener("securitypolicyviolation", (event) => window.seen.violations.push(event.violatedDirective));
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (entry.hadRecentInput) continue;
    const moved = entry.sources.map(({ node }) => node && (node.id || node.parentElement?.id || node.nodeName));
    window.seen.shifts.push({ value: entry.value, moved });
  }
}).observe({ type: "layout-shift", buffered: true });
"""

# A browser says on the console that an answer was a refusal, or that none came; no page can keep it from that.
_LOAD = re.compile(r"Failed to load resource: (?:the server responded with a status of (\d+)|net::(ERR_\w+))")


@dataclass
class Visit:
    """One open page, and all that it said and asked."""

    page: Page
    origin: str
    expected: set[str] = field(default_factory=set)
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def expect(self, *outcomes: str) -> None:
        """Answers that the test provokes, by status or by Chromium's name of the failure; all others are errors."""
        self.expected.update(outcomes)

    def text(self, selector: str) -> str:
        """What is read there, spaces as single ones."""
        return " ".join(self.page.locator(selector).inner_text().split())

    def wait_for(self, selector: str, words: str | re.Pattern[str]) -> None:
        """Waits until these words stand there."""
        self.page.locator(selector).filter(has_text=words).first.wait_for()

    def slide(self, selector: str, value: float) -> None:
        """Moves a slider as a hand does: its value, and that it was put in."""
        self.page.locator(selector).fill(str(value))

    def to_live(self) -> None:
        """Brings the live part onto the screen, and waits for its first numbers."""
        self.page.evaluate("document.querySelector('#live').scrollIntoView({ behavior: 'instant' })")
        self.page.locator("#l-calibrations tr").first.wait_for()

    def calls(self, path: str) -> int:
        """How often that path was asked for."""
        return sum(urlsplit(url).path == path for url in self.asked)

    def check(self) -> None:
        """Nothing on the console but provoked answers, no violation, nobody else asked."""
        wrong = [line for line in self.said if not self._provoked(line)]
        assert wrong == []
        elsewhere = [url for url in self.asked if not url.startswith(f"{self.origin}/")]
        assert elsewhere == []
        if not self.page.is_closed():
            assert self.page.evaluate("window.seen.violations") == []

    def _provoked(self, line: str) -> bool:
        found = _LOAD.search(line)
        return found is not None and (found[1] or found[2]) in self.expected


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium. For a module only: while it runs, its thread has a running event loop."""
    path = os.environ.get("KVLANE_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium: install Debian's chromium, or name one in KVLANE_CHROMIUM")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield chromium
        chromium.close()


Visiting = Callable[..., Visit]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visiting]:
    """Opens a served page; everything opened is looked over at the end."""
    contexts: list[BrowserContext] = []
    visits: list[Visit] = []

    def go(
        port: int, *, width: int = 1280, height: int = 900, ready: str = "#serves", **options: Any
    ) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(10_000)
        context.add_init_script(WATCH)
        contexts.append(context)
        opened = Visit(context.new_page(), f"http://127.0.0.1:{port}")
        visits.append(opened)

        def note(message: ConsoleMessage) -> None:
            if message.type not in ("log", "debug", "info"):
                opened.said.append(f"{message.type}: {message.text}")

        opened.page.on("console", note)
        opened.page.on("pageerror", lambda error: opened.said.append(f"uncaught: {error}"))
        context.on("request", lambda request: opened.asked.append(request.url))
        opened.page.goto(opened.origin + "/")
        if ready:
            opened.wait_for(ready, re.compile(r"\w"))
        return opened

    yield go
    try:
        for opened in visits:
            opened.check()
    finally:
        for context in contexts:
            context.close()
