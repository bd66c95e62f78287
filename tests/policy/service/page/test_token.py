"""A service that asks for a token: the page asks for it in turn, and keeps it to itself."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

TOKEN = "s3cret-of-the-fleet"


@pytest.fixture(scope="module")
def served(start_server):
    arguments = (
        "--model",
        "llama-3.1-8b",
        "--machine",
        "h100-sxm",
        "--name",
        "chat",
        "--listen",
        "127.0.0.1:0",
    )
    running = start_server(*arguments, environment={"KVLANE_TOKEN": TOKEN})
    yield running
    assert running.stop() == 0


def test_the_token_is_asked_for_refused_taken_and_kept_in_memory_only(served, visit):
    seen = visit(served.port, ready="")
    seen.expect("401")
    page = seen.page
    dialog = page.locator("#token-dialog")
    dialog.wait_for()
    assert page.locator("#token").get_attribute("type") == "password"
    assert page.evaluate("document.activeElement.id") == "token"

    page.keyboard.press("Enter")
    assert seen.text("#token-error").endswith("Enter the token first.")

    page.keyboard.type("another")
    page.keyboard.press("Enter")
    seen.wait_for("#token-error", "That token was refused")
    assert page.locator("#token").get_attribute("aria-invalid") == "true"
    assert page.locator("#token").input_value() == ""

    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    seen.wait_for("#serves", "chat")
    assert not dialog.is_visible()
    seen.wait_for("#c-crossover", re.compile(r"\w"))

    assert TOKEN not in page.url
    assert not any(TOKEN in url for url in seen.asked)
    kept = page.evaluate(
        """async () => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie,
            await indexedDB.databases(), await caches.keys(), history.state])"""
    )
    assert kept == '[{},{},"",[],[],null]'
    assert TOKEN not in page.content()
    # Whoever opens it again is asked again.
    page.reload()
    dialog.wait_for()
    page.keyboard.press("Escape")


def test_who_has_no_token_can_leave_the_question_and_take_it_up_again(served, visit):
    seen = visit(served.port, ready="")
    seen.expect("401")
    page = seen.page
    page.locator("#token-dialog").wait_for()
    page.keyboard.press("Escape")
    seen.wait_for("#start-words", "only those who have its token")
    assert not page.locator("#token-dialog").is_visible()

    page.get_by_role("button", name="Enter the token").click()
    page.locator("#token-dialog").wait_for()
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    seen.wait_for("#serves", "chat")
    assert not page.locator("#start-error").is_visible()


def test_a_token_that_was_changed_is_asked_for_anew(serve, visit, tmp_path):
    file = tmp_path / "token"
    file.write_text("first\n")
    served = serve({"token_file": str(file)})
    seen = visit(served.port, ready="")
    seen.expect("401", "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
    page = seen.page
    page.locator("#token-dialog").wait_for()
    page.keyboard.type("first")
    page.keyboard.press("Enter")
    # Nothing is on its way any more: what is asked next is what the test asks.
    page.locator("#c-charts[aria-busy=false]").wait_for()

    served.stop()
    file.write_text("second\n")
    serve({"listen": f"127.0.0.1:{served.port}", "token_file": str(file)})
    page.locator("#ask-button").click()
    seen.wait_for("#token-error", "That token was refused")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    seen.wait_for("#answer-path", re.compile(r"\w"))


@pytest.mark.parametrize("own", [False, True], ids=["one token", "a token to observe"])
def test_what_an_empty_part_says_to_do_works_with_tokens_too(serve, visit, own):
    tokens = {"KVLANE_TOKEN": TOKEN} | ({"KVLANE_OBSERVE_TOKEN": "an-0ther"} if own else {})
    served = serve({}, environment=tokens)
    seen = visit(served.port, ready="")
    seen.expect("401")
    seen.page.locator("#token").fill(TOKEN)
    seen.page.keyboard.press("Enter")
    seen.wait_for("#serves", "chat")
    seen.to_live()
    lines = seen.page.locator("#curl-observe").text_content()
    assert all(token not in lines for token in tokens.values())
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVLANE_")}
    answered = subprocess.run(
        ["bash", "-c", lines], capture_output=True, text=True, timeout=30, check=True, env=clean | tokens
    )
    assert '"accepted":1' in answered.stdout, answered
