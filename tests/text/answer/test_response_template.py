"""A model's own description of its answers, compared with transformers, which defines it."""

from __future__ import annotations

import json

import pytest

from penstock.errors import UnsupportedError
from penstock.text.answer.constraint import calls_grammar
from penstock.text.answer.formats import DECLARED, REASONING_FORMATS, TOOL_FORMATS
from penstock.text.answer.parser import AnswerParser
from penstock.text.answer.response_template import declared_formats, read_response_template
from penstock.text.answer.template_features import features_of
from penstock.text.answer.tool_prompt import written_calls
from penstock.text.grammar.compiler import GrammarCompiler
from penstock.text.grammar.source import GrammarSource
from penstock.text.tokenizer import Tokenizer
from tests.support.answer_texts import ARGUMENTS, TOOLS
from tests.support.errors import raises
from tests.support.fake_model import FILES
from tests.support.parsed_answers import read

LISTED = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"content": "text", "close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"}
ENDED = {"content": "text", "close": "<end>"}


def template(tool_calls: dict, content: dict | None = None, thinking: dict | None = None, **others) -> dict:
    fields = {"reasoning_content": thinking or THINK, "tool_calls": tool_calls, "content": content or CONTENT}
    return {"defaults": {"role": "assistant"}, "start_anchor": "<answer>", "fields": fields, **others}


