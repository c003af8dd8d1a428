"""The page in a real browser: Chromium, driven by playwright.  Skipped where either is missing."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.serving.settings import GatewaySettings
from tests.support.http_service import SECONDS, Service, until
from tests.system_packages import skip_reason

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason=skip_reason("chromium"))]

KEY = "a-key-that-is-long-enough-for-the-service"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium has none for root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, request) -> Iterator[Callable[..., Any]]:
    """Opens a service's page; in the end no script failed and nothing was asked of another host.

    PENSTOCK_SCREENSHOTS=folder: keeps a picture of how each test left its page.
    """
    pages: list[Any] = []
    wrong: list[str] = []

    def open_page(url: str, width: int = 1000, height: int = 700, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(SECONDS * 1000)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if "Content Security Policy" in m.text else None)
        page.on("request", lambda r: None if r.url.startswith((url, "data:")) else wrong.append(r.url))
        page.goto(f"{url}/")
        pages.append(page)
        return page

    yield open_page
    for number, page in enumerate(pages):
        if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"{request.node.name}-{number}.png")
        page.context.close()
    assert wrong == []


@pytest.fixture
def serve_plain(make_llm) -> Iterator[Service]:
    """A service over a model that has no chat template."""
    service = Service({"plain": make_llm()})
    yield service
    service.close()


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.locator("#send:enabled").wait_for()  # the page knows its models
    page.press("#prompt", "Enter")


def sent(page: Any, act: Callable[[], None]) -> tuple[str, dict[str, Any]]:
    """Path and body of what the page asks for when something is done."""
    with page.expect_request(lambda r: r.method == "POST") as caught:
        act()
    return caught.value.url.partition("/v1/")[2], json.loads(caught.value.post_data)


def slow_down(service: Any, name: str = "fake") -> None:
    """Let each of a model's steps take long enough for a person."""
    program = service.llms[name].engine.program
    run = program.run

    def slowly(*args: Any) -> Any:
        time.sleep(0.02)
        return run(*args)

    program.run = slowly


def test_an_answer_streams_and_tells_its_speed(serve, visit):
    service = serve("fake")
    slow_down(service)
    page = visit(service.url)
    page.click("summary")
    page.fill("#max_tokens", "20")
    said = "the cat " * 20  # long enough to fill a page of the cache
    path, body = sent(page, lambda: ask(page, said))
    assert path == "chat/completions"
    assert body["messages"] == [{"role": "user", "content": said}]
    foot = page.locator("article.assistant .foot")
    foot.wait_for()
    for words in ("tokens/s", "first token", "tokens"):
        assert words in foot.inner_text()
    answer = page.locator("article.assistant .text").text_content()
    assert answer
    _, body = sent(page, lambda: ask(page, "sat"))
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == answer
    page.locator("article.assistant .foot").nth(1).wait_for()
    assert "cached" in page.locator(".foot").nth(1).inner_text()


def test_an_answer_that_came_at_once_tells_its_speed_too(serve, visit):
    page = visit(serve("fake").url)
    page.click("summary")
    page.fill("#max_tokens", "2")
    ask(page, "cat")
    page.locator(".foot").wait_for()
    assert "tokens/s" in page.locator(".foot").inner_text()


def test_stop_ends_the_request_at_the_service_and_the_next_turn_works(serve, visit):
    service = serve("fake")
    slow_down(service)
    page = visit(service.url)
    ask(page, "the")
    until(lambda: page.evaluate("document.querySelector('article.assistant .text')?.textContent.length > 3"))
    assert service.num_open >= 1
    page.click("#stop")
    page.locator(".foot").wait_for()
    page.click("summary")
    assert "stopped" in page.locator(".foot").inner_text()
    until(lambda: not service.llms["fake"].engine.scheduler.has_work, "the end of the request")
    page.fill("#max_tokens", "2")
    ask(page, "cat")
    page.locator(".foot").nth(1).wait_for()
    assert "stopped at max tokens" in page.locator(".foot").nth(1).inner_text()


def test_settings_are_sent_kept_and_checked(serve, visit):
    page = visit(serve("fake").url)
    page.click("summary")
    given = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11}
    for name, value in given.items():
        page.fill(f"#{name}", str(value))
    page.fill("#stop_text", "END")
    page.fill("#system", "Be brief.")
    _, body = sent(page, lambda: ask(page, "cat"))
    assert {name: body[name] for name in given} == given
    assert body["stop"] == ["END"]
    assert "repetition_penalty" not in body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.locator(".foot").wait_for()
    page.reload()
    page.click("summary")
    assert page.input_value("#top_k") == "7"
    page.fill("#temperature", "-1")
    ask(page, "cat")
    assert page.evaluate("document.activeElement.id") == "temperature"
    assert page.locator("article").count() == 0
    page.click("#defaults")
    _, body = sent(page, lambda: ask(page, "cat"))
    assert set(body) == {"model", "messages", "max_tokens", "stream", "stream_options"}


