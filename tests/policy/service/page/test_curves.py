"""The crossover chart says what the API says, and follows its sliders."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Response, Route

CONFIG = {
    "deployments": [
        {
            "name": "chat",
            "model": "llama-3.1-8b",
            "machine": "h100-sxm",
            "links": {"pcie5-x16": {"rate": "5 GB/s"}},
        },
        {"name": "profile", "model": "llama-3.1-8b", "machine": "h100-sxm", "executor": "layered"},
        {"name": "hybrid", "model": "nemotron-3-nano-30b-a3b", "machine": "h100-sxm", "executor": "layered"},
    ]
}

# Where the two lines cross, read off the drawing: pixels of both paths, and the mark's.
CROSSING = """() => {
  const points = (path) => [...document.querySelector(`#c-times .line.${path}`).getAttribute("d")
    .matchAll(/[ML]([\\d.]+) ([\\d.]+)/g)].map(([, x, y]) => [Number(x), Number(y)]);
  const [load, recompute] = [points("load"), points("recompute")];
  const below = load.findIndex(([, y], index) => y > recompute[index][1]);
  const mark = document.querySelector("#c-times .mark");
  return { from: load[below - 1][0], to: load[below][0], mark: Number(mark.getAttribute("x1")) };
}"""


@pytest.fixture(scope="module")
def served(start_server, write_toml, tmp_path_factory):
    file = tmp_path_factory.mktemp("serve") / "serve.toml"
    write_toml(file, CONFIG)
    running = start_server("--config", str(file))
    yield running
    assert running.stop() == 0


def tokens(text: str) -> int:
    found = re.search(r"([\d,]+) tokens?", text)
    assert found, text
    return int(found[1].replace(",", ""))


def shown(seen) -> None:
    """Waits until what is shown is of what the sliders say: nothing is on its way."""
    seen.page.locator("#c-charts[aria-busy=false]").wait_for()


def test_the_crossover_is_the_apis_and_where_the_lines_cross(served, visit):
    seen = visit(served.port)
    shown(seen)
    decided = served.decide(prompt_tokens=12370, hits=[{"tier": "host", "tokens": 12368}], deployment="chat")
    expected = decided["crossover_tokens"]
    assert expected is not None
    assert tokens(seen.text("#c-crossover")) == expected
    label = seen.page.locator("#c-times .words.strong").text_content()
    assert label == f"crossover {expected:,} tokens"
    assert f"{expected:,} tokens" in seen.page.locator("#c-times svg").get_attribute("aria-label")
    drawn = seen.page.evaluate(CROSSING)
    assert drawn["from"] - 0.5 <= drawn["mark"] <= drawn["to"] + 0.5


SLIDERS = [
    ("#c-rate", -20, "3.15 GB/s"),
    ("#c-queue", 60, "2.42 GB"),
    ("#c-busy", 80, "1.56 s"),
    ("#c-resident", 4096, "4,096 tokens"),
]


def test_a_slider_changes_label_and_answer(served, visit):
    seen = visit(served.port)
    shown(seen)
    for slider, position, readout in SLIDERS:
        line = seen.page.locator("#c-times .line.load").get_attribute("d")
        with seen.page.expect_response("**/v1/curves") as answered:
            seen.slide(slider, position)
            assert seen.text(f"{slider}-readout") == readout
            assert seen.page.locator(slider).get_attribute("aria-valuetext") == readout
        expected = answered.value.json()["crossover_tokens"]
        shown(seen)
        assert seen.page.locator("#c-times .line.load").get_attribute("d") != line, slider
        crossover = seen.text("#c-crossover")
        assert crossover == "none" if expected is None else tokens(crossover) == expected


def test_the_queue_on_the_link_is_the_same_as_in_a_decision(served, visit):
    seen = visit(served.port)
    shown(seen)
    with seen.page.expect_response("**/v1/curves") as answered:
        seen.slide("#c-queue", 50)
    queued = answered.value.request.post_data_json["queued_bytes"]
    assert queued > 0
    shown(seen)
    decided = served.decide(
        prompt_tokens=12370,
        hits=[{"tier": "host", "tokens": 12368}],
        deployment="chat",
        state={"links": {"pcie5-x16": {"queued_bytes": queued}}},
    )
    assert tokens(seen.text("#c-crossover")) == decided["crossover_tokens"]


def test_the_machines_own_rate_is_marked_and_a_step_away(served, visit):
    seen = visit(served.port)
    shown(seen)
    own = seen.page.get_by_role("button", name="the machine's own")
    assert own.is_disabled()
    before = seen.text("#c-crossover")
    seen.slide("#c-rate", 40)
    shown(seen)
    assert seen.text("#c-rate-readout") == "12.6 GB/s"
    own.click()
    assert seen.text("#c-rate-readout") == "5 GB/s, the machine's"
    seen.wait_for("#c-crossover", before)


def test_an_older_answer_never_comes_after_a_newer_one(served, visit):
    seen = visit(served.port)
    shown(seen)
    page = seen.page
    held: list[Route] = []

    def hold(route):
        # The first is held back; whatever comes later is answered at once.
        if held:
            route.continue_()
        else:
            held.append(route)
            page.wait_for_timeout(600)
            route.continue_()

    page.route("**/v1/curves", hold)
    page.evaluate(
        """() => { window.read = []; const shown = document.querySelector("#c-crossover");
            new MutationObserver(() => window.read.push(shown.textContent)).observe(shown, { childList: true }); }"""
    )
    seen.slide("#c-queue", 30)
    page.wait_for_timeout(200)

    def is_last(got: Response) -> bool:
        sent = got.request.post_data_json
        return "/v1/curves" in got.url and sent is not None and sent["queued_bytes"] > 1e10

    with page.expect_response(is_last) as last:
        seen.slide("#c-queue", 78)
    newest = last.value.json()["crossover_tokens"]
    seen.wait_for("#c-crossover", f"{newest:,}")
    page.wait_for_timeout(300)
    assert tokens(seen.text("#c-crossover")) == newest
    assert tokens(page.evaluate("window.read.at(-1)")) == newest


def test_a_busy_service_is_asked_again_after_the_time_it_names(served, visit):
    seen = visit(served.port)
    shown(seen)
    seen.expect("429")
    refusals: list[Route] = []

    def refuse_once(route):
        if refusals:
            route.continue_()
            return
        refusals.append(route)
        route.fulfill(
            status=429,
            headers={"Retry-After": "1", "Content-Type": "application/problem+json"},
            body='{"type":"about:blank","title":"busy","status":429,"code":"too_many_requests","detail":"busy"}',
        )

    seen.page.route("**/v1/curves", refuse_once)
    before = seen.text("#c-crossover")
    seen.slide("#c-queue", 60)
    seen.wait_for("#c-note", "The service is busy; asking again in 1.00 s.")
    seen.page.wait_for_function(
        "(before) => document.querySelector('#c-crossover').textContent !== before", arg=before
    )
    assert len(refusals) == 1


def test_the_chart_is_read_by_arrow_keys_and_as_a_table(served, visit):
    seen = visit(served.port)
    shown(seen)
    page = seen.page
    page.locator("#c-times svg").focus()
    page.keyboard.press("End")
    assert seen.text("#c-readout").startswith("32,768 tokens: recompute ")
    # The chart below is read at the same place.
    assert seen.text("#c-rates-readout").startswith("32,768 tokens: breaks even at ")
    page.keyboard.press("ArrowLeft")
    second = tokens(seen.text("#c-readout"))
    assert second < 32768
    assert page.locator("#c-times .cursor .dot").count() >= 2
    page.get_by_text("The same as a table").click()
    rows = page.locator("#c-rows tr")
    rows.nth(64).wait_for()
    assert rows.count() == 65
    assert f"{second:,}" in rows.nth(63).inner_text()
    with page.expect_response("**/v1/what-if") as answered:
        page.locator("#c-ask").click()
    sent = answered.value.request.post_data_json
    assert sent["hits"] == [{"tier": "host", "tokens": second, "state": "hit"}]
    assert sent["prompt_tokens"] == second + 2
    seen.wait_for("#answer-path", re.compile(r"\w"))


def test_the_point_of_the_chart_is_answered_as_the_chart_says(served, visit):
    seen = visit(served.port)
    shown(seen)
    with seen.page.expect_response("**/v1/curves") as answered:
        seen.slide("#c-rate", 30)
    curves = answered.value.json()
    shown(seen)
    with seen.page.expect_response("**/v1/what-if") as answered:
        seen.page.locator("#c-ask").click()
    sent, answer = answered.value.request.post_data_json, answered.value.json()
    index = curves["tokens"].index(sent["hits"][0]["tokens"])
    for path in ("recompute", "load"):
        assert answer["estimates"][path]["ttft_s"] == pytest.approx(curves[f"{path}_ttft_s"][index], rel=1e-3)
    assert answer["crossover_tokens"] == curves["crossover_tokens"]


def test_another_deployment_brings_its_tiers_and_its_rate(served, visit):
    seen = visit(served.port)
    shown(seen)
    seen.slide("#c-rate", 40)
    seen.page.locator("#c-deployment").select_option("profile")
    assert seen.text("#c-rate-readout").endswith("GB/s, the machine's")
    shown(seen)
    assert "layered executor" in seen.text("#c-note")
    assert seen.page.locator("#c-times .line.split").get_attribute("d") != ""
    seen.page.locator("#c-tier").select_option("nvme")
    seen.wait_for("#c-note", "Loading from nvme")


def test_a_suffix_that_is_none_is_said_beside_the_chart_that_stays(served, visit):
    seen = visit(served.port)
    seen.expect("422")
    shown(seen)
    line = seen.page.locator("#c-times .line.recompute")
    before = line.get_attribute("d")
    suffix = seen.page.locator("#c-suffix")
    suffix.fill("few")
    seen.wait_for(
        "#c-note", "Suffix, tokens: Expected a whole number. The charts show what was asked before."
    )
    assert suffix.get_attribute("aria-invalid") == "true"
    assert suffix.get_attribute("aria-describedby") == "c-note"
    assert line.get_attribute("d") == before
    suffix.fill("600")
    shown(seen)
    assert suffix.get_attribute("aria-invalid") is None
    assert "600 tokens after the prefix" in seen.text("#c-note")
    assert line.get_attribute("d") != before


def test_a_crossover_beyond_the_chart_is_told_at_its_edge(served, visit):
    seen = visit(served.port)
    shown(seen)
    seen.page.locator("#c-longest").select_option("1024")
    seen.slide("#c-queue", 80)
    shown(seen)
    crossover = tokens(seen.text("#c-crossover"))
    assert crossover > 1024
    assert seen.page.locator("#c-times .mark").count() == 0
    assert seen.page.locator("#c-times .words.strong").text_content() == f"crossover {crossover:,} tokens →"


def test_what_a_recurrent_models_chart_says_is_what_is_answered_about_its_point(served, visit):
    seen = visit(served.port)
    shown(seen)
    seen.page.locator("#c-deployment").select_option("hybrid")
    seen.wait_for("#c-note", "A state checkpoint is taken to be stored where the prefix ends.")
    shown(seen)
    told = re.search(r"load ([\d.]+ ms)", seen.text("#c-readout"))
    assert told
    with seen.page.expect_response("**/v1/what-if") as answered:
        seen.page.locator("#c-ask").click()
    answer = answered.value.json()
    assert f"{answer['estimates']['load']['ttft_s'] * 1e3:.1f} ms" == told[1]
