"""The page in a real browser: Chromium, driven by playwright.  Tests are skipped where either is missing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_service import SECONDS
from tests.system_packages import skip_reason

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium.  It ends with the module, because its event loop runs in this thread, where other tests need theirs."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip(skip_reason("chromium"))
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
        page.on("request", lambda r: None if r.url.startswith((url, "data:", "blob:")) else wrong.append(r.url))
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
def script() -> Callable[..., None]:
    """Lets the service answer each chat of a page with a given text, or with given deltas."""

    def answer_with(page: Any, *deltas: str | dict[str, Any], finish: str = "stop") -> None:
        parts = [{"content": one} if isinstance(one, str) else one for one in deltas]
        choices = [{"delta": part, "finish_reason": None} for part in parts]
        events: list[dict[str, Any]] = [{"choices": [one]} for one in choices]
        events[-1]["choices"][0]["finish_reason"] = finish
        events.append({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": len(parts)}})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda r: r.fulfill(content_type="text/event-stream", body=body))

    return answer_with
