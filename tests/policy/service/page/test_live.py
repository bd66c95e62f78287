"""The live part under real traffic: numbers that move, words where there are none, a service that goes and comes."""

from __future__ import annotations

import re
import subprocess
from statistics import median

import pytest

SLOW = {
    "name": "chat",
    "model": "llama-3.1-8b",
    "machine": "h100-sxm",
    "links": {"pcie5-x16": {"rate": "5 GB/s"}},
}
DECIDE = {"prompt_tokens": 12370, "hits": [{"tier": "host", "tokens": 12368}], "deployment": "chat"}


UNKNOWN = {
    "type": "request",
    "decision_id": "never-made",
    "path_taken": "recompute",
    "loaded_tokens": 0,
    "ttft_s": 0.1,
}


@pytest.fixture(scope="module")
def served(start_server, write_toml, tmp_path_factory):
    """A server whose loads take long enough to be seen in a queue."""
    file = tmp_path_factory.mktemp("serve") / "serve.toml"
    write_toml(file, {"deployments": [SLOW]})
    running = start_server("--config", str(file))
    yield running
    assert running.stop() == 0


def decide_and_tell(served, times: int, factor: float = 1.1) -> None:
    """So many decisions, each followed, and told to have taken a little longer than predicted."""
    for _ in range(times):
        made = served.decide(**DECIDE)
        served.observe(
            {
                "type": "request",
                "observation_id": made["decision_id"],
                "decision_id": made["decision_id"],
                "path_taken": made["path"],
                "loaded_tokens": made["load_tokens"],
                "ttft_s": made["ttft_s"] * factor,
            }
        )


def test_numbers_move_under_traffic(served, visit):
    seen = visit(served.port)
    seen.to_live()
    loads = served.metric("kvlane_decisions_total", path="load")
    recomputes = served.metric("kvlane_decisions_total", path="recompute")
    assert seen.text("#l-total-load") == f"{loads:.0f} in all"

    decide_and_tell(served, 12)
    seen.wait_for("#l-total-load", f"{loads + 12:.0f} in all")
    assert float(seen.text("#l-now-load")) > 0
    scored = served.ask("GET", "/v1/live").body["requests"]
    drawn = "(count) => document.querySelectorAll('#l-scores .dot.load').length === count"
    seen.page.wait_for_function(drawn, arg=sum(each["path"] == "load" for each in scored))
    error = median(abs(each["predicted_ttft_s"] / each["ttft_s"] - 1) for each in scored)
    assert f"Median error {error:.1%} over the last {len(scored)}" in seen.text("#l-scores-readout")
    chart = seen.page.locator("#l-scores svg")
    assert "predicted against actual" in chart.get_attribute("aria-label").lower()
    line = seen.page.locator("#l-rates .line.load").get_attribute("d")

    served.decide(prompt_tokens=400, deployment="chat")
    seen.wait_for("#l-total-recompute", f"{recomputes + 1:.0f} in all")
    assert seen.page.locator("#l-rates .line.load").get_attribute("d") != line


def test_queues_calibrations_and_refusals_are_told(served, visit):
    seen = visit(served.port)
    seen.to_live()
    # Loads that take seconds, so that a queue is there to be seen.
    for pod in ("pod-1", "pod-2"):
        served.decide(
            prompt_tokens=131_072, hits=[{"tier": "host", "tokens": 131_056}], instance=pod, reserve=True
        )
    row = seen.page.locator("#l-links tr").filter(has_text="pcie5-x16")
    row.locator("td").first.filter(has_text="GB").wait_for()
    assert re.search(r"reservations? held", seen.text("#l-reservations"))

    refused = served.observe(
        {
            "type": "prefill",
            "observation_id": "p1",
            "resident_tokens": 0,
            "new_tokens": 100,
            "seconds": 0.1,
            "batch_tokens": 300,
        },
        {
            "type": "transfer",
            "observation_id": "t1",
            "link": "<b>no link</b>",
            "bytes": 100,
            "copies": 1,
            "start_s": 0,
            "end_s": 1,
        },
    )["refused"]
    assert len(refused) == 2
    told = seen.page.locator("#l-refused li")
    told.nth(1).wait_for()
    assert not seen.page.locator("#l-refused-empty").is_visible()
    for each, item in zip(reversed(refused), told.all(), strict=True):
        assert each["reason"] in item.inner_text()
        assert each["field"] in item.inner_text()
    assert seen.page.locator("#l-refused b").count() == 0
    assert seen.text("#l-calibrations").startswith("chat profile –")
    assert seen.page.locator("#l-profile").is_visible()


def test_what_an_empty_part_says_to_do_works_as_pasted(serve, visit):
    served = serve({})
    seen = visit(served.port)
    seen.to_live()
    assert seen.page.locator("#l-rates-empty").is_visible()
    assert seen.page.locator("#l-scores-empty").is_visible()
    assert seen.page.locator("#l-refused-empty").is_visible()
    lines = seen.page.locator("#curl-observe").text_content()
    answered = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, timeout=30, check=True)
    assert '"accepted":1' in answered.stdout, answered
    seen.wait_for("#l-total-load", "1 in all")
    assert not seen.page.locator("#l-rates-empty").is_visible()
    assert not seen.page.locator("#l-scores-empty").is_visible()
    # One line is in the other: this is the one for deciding alone.
    asked = seen.page.locator("#curl-decide").text_content()
    answered = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=30, check=True)
    assert '"path":"load"' in answered.stdout


