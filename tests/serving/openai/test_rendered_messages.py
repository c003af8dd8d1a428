"""Assistants' messages with tool calls and without content, as the templates of models expect them."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from penstock.serving.openai.messages import Message, rendered
from penstock.text.chat_template import render_chat

ADDS = "{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls %}"
TESTS = "{% for m in messages %}{% if m['content'] is none %}none{% endif %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"
TOJSON = "{{ c.function.arguments | tojson }}"
TEXT = "{{ '=' + c.function.arguments }}"


def text_of(template: str, arguments: str = '{"a": 1}', **fields) -> str:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = msgspec.convert({"role": "assistant", "tool_calls": [call], **fields}, Message)
    return rendered(template, [message], partial(render_chat, template, special_tokens={}))


@pytest.mark.parametrize("fields", [{}, {"content": None}])
def test_templates_with_and_without_a_test_for_no_content(fields):
    assert text_of(ADDS + TOJSON + END, **fields) == 'assistant{"a": 1}'
    assert text_of(ADDS + TEXT + END, **fields) == 'assistant={"a": 1}'
    assert text_of(TESTS + TEXT + END, **fields) == 'none={"a": 1}'


def test_arguments_beyond_the_bounds_of_json_stay_a_text():
    for arguments in ("[" * 5000 + "]" * 5000, "x", '{"a": ' + "[" * 70 + "]" * 70 + "}"):
        assert text_of(ADDS + "{{ c.function.arguments }}" + END, arguments) == "assistant" + arguments
