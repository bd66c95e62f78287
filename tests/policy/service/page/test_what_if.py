"""The form: an answer with its timeline, and what is wrong said where it is wrong."""

from __future__ import annotations

import re

import pytest

HOSTILE = "<img src=x onerror=alert(1)>'\"&"

CONFIG = {
    "deployments": [
        {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm", "executor": "layered"},
        {"name": HOSTILE, "model": "llama-3.1-8b", "machine": "h100-sxm"},
        {"name": "hybrid", "model": "nemotron-3-nano-30b-a3b", "machine": "h100-sxm", "executor": "layered"},
    ]
}

BARS = """() => [...document.querySelectorAll("#timeline rect")].map((each) => ({ kind: each.getAttribute("class"),
    from: Number(each.getAttribute("x")), to: Number(each.getAttribute("x")) + Number(each.getAttribute("width")),
    top: Number(each.getAttribute("y")) }))"""


@pytest.fixture(scope="module")
def served(start_server, write_toml, tmp_path_factory):
    file = tmp_path_factory.mktemp("serve") / "serve.toml"
    write_toml(file, CONFIG)
    running = start_server("--config", str(file))
    yield running
    assert running.stop() == 0


def ask(seen):
    """Presses the button; the response."""
    with seen.page.expect_response("**/v1/what-if") as answered:
        seen.page.locator("#ask-button").click()
    return answered.value


def put(seen, pointer: str, text: str) -> None:
    control = seen.page.locator(f'[data-pointer="{pointer}"]')
    if not control.is_visible():
        control.locator("xpath=ancestor::details/summary").click()
    control.fill(text)


def test_the_example_is_answered_as_decide_answers_it(served, visit):
    seen = visit(served.port)
    answer = ask(seen).json()
    decided = served.decide(prompt_tokens=12370, hits=[{"tier": "host", "tokens": 12368}], deployment="chat")
    for name in ("path", "ttft_s", "reason", "crossover_tokens", "break_even_bytes_per_s"):
        assert answer[name] == decided[name]
    seen.wait_for("#answer-path", re.compile(r"\w"))
    assert seen.text("#answer-reason") == decided["reason"]
    told = seen.text("#answer")
    assert f"{decided['load_tokens']:,} tokens from host" in seen.text("#answer-path")
    assert f"{decided['ttft_s'] * 1e3:.1f} ms" in seen.text("#answer-facts")
    for path, estimate in decided["estimates"].items():
        card = seen.text(f".estimate.{path}")
        if estimate is None:
            assert decided["unavailable"][path] in card
        else:
            assert f"{estimate['ttft_s'] * 1e3:.1f} ms" in card
    for name, parameter in decided["parameters_from"].items():
        assert name in told
        assert parameter["text"] in told
    # The service was asked out of curiosity: nothing of it is counted.
    assert served.metric("kvlane_decisions_total") == 1


def test_the_timeline_is_drawn_as_it_was_answered(served, visit):
    seen = visit(served.port)
    answer = ask(seen).json()
    timeline = answer["timeline"]
    seen.wait_for("#answer-path", re.compile(r"\w"))
    bars = seen.page.evaluate(BARS)
    copies = [bar for bar in bars if bar["kind"].startswith("copy")]
    computes = [bar for bar in bars if bar["kind"].startswith("compute")]
    exposed = [bar for bar in bars if bar["kind"] == "exposed"]
    assert len(copies) == len(timeline["copies"]) > 1
    assert len(computes) == len(timeline["computes"]) > 1
    assert len(exposed) == len(timeline["exposed"])
    assert max(bar["top"] for bar in copies) < min(bar["top"] for bar in computes)
    # Every bar stands at its time: one scale from 0 to the TTFT fits them all.
    last = max(bar["to"] for bar in computes)
    first = copies[0]["from"] - timeline["copies"][0]["start_s"] / timeline["ttft_s"] * last
    scale = (last - first) / timeline["ttft_s"]
    for bar, item in zip(copies + computes, timeline["copies"] + timeline["computes"], strict=True):
        assert bar["from"] == pytest.approx(first + item["start_s"] * scale, abs=2.5)
    chart = seen.page.locator("#timeline svg")
    chart.focus()
    seen.page.keyboard.press("Home")
    assert seen.text("#timeline-readout").startswith("layer 1 ")
    assert "its KV copied" in seen.text("#timeline-readout") or timeline["computes"][0]["part"] == "front"
    seen.page.keyboard.press("End")
    assert f"{timeline['ttft_s'] * 1e3:.1f} ms" in seen.text("#timeline-readout")


# With the words for it: those about a type are for people and in the field's unit, others the service's own.
WRONG = [
    ("/prompt_tokens", "0", "Expected a whole number of at least 1."),
    ("/prompt_tokens", "many", "Expected a whole number."),
    ("/prompt_tokens", "", "Expected a whole number."),
    ("/prompt_tokens", "99,999,999", "Expected a whole number of at most 16,777,216."),
    ("/resident_tokens", "-1", "Expected a whole number of at least 0."),
    ("/hits/0/tokens", "99,999", None),
    ("/load_unit_tokens", "1.5", "Expected a whole number."),
    ("/ttft_slo_s", "-20", "Expected a number above 0."),
    ("/state/device_busy_s", "long", "Expected a number."),
    ("/state/links/pcie5-x16/queued_bytes", "-1", "Expected a number of at least 0."),
    ("/link_bytes_per_s/pcie5-x16", "0", "Expected a number above 0."),
    ("/instance", "x" * 201, "Expected text of at most 200 characters."),
]


def test_what_is_wrong_is_said_at_its_field(served, visit):
    seen = visit(served.port)
    seen.expect("422")
    error = seen.page.locator("#ask-form .error")
    for pointer, text, words in WRONG:
        field = seen.page.locator(f'[data-pointer="{pointer}"]')
        right = field.input_value()
        put(seen, pointer, text)
        refused = ask(seen).json()
        error.wait_for()
        assert error.count() == 1
        assert error.inner_text() == (refused["detail"] if words is None else words)
        assert field.get_attribute("aria-invalid") == "true"
        assert error.get_attribute("id") in field.get_attribute("aria-describedby").split()
        assert field.evaluate("(each) => each === document.activeElement && each.offsetParent !== null")
        # Put right, it is answered, and nothing of the error is left.
        field.fill(right)
        assert ask(seen).status == 200
        error.wait_for(state="detached")
        assert field.get_attribute("aria-invalid") is None


def test_a_wrong_field_that_is_folded_away_is_unfolded(served, visit):
    seen = visit(served.port)
    seen.expect("422")
    put(seen, "/instance", "x" * 201)
    seen.page.locator('[data-pointer="/instance"]').locator("xpath=ancestor::details/summary").click()
    ask(seen)
    seen.page.locator("#ask-form .error").wait_for()
    assert seen.page.evaluate("document.activeElement.dataset.pointer") == "/instance"
    assert seen.page.locator('[data-pointer="/instance"]').is_visible()


def test_what_is_wrong_in_the_second_row_is_said_there(served, visit):
    seen = visit(served.port)
    seen.expect("422")
    page = seen.page
    page.get_by_role("button", name="Add a hit").click()
    # A row that is added takes a tier that is not taken yet.
    first, second = (page.locator(f'[data-pointer="/hits/{row}/tier"]') for row in (0, 1))
    assert first.input_value() != second.input_value()
    page.locator('[data-pointer="/hits/1/tokens"]').fill("64")
    second.select_option(first.input_value())
    assert ask(seen).json()["pointer"] == "/hits/1/tier"
    seen.page.locator("#ask-form .error").wait_for()
    assert second.get_attribute("aria-invalid") == "true"
    page.get_by_role("button", name="Remove hit 1").click()
    sent = ask(seen).request.post_data_json
    assert sent["hits"] == [{"tier": "host", "tokens": 64, "state": "hit"}]


def test_a_refusal_of_no_field_is_said_beside_the_button(served, visit):
    seen = visit(served.port)
    seen.expect("500")
    seen.page.route(
        "**/v1/what-if",
        lambda route: route.fulfill(
            status=500,
            content_type="application/problem+json",
            body='{"type":"about:blank","title":"t","status":500,"code":"internal_error","detail":"its log says why"}',
        ),
    )
    ask(seen)
    seen.wait_for("#ask-note", "Not answered: its log says why")
    assert seen.page.locator("#ask-form .error").count() == 0


def test_every_field_is_sent_in_the_requests_units(served, visit):
    seen = visit(served.port)
    page = seen.page
    for pointer, text in {
        "/prompt_tokens": "20,000",
        "/resident_tokens": "1 024",
        "/hits/0/tokens": "16,000; 15,000",
        "/state/device_busy_s": "12.5",
        "/state/queued_prefill_tokens": "300",
        "/state/num_requests_waiting": "2",
        "/state/num_requests_running": "3",
        "/state/links/pcie5-x16/queued_bytes": "1.5",
        "/link_bytes_per_s/pcie5-x16": "12",
        "/ttft_slo_s": "500",
        "/load_unit_tokens": "32",
        "/instance": "pod-1",
        "/node": "n1",
        "/prefix_id": "p",
    }.items():
        put(seen, pointer, text)
    page.locator('[data-pointer="/executor"]').select_option("two_ended")
    page.locator('[data-pointer="/objective"]').select_option("blend")
    answered = ask(seen)
    assert answered.status == 200
    assert answered.request.post_data_json == {
        "prompt_tokens": 20000,
        "deployment": "chat",
        "resident_tokens": 1024,
        "hits": [{"tier": "host", "tokens": [16000, 15000], "state": "hit"}],
        "state": {
            "device_busy_s": pytest.approx(0.0125),
            "queued_prefill_tokens": 300,
            "num_requests_waiting": 2,
            "num_requests_running": 3,
            "links": {"pcie5-x16": {"queued_bytes": 1.5e9}},
        },
        "link_bytes_per_s": {"pcie5-x16": 12e9},
        "ttft_slo_s": 0.5,
        "load_unit_tokens": 32,
        "executor": "two_ended",
        "objective": "blend",
        "instance": "pod-1",
        "node": "n1",
        "prefix_id": "p",
    }
    seen.wait_for("#answer-facts", "TTFT objective")
    assert "12 GB/s" in seen.text("#answer-parameters")


def test_a_hostile_name_is_only_ever_text(served, visit):
    seen = visit(served.port)
    page = seen.page
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    page.locator('[data-pointer="/deployment"]').select_option(HOSTILE)
    put(seen, "/instance", HOSTILE)
    assert ask(seen).status == 200
    page.locator("#c-deployment").select_option(HOSTILE)
    page.evaluate("document.querySelector('#live').scrollIntoView({ behavior: 'instant' })")
    served.decide(prompt_tokens=12370, deployment=HOSTILE)
    row = page.locator("#l-calibrations tr").filter(has_text=HOSTILE)
    row.wait_for()
    assert HOSTILE in seen.text("#serves")
    assert page.locator("img").count() == 0


def test_an_answer_that_is_not_of_what_stands_in_the_form_is_said_to_be_none(served, visit):
    seen = visit(served.port)
    seen.expect("422")
    put(seen, "/prompt_tokens", "none")
    ask(seen)
    seen.wait_for("#ask-note", re.compile(r"^Not answered: see the field marked\.$"))
    put(seen, "/prompt_tokens", "12,370")
    ask(seen)
    seen.wait_for("#answer-path", re.compile(r"\w"))
    assert seen.text("#ask-note") == ""
    put(seen, "/prompt_tokens", "none")
    assert seen.text("#ask-note") == "Changed since the answer."
    ask(seen)
    seen.wait_for("#ask-note", "The answer shown is of the request before.")


def test_a_recurrent_model_is_asked_about_with_a_checkpoint(served, visit):
    seen = visit(served.port)
    checkpoints = seen.page.locator('[data-pointer="/hits/0/state_checkpoints"]')
    assert not checkpoints.is_visible()
    assert "state_checkpoints" not in ask(seen).request.post_data_json["hits"][0]
    seen.page.locator('[data-pointer="/deployment"]').select_option("hybrid")
    assert checkpoints.input_value() == "12,368"
    answer = ask(seen)
    assert answer.request.post_data_json["hits"][0]["state_checkpoints"] == [12368]
    assert answer.json()["path"] == "load"


def test_a_service_that_has_changed_is_told_beside_the_answer_of_before(serve, visit):
    before = serve({"deployments": [{"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}]})
    seen = visit(before.port)
    seen.expect("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
    ask(seen)
    seen.wait_for("#answer-path", re.compile(r"\w"))
    before.stop()
    seen.page.locator("#ask-button").click()
    seen.wait_for("#ask-note", "The service does not answer.")
    serve(
        {
            "listen": f"127.0.0.1:{before.port}",
            "deployments": [{"name": "anew", "model": "gemma-3-27b", "machine": "h100-sxm"}],
        }
    )
    seen.page.locator("#gone").wait_for(state="hidden", timeout=20_000)
    seen.wait_for("#ask-note", "The service decides by something else since the answer.")


def test_what_comes_with_a_load_in_flight_is_told(served, visit):
    seen = visit(served.port)
    put(seen, "/prompt_tokens", "131,072")
    put(seen, "/hits/0/tokens", "131,056")
    put(seen, "/instance", "pod-joined")
    put(seen, "/prefix_id", "shared")
    # Several seconds of loads on its link before the one to join.
    for prefix in ("one", "two", "three", "four", "shared"):
        served.decide(
            deployment="chat",
            prompt_tokens=131_072,
            hits=[{"tier": "host", "tokens": 131_056}],
            instance="pod-joined",
            prefix_id=prefix,
            reserve=True,
        )
    answer = ask(seen).json()
    assert answer["joined"]
    seen.wait_for("#answer-path", f"{answer['joined_tokens']:,} tokens come with a load in flight")
    assert f"{answer['joined_tokens']} of the tokens join a load in flight" in seen.text("#answer-reason")
