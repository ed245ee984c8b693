"""The page at / in a real browser: a message is answered, and the numbers next to it are the server's."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from server_thread import running

NAME = "tiny"


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield found
        found.close()


def test_a_message_is_answered_and_numbers_are_shown(server, browser):
    page = browser.new_page(viewport={"width": 1100, "height": 700})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    page.wait_for_function("document.querySelectorAll('#model option').length == 3")
    assert page.locator("#model").input_value() == NAME
    page.fill("#temperature", "0")
    page.fill("#tokens", "30")
    page.fill("#text", "Once")
    page.press("#text", "Enter")
    page.wait_for_selector(".note")
    assert page.locator(".user").inner_text() == "Once" and page.locator(".assistant").inner_text()
    assert "tokens/s" in page.locator("#speed").inner_text()
    page.fill("#text", "And then?")
    page.click("#send")
    page.wait_for_function("document.querySelectorAll('.note').length == 2")
    page.wait_for_timeout(1200)
    assert "resident" in page.locator("#chosen").inner_text()
    assert "all resident" in page.locator("#cache").inner_text().replace("\n", " ")
    assert page.locator("#hits").bounding_box()["width"] > 100
    if folder := os.environ.get("AMOEBA_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / "serve.png"))
    page.select_option("#model", "first")
    page.click("#clear")
    page.fill("#text", "x" * 700)
    page.press("#text", "Enter")
    page.wait_for_selector(".failed")
    assert "prompt: expected 1 to 500 tokens" in page.locator(".failed").inner_text()
    assert [each for each in problems if "422" not in each] == []
    page.close()


def test_stop_ends_an_answer_on_the_server_too(server, browser, monkeypatch):
    advance = server.served.engine.advance
    monkeypatch.setattr(server.served.engine, "advance", lambda: (time.sleep(0.01), advance()))
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_function("document.querySelectorAll('#model option').length == 3")
    page.fill("#tokens", "480")
    page.fill("#text", "Once")
    page.press("#text", "Enter")
    page.wait_for_function("document.querySelector('.assistant')?.textContent.length > 3")
    page.click("#send")
    page.wait_for_selector(".note")
    assert page.locator(".note").inner_text() == "stopped"
    assert server.idle()
    page.close()


def test_a_new_chat_during_an_answer_is_empty(server, browser, monkeypatch):
    advance = server.served.engine.advance
    monkeypatch.setattr(server.served.engine, "advance", lambda: (time.sleep(0.01), advance()))
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_function("document.querySelectorAll('#model option').length == 3")
    page.fill("#tokens", "480")
    page.fill("#text", "Once")
    page.press("#text", "Enter")
    page.wait_for_function("document.querySelector('.assistant')?.textContent.length > 3")
    page.click("#clear")
    page.wait_for_function("document.querySelector('#send').textContent == 'Send'")
    assert page.locator("#talk").inner_text() == "" and page.evaluate("messages.length") == 0
    page.close()


def test_bars_show_hits_and_the_plan_is_told(folder, browser):
    from amoeba.jobs.generate.options import GenerationOptions

    with running(folder, options=GenerationOptions(max_new_tokens=20, ram="auto"), plan="experts streamed") as streamed:
        page = browser.new_page()
        page.goto(streamed.url)
        page.wait_for_function("document.querySelector('#plan').textContent == 'plan: experts streamed'")
        hits = streamed.served.status()["expert_cache"]["hit_rate"]
        whole = page.locator(".bar").last.bounding_box()["width"]
        assert page.locator("#hits").bounding_box()["width"] == pytest.approx(hits * whole, abs=1.5) and hits > 0
        page.close()
