"""Reads the text of answers with a parser, as tests compare it."""

from __future__ import annotations

import json

from penstock.text.answer.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from penstock.text.answer.parser import AnswerParser, MoreArguments, Piece, ToolCall
from tests.support.answer_texts import TOOLS


def parser_of(name: str, reasoning: str = "none", **options) -> AnswerParser:
    form = AnswerFormat(TOOL_FORMATS.get(name), REASONING_FORMATS.get(reasoning))
    return AnswerParser(form, TOOLS, **options)


def read(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, object]]]:
    """Return the content, the thoughts and the calls."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    texts = {
        is_reasoning: "".join(p.text for p in parts if isinstance(p, Piece) and p.is_reasoning is is_reasoning)
        for is_reasoning in (False, True)
    }
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append((part.name, part.arguments))
        elif isinstance(part, MoreArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return texts[False], texts[True], [(name, value_of(arguments)) for name, arguments in calls]


def value_of(arguments: str) -> object:
    """Return arguments as an object; the text of those that break off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
