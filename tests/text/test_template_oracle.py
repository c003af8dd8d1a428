"""The templates of ``templates/``, in the shapes that published models have, render as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.auto.tokenizer import AutoTokenizer
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.text.tokenizer import Tokenizer
from tests.support.fake_model import byte_level_json

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
REFUSED = "refused"
NEVER_RENDERED = ("does_not_compile", "dunder_access", "generation_break", "mutates_messages", "undefined_attribute",
                  "underscore_namespace")  # fmt: skip

USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief. /no_think"}
ANSWER = {"role": "assistant", "content": "It is 4. "}
CALL = {"name": "weather", "arguments": {"city": "Łódź", "days": 2, "units": ["C", "F"], "exact": True}}
CALLS = [{"id": "call12345", "type": "function", "function": CALL}]
AS_TEXT = [{"id": "call12345", "type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}]
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": '{"temp": 3}'}
PARTS = [{"type": "text", "text": "Look: "}, {"type": "image", "image": "x.png"}, {"type": "text", "text": "a cat? "}]
ODD = "  {{ messages }} {% if %} <b>&amp;</b> \"quoted\" 'x' \\n\n\n日本 </think> after\t "

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "turns": [
        SYSTEM,
        USER,
        ANSWER,
        {"role": "user", "content": "And 3 + 3?"},
        ANSWER,
        {"role": "user", "content": "/think"},
    ],
    "answered": [USER, ANSWER],
    "odd characters": [
        {"role": "system", "content": ODD},
        {"role": "user", "content": ODD},
        {"role": "assistant", "content": ODD},
    ],
    "call": [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, RESULT],
    "call as text": [USER, {"role": "assistant", "content": "", "tool_calls": AS_TEXT}, RESULT, ANSWER, USER],
    "two calls": [
        SYSTEM,
        USER,
        {"role": "assistant", "tool_calls": CALLS * 2},
        RESULT,
        RESULT | {"content": {"temp": 5}},
        USER,
    ],
    "no content": [USER, {"role": "assistant", "content": None, "tool_calls": None, "refusal": None}, USER],
    "reasoning": [USER, {"role": "assistant", "reasoning": "Adding.\n", "content": "4"}, USER],
    "thinking": [USER, {"role": "assistant", "thinking": "Adding.", "content": "4", "reasoning": "not this"}],
    "reasoning_content": [
        USER,
        {"role": "assistant", "reasoning_content": "\nAdding.", "content": None, "tool_calls": CALLS},
    ],
    "think in content": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}],
    "parts": [
        {"role": "system", "content": PARTS[:1]},
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": PARTS[2:]},
    ],
    "other roles": [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "name": "Ann", "content": "Hi"},
        {"role": "critic", "content": "No"},
    ],
    "order": [USER, USER, ANSWER, SYSTEM],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Tell the weather.",
            "return": {"type": "string"},
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {
                    "city": {"type": "string", "description": " The city's name & more "},
                    "days": {"type": ["integer", "null"], "minimum": 1},
                    "units": {"type": "array", "items": {"type": "string"}, "enum": ["C", "F"]},
                    "place": {
                        "type": "object",
                        "properties": {"lat": {"type": "number"}},
                        "additionalProperties": {"type": "boolean"},
                    },
                },
            },
        },
    }
    for name in ("weather", "another")
]
DOCUMENTS = [
    {"title": "tHE cat", "text": "The cat sat on the mat, and then on the chair and on the bed."},
    {"doc_id": 7, "text": "x"},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "tools": TOOLS, "enable_thinking": False, "tools_in_user_message": False},
    {
        "tools": TOOLS,
        "documents": DOCUMENTS,
        "controls": {"citations": 1},
        "thinking": True,
        "reasoning_effort": "high",
    },
    {"documents": DOCUMENTS, "add_generation_prompt": True, "date_string": "today", "bos_token": "<other>"},
    {"tools": [], "documents": [], "citation_mode": "fast", "add_vision_id": True},
    {"continue_final_message": True},
    {"continue_final_message": "reasoning_content"},
    {"continue_final_message": True, "add_generation_prompt": True},
]


@cache
def tokenizers() -> tuple[Any, AutoTokenizer]:
    """The tokenizer of transformers, and ours."""
    import tokenizers as library
    import transformers

    data = byte_level_json()
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library.Tokenizer.from_str(data.decode()), **SPECIALS
    )
    ours = Tokenizer({"tokenizer.json": data, "tokenizer_config.json": json.dumps(SPECIALS).encode()})
    return theirs, AutoTokenizer(ours)


def rendered(tokenizer: Any, errors: tuple[type[Exception], ...], template: str, messages: Any, options: Any) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    except errors:
        return REFUSED
    return text


def cases_of(number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every conversation with one of the options; over the templates every pair occurs."""
    for index, name in enumerate(CONVERSATIONS):
        yield name, OPTIONS[(number + index) % len(OPTIONS)]


@pytest.mark.parametrize("number", range(len(TEMPLATES)), ids=lambda number: TEMPLATES[number].stem)
def test_a_template_renders_as_in_transformers(number: int) -> None:
    template, (theirs, ours) = TEMPLATES[number].read_text(encoding="utf-8"), tokenizers()
    num_rendered = 0
    for name, options in cases_of(number):
        expected = rendered(theirs, (Exception,), template, CONVERSATIONS[name], options)
        text = rendered(ours, (InvalidArgumentError, InvalidFileError), template, CONVERSATIONS[name], options)
        assert text == expected, (name, options)
        num_rendered += expected != REFUSED
    assert (num_rendered == 0) == (TEMPLATES[number].stem in NEVER_RENDERED)


def test_there_are_templates_of_many_shapes() -> None:
    assert len(TEMPLATES) >= 60
