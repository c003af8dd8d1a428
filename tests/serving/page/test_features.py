"""Controls that exist only if the service's description has the field: JSON schemas and tools."""

from __future__ import annotations

import pytest

from tests.support.http_service import until
from tests.support.page_actions import ask, sent

pytestmark = pytest.mark.long

SCHEMA = '{"type": "object"}'
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {}}}]'
CALL = {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}]}
MORE = {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Zug"}'}}]}


def describe(page, *, schema: dict, tools: dict) -> None:
    """Let the service's description have these shapes of response_format and tools."""

    def changed(route) -> None:
        response = route.fetch()
        description = response.json()
        fields = description["components"]["schemas"]["ChatCompletionRequest"]["properties"]
        fields |= {"response_format": schema, "tools": tools}
        description["components"]["schemas"]["Nothing"] = {"type": "null"}
        route.fulfill(response=response, json=description)

    page.route("**/openapi.json", changed)


def open_panel(page) -> None:
    with page.expect_response("**/openapi.json"):
        page.click("#show-panel")


def test_controls_that_the_service_lacks_are_not_there(serve, visit):
    page = visit(serve("fake").url)
    describe(page, schema={"enum": ["text"]}, tools={"type": "null"})
    open_panel(page)
    page.wait_for_timeout(200)
    for name in ("tabs", "tab-schema", "tab-tools", "of-schema", "of-tools"):
        assert page.locator(f"#{name}").is_hidden()


REFUSED_TOOLS = {
    "description": {"anyOf": [{"type": "array", "items": {}, "maxItems": 0}, {"type": "null"}]},
    "empty values": {"enum": [None, False, 0, "", [], {}]},
    "no items": {"type": ["array", "null"], "items": False},
    "a name": {"$ref": "#/components/schemas/Nothing"},
    "not": {"type": "array", "not": {"type": "array"}},
}


@pytest.mark.parametrize("tools", REFUSED_TOOLS.values(), ids=REFUSED_TOOLS)
def test_tools_that_are_refused_are_not_offered(serve, visit, tools):
    """The meaning of the schema decides, not its words: a list that must be empty takes no tools."""
    page = visit(serve("fake").url)
    describe(page, schema={"properties": {"type": {"enum": ["text", "json_schema"]}}}, tools=tools)
    open_panel(page)
    page.locator("#tab-schema").wait_for()  # the description has been read
    assert page.locator("#tab-tools").is_hidden()


def test_the_page_offers_what_this_service_takes(serve, visit):
    """A tab for JSON schemas, and one for tools."""
    page = visit(serve("fake").url)
    open_panel(page)
    page.locator("#of-sampling").wait_for()
    page.locator("#tab-schema").wait_for()
    assert page.locator("#tab-tools").is_visible()


def test_a_schema_is_sent(serve, visit, script):
    page = visit(serve("fake").url)
    describe(page, schema={"properties": {"type": {"enum": ["text", "json_schema"]}}}, tools={"type": "null"})
    script(page, "{}")
    open_panel(page)
    page.click("#tab-schema")
    assert page.locator("#tab-tools").is_hidden()
    page.fill("#schema-text", "{")
    ask(page, "cat")
    until(lambda: "Invalid JSON" in page.inner_text("#schema-error"))
    assert page.locator("article").count() == 0
    page.fill("#schema-text", SCHEMA)
    _, body = sent(page, lambda: page.press("#prompt", "Enter"))
    expected = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert body["response_format"] == expected
    page.focus("#tab-schema")
    page.keyboard.press("ArrowRight")
    assert page.locator("#of-sampling").is_visible()


def test_calls_of_tools_are_shown_and_answered(serve, visit, script):
    page = visit(serve("fake").url)
    describe(page, schema={"type": "null"}, tools={"anyOf": [{"type": "array", "items": {}}, {"type": "null"}]})
    script(page, CALL, MORE, finish="tool_calls")
    open_panel(page)
    page.click("#tab-tools")
    page.fill("#tools-text", TOOLS)
    _, body = sent(page, lambda: ask(page, "What is the weather?"))
    assert body["tools"][0]["function"]["name"] == "weather"
    page.locator(".calls").wait_for()
    assert page.inner_text(".calls pre") == 'weather({"city": "Zug"})'
    page.get_by_label("Result of weather").fill("rain")
    script(page, "It rains.")
    _, body = sent(page, lambda: page.click("text=Send result"))
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert body["messages"][1]["tool_calls"][0]["id"] == "c1"
    assert body["messages"][2] == {"role": "tool", "content": "rain", "tool_call_id": "c1"}
    until(lambda: page.locator(".foot").count() == 2)
    assert page.locator("article.user").last.inner_text().startswith("rain")
