"""Schemas as the compiler gets them: dates, formats that are notes, counts, and limits on what takes long."""

from __future__ import annotations

import json
import random
from datetime import date, datetime, time
from typing import Any

import pytest

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.text.grammar.schema import MAX_OPTIONAL, MAX_PATTERNS
from penstock.text.grammar.source import GrammarSource
from tests.support.byte_vocabulary import allows, byte_compiler, random_text
from tests.support.errors import raises


@pytest.fixture(scope="module")
def compiler():
    return byte_compiler()


def grammar_of(compiler, schema: dict[str, Any]):
    return compiler.compile(GrammarSource("json_schema", json.dumps(schema)))


DAYS = ["2020-02-29", "2000-02-29", "0004-02-29", "1999-02-28", "2021-12-31", "0001-01-01"]
NO_DAYS = ["2021-02-29", "1900-02-29", "0000-02-29", "0000-01-01", "2021-04-31", "2021-13-01", "2021-00-10", "2021-1-1"]


def test_dates_are_those_that_programs_read(compiler):
    """With a pattern beside them, and deep in a schema."""
    grammars = [
        grammar_of(compiler, {"format": "date", "type": "string"} | more) for more in ({}, {"pattern": "^[0-9-]+$"})
    ]
    for grammar in grammars:
        assert [day for day in [*DAYS, *NO_DAYS] if allows(grammar, f'"{day}"')] == DAYS
        assert not allows(grammar, "5")
    times = grammar_of(compiler, {"items": {"format": "date-time", "pattern": "Z$"}, "type": "array"})
    assert allows(times, '["2024-02-29T23:59:59.123456Z"]')
    for text in ("2024-02-29T23:59:60Z", "2023-02-29T10:00:00Z", "2024-02-29T10:00:00+01:00", "2024-02-29T24:00:00Z"):
        assert not allows(times, f'["{text}"]')


@pytest.mark.parametrize(("form", "read"), [("date", date), ("time", time), ("date-time", datetime)])
def test_python_reads_what_a_format_allows(compiler, form, read):
    grammar, rng, found = grammar_of(compiler, {"type": "string", "format": form}), random.Random(5), 0
    for text in filter(None, (random_text(grammar, rng) for _ in range(60))):
        read.fromisoformat(json.loads(text).upper().replace("Z", "+00:00"))
        found += 1
    assert found > 30


def test_formats_outside_the_standard_say_nothing(compiler):
    schema = {"properties": {"a": {"type": "string", "format": "password"}}, "required": ["a"]}
    assert allows(grammar_of(compiler, schema), '{"a": "x"}')
    for form in ("regex", "json-pointer", "iri"):
        with raises(UnsupportedError, param="json_schema", match=form):
            grammar_of(compiler, {"anyOf": [{"type": "string", "format": form}]})
    named = {"properties": {"format": {"const": "date"}, "date": {"enum": [{"format": "time"}]}}}
    assert allows(grammar_of(compiler, named), '{"format": "date", "date": {"format": "time"}}')


def test_counts_may_have_a_point(compiler):
    grammar = grammar_of(compiler, {"type": "string", "minLength": 1.0, "maxLength": 2.0})
    assert [text for text in ("", "a", "ab", "abc") if allows(grammar, f'"{text}"')] == ["a", "ab"]


def test_properties_that_take_long_are_counted(compiler):
    """Also in a schema of a grammar in Lark."""
    names = [f"p{index}" for index in range(MAX_OPTIONAL + 1)]
    half = MAX_OPTIONAL // 2 + 1
    optional = {"allOf": [{"properties": dict.fromkeys(part, True)} for part in (names[:half], names[half:])]}
    with raises(InvalidArgumentError, param="json_schema", match="optional properties"):
        grammar_of(compiler, optional)
    grammar = GrammarSource("grammar", f'start: "x" %json {json.dumps(optional)}\n')
    with raises(InvalidArgumentError, param="grammar", match="optional properties"):
        compiler.compile(grammar)
    patterns = {f"^{name}$": True for name in names[: MAX_PATTERNS + 1]}
    with raises(InvalidArgumentError, param="json_schema", match="patternProperties"):
        grammar_of(compiler, {"patternProperties": patterns})
    properties = {name: {"const": 1} for name in names}
    assert grammar_of(compiler, {"type": "object", "properties": properties, "required": names[1:]})


def test_schemas_in_lark_are_prepared(compiler):
    grammar = compiler.compile(
        GrammarSource("grammar", 'start: "%json {" %json {"format": "date", "minLength": 1.0} "}"\n')
    )
    assert allows(grammar, '%json {"2020-02-29"}')
    assert not allows(grammar, '%json {"2021-02-29"}')
