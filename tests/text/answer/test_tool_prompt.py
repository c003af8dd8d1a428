"""Tools for templates that do not read them: as text, in every format, and without the roles that a template lacks."""

from __future__ import annotations

from functools import partial

import pytest

from penstock import InvalidArgumentError
from penstock.text.answer.formats import TOOL_FORMATS
from penstock.text.answer.tool_prompt import render_described, tool_prompt, with_plain_calls, written_calls
from penstock.text.chat_template import render_chat
from tests.support.answer_texts import ARGUMENTS, TOOLS
from tests.support.parsed_answers import parser_of, read

LISTED = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
USER = {"role": "user", "content": "x"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": str(i), "function": {"name": "now", "arguments": {}}} for i in range(2)],
}
HISTORY = [
    USER,
    CALLED,
    {"role": "tool", "tool_call_id": "0", "content": "noon"},
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "user", "content": "and now?"},
]


def rendered(template: str, messages: list, prompt: str = "") -> str:
    return render_described(partial(render_chat, template, special_tokens={}), messages, prompt)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_written_calls_are_read_as_they_were(name):
    text = written_calls(TOOL_FORMATS[name], [("weather", ARGUMENTS), ("now", {})])
    assert read(parser_of(name), [text]) == ("", "", [("weather", ARGUMENTS), ("now", {})])
    assert "FUNCTION_NAME" in tool_prompt(TOOL_FORMATS[name], LISTED)


def test_a_description_finds_a_message_that_the_template_writes():
    system = {"role": "system", "content": "Be kind."}
    assert rendered(PLAIN, [USER], "P") == "<system>P<user>x"
    assert rendered(PLAIN, [system, USER], "P") == "<system>Be kind.\n\nP<user>x"
    assert rendered(DROPS_SYSTEM, [system, USER], "P") == "<user>P\n\nx"
    assert rendered(NO_SYSTEM, [USER], "P") == rendered(ALTERNATES, [USER], "P") == "<user>P\n\nx"
    with pytest.raises(InvalidArgumentError) as caught:  # of the caller's own message
        rendered(NO_SYSTEM, [system, USER], "P")
    assert caught.value.param == "messages"


def test_earlier_calls_are_text_for_a_template_without_them():
    messages = with_plain_calls(HISTORY, TOOL_FORMATS["hermes"])
    text = rendered(ALTERNATES, messages, "P")
    assert text.startswith("<user>P\n\nx<assistant><tool_call>\n")
    assert text.count('"now"') == 2
    noon, one = (f"<tool_response>\n{result}\n</tool_response>" for result in ("noon", "one"))
    assert text.endswith(f"<user>{noon}\n{one}\nand now?")
    assert with_plain_calls([USER, USER], TOOL_FORMATS["hermes"]) == [USER, USER]
    broken = {**CALLED, "content": "So.", "tool_calls": [{"function": {"name": "now", "arguments": '{"a'}}]}
    (message,) = with_plain_calls([broken], TOOL_FORMATS["hermes"])
    assert message["content"] == 'So.\n<tool_call>\n{"name": "now", "arguments": {"a}\n</tool_call>'