TEMPLATES = {
    "hermes": template(
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
         "transform": FUNCTION}
    ),
    "qwen3_coder": template(
        {"open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\s]+)>", "close_pattern":
         r"</function>\s*</tool_call>", "repeats": True, "content": "xml-inline", "transform": NAMED,
         "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\s]+)>\n(?P<value>.*?)\n</parameter>"}}
    ),
    "parameters": template(
        {"open_pattern": r"\s*(?:<call>|<\|invoke\|>)", "close": "</call>", "repeats": True, "content": "json",
         "transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}}},
        ENDED, {"open": "[THOUGHTS]", "close": "[/THOUGHTS]"},
    ),
    "named": template(
        {"open_pattern": r"\s*<\|call\|>(?P<name>\w+)<\|with\|>\s*", "close": "<|done|>", "repeats": True,
         "content": "json", "transform": NAMED},
        ENDED,
    ),
    "list": template(
        {"open": "[CALLS]", "close_pattern": r"\[/CALLS\]", "content": "json", "transform_each": True, "transform":
         {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}},
        ENDED,
    ),
    "python": template(
        {"open": "<|calls|>", "close": "<|/calls|>", "content": "python-call-list", "transform_each": True, "transform":
         {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}},
        ENDED,
    ),
    "lax": template(
        {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True, "content":
         "json", "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}, "transform": NAMED},
        ENDED, {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
    ),
    "lines": template(
        {"open_pattern": r"<call>\s*(?P<name>\w+)\n", "close": "</call>", "repeats": True, "content": "kv-lines",
         "transform": NAMED},
        ENDED,
    ),
    "json lines": template(
        {"open_pattern": r"<call>\s*(?P<name>\w+)\n", "close": "</call>", "repeats": True, "content": "kv-lines",
         "content_args": {"kv_sep": "=", "line_sep": ";;", "value_parser": {"name": "json", "args": {"allow_non_json":
         True}}}, "transform": NAMED},
        ENDED,
    ),
}  # fmt: skip
CALLS = [("weather", ARGUMENTS), ("now", {})]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer(FILES)
    return GrammarCompiler(lambda: tokenizer, 259, [1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_read_as_transformers_reads_them(name):
    parse = pytest.importorskip("transformers.utils.chat_parsing").parse_response
    form = read_response_template(json.dumps(TEMPLATES[name]))
    thoughts = f"{form.reasoning.opening}\nhm {'{'}\n{form.reasoning.closing}\n\n"
    calls = written_calls(form.tools, CALLS)
    for text in (f"{thoughts}Well.\n{calls}", calls, f"{thoughts}Well < [ é", "Well.", f"{thoughts}{calls}\n"):
        message = parse(text, TEMPLATES[name], prefix="", tools=LISTED)
        found = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
        expected = (message.get("content", ""), message.get("reasoning_content", ""), found)
        whole = read(AnswerParser(form, TOOLS), [text])
        assert (whole[0].strip(), whole[1].strip(), whole[2]) == expected
        for pieces in (list(text), [text[:7], text[7:]], [text[:-9], text[-9:]]):
            assert read(AnswerParser(form, TOOLS), pieces) == whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_described_call_can_be_required(name, compiler):
    form = read_response_template(json.dumps(TEMPLATES[name])).tools
    tokenizer = compiler._tokenizer()
    matcher = compiler.compile(GrammarSource("grammar", calls_grammar(form, TOOLS))).matcher()
    called = [("weather", {"city": "Bern", "days": 3}), ("now", {})]
    text = written_calls(form, called).replace("'", '"')  # of Python
    matcher.accept([token for byte in text.encode() for token in tokenizer.encode(chr(byte), add_special_tokens=False)])


def test_every_text_that_begins_a_call_does():
    form = read_response_template(json.dumps(TEMPLATES["parameters"]))
    text = '<|invoke|>{"name": "now", "parameters": {}}</call>'
    assert read(AnswerParser(form, TOOLS), [text]) == ("", "", [("now", {})])


def test_known_texts_are_one_of_our_formats():
    for name in ("hermes", "qwen3_coder"):
        form = read_response_template(json.dumps(TEMPLATES[name]))
        assert form.tools is TOOL_FORMATS[name]
        assert form.reasoning is REASONING_FORMATS["think"]
    assert read_response_template(json.dumps(TEMPLATES["named"])).tools.name == DECLARED


def test_what_is_not_known_is_refused_by_name(caplog):
    good, lines, lax = (TEMPLATES[name]["fields"]["tool_calls"] for name in ("hermes", "lines", "lax"))
    for changed, where in (
        ({"version": 2}, "version"),
        ({"other": 1}, "fields"),
        ({"fields": {"citations": {}}}, "fields.citations"),
        ({"fields": {"tool_calls": {**good, "open_pattern": "(a+)+b"}}}, "fields.tool_calls.open_pattern"),
        ({"fields": {"tool_calls": {**good, "open_pattern": "x" * 5000}}}, "fields.tool_calls.open_pattern"),
        ({"fields": {"tool_calls": {**good, "open_pattern": "a(?:b|c)"}}}, "fields.tool_calls.open_pattern"),
        ({"fields": {"tool_calls": {**good, "content": "toml"}}}, "fields.tool_calls.content"),
        ({"fields": {"tool_calls": {**good, "content_args": {"unquoted_keys": True}}}}, "fields.tool_calls.content"),
        ({"fields": {"tool_calls": {**lines, "close": ""}}}, "fields.tool_calls.close"),
        ({"fields": {"tool_calls": {**lines, "content_args": {"kv_sep": 1}}}}, "fields.tool_calls.content_args"),
        ({"fields": {"tool_calls": {**lines, "content_args": {"strip": False}}}}, "fields.tool_calls.content_args"),
        (
            {"fields": {"tool_calls": {**lines, "content_args": {"value_parser": {"name": "int"}}}}},
            "fields.tool_calls.content_args",
        ),
        (
            {"fields": {"tool_calls": {**lax, "content_args": {"string_delims": ["x"]}}}},
            "fields.tool_calls.content_args",
        ),
        ({"fields": {"tool_calls": {**good, "transform": {"function": "x"}}}}, "fields.tool_calls.transform"),
        ({"fields": {"content": {"open": "<text>"}}}, "fields.content"),
        ({"fields": {"thinking": {"open": "<a>", "close": "</a>", "content": "json"}}}, "fields.thinking"),
    ):
        with raises(UnsupportedError, match=rf"response_template\.{where}"):
            read_response_template(json.dumps({**TEMPLATES["hermes"], **changed}))
    broken = {"bos_token": "<s>", "chat_template": "{{ tools }}<tool_call></think>", "response_template": [1]}
    tokenizer = Tokenizer(FILES | {"tokenizer_config.json": json.dumps(broken).encode()})
    assert features_of(tokenizer) == ["tools", "thoughts"]
    assert "response_template" in caplog.text


def test_a_description_needs_no_signs_in_the_chat_template():
    config = {"bos_token": "<s>", "chat_template": "{{ tools }}", "response_template": TEMPLATES["named"]}
    tokenizer = Tokenizer(FILES | {"tokenizer_config.json": json.dumps(config).encode()})
    assert declared_formats(tokenizer).tools.name == DECLARED
    assert features_of(tokenizer) == ["tools", "thoughts"]
    assert features_of(tokenizer, "none", "none") == []


def test_strings_between_marks_may_have_any_characters():
    form = read_response_template(json.dumps(TEMPLATES["lax"]))
    head, end = "<|tool_call>call:weather", "<tool_call|>"
    text = f'{head}{{city:<|"|>a: "{{b:1,<|"|>, "days" : 3,near:{{c:["x,y:"]}}}}{end}'
    assert read(AnswerParser(form, TOOLS), [text])[2] == [
        ("weather", {"city": 'a: "{b:1,', "days": 3, "near": {"c": ["x,y:"]}})
    ]
    for broken in ('{city:<|"|>Bern}', '{city:"Bern}', "{city:Bern}", "[1]"):
        text = f"{head}{broken}{end}"
        assert read(AnswerParser(form, TOOLS), [text]) == (text, "", [])
