"""What the page asks for beside sampling: JSON schemas, tools and thoughts, each where service and model have it.

One service and one browser for all checks.  Scripted models write thoughts, calls and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_service import Service
from tests.support.scripted_model import scripted_llm
from tests.support.web_page_actions import ask, sent
from tests.support.web_page_look import check

pytestmark = pytest.mark.long

WAIT_MS = 30_000
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "big": {"type": "integer"}},
    "required": ["name"],
}
ANSWER = '{"name": "Mia", "big": 12345678901234567890}'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "now")]
# A template that reads these variables beside the one of scripted models.
SWITCHES = "#}{{ '' if enable_thinking is defined and not enable_thinking }}{{ '' if reasoning_effort }}{#"


def called(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = f"<think>\nI *ask* the tool.\n</think>\n\nOne moment.{called('weather', {'city': 'Zug'})}\n{called('now', {})}"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Models that think and call tools, write JSON, and write text."""
    thinker = scripted_llm(
        {0: CALLS, 2: "<think>\nFine.\n</think>\n\nIt **rains**."}, "<tool_call> </think> " + SWITCHES
    )
    made = Service({"thinker": thinker, "json": scripted_llm({0: ANSWER}, "")})
    yield made
    made.close()


@pytest.fixture
def open_page(service, visit):
    """Opens the page with a model; every wait has an end."""

    def open_with(model: str, **options):
        page = visit(service.url, **options)
        page.context.set_default_timeout(WAIT_MS)
        page.locator("#model:enabled").wait_for()
        page.select_option("#model", model)
        return page

    return open_with


def describe(page, **fields: object) -> None:
    """Let the service's description have these shapes of fields of a conversation."""

    def changed(route) -> None:
        response = route.fetch()
        description = response.json()
        description["components"]["schemas"]["ChatCompletionRequest"]["properties"] |= fields
        description["components"]["schemas"]["Nothing"] = {"type": "null"}
        route.fulfill(response=response, json=description)

    page.unroute("**/openapi.json")
    page.route("**/openapi.json", changed)


def open_panel(page) -> None:
    with page.expect_response("**/openapi.json"):
        page.click("#show-panel")
    page.locator("#of-sampling, #of-schema, #of-tools").locator("visible=true").first.wait_for()


REFUSED_TOOLS = {
    "a list that must be empty": {"anyOf": [{"type": "array", "items": {}, "maxItems": 0}, {"type": "null"}]},
    "empty values": {"enum": [None, False, 0, "", [], {}]},
    "no items": {"type": ["array", "null"], "items": False},
    "a name": {"$ref": "#/components/schemas/Nothing"},
    "not": {"type": "array", "not": {"type": "array"}},
}


def test_controls_follow_the_meaning_of_the_schema(open_page):
    """What the description refuses is not offered, in whatever words it says so."""
    page = open_page("thinker")
    for tools in REFUSED_TOOLS.values():
        describe(page, tools=tools, reasoning_effort={"enum": ["none"]}, chat_template_kwargs={"type": "null"})
        page.reload()
        page.locator("#model:enabled").wait_for()
        page.select_option("#model", "thinker")
        open_panel(page)
        page.locator("#tab-schema").wait_for()  # the description has been read
        for name in ("tab-tools", "thinking-field", "effort-field"):
            assert page.locator(f"#{name}").is_hidden(), tools
        page.click("#close-panel")
    describe(page, response_format={"enum": ["text"]}, tools={"type": "null"})
    page.reload()
    page.locator("#model:enabled").wait_for()
    page.select_option("#model", "thinker")
    open_panel(page)
    page.locator("#thinking-field").wait_for()
    assert page.locator("#tabs").is_hidden()


def test_controls_follow_the_model(open_page):
    page = open_page("thinker")
    open_panel(page)
    page.locator("#tab-tools").wait_for()
    assert page.locator("#thinking").is_visible()
    assert page.locator("#effort option").all_inner_texts() == ["default", "low", "medium", "high"]
    assert page.get_attribute("#max_tokens", "placeholder") == "2048"
    page.select_option("#model", "json")
    page.locator("#tab-schema").wait_for()
    for name in ("tab-tools", "thinking-field", "effort-field"):
        assert page.locator(f"#{name}").is_hidden()
    assert page.get_attribute("#max_tokens", "placeholder") == "512"


