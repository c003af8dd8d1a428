"""The page at /docs: Swagger UI over the service's own description, offline and under the strict policy."""

from __future__ import annotations

import pytest

from penstock.llm.llm import LLM
from tests.support.command import DEMO
from tests.support.http_service import Service

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def demo():
    service = Service({"demo": LLM(DEMO)})
    yield service
    service.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 390])
def test_routes_can_be_read_and_tried(visit, demo, scheme, width):
    page = visit(demo.url, width=width, color_scheme=scheme)
    page.goto(f"{demo.url}/docs")
    listed = page.locator(".opblock-summary-path")
    listed.first.wait_for()
    paths = [text.replace("\u200b", "") for text in listed.all_inner_texts()]
    assert {"/v1/chat/completions", "/v2/models/{model}/infer", "/docs"} <= set(paths)
    route = page.locator("[id$=-list_models]")
    route.locator(".opblock-summary-control").click()
    route.get_by_role("button", name="Execute").click()
    route.locator(".live-responses-table .response-col_status").get_by_text("200").wait_for()
    assert "demo" in route.locator(".live-responses-table .highlight-code").first.inner_text()
    is_dark = page.evaluate("document.documentElement.classList.contains('dark-mode')")
    assert is_dark == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