def test_a_model_without_a_template_continues_the_text(serve_plain, visit):
    page = visit(serve_plain.url)
    until(lambda: page.evaluate("document.getElementById('mode').textContent.includes('continues')"))
    assert page.locator("#system-field").is_hidden()
    path, body = sent(page, lambda: ask(page, "the cat "))
    assert (path, body["prompt"]) == ("completions", "the cat ")
    page.locator(".foot").wait_for()
    assert page.locator(".given").text_content() == "the cat "
    assert len(page.locator("article .text").text_content()) > len("the cat ")


def test_models_are_chosen_and_each_begins_anew(serve, visit):
    page = visit(serve("one", "two").url)
    ask(page, "cat")
    page.locator(".foot").wait_for()
    page.select_option("#model", "two")
    assert page.locator("article").count() == 0
    _, body = sent(page, lambda: ask(page, "cat"))
    assert (body["model"], len(body["messages"])) == ("two", 1)
    page.locator(".foot").wait_for()
    page.click("#fresh")
    assert page.locator("article").count() == 0


def test_a_refusal_is_shown_in_the_services_words_and_can_be_tried_again(serve, visit):
    page = visit(serve("fake").url)
    page.click("summary")
    page.fill("#top_p", "0")
    ask(page, "cat")
    page.locator("p.error").wait_for()
    assert "top_p" in page.locator("p.error").inner_text()
    page.fill("#top_p", "0.5")
    page.fill("#max_tokens", "2")
    page.click("#again")
    page.locator("p.error").wait_for(state="detached")
    page.locator(".foot").wait_for()
    assert "2 tokens" in page.locator(".foot").inner_text()


def test_a_models_text_is_never_markup(serve, visit):
    page = visit(serve("fake").url)
    text = "<img src=x onerror=alert(1)>\n```html\n<script>alert(2)</script>\n```\nend"
    page.evaluate(
        """async (text) => {
            const place = document.createElement("div");
            place.id = "place";
            document.body.append(place);
            (await import("./page/text.js")).showText(place, text);
        }""",
        text,
    )
    assert page.locator("#place img, #place script").count() == 0
    assert page.locator("#place pre code").inner_text() == "<script>alert(2)</script>"
    assert page.locator("#place").inner_text().startswith("<img src=x")


def test_the_key_is_asked_for_until_it_is_right(serve, visit, tmp_path):
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    page = visit(serve("fake", settings=GatewaySettings(keys_file=tmp_path / "keys")).url)
    for given in ("wrong", KEY):
        page.locator("#key").wait_for()
        assert page.locator("#key-wrong").is_visible() == (given == KEY)
        page.fill("#key", given)
        page.press("#key", "Enter")
        if given != KEY:
            page.locator("#key-wrong").wait_for()
    until(lambda: page.evaluate("document.getElementById('model').value === 'fake'"))
    ask(page, "cat")
    page.locator(".foot").wait_for()


def test_the_live_view_shows_what_runs(serve, visit):
    service = serve("fake")
    slow_down(service)
    page = visit(service.url)
    ask(page, "the")
    page.click("#show-live")
    page.locator(".card").wait_for()
    running = page.locator(".figures div", has=page.locator("dt", has_text="Running")).locator("dd")
    until(lambda: page.evaluate("[...document.querySelectorAll('.figures dd')][0].textContent === '1'"))
    assert running.inner_text() == "1"
    assert "of" in page.locator(".figures div", has_text="Pages in use").inner_text()
    page.click("#show-talk")
    page.click("#stop")
    page.click("#show-live")
    until(lambda: page.evaluate("[...document.querySelectorAll('.figures dd')][0].textContent === '0'"))
    assert "Generated tokens" in page.locator(".card").inner_text()


def test_a_service_that_went_away_is_told(serve, visit):
    service = serve("fake")
    page = visit(service.url)
    until(lambda: page.evaluate("document.getElementById('model').value === 'fake'"))
    service.close()
    page.click("#show-live")
    until(lambda: page.evaluate("!document.getElementById('notice').hidden"))
    assert "does not respond" in page.locator("#notice").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_only(serve, visit, scheme):
    page = visit(serve("a-model-with-quite-a-long-name-for-a-phone").url, 320, 600, color_scheme=scheme)
    ask(page, "cat " * 30 + "W" * 200)
    page.locator(".foot, p.error").first.wait_for()
    page.click("summary")
    assert page.evaluate("(one => one.scrollWidth <= one.clientWidth)(document.querySelector('.fields'))")
    for view in ("#show-talk", "#show-live"):
        page.click(view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")


def test_everything_to_press_or_fill_has_a_name(serve, visit):
    page = visit(serve("fake").url)
    page.click("summary")
    nameless = """[...document.querySelectorAll('button, input, select, textarea')].filter(
        (one) => !one.textContent.trim() && !one.labels?.length && !one.ariaLabel).map((one) => one.outerHTML)"""
    assert page.evaluate(nameless) == []
    assert page.locator("html[lang=en]").count() == 1