def test_tools_are_called_shown_and_answered(open_page, tmp_path):
    """A loop of two steps with thoughts, kept in the browser and exported."""
    page = open_page("thinker", width=360, color_scheme="dark")
    open_panel(page)
    page.select_option("#thinking", "on")
    page.select_option("#effort", "low")
    page.click("#tab-tools")
    page.fill("#tools-text", '[{"type": "function"}]')
    ask(page, "Rain?")
    page.locator("#tools-error", has_text="name").wait_for()
    assert page.locator("article").count() == 0
    page.fill("#tools-text", json.dumps([tool["function"] for tool in TOOLS]))  # also without the part around them
    assert page.locator("#active").inner_text().split("\n") == ["2 tools", "Thinking on"]
    page.click("#close-panel")
    _, body = sent(page, lambda: page.press("#prompt", "Enter"))
    assert body["tools"] == TOOLS
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert (body["reasoning_effort"], body["max_tokens"]) == ("low", 2048)
    assert "reasoning_format" not in body
    page.locator(".results textarea").nth(1).wait_for()
    answer = page.locator("article.assistant")
    assert answer.locator("> .text").inner_text() == "One moment."
    assert answer.locator(".call strong").all_inner_texts() == ["weather", "now"]
    assert json.loads(answer.locator(".call pre").inner_text()) == {"city": "Zug"}
    assert page.inner_text("#said") == "One moment. The model calls weather. The model calls now."
    thoughts = answer.locator(".thoughts")
    assert thoughts.locator("summary").inner_text().startswith("Thoughts (")
    assert thoughts.locator(".text").is_hidden()
    assert page.evaluate("document.activeElement.labels[0].textContent") == "Result of weather"
    thoughts.locator("summary").click()
    assert thoughts.locator("em").inner_text() == "ask"
    page.evaluate("(log => (log.scrollTop = log.scrollHeight))(document.getElementById('log'))")
    check(page)
    page.locator(".results textarea").first.focus()
    page.keyboard.type("rain")
    page.keyboard.press("Enter")
    page.keyboard.type("noon")
    _, body = sent(page, lambda: page.keyboard.press("Enter"))
    messages = body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning_content"].strip() == "I *ask* the tool."
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [(one["tool_call_id"], one["content"]) for one in messages[2:]] == [*zip(ids, ("rain", "noon"), strict=True)]
    page.locator("article.assistant strong", has_text="rains").wait_for()
    page.locator(".foot").nth(1).wait_for()
    assert page.locator("article.tool").all_inner_texts() == ["Result of weather\nrain", "Result of now\nnoon"]

    page.locator("article.tool .edit").first.click()  # the result of the other call stays
    page.fill(".editor", "snow")
    _, body = sent(page, lambda: page.press(".editor", "Enter"))
    assert [message["content"] for message in body["messages"][2:]] == ["snow", "noon"]
    page.locator(".foot").nth(1).wait_for()

    page.reload()  # the conversation and the settings are kept
    page.locator("#active button").nth(1).wait_for()
    page.click("#show-list")
    page.locator("#conversations .open").click()
    assert page.locator(".thoughts summary").count() == 2
    page.click("#show-list")
    for name, suffix in (("export-markdown", "md"), ("export-json", "json")):
        page.click("#conversations .more")
        with page.expect_download() as caught:
            page.click(f"#{name}")
        caught.value.save_as(tmp_path / f"kept.{suffix}")
    text = Path(tmp_path / "kept.md").read_text()
    for words in ("> **Thoughts**\n>\n> I *ask* the tool.", "Call of `weather`", "## Tool: weather\n\nsnow"):
        assert words in text
    turns = json.loads(Path(tmp_path / "kept.json").read_text())["turns"].values()
    assert sum("ask" in turn.get("thoughts", "") and turn["thoughtsMs"] >= 0 for turn in turns) == 1