def test_nothing_moves_while_numbers_do(served, visit):
    decide_and_tell(served, 3)
    made = served.metric("kvlane_decisions_total", path="load")
    seen = visit(served.port)
    seen.to_live()
    seen.wait_for("#l-total-load", f"{made:.0f} in all")
    seen.page.wait_for_function("() => document.querySelectorAll('#l-rates .line.load').length === 1")
    boxes = """() => [...document.querySelectorAll('#live .card, #live h3, #live .plot, #live .now li, #live table')]
        .map((each) => each.getBoundingClientRect()).map(({ x, y, width, height }) => [x, y, width, height])"""
    before, shifts = seen.page.evaluate(boxes), seen.page.evaluate("window.seen.shifts")
    for factor in (0.3, 1, 30):
        decide_and_tell(served, 40, factor)
        served.decide(prompt_tokens=40_000, deployment="chat")
    served.observe(
        {
            "type": "prefill",
            "observation_id": "p",
            "resident_tokens": 0,
            "new_tokens": 1,
            "seconds": 0.1,
            "batch_tokens": 3,
        }
    )
    seen.wait_for("#l-total-load", f"{made + 120:.0f} in all")
    seen.wait_for("#l-refused", "2 tokens of other requests")
    assert seen.page.evaluate(boxes) == before
    assert seen.page.evaluate("window.seen.shifts") == shifts


def falls_silent(seen) -> bool:
    """Whether it is not asked any more for longer than it ever is while it can be seen."""
    for _ in range(4):
        asked = seen.calls("/v1/live")
        seen.page.wait_for_timeout(1400)
        if seen.calls("/v1/live") == asked:
            return True
    return False


def test_it_asks_only_while_it_can_be_seen(served, visit):
    seen = visit(served.port, height=500)
    # A tab in the background: Chromium has no such thing without a screen, so that the page is told that it is.
    turn = """(hidden) => { Object.defineProperty(document, 'hidden', { configurable: true, value: hidden });
                            document.dispatchEvent(new Event('visibilitychange')); }"""
    seen.page.locator("#c-charts[aria-busy=false]").wait_for()
    assert seen.calls("/v1/live") == 0
    seen.to_live()
    assert seen.calls("/v1/live") >= 1
    seen.page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    assert falls_silent(seen)
    with seen.page.expect_request("**/v1/live"):
        seen.to_live()
    seen.page.evaluate(turn, True)
    assert falls_silent(seen)
    with seen.page.expect_request("**/v1/live"):
        seen.page.evaluate(turn, False)


def test_a_service_that_goes_is_said_to_be_gone_and_taken_up_again(serve, visit):
    served = serve({})
    seen = visit(served.port)
    seen.to_live()
    assert not seen.page.locator("#gone").is_visible()
    seen.expect("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
    served.stop()
    seen.wait_for("#gone", "The service does not answer;")
    seen.wait_for("#gone", re.compile(r"last heard \d+ s ago; trying again"))
    seen.page.locator("#ask-button").click()
    seen.wait_for("#ask-note", "The service does not answer.")

    again = serve(
        {
            "listen": f"127.0.0.1:{served.port}",
            "deployments": [{"name": "anew", "model": "llama-3.1-8b", "machine": "h100-sxm"}],
        }
    )
    seen.page.locator("#gone").wait_for(state="hidden", timeout=20_000)
    # It is another one by now, which the page shows without being loaded anew.
    seen.wait_for("#serves", "anew")
    assert seen.text("#ask-note") == ""
    again.decide(prompt_tokens=400)
    seen.to_live()
    seen.wait_for("#l-total-recompute", "1 in all")
    assert seen.page.locator("#c-deployment").input_value() == "anew"


def test_an_answer_that_ends_early_is_no_end_of_asking(serve, visit):
    served = serve({})
    seen = visit(served.port)
    seen.to_live()
    cut = {"left": 1}

    def once(route):
        if cut["left"]:
            cut["left"] -= 1
            route.fulfill(status=200, content_type="application/json", body='{"at_s": 17')
        else:
            route.continue_()

    seen.page.route("**/v1/live", once)
    seen.wait_for("#gone", "The service does not answer;")
    seen.page.locator("#gone").wait_for(state="hidden", timeout=20_000)
    served.decide(prompt_tokens=400)
    seen.wait_for("#l-total-recompute", "1 in all")


def test_a_refused_observation_can_be_read_at_leisure(serve, visit):
    served = serve({})
    served.observe(UNKNOWN | {"observation_id": "one"})
    seen = visit(served.port)
    seen.to_live()
    seen.wait_for("#l-refused", "no such decision")
    seen.page.evaluate("document.querySelector('#l-refused li').dataset.same = 'yes'")
    ago = seen.text("#l-refused time")
    seen.page.wait_for_function(
        "(ago) => document.querySelector('#l-refused time').textContent !== ago", arg=ago
    )
    assert seen.page.locator("#l-refused li[data-same]").count() == 1
    served.observe(UNKNOWN | {"observation_id": "two"})
    seen.page.locator("#l-refused li").nth(1).wait_for()


def test_a_name_that_runs_the_other_way_turns_nothing_else_around(serve, visit):
    model = {"model": "llama-3.1-8b", "machine": "h100-sxm"}
    served = serve({"deployments": [{"name": "\u202eever", **model}, {"name": "chat", **model}]})
    seen = visit(served.port)
    assert seen.page.locator("#serves bdi").all_text_contents() == ["\u202eever", "chat"]
    left = [
        box["x"] for box in (each.bounding_box() for each in seen.page.locator("#serves bdi").all()) if box
    ]
    assert left == sorted(left)
    # Within its own name the second reads as ever: its first letter is its leftmost.
    assert seen.page.evaluate(
        """() => { const text = document.querySelectorAll("#serves bdi")[1].firstChild;
            const at = (index) => { const range = document.createRange(); range.setStart(text, index);
                range.setEnd(text, index + 1); return range.getBoundingClientRect().left; };
            return at(0) < at(3); }"""
    )
