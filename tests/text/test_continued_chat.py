"""A conversation whose last message is continued: the prompts are those of transformers."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.errors import InvalidArgumentError
from penstock.text.chat_template import render_chat
from tests.support.errors import raises

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = "{% for m in messages %}<|{{ m.role }}|>TEXT<|end|>\n{% endfor %}"
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)
TEMPLATES = {
    "plain": TURNS.replace("TEXT", "{{ m.content }}"),
    "trimmed": TURNS.replace("TEXT", "{{ m.content | trim }}"),
    "spaced": TURNS.replace("TEXT", "\n{{ ' ' + m['content'] + ' ' }}"),
    "parts": TURNS.replace("TEXT", PARTS),
    "begins": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
    "last": "{% for m in messages %}{{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}",
}
TEXTS = ["The answer is", "with a space ", "two lines\n", " in front", "a", "", "é\U0001f600 {{ x }}"]
USER = {"role": "user", "content": "the cat"}


def render_continued(template, messages, special_tokens):
    return render_chat(template, messages, special_tokens, add_generation_prompt=False, continue_final_message=True)


def of_transformers(template, messages):
    rendered, _ = render_jinja_template([messages], chat_template=template, continue_final_message=True, **SPECIAL)
    return rendered[0]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name, text):
    template = TEMPLATES[name]
    for messages in (
        [USER, {"role": "assistant", "content": text}],
        [USER, {"role": "assistant", "content": "once"}, USER, {"role": "assistant", "content": text}],
        [{"role": "user", "content": text}],
    ):
        assert render_continued(template, messages, SPECIAL) == of_transformers(template, messages)


def test_the_last_text_of_several_parts_is_continued():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}, {"type": "other"}]
    messages = [USER, {"role": "assistant", "content": parts}]
    template = TURNS.replace("TEXT", PARTS)
    assert render_continued(template, messages, SPECIAL) == of_transformers(template, messages)
    assert parts[1]["text"] == "two"


def test_a_text_that_looks_like_the_mark_is_kept():
    messages = [USER, {"role": "assistant", "content": "CONTINUE_FINAL_MESSAGE_TAG CONTINUE_FINAL_MESSAGE_TAG"}]
    prompt = render_continued(TEMPLATES["plain"], messages, SPECIAL)
    assert prompt.endswith("<|assistant|>CONTINUE_FINAL_MESSAGE_TAG CONTINUE_FINAL_MESSAGE_TAG")


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "x"),
        (TURNS.replace("TEXT", "{{ m.content | upper }}"), "x"),
        (TURNS.replace("TEXT", "{{ m.content }}"), None),
        (TURNS.replace("TEXT", "{{ m.content }}"), [{"type": "image"}]),
    ],
)
def test_what_cannot_be_continued_is_refused(template, content):
    with raises(InvalidArgumentError, param="continue_final_message"):
        render_continued(template, [USER, {"role": "assistant", "content": content, "tool_calls": []}], SPECIAL)
