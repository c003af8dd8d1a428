"""A grammar as a caller gives it, and its translation to the one language that the compiler reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.config import parse_json, show
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.sampling_fields import MAX_GRAMMAR_CHARS, MAX_SCHEMA_CHARS
from penstock.text.grammar.schema import prepared_schema
from penstock.validation import optional_text, refusal

__all__ = ["GRAMMAR_FIELDS", "GrammarSource", "grammar_of", "schema_text"]

WHITESPACE: Final = r"[ ]?|\n[ ]{0,32}|\n\t{0,8}"
"""The whitespace between two tokens of JSON: one space, or a line break and an indentation.  A model that could write
more would sometimes write nothing else up to its token limit."""
_JSON_START: Final = "start: %json "
GRAMMAR_FIELDS: Final = ("json_schema", "json_object", "regex", "choice", "grammar")
"""The fields of SamplingParams that ask for a grammar; a request has at most one."""


@dataclass(frozen=True)
class GrammarSource:
    """A grammar of a request: the field of SamplingParams that has it, and its text.

    The text of a choice is a list of JSON.
    """

    field: str
    text: str

    def lark(self, *, begins_with_space: bool = False) -> str:
        """Return the grammar in Lark.  Raises InvalidArgumentError.

        ``begins_with_space``: JSON may have a space in front.
        """
        lark = _TRANSLATIONS[self.field](self.text)
        if not (begins_with_space and self.field in ("json_schema", "json_object")):
            return lark
        return lark.replace(_JSON_START, f'start: " "? {_JSON_START[7:]}', 1)

    def place(self, line: int, column: int) -> str:
        """Return where a place of ``lark`` is in the grammar itself; "" if that has no lines."""
        if self.field != "grammar":
            return ""
        if _is_lark(self.text):
            return f" at line {max(1, line - 1)}, column {column}"
        return _gbnf_place(self.text, self.lark().splitlines()[:line])


def grammar_of(values: Mapping[str, Any]) -> GrammarSource | None:
    """Return the grammar that checked fields of SamplingParams ask for, if any.

    Raises InvalidArgumentError if two of them do.
    """
    named = [name for name in GRAMMAR_FIELDS if values.get(name)]
    if not named:
        return None
    if len(named) > 1:
        raise InvalidArgumentError(
            f"{named[1]}: expected one of {', '.join(GRAMMAR_FIELDS)}, got {' and '.join(named)}", param=named[1]
        )
    (field,) = named
    value = values[field]
    if field == "json_object":
        return GrammarSource(field, '{"type": "object"}')
    if field == "choice":
        optional_text(field, "".join(value), MAX_GRAMMAR_CHARS)
        return GrammarSource(field, json.dumps(value))
    return GrammarSource(field, value)


def schema_text(name: str, value: object) -> str | None:
    """Check a JSON schema, an object or its text, and return it as text; None for None and "".

    The order of its properties is kept, because answers have it.
    """
    if value is None or value == "":
        return None
    if not isinstance(value, (str, dict)):
        raise refusal(name, "a JSON schema as an object or as text", value)
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        schema = parse_json(text.encode(), name, max_bytes=MAX_SCHEMA_CHARS)
    except InvalidFileError as error:
        raise InvalidArgumentError(str(error), param=name) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"{name}: expected a JSON schema: {error}", param=name) from None
    if not isinstance(schema, dict):
        raise refusal(name, "a JSON schema that is an object", schema)
    if "x-guidance" in schema:
        raise InvalidArgumentError(f"{name}: x-guidance is not a keyword of JSON schemas; remove it", param=name)
    return text


def _with_options(rules: str, options: dict[str, Any] | None = None) -> str:
    """Return a Lark grammar whose masks have every token that fits.

    By default the library would allow only its own split of a text that is forced, and ask a tokenizer for it.
    """
    return f"%llguidance {json.dumps({**(options or {}), 'no_forcing': True})}\n{rules}"


def _schema_lark(text: str) -> str:
    schema = prepared_schema("json_schema", json.loads(text))
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return _with_options(_JSON_START + json.dumps(schema))


def _regex_lark(text: str) -> str:
    from llguidance import LLMatcher

    rules: str = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    return _with_options(rules)


def _choice_lark(text: str) -> str:
    """Return a grammar of one lexeme, because the time for many alternatives of a rule grows with their square."""
    return _regex_lark("|".join(f"({_escaped(choice)})" for choice in json.loads(text)))


def _escaped(text: str) -> str:
    return re.sub(r"[^0-9A-Za-z_\x80-\U0010ffff]", lambda match: f"\\x{ord(match[0]):02x}", text)


_OPTIONS: Final = re.compile(r"^[ \t]*%llguidance[ \t]*(\{.*\})[ \t]*$", re.MULTILINE)
_LARK_SCHEMA: Final = re.compile(r"%json\s*(?=\{)")
_IS_LARK: Final = re.compile(r"^[ \t]*(%llguidance\b|start(\[[^\]\n]*\])?[ \t]*:(?!:))", re.MULTILINE)
_IS_GBNF: Final = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


def _is_lark(text: str) -> bool:
    return _IS_LARK.search(text) is not None


def _grammar_lark(text: str) -> str:
    """Return a grammar in Lark or GBNF as Lark; both are known by their first rule."""
    if not _is_lark(text):
        if _IS_GBNF.search(text) is None:
            raise refusal("grammar", "Lark with a rule `start: ...` or GBNF with a rule `root ::= ...`", text)
        text = _gbnf_lark(text)
    options: dict[str, Any] = {}
    match = _OPTIONS.search(text)
    if match is not None:
        try:
            options = json.loads(match[1])
        except ValueError:
            raise refusal("grammar", "%llguidance with an object of JSON", match[1]) from None
        text = _OPTIONS.sub("", text, count=1)
    return _with_options(_with_prepared_schemas(text), options)


def _with_prepared_schemas(text: str) -> str:
    """Return a grammar in Lark whose schemas are prepared.  Places in it stay unless one changes."""
    parts, end = [], 0
    for head in _LARK_SCHEMA.finditer(text):
        if head.start() < end:
            continue
        try:
            schema, after = json.JSONDecoder().raw_decode(text, head.end())
            before = json.dumps(schema)
        except (ValueError, RecursionError):
            continue  # a text that looks like it, or the library names what is wrong
        changed = json.dumps(prepared_schema("grammar", schema))
        if changed != before:
            parts += [text[end : head.end()], changed]
            end = after
    return "".join([*parts, text[end:]])


_GBNF_PART: Final = re.compile(r'"(?:\\.|[^"\\])*"?|!?<\[[0-9]{1,9}\]>|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|\.', re.DOTALL)
_GBNF_RULE: Final = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|([\w-]+)[ \t]*::=', re.DOTALL)
_TOKEN_RULE: Final = re.compile(r"^penstock_token_(not_)?(\d+): .*$", re.MULTILINE)
_LARK_RULE: Final = re.compile(r"([A-Za-z]\w*): ")
_ANY_CHARACTER: Final = "[\\x00-\U0010ffff]"
"""Also a line break, as in llama.cpp; in Lark the dot has all others."""
_GBNF_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_SET_OPERATORS: Final = ("&&", "--", "~~")
_MAX_GBNF_RULES: Final = 1000


def _plain_escape(match: re.Match[str]) -> str:
    r"""Return a character instead of its escape \u or \U, whose leading zeros the converter drops, and instead of \-.

    The converter refuses the latter.
    """
    if match[0] == r"\-":
        return r"\x2d"
    code = int(match[1] or match[2] or "0", 16)
    if not (match[1] or match[2]) or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return match[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _plain_part(match: re.Match[str]) -> str:
    part = match[0]
    if part == ".":
        return _ANY_CHARACTER
    if part[0] in "!<":
        return f" {_token_rule(part)} "
    if part[0] == "[":
        for operator in _SET_OPERATORS:
            if operator in part:
                raise InvalidArgumentError(
                    f"grammar: {show(part)}: expected no {operator} in a class of characters; write one of the two as "
                    "an escape",
                    param="grammar",
                )
    return part if part[0] == "#" else _GBNF_ESCAPE.sub(_plain_escape, part)


def _token_rule(part: str) -> str:
    """Return the name of the rule for a token, or with an exclamation mark for all others."""
    return f"penstock-token-{'not-' if part[0] == '!' else ''}{int(part.strip('!<[]>'))}"


def _gbnf_lark(text: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    if text.count("::=") > _MAX_GBNF_RULES:  # the converter's time grows with their square
        raise refusal("grammar", f"at most {_MAX_GBNF_RULES} rules", text.count("::="))
    tokens = {_token_rule(part[0]) for part in _GBNF_PART.finditer(text) if part[0][0] in "!<"}
    text = _GBNF_PART.sub(_plain_part, text)
    # The converter knows no tokens.  Of rules that never refer to themselves it makes terminals, which have none.
    text += "".join(f'\n{name} ::= "" {name}' for name in sorted(tokens))
    try:
        converted: str = gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise InvalidArgumentError(f"grammar: {error}", param="grammar") from None
    except RecursionError:
        raise InvalidArgumentError("grammar: groups are nested too deeply", param="grammar") from None
    except Exception as error:  # the converter raises this class for a rule that is missing or written twice
        raise InvalidArgumentError(f"grammar: {show(str(error))[1:-1]}", param="grammar") from None
    return _TOKEN_RULE.sub(
        lambda rule: f"{rule[0].partition(':')[0]}: <[{'^' if rule[1] else ''}{rule[2]}]>", converted
    )


def _gbnf_place(text: str, lark_lines: list[str]) -> str:
    """Return which rule of a GBNF grammar the last one of these lines of its translation belongs to, and its line.

    The converter changes names: it writes hyphens as underlines, some in upper case, and ``root`` as ``start``.
    """
    heads = (match for match in map(_LARK_RULE.match, reversed(lark_lines)) if match is not None)
    head = next(heads, None)
    for rule in _GBNF_RULE.finditer(text):
        if rule[1] and head is not None and _plain_name(rule[1]) == _plain_name(head[1]):
            return f" in the rule {rule[1]} at line {text.count(chr(10), 0, rule.start()) + 1}"
    return ""


def _plain_name(name: str) -> str:
    plain = name.replace("-", "").replace("_", "").lower()
    return "root" if plain == "start" else plain


_TRANSLATIONS: Final[dict[str, Callable[[str], str]]] = {
    "json_schema": _schema_lark,
    "json_object": _schema_lark,
    "regex": _regex_lark,
    "choice": _choice_lark,
    "grammar": _grammar_lark,
}
