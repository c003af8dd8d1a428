"""Grammars of tool calls: whatever follows one, the parser reads as calls that follow the tools' schemas."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest

from penstock.errors import InvalidArgumentError
from penstock.text.answer.constraint import calls_grammar, calls_or_answer, grammar_behind_thoughts
from penstock.text.answer.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from penstock.text.answer.parser import AnswerParser, AnswerPart, MoreArguments, Piece, ToolCall
from penstock.text.grammar.compiler import GrammarCompiler
from penstock.text.grammar.source import GrammarSource
from penstock.text.tokenizer import Tokenizer
from tests.support.fake_model import FILES

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "near": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "near"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
            "additionalProperties": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer(FILES)
    return GrammarCompiler(lambda: tokenizer, 259, [1])


ENDS = ["</think>", "</arg_value>", "\n</parameter>", "<|end|>", '"', "}", ">", "]"]


def drawn(compiler: GrammarCompiler, grammar: str, rng: random.Random) -> str:
    """Draw an answer; where a text is free, one that soon ends it."""
    matcher = compiler.compile(GrammarSource("grammar", grammar)).matcher()
    tokens = {bytes([byte]): token for token in range(2, 258) for byte in compiler._tokenizer().token_bytes(token)}
    texts = {token: text for text, token in tokens.items()}
    data, planned = b"", b""
    for _ in range(1500):
        allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist()
        if 1 in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return data.decode()
        if not planned and rng.random() < 0.4:
            planned = rng.choice(ENDS).encode()
        choice = tokens[planned[:1]] if planned else 0
        planned = planned[1:] if choice in allowed else b""
        if choice not in allowed:
            plain = [token for token in allowed if texts.get(token, b"\xff") < b"\x80"]
            choice = rng.choice(plain or allowed)
        data += texts[choice]
        if matcher.accept([choice]):
            return data.decode()
    raise AssertionError(f"no end: {data!r}")


def calls_of(parts: list[AnswerPart]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append((part.name, part.arguments))
        elif isinstance(part, MoreArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return calls


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_parser_reads_whatever_follows_the_grammar(name, compiler):
    form, thoughts = TOOL_FORMATS[name], REASONING_FORMATS["harmony" if name == "harmony" else "think"]
    rng = random.Random(name)
    called = set()
    for turn in range(6):
        is_reasoning = bool(turn % 2) and name != "harmony"
        grammar = calls_grammar(
            form, TOOLS, reasoning=thoughts, is_reasoning=is_reasoning, is_parallel=turn < 3, specials={}
        )
        text = drawn(compiler, grammar, rng)
        parser = AnswerParser(AnswerFormat(form, thoughts), TOOLS, is_reasoning=is_reasoning)
        parts = parser.push(text) + parser.finish()
        calls = calls_of(parts)
        assert calls, text
        assert turn < 3 or len(calls) == 1
        assert all(part.is_reasoning for part in parts if isinstance(part, Piece)), text
        for tool, arguments in calls:
            jsonschema.validate(json.loads(arguments), TOOLS[tool])
        called |= {tool for tool, _ in calls}
    assert len(called) > 1


def test_a_special_token_stands_for_its_marker(compiler):
    """Only the token itself is allowed, not its text."""
    grammar = calls_grammar(TOOL_FORMATS["mistral_v11"], {"now": TOOLS["now"]}, specials={"[TOOL_CALLS]": 0})
    matcher = compiler.compile(GrammarSource("grammar", grammar)).matcher()
    assert np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist() == [0]


def test_a_format_begins_behind_the_thoughts(compiler):
    for source in (
        GrammarSource("json_schema", '{"type": "boolean"}'),
        GrammarSource("regex", "true|false"),
        GrammarSource("choice", '["true", "false"]'),
        GrammarSource("grammar", 'start: "tru" e | "false"\ne: "e"'),
        GrammarSource("grammar", 'start: answer | text0 // start\nanswer: "true"\ntext0: "false"'),
        GrammarSource("grammar", 'start: "true" | "" start # start\n'),
    ):
        grammar = grammar_behind_thoughts(source.lark(), REASONING_FORMATS["think"], {}, has_begun=True)
        text = drawn(compiler, grammar, random.Random(3))
        thoughts, _, answer = text.partition("</think>")
        assert answer.strip() in ("true", "false")
        assert thoughts is not None


def test_names_are_changed_only_where_they_are_rules():
    own = 'start: "start" /start/ <start> start? restart // start'
    grammar = grammar_behind_thoughts(own, REASONING_FORMATS["think"], {}, has_begun=True).splitlines()[0]
    assert grammar == 'penstock_answer: "start" /start/ <start> penstock_answer? restart // start'


def test_a_grammar_grows_with_the_size_of_its_tools_only(compiler):
    places = {f"p{index}": {"type": "object", "description": "x" * 100} for index in range(200)}
    properties = {f"a{index}": {"$ref": f"#/$defs/p{index}"} for index in range(200)}
    tools = {"f": {"type": "object", "properties": properties, "$defs": places}}
    for name in ("pythonic", "qwen3_coder"):
        grammar = calls_grammar(TOOL_FORMATS[name], tools)
        assert len(grammar) < 80_000
    tools["f"]["properties"] = {f"a{index}": {"type": "integer"} for index in range(10_000)}
    with pytest.raises(InvalidArgumentError) as caught:
        calls_grammar(TOOL_FORMATS["pythonic"], tools)
    assert caught.value.param == "tools"


def test_the_arguments_of_a_call_are_an_object(compiler):
    """A schema that does not say so allows other values."""
    for schema in ({}, {"properties": {"a": {"type": "null"}}}, {"type": ["object", "null"]}):
        grammar = calls_grammar(TOOL_FORMATS["mistral_v11"], {"f": schema})
        assert drawn(compiler, grammar, random.Random(2)).startswith("[TOOL_CALLS]f[ARGS]{")
    with pytest.raises(InvalidArgumentError) as caught:
        calls_grammar(TOOL_FORMATS["hermes"], {"f": {"type": "string"}})
    assert caught.value.param == "tools"


def test_an_answer_has_a_form_or_calls_tools(compiler):
    form, source = TOOL_FORMATS["mistral_v11"], GrammarSource("choice", '["true", "false"]')
    lark = calls_or_answer(
        source.lark(), form, {"now": TOOLS["now"]}, thoughts=REASONING_FORMATS["think"], is_reasoning=True,
        is_parallel=False, specials={},
    )  # fmt: skip
    answers = {drawn(compiler, lark, random.Random(seed)).partition("</think>")[2].strip() for seed in range(12)}
    assert answers & {"true", "false"}
    assert all(answer in ("true", "false") or answer.startswith("[TOOL_CALLS]now[ARGS]{") for answer in answers)
    assert any(answer.startswith("[") for answer in answers)


def test_calls_in_python_have_names_that_are_read(compiler):
    tools = {"get-weather": {"properties": {"max-days": {"type": "null"}, "class": {"type": "null"}}}}
    grammar, form = calls_grammar(TOOL_FORMATS["pythonic"], tools, is_parallel=False), TOOL_FORMATS["pythonic"]
    for seed in range(4):
        parser = AnswerParser(AnswerFormat(form), tools)
        ((name, arguments),) = calls_of(parser.push(drawn(compiler, grammar, random.Random(seed))) + parser.finish())
        assert name == "get-weather"
        assert set(json.loads(arguments)) <= {"max-days", "class"}
    for key in ("a b", "a=", 'a"', "a)"):
        with pytest.raises(InvalidArgumentError) as caught:
            calls_grammar(TOOL_FORMATS["pythonic"], {"f": {"properties": {key: {}}}})
        assert caught.value.param == "tools"


def test_a_text_ends_at_a_marker_that_is_a_special_token(compiler):
    """Also if it begins with a line break, which is none."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    markers = {"</parameter>": 0}
    grammar = calls_grammar(TOOL_FORMATS["qwen3_coder"], {"f": schema}, specials=markers)
    matcher = compiler.compile(GrammarSource("grammar", grammar)).matcher()
    tokens = {byte: token for token in range(2, 258) for byte in compiler._tokenizer().token_bytes(token)}
    matcher.accept([tokens[byte] for byte in b"<tool_call>\n<function=f>\n<parameter=a>\nx"])
    assert not matcher.mask[0] & 1
    matcher.accept([tokens[ord("\n")]])
    assert matcher.mask[0] & 1
    matcher.accept([0])
    assert not matcher.accept([tokens[byte] for byte in b"\n</function>\n"])


def test_a_list_of_calls_may_have_a_space_before_it(compiler):
    """As of tokens of SentencePiece, which begin with one."""
    grammar = calls_grammar(TOOL_FORMATS["mistral"], {"now": TOOLS["now"]})
    tokens = {byte: token for token in range(2, 258) for byte in compiler._tokenizer().token_bytes(token)}
    for opening in (b"[TOOL_CALLS][{", b"[TOOL_CALLS] [{"):
        matcher = compiler.compile(GrammarSource("grammar", grammar)).matcher()
        assert not matcher.accept([tokens[byte] for byte in opening])
