"""The features of chat templates."""

from __future__ import annotations

import json

import pytest

from penstock.text import template_sandbox
from penstock.text.answer.template_features import features_of
from penstock.text.tokenizer import Tokenizer
from tests.support.fake_model import FILES

TOOLS = "{%- if tools %}<tool_call>{{ tools }}{% endif %}"
TEMPLATES = {
    "plain": ("{{ messages }}", []),
    "qwen3": (
        TOOLS + "{{ messages }}</think>{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}",
        ["tools", "thoughts", "enable_thinking"],
    ),
    "a field of messages": ("{% for m in messages %}{{ m.thinking }}{{ m.reasoning_effort }}{% endfor %}", []),
    "defaults": ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}", ["thinking"]),
    "harmony": (
        "{% if tools %}functions.{% endif %}<|channel|><|message|>{{ reasoning_effort }}",
        ["tools", "thoughts", "reasoning_effort"],
    ),
    "an unknown format": ("{{ tools }}", []),
    "does not compile": ("{% if tools %}<tool_call>", []),
}


def test_a_refusal_by_the_deadline_does_not_last(monkeypatch):
    template = "{{ enable_thinking }}{# one of its own #}"
    config = json.dumps({"bos_token": "<s>", "chat_template": template}).encode()
    tokenizer = Tokenizer(FILES | {"tokenizer_config.json": config})
    with monkeypatch.context() as patched:
        patched.setattr(template_sandbox, "MAX_SECONDS", -1.0)
        assert "longer than" in tokenizer.chat_template_error
        assert features_of(tokenizer) == []
    assert tokenizer.chat_template is None  # not tried for each request
    monkeypatch.setattr(template_sandbox, "_slow", {})  # as after a minute
    assert tokenizer.chat_template == template
    assert features_of(tokenizer) == ["enable_thinking"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_features_are_those_of_the_template(name):
    template, features = TEMPLATES[name]
    config = json.dumps({"bos_token": "<s>", "chat_template": template}).encode()
    assert features_of(Tokenizer(FILES | {"tokenizer_config.json": config})) == features


def test_features_follow_the_formats_of_the_service():
    config = json.dumps({"bos_token": "<s>", "chat_template": "{{ tools }}</think>"}).encode()
    tokenizer = Tokenizer(FILES | {"tokenizer_config.json": config})
    assert features_of(tokenizer, "hermes", "none") == ["tools"]
    plain = json.dumps({"bos_token": "<s>", "chat_template": "{{ messages }}"}).encode()
    assert features_of(Tokenizer(FILES | {"tokenizer_config.json": plain}), "hermes") == ["tools"]
    assert features_of(Tokenizer(FILES | {"tokenizer_config.json": b"{}"})) == []
