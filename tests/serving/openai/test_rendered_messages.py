"""Assistants' messages with tool calls and without content, as the templates of models expect them."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from penstock.serving.openai.messages import Message, rendered
from penstock.text.chat_template import render_chat

ADDS = "{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"
TOJSON = "{{ c.function.arguments | tojson }}"
TEXT = "{{ '=' + c.function.arguments }}"


def text_of(template: str, arguments: str = '{"a": 1}', **fields) -> str:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = msgspec.convert({"role": "assistant", "tool_calls": [call], **fields}, Message)
    return rendered([message], partial(render_chat, template, special_tokens={}))


@pytest.mark.parametrize("fields", [{}, {"content": None}])
def test_no_content_is_an_empty_text(fields):
    assert text_of(ADDS + TOJSON + END, **fields) == 'assistant{"a": 1}'
    assert text_of(ADDS + TEXT + END, **fields) == 'assistant={"a": 1}'


def test_arguments_beyond_the_bounds_of_json_stay_a_text():
    for arguments in ("[" * 5000 + "]" * 5000, "x", '{"a": ' + "[" * 70 + "]" * 70 + "}"):
        assert text_of(ADDS + "{{ c.function.arguments }}" + END, arguments) == "assistant" + arguments
