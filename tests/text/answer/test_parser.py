"""Tool calls and thoughts in the text of answers, in every format, however the text is split."""

from __future__ import annotations

import json
import random

import pytest

from penstock.text.answer.formats import (
    TOOL_FORMATS,
    AnswerFormat,
    find_reasoning_format,
    find_tool_format,
)
from penstock.text.answer.parser import AnswerParser, MoreArguments
from penstock.text.answer.values import value_types
from tests.support.answer_texts import ARGUMENTS, SEP, TEXTS, THOUGHTS, J, called
from tests.support.parsed_answers import parser_of, read


def splits(text: str) -> list[list[str]]:
    """Return the text in single characters, in two pieces at every place, and in some random pieces."""
    rng = random.Random(7)
    found = [list(text), *([text[:at], text[at:]] for at in range(0, len(text), 1 + len(text) // 200))]
    for _ in range(5):
        ends = sorted(rng.sample(range(len(text) + 1), min(6, len(text))))
        found.append([text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)])
    return found


EXPECTED = [("weather", ARGUMENTS), ("now", {})]


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found_however_the_text_is_split(name):
    text = TEXTS[name]
    for pieces in ([text], *splits(text)):
        assert read(parser_of(name), pieces) == ("", "", EXPECTED), pieces
    assert read(parser_of(name, max_calls=1), [text])[2] == EXPECTED[:1]


@pytest.mark.parametrize(
    ("tools", "reasoning"),
    [("hermes", "think"), ("qwen3_coder", "think"), ("mistral_v11", "mistral"), ("harmony", "harmony"),
     ("glm4", "think"), ("pythonic", "cohere"), ("deepseek_v31", "think"), ("none", "think"), ("none", "harmony")],
)  # fmt: skip
def test_thoughts_content_and_calls_are_told_apart(tools, reasoning):
    final = "<|channel|>final<|message|>Hello\n\nyou<|end|><|start|>assistant" if reasoning == "harmony" else ""
    content = final or ("" if tools == "pythonic" else "Hello\n\nyou\n")
    text = THOUGHTS[reasoning] + content + TEXTS.get(tools, "")
    expected = ("Hello\n\nyou" if content else "", "I <think> so", EXPECTED if tools in TEXTS else [])
    for pieces in ([text], *splits(text)):
        found = read(parser_of(tools, reasoning), pieces)
        assert (found[0].rstrip(), *found[1:]) == expected, pieces


def test_thoughts_that_the_prompt_began_need_no_opening():
    for text, expected in (
        ("a\n</think>\n\nb", ("b", "a", [])),
        ("\n</think>b", ("b", "", [])),
        ("never closed <tool_call>", ("", "never closed <tool_call>", [])),
    ):
        for pieces in ([text], *splits(text)):
            assert read(parser_of("hermes", "think", is_reasoning=True), pieces) == expected
    call = TEXTS["deepseek_v31"]
    assert read(parser_of("deepseek_v31", "think", is_reasoning=True), ["hm " + call]) == ("", "hm", EXPECTED)


NOT_CALLS = {
    "hermes": [
        "<tool_call>", "<tool_call>\n{", '<tool_call>{"name": "weather"', '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "<tool_call>x</tool_call>", "a < b <tool", " a\n ",
        "<tool_call>{}}</tool_call>", "</tool_call>", "<tool_call>[]</tool_call>", '<tool_call>{"name": "a" "b": 1}',
        '<tool_call>{"name": ["a"], "arguments": {}}</tool_call>', '<tool_call>{"name": "a", "x": NaN}</tool_call>',
    ],
    "llama3_json": ['{"a": 1}', '{"name": "unknown", "parameters": {}}', "{", '{"name": "now"', "[1]", " {]} x"],
    "pythonic": ["[1, 2]", "[unknown()]", "[now(1)]", "[now(x=y)]", "[now(", "[" * 300, "[now(**{})]",
                 "[x for x in y]"],
    "lfm2": ["<|tool_call_start|>now", "<|tool_call_start|>[now(x=__import__('os'))]<|tool_call_end|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [1]", "[TOOL_CALLS] " + "x" * 300 + "{}", "[TOOL_CALLS]now[ARGS]x"],
    "qwen3_coder": ["<tool_call>\n<function=now", "<function=now>\n<parameter=a>\nb", "<function=>", "<tool_call>hm"],
    "glm4": ["<tool_call>now\n<arg_key>a</arg_key>", "<tool_call>now<arg_key>a b</arg_key>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>x",
                    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}now\n```\n{{}}"],
    "harmony": ["<|channel|>commentary to=functions.now<|message|>x", "<|channel|>commentary to=functions.now"],
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_CALLS)
def test_a_text_that_is_no_call_is_content(name):
    for text in NOT_CALLS[name]:
        whole = read(parser_of(name), [text])
        assert whole[1:] == ("", [])
        if name != "harmony":
            assert whole[0] == text
        for pieces in splits(text):
            assert read(parser_of(name), pieces) == whole, pieces


def test_a_call_after_a_broken_one_is_found():
    text = '<tool_call>{"name": }</tool_call> and <tool_call>' + called("now", '{"a": 1}') + "</tool_call> then"
    for pieces in ([text], *splits(text)):
        content, _, calls = read(parser_of("hermes"), pieces)
        assert calls == [("now", {"a": 1})]
        assert content == '<tool_call>{"name": }</tool_call> andthen'


BROKEN = ("now", '{"a": [1')
JSON_CALLS = {
    "hermes": called("now", {"a": [1]}),
    "mistral_v11": 'now[ARGS]{"a": [1]}',
    "deepseek_v31": f'<｜tool▁call▁begin｜>now{SEP}{{"a": [1]}}<｜tool▁call▁end｜>',
    "deepseek_v3": f'<｜tool▁call▁begin｜>function{SEP}now\n```json\n{{"a": [1]}}\n```<｜tool▁call▁end｜>',
    "llama3_json": called("now", {"a": [1]}, "parameters"),
}


@pytest.mark.parametrize("name", JSON_CALLS)
def test_a_call_that_breaks_off_keeps_its_arguments(name):
    """The next one is found, and the end of the broken one is no content."""
    form, call = TOOL_FORMATS[name], JSON_CALLS[name]
    opening, closing = form.all_openings[0], form.closing.strip()
    begun = f"{opening}{call[: call.index('1') + 1]}"
    whole = f"{opening}{call}{closing}"
    for text, expected in (
        (begun, ("", "", [BROKEN])),
        (begun + closing + whole, ("", "", [BROKEN, ("now", {"a": [1]})])),
        (begun + "".join(form.ends) + " then", ("then", "", [BROKEN])),
    ):
        if text.endswith("then") and not closing:
            continue
        for pieces in ([text], *splits(text)):
            assert read(parser_of(name), pieces) == expected, pieces
            assert read(parser_of(name, max_calls=0), pieces)[2] == []


def test_a_call_in_python_that_is_not_closed_swallows_no_other():
    text = "<|tool_call_start|>[now(a=[1<|tool_call_end|><|tool_call_start|>[now(a=[1])]<|tool_call_end|>"
    for pieces in ([text], *splits(text)):
        content, _, calls = read(parser_of("lfm2"), pieces)
        assert calls == [("now", {"a": [1]})], pieces
        assert content.startswith("<|tool_call_start|>")


def test_a_value_that_is_not_closed_swallows_no_other_call():
    for name in ("qwen3_coder", "glm4"):
        end = {"qwen3_coder": "\n</parameter>\n</function>", "glm4": "</arg_value>"}[name]
        broken = TEXTS[name].replace(end, end.replace("\n</parameter>", "").replace("</arg_value>", ""), 3)
        assert broken != TEXTS[name]
        for pieces in ([broken], *splits(broken)):
            content, _, calls = read(parser_of(name), pieces)
            assert (content, [call for call, _ in calls]) == ("", ["weather", "now"]), pieces
            assert calls[0][1]["city"].startswith('Zü"r}i<ch')


def test_names_that_are_not_python_are_read_and_enforced():
    tools = {"get-weather": {"properties": {"max-days": {}, "class": {}}}, "2d/plot": {}}
    text = """[get-weather(max-days=3, class="2d/plot(max-days=1)"), 2d/plot()]"""
    expected = [("get-weather", {"max-days": 3, "class": "2d/plot(max-days=1)"}), ("2d/plot", {})]
    for pieces in ([text], *splits(text)):
        parser = AnswerParser(AnswerFormat(TOOL_FORMATS["pythonic"]), tools)
        assert read(parser, pieces) == ("", "", expected)
    assert read(AnswerParser(AnswerFormat(TOOL_FORMATS["pythonic"]), tools), ["[penstock_hidden_0()]"])[2] == []


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "mistral_v11", "deepseek_v3", "harmony"])
def test_arguments_stream_as_they_are_written(name):
    parser, text = parser_of(name), TEXTS[name]
    pieces = [part.text for char in text for part in parser.push(char) if isinstance(part, MoreArguments)]
    assert len(pieces) > 20
    assert json.loads("".join(pieces)[: len(J)]) == ARGUMENTS


def test_a_call_of_a_known_tool_needs_no_marker_in_hermes():
    """Small models leave it out."""
    for text, expected in (
        (called("now", {"a": 1}), ("", "", [("now", {"a": 1})])),
        (called("now", {}) + "\n</tool_call>\n" + TEXTS["hermes"], ("", "", [("now", {}), *EXPECTED])),
        (called("unknown", {}), (called("unknown", {}), "", [])),
        ('{"a": 1}', ('{"a": 1}', "", [])),
    ):
        for pieces in ([text], *splits(text)):
            assert read(parser_of("hermes"), pieces) == expected, pieces


def test_calls_without_markers_follow_each_other():
    """Without the separator of the format, too."""
    first, second = called("now", {"a": 1}), called("now", {})
    for name, text, content in (
        ("hermes", f"{first}\n{second}\n</tool_call>", ""),
        ("hermes", f"{first}{second}", ""),
        ("hermes", f"<tool_call>\n{first}\n{second}\n</tool_call>", ""),
        ("hermes", f'{first}\n{second}\n{{"a": 1}}', '{"a": 1}'),
        ("hermes", f"{first}\n{second}\n{called('unknown', {})} x", f"{called('unknown', {})} x"),
        ("llama3_json", f"{first}\n{second}", ""),
        ("pythonic", "[now(a=1)]\n[now()]", ""),
    ):
        for pieces in ([text], *splits(text)):
            assert read(parser_of(name), pieces) == (content, "", [("now", {"a": 1}), ("now", {})]), pieces


def test_calls_of_a_list_keep_their_order():
    """A call without arguments, or with its name behind them, is not given out as it is read."""
    calls = ['{"name": "now"}', '{"arguments": {"a": 1}, "name": "now"}', '{"name": "now", "arguments": "{}"}']
    calls.insert(1, called("weather", {"city": "Bern"}))
    expected = [("now", {}), ("weather", {"city": "Bern"}), ("now", {"a": 1}), ("now", {})]
    for name, opening, closing in (
        ("mistral", "[TOOL_CALLS] [", "]"),
        ("mistral_v11", "[TOOL_CALLS][", "]"),
        ("hermes", "<tool_call>[", "]</tool_call>"),
    ):
        text = opening + ", ".join(calls)
        for pieces in ([text + closing], *splits(text + closing), [text]):
            assert read(parser_of(name), pieces) == ("", "", expected), pieces
            assert read(parser_of(name, max_calls=1), pieces)[2] == expected[:1]
        assert read(parser_of(name), [text + ", x"]) == (", x", "", expected)


def test_arguments_before_their_name_or_in_a_string_come_whole():
    for inner, expected in (
        ('{"arguments": {"a": 1}, "name": "now"}', {"a": 1}),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"id": "x", "name": "now", "arguments": null, "parameters": {"b": 1}}', {}),
        ('{"name": "now", "parameters": {"b": 1}, "x": [1, {}]}', {"b": 1}),
        ('{"name": "now"}', {}),
    ):
        text = f"<tool_call>{inner}</tool_call>"
        for pieces in ([text], *splits(text)):
            assert read(parser_of("hermes"), pieces) == ("", "", [("now", expected)]), pieces


def test_every_name_of_a_tool_is_read_in_channels():
    text = "<|channel|>commentary to=functions.a:b/c.d-e<|message|>{}<|call|>"
    assert read(parser_of("harmony"), [text])[2] == [("a:b/c.d-e", {})]


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_texts_take_linear_time_and_raise_nothing(name):
    """Texts of 20,000 characters, whole and in small pieces; with a quadratic reader the test would take hours."""
    form = TOOL_FORMATS[name]
    starts = [*form.all_openings, *form.bare, "<|channel|>", "{", "[", '"', "\\", "<", "now", "<arg_key>", "<function="]
    rng = random.Random(1)
    texts = [mark * (20_000 // len(mark)) for mark in starts if mark]
    texts.append((form.all_openings or ("",))[0] + form.bare + '{"name": "now", "arguments": {"x": "' + "y" * 20_000)
    texts += ["".join(rng.choices([*starts, *form.markers, " ", '"}', "}", "]", "x"], k=600)) for _ in range(5)]
    for text in texts:
        whole = read(parser_of(name, "think"), [text])
        pieces = [text[at : at + 41] for at in range(0, len(text), 41)]
        assert read(parser_of(name, "think"), pieces) == whole


def test_values_written_as_text_have_the_type_of_their_schema():
    def value(text: str, city: str = "city") -> object:
        call = f"<function=weather>\n<parameter={city}>\n{text}\n</parameter>\n</function>"
        ((_, arguments),) = read(parser_of("qwen3_coder"), [call])[2]
        return arguments[city]

    assert value("3") == "3"
    assert value("null") == "null"
    assert value("\n  x\n") == "\n  x\n"
    assert value("3", "days") == 3
    assert value("three", "days") == "three"
    assert value("null", "near") is None
    assert value("3", "unknown") == "3"


def test_formats_are_chosen_by_template_or_name():
    signs = {
        "hermes": "<tool_call></tool_call>",
        "glm4": "<tool_call>{{name}}<arg_key>",
        "qwen3_coder": "<tool_call><function=<parameter=",
        "mistral": "[TOOL_CALLS]",
        "mistral_v11": "[TOOL_CALLS][ARGS]",
        "deepseek_v3": "<｜tool▁call▁begin｜>```json",
        "deepseek_v31": "<｜tool▁call▁begin｜>",
        "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary}',
        "harmony": "<|channel|>to=functions.",
    }
    for name, template in signs.items():
        form = find_tool_format("auto", template)
        assert form is not None
        assert form.name == name
    assert find_tool_format("auto", "{{ messages }}") is None
    assert find_tool_format("none", "<tool_call>") is None
    assert find_tool_format("qwen3_xml", "") is TOOL_FORMATS["qwen3_coder"]
    assert find_reasoning_format("deepseek-r1", "") is find_reasoning_format("auto", "</think>")
    with pytest.raises(ValueError, match="tool_format") as caught:
        find_tool_format("x", "")
    assert caught.value.param == "tool_format"


def test_types_of_a_schema_that_refers_to_itself():
    """Without a note of what was seen, every level would multiply the work by the number of options."""
    own = {"anyOf": [{"$ref": "#/$defs/own"}] * 40 + [{"type": "string"}, {"enum": [1, None]}]}
    assert value_types({"$ref": "#/$defs/own"}, {"$defs": {"own": own}}) == {"string", "integer", "null"}
    for schema in (
        {"type": 5},
        {"anyOf": 5},
        {"oneOf": {"a": 1}},
        {"enum": 5},
        {"$ref": "#/x/y"},
        {"type": [5, {}]},
        5,
    ):
        assert value_types(schema, {"x": 5}) == set()