def test_json_answers_follow_a_schema(open_page):
    page = open_page("json")
    open_panel(page)
    page.click("#tab-schema")
    page.fill("#schema-text", "{")
    ask(page, "cat")
    page.locator("#schema-error", has_text="Invalid JSON").wait_for()
    assert page.locator("article").count() == 0
    page.fill("#schema-text", json.dumps(SCHEMA))
    _, body = sent(page, lambda: page.press("#prompt", "Enter"))
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    page.locator(".verdict.good").wait_for()
    check(page)
    shown = page.locator("article.assistant .code pre").inner_text()
    assert shown == '{\n  "name": "Mia",\n  "big": 12345678901234567890\n}'  # numbers as they are written
    page.focus("#tab-schema")
    page.keyboard.press("ArrowLeft")
    page.fill("#max_tokens", "5")
    ask(page, "cat")
    page.locator(".verdict.error", has_text="Incomplete").wait_for()
    page.click("#active button")  # opens the tab
    page.click("#schema-clear")
    assert page.locator("#active").is_hidden()


def test_json_that_breaks_its_schema_is_named(open_page, script):
    page = open_page("json")
    open_panel(page)
    page.click("#tab-schema")
    schema = {"properties": {"a": {"items": {"$ref": "#/$defs/n"}}}, "$defs": {"n": {"type": "integer", "maximum": 5}}}
    page.fill("#schema-text", json.dumps(schema))
    for text, words in (
        ('{"a": [1, 5]}', "Valid"),
        ('{"a": [1, 6]}', "a[1]: expected at most 5, got 6"),
        ('{"a": ["x"]}', 'a[0]: expected integer, got "x"'),
        ("Sorry", "Not JSON"),
    ):
        script(page, text)
        ask(page, "cat")
        page.locator(".verdict", has_text=words).wait_for()
        page.click("#fresh")


def test_thoughts_are_open_while_they_grow(open_page, script):
    page = open_page("thinker")
    script(page, {"reasoning_content": "Hm"}, finish="length")
    ask(page, "Why?")
    page.locator(".foot").wait_for()
    assert page.locator(".thoughts .text").is_hidden()
    page.evaluate(
        """() => {
            const encoder = new TextEncoder();
            const event = (delta) => encoder.encode(`data: ${JSON.stringify({choices: [{delta}]})}\\n\\n`);
            const body = new ReadableStream({start: (controller) => (window.push = (delta) => delta
                ? controller.enqueue(event(delta)) : controller.enqueue(encoder.encode("data: [DONE]\\n\\n")))});
            const real = window.fetch;
            window.fetch = (path, options) => String(path).includes("chat/completions")
                ? Promise.resolve(new Response(body)) : real(path, options);
        }"""
    )
    ask(page, "Why then?")
    page.evaluate("window.push({reasoning_content: 'I think'})")
    block = page.locator("article.assistant").last.locator(".thoughts")
    block.locator(".text", has_text="I think").wait_for()
    assert block.locator("summary").inner_text().startswith("Thinking")
    page.evaluate("window.push({content: 'So.'})")
    block.locator(".text").wait_for(state="hidden")
    block.locator("summary", has_text="Thoughts (").wait_for()
    page.evaluate("window.push(null)")
    page.locator(".foot").nth(1).wait_for()
    page.locator("article.assistant > .text", has_text="So.").wait_for()


@pytest.mark.parametrize("text", ["So", ""])
def test_an_answer_is_continued_after_or_within_thoughts(text, open_page, script):
    page = open_page("thinker")
    script(page, {"reasoning_content": "Hm"}, *filter(None, [text]), finish="length")
    ask(page, "Why?")
    page.locator(".foot").wait_for()
    path, body = sent(page, lambda: page.click(".resume"))
    assert path == "chat/completions"
    assert body["messages"][-1] == {"role": "assistant", "content": text, "reasoning_content": "Hm"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
