"""The server's page in a browser."""

from __future__ import annotations

import shutil

import pytest

from moejax import LLM
from tests.conftest import REPOSITORY
from tests.moejax.serve.http.test_http import Served

pytestmark = [pytest.mark.browser, pytest.mark.slow]

STORY = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def url():
    # The model of the package, with its own chat template, and no key.
    limits = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    with LLM(REPOSITORY / "moejax/demo", expert_budget="25%", progress=False, **limits) as llm:
        server = Served(llm, key=None)
        yield f"http://127.0.0.1:{server.port}/"
        server.close()


@pytest.fixture(scope="module")
def browser(url):
    # After the server and ended before it: Playwright's loop runs on this thread.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.mark.parametrize(("width", "height", "scheme"), [(400, 800, "light"), (1600, 1000, "dark")])
def test_a_chat_beside_the_experts(browser, url, width, height, scheme):
    from playwright.sync_api import expect

    size = {"width": width, "height": height}
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.goto(url)
    expect(page.locator("#state")).to_have_text("idle", timeout=20_000)
    # By keyboard alone: the message, Enter, then the slider.
    page.focus("#text")
    page.keyboard.type(STORY)
    page.keyboard.press("Enter")
    answer = page.locator(".turn").nth(1)
    expect(answer).to_contain_text("fox", timeout=60_000)
    expect(page.locator("#send")).to_have_text("Send", timeout=60_000)
    page.focus("#split")
    page.keyboard.press("End")
    most = page.locator("#split").get_attribute("max")
    page.focus("#text")
    expect(page.locator("#split-now")).to_have_text(str(most), timeout=20_000)
    page.hover("#experts", position={"x": 5, "y": 5})
    expect(page.locator("#about")).to_contain_text("layer 0, expert 0: ")
    box = page.locator("main").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    for canvas in ("slots", "experts", "history"):
        assert page.locator(f"#{canvas}").bounding_box()["height"] > 20
    page.click("#clear")
    expect(page.locator(".turn")).to_have_count(0)
    assert not errors
    page.context.close()
