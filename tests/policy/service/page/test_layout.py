"""The page fits, can be used without a mouse, and brings nothing along from elsewhere."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

OVERFLOW = """() => [document.documentElement.scrollWidth, [...document.querySelectorAll("body *")]
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 0.5 && each.offsetParent !== null
                      && !each.closest(".scroll, pre, dialog, .hidden"))
    .map((each) => each.tagName + "." + each.className)]"""

REDRAWN = """() => [...document.querySelectorAll(".plot")].every((plot) =>
    plot.querySelector("svg").viewBox.baseVal.width === plot.clientWidth)"""

# Contrast of every text with what is behind it, by WCAG's formula; charts' words stand on the card.
CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (each) => {
    for (let node = each; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim() !== "");
    if (!own || each.closest("button:disabled, option, script, noscript")) continue;
    if (each.getClientRects().length === 0) continue;
    const style = getComputedStyle(each);
    const ink = parse(each instanceof SVGElement ? style.fill : style.color);
    const [one, other] = [light(ink), light(behind(each))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < 4.5) low.push([each.tagName, each.id || each.getAttribute("class"), ratio]);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(server, visit, scheme):
    seen = visit(server.port, width=375, color_scheme=scheme)
    seen.page.locator("#ask-button").click()
    seen.wait_for("#answer-path", re.compile(r"\w"))
    seen.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    seen.to_live()
    for width in (375, 600, 768, 1024, 1440, 2560):
        seen.page.set_viewport_size({"width": width, "height": 900})
        seen.page.wait_for_function(REDRAWN)
        across, over = seen.page.evaluate(OVERFLOW)
        assert over == [], width
        assert across == width
    assert seen.page.evaluate(CONTRAST) == []


def test_everything_is_named_and_every_chart_has_words(server, visit):
    seen = visit(server.port)
    page = seen.page
    page.locator("#ask-button").click()
    seen.wait_for("#answer-path", re.compile(r"\w"))
    seen.to_live()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select")].filter((each) => each.labels.length !== 1
            || each.labels[0].textContent.trim() === "").map((each) => each.outerHTML)"""
    )
    assert unnamed == []
    assert page.evaluate(
        "[...document.querySelectorAll('button')].every((each) => each.textContent.trim() !== '')"
    )
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    charts = page.locator("svg[role=img]")
    assert charts.count() == 5
    for chart in charts.all():
        assert len(chart.get_attribute("aria-label")) > 40
        titles = chart.locator(".title").all_text_contents()
        # Every axis has its title, with the unit.
        assert all(
            re.search(r"tokens|ms|µs|, s$|GB/s|per second|seconds ago", title) for title in titles if title
        )
        assert any(titles)


def test_without_a_mouse(server, visit):
    seen = visit(server.port)
    page = seen.page
    seen.page.locator("#c-charts[aria-busy=false]").wait_for()
    page.evaluate("document.body.focus()")
    reached: list[str] = []
    for _ in range(80):
        page.keyboard.press("Tab")
        here = page.evaluate(
            """() => { const each = document.activeElement; const style = getComputedStyle(each);
                if (each === document.body) return null;
                return [each.id || each.dataset.pointer || each.getAttribute("aria-label") || each.textContent.trim(),
                        style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0]; }"""
        )
        if here is None:
            break
        assert here[1], f"no visible focus on {here[0]}"
        reached.append(here[0])
        if here[0] == "c-rate":
            before = seen.text("#c-rate-readout")
            page.keyboard.press("ArrowRight")
            assert seen.text("#c-rate-readout") != before
        if here[0] == "ask-button":
            page.keyboard.press("Enter")
            seen.wait_for("#answer-path", re.compile(r"\w"))
    controls = {"c-deployment", "c-tier", "c-queue", "c-busy", "c-resident", "c-longest", "c-ask", "hit-add"}
    assert controls | {"l-deployment"} <= set(reached)
    charts = ("TTFT against", "Break-even", "Layer timeline", "Decisions per", "Predicted against")
    assert sum(name.startswith(charts) for name in reached) == 5, reached


def test_motion_is_only_where_it_is_wanted(server, visit):
    seen = visit(server.port, reduced_motion="reduce")
    assert seen.page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    moving = seen.page.evaluate("document.getAnimations().length")
    assert moving == 0


def test_nothing_is_laid_out_anew_while_it_opens(server, visit):
    seen = visit(server.port)
    seen.page.locator("#c-charts[aria-busy=false]").wait_for()
    seen.page.wait_for_timeout(300)
    shifts = seen.page.evaluate("window.seen.shifts")
    assert sum(each["value"] for each in shifts) < 0.02, shifts


def test_its_files_keep_to_the_policy():
    folder = files("kvlane.policy.service") / "page"
    for each in folder.iterdir():
        text = each.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), each
        assert not re.search(r"setAttribute\(\s*[\"']style|\sstyle=|<script>|\son\w+=[\"']", text), each
        assert not re.search(r"localStorage|sessionStorage|document\.cookie|indexedDB", text), each
        elsewhere = re.findall(r"https?://[^\s\"']+", text)
        assert [url for url in elsewhere if url != "http://www.w3.org/2000/svg"] == [], each
        assert len(text.splitlines()) <= 400, each
