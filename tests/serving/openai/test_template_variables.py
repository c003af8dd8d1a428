"""The variables that a chat template gets from a request: switches of thoughts, an effort, a budget."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.api_errors import FieldError
from penstock.serving.openai.answer_spec import template_variables
from penstock.serving.openai.bodies import ChatCompletionRequest
from penstock.text.chat_template import render_chat
from tests.support.errors import raises

TEMPLATES = Path(__file__).parents[2] / "text/templates"
QWEN3, GPT_OSS, DEEPSEEK = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("qwen3", "gpt_oss", "deepseek_v31"))
NAMES_ONLY = "{# thinking enable_thinking #}{% for m in messages %}{{ m.thinking }}{{ m.reasoning_effort }}{% endfor %}"
USER = {"role": "user", "content": "x"}


def variables(template: str, **fields) -> dict:
    body = msgspec.convert({"model": "m", "messages": [USER], **fields}, ChatCompletionRequest)
    return template_variables(body, template)


def test_variables_are_those_that_the_template_reads():
    assert variables(QWEN3) == {}
    assert variables(QWEN3, reasoning_effort="none") == {"enable_thinking": False}
    assert variables(QWEN3, reasoning_effort="high") == {"enable_thinking": True, "reasoning_effort": "high"}
    assert variables(QWEN3, thinking_token_budget=0) == {"enable_thinking": False}
    assert variables(QWEN3, thinking_token_budget=9) == {}
    asked = {"enable_thinking": True, "other": 1}
    assert variables(QWEN3, reasoning_effort="none", chat_template_kwargs=asked) == asked
    assert variables(DEEPSEEK, reasoning_effort="low") == {"thinking": True, "reasoning_effort": "low"}
    assert variables(GPT_OSS, reasoning_effort="low") == {"reasoning_effort": "low"}


def test_a_name_in_a_comment_or_of_a_field_is_no_variable():
    assert variables(NAMES_ONLY, reasoning_effort="none") == {}
    with raises(FieldError, param="reasoning_effort"):
        variables(NAMES_ONLY, reasoning_effort="high")


@pytest.mark.parametrize(("effort", "is_closed"), [("none", True), ("low", False)])
def test_an_effort_reaches_a_prompt_of_qwen3(effort, is_closed):
    text = render_chat(QWEN3, [USER], {}, variables=variables(QWEN3, reasoning_effort=effort))
    assert text.endswith("</think>\n\n") is is_closed
