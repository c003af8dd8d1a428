"""The page on small and large screens, in both themes, by keyboard."""

from __future__ import annotations

import re
import time

import pytest

from penstock.serving.history import History
from tests.support.http_service import until
from tests.support.web_page_actions import ask
from tests.support.web_page_look import check

pytestmark = pytest.mark.long

SCREENS = pytest.mark.parametrize(("width", "height"), [(1280, 800), (360, 740)])
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


@SCREENS
@SCHEMES
def test_every_view_is_readable(serve, visit, script, width, height, scheme):
    page = visit(serve("fake", "other").url, width, height, color_scheme=scheme)
    script(
        page, "| a | b |\n|---|---|\n| 1 | `x` |\n\n```python\ndef f(x):  # comment\n    return 'a', 1\n```\n\n> quote"
    )
    check(page)
    ask(page, "A question " * 5)
    page.locator(".foot").wait_for()
    until(lambda: page.locator(".hljs-keyword").count() == 2)
    check(page)
    page.click("#show-panel")
    check(page)
    page.click("#close-panel")
    if page.locator("#list").is_hidden():
        page.click("#show-list")
    check(page)
    page.click("#close-list")
    page.click("#show-connect")
    page.locator("#connect .hljs-string").first.wait_for()
    check(page)
    page.click("#show-live")
    page.locator(".uplot").first.wait_for()
    check(page)
    labels = page.locator(".chart [role=img]").first.get_attribute("aria-label")
    assert labels.startswith("Tokens per second: generated ")
    assert page.locator(".chart").count() == 6
    assert "The charts begin " in page.inner_text("#live")


def test_the_start_view_says_how_to_begin(serve, visit, script):
    page = visit(serve("fake").url)
    script(page, "An answer.")
    page.locator("#start").wait_for()
    assert page.inner_text("#start-name") == "fake"
    example = page.locator("#start-examples button").first
    text = example.inner_text()
    example.click()
    assert page.input_value("#prompt") == text
    assert page.locator("#log").is_hidden()
    page.press("#prompt", "Enter")
    page.locator(".foot").wait_for()
    assert page.locator("#start").is_hidden()
    assert page.inner_text("article.user .text") == text
    page.click("#fresh")
    page.locator("#start").wait_for()


@SCREENS
def test_controls_of_a_message_are_on_one_line(serve, visit, width, height):
    page = visit(serve("fake").url, width, height)
    page.locator("#model:enabled").wait_for()
    edges = page.evaluate(
        """() => ["attach", "prompt", "send"].map((id) => {
            const {top, bottom} = document.getElementById(id).getBoundingClientRect();
            return [Math.round(top), Math.round(bottom)];
        })"""
    )
    assert len(set(map(tuple, edges))) == 1


def test_deleting_all_is_apart_from_the_rest(serve, visit):
    page = visit(serve("fake").url)
    if page.locator("#list").is_hidden():
        page.click("#show-list")
    line = "(id) => [...document.getElementById(id).parentElement.children].map((element) => element.id)"
    assert page.evaluate(line, "delete-all") == ["delete-all"]
    boxes = [page.locator(f"#{name}").bounding_box() for name in ("export-all", "import", "delete-all")]
    assert boxes[2]["y"] >= max(box["y"] + box["height"] for box in boxes[:2])


def test_figures_beside_traffic_are_not_zero(serve, visit):
    """A request that ends between two samples is counted, and tokens per second are a mean over several samples."""
    service = serve("fake")
    page = visit(service.url)
    page.click("#show-live")
    page.locator(".figures").wait_for()
    for _ in range(3):
        service.post("/v1/completions", prompt="the cat", max_tokens=5, ignore_eos=True)
    figures = """() => Object.fromEntries([...document.querySelectorAll(".figures > div")].map(
        (pair) => [pair.querySelector("dt").textContent, pair.querySelector("dd").textContent]))"""
    until(lambda: page.evaluate(figures)["Requests finished"] == "3")
    until(lambda: page.evaluate(figures)["Tokens/s, last 10 s"] != "0")
    samples: set[str] = set()  # further ones, in which nothing happens
    until(
        lambda: (
            len(samples | {page.inner_text("#service")}) > len(samples) > 2 or samples.add(page.inner_text("#service"))
        )
    )
    assert page.evaluate(figures)["Tokens/s, last 10 s"] != "0"
    assert "finished per second" in page.locator(".chart [role=img]").nth(1).get_attribute("aria-label")


@SCHEMES
def test_the_theme_is_chosen_and_kept(serve, visit, scheme):
    page = visit(serve("fake").url, color_scheme=scheme)
    ground = "getComputedStyle(document.body).backgroundColor"
    by_system = page.evaluate(ground)
    seen = []
    for name in ("light", "dark"):
        page.click("#theme")
        assert page.get_attribute("#theme", "aria-label") == f"Theme: {name}"
        seen.append(page.evaluate(ground))
    assert seen[0] != seen[1]
    assert by_system == seen[scheme == "dark"]
    page.reload()
    assert page.evaluate(ground) == seen[1]
    page.click("#theme")
    assert page.evaluate(ground) == by_system


def test_the_page_is_used_by_keyboard(serve, visit, script):
    page = visit(serve("fake").url, 360, 740)
    script(page, "An answer.")
    page.locator("#model:enabled").wait_for()
    page.focus(".skip")
    assert page.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("First line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    page.locator(".foot").wait_for()
    assert page.inner_text("article.user .text") == "First line\nsecond line"
    assert page.inner_text("#said") == "An answer."
    for name in ("list", "panel"):
        page.focus(f"#show-{name}")
        page.keyboard.press("Enter")
        assert page.get_attribute(f"#show-{name}", "aria-expanded") == "true"
        assert page.evaluate(f"document.getElementById('{name}').contains(document.activeElement)")
        page.keyboard.press("Escape")
        assert page.locator(f"#{name}").is_hidden()
        assert page.evaluate("document.activeElement.id") == f"show-{name}"
    page.focus("#show-list")
    page.keyboard.press("Enter")
    page.focus("#conversations .more")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "rename"
    page.keyboard.press("Escape")
    assert page.locator("#menu").is_hidden()


def test_charts_begin_with_the_service(serve, visit):
    service = serve("fake")
    started = time.perf_counter()

    async def sample() -> None:
        for second in range(1, 61):
            service.gateway.admission.metrics.history.sample(started - 121 + 2 * second)

    service.gateway.admission.metrics.history = History(service.models, started - 121)
    service.gateway.admission.metrics.started = started - 121
    service.do(sample())
    page = visit(service.url)
    page.click("#show-live")
    page.locator(".uplot").first.wait_for()
    page.get_by_text(re.compile(r"The charts begin \d+ min")).wait_for()
