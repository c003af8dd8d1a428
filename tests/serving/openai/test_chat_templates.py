"""Chat templates over HTTP: those of training render, and one that cannot be used refuses chat only."""

from __future__ import annotations

import json

import pytest

from penstock.text.tokenizer import Tokenizer
from tests.support.fake_model import FILES
from tests.support.http_service import Service

MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def files_of(template: object) -> dict[str, bytes]:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    return FILES | {"tokenizer_config.json": json.dumps(config).encode()}


@pytest.fixture
def service_of(make_llm):
    made = []

    def start(template: object) -> Service:
        made.append(Service({"fake": make_llm(files=files_of(template))}))
        return made[-1]

    yield start
    for service in made:
        service.close()


def test_a_template_with_generation_blocks_chats(service_of):
    service = service_of(GENERATION)
    ids = service.post("/tokenize", messages=MESSAGES)["tokens"]
    assert service.post("/detokenize", tokens=ids)["prompt"] == "the catsat"
    whole = service.post("/v1/chat/completions", messages=MESSAGES, max_tokens=3)
    assert whole["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        ("{{ messages }}\n{% wrong %}", "line 2"),
        ([{"name": "tool_use", "template": "T"}], "tool_use"),
        (7, "chat_template"),
        ("{{ messages[0].content + none }}", "TypeError"),
        ("{{ messages[0].content * 99999999 }}", "limit"),
    ],
)
def test_a_template_that_cannot_be_used_refuses_only_chat(service_of, template, fact):
    service = service_of(template)
    is_found_at_start = fact not in ("TypeError", "limit")  # the others depend on the messages
    assert (fact in Tokenizer(files_of(template)).chat_template_error) == is_found_at_start
    for path in ("/v1/chat/completions", "/tokenize"):
        status, error = service.refused(path, messages=MESSAGES)
        assert (status, error["param"]) == (400, "messages")
        assert error["code"] == ("invalid_chat_template" if is_found_at_start else "invalid_value")
        assert fact in error["message"]
    assert service.post("/v1/completions", prompt="the cat", max_tokens=3)["usage"]["completion_tokens"] == 3
    assert service.post("/tokenize", prompt="the cat")["count"] > 0
