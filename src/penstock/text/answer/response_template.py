"""A folder's own description of its answers: ``response_template`` of tokenizer_config.json, which transformers reads.

It is translated to our formats, from which the parser, what it holds back and the grammars are made.  Its regular
expressions come with the model and are never run: only literals, whitespace, alternatives of literals and named groups
are understood, and a description that needs more is refused by name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from penstock.config import show
from penstock.errors import UnsupportedError
from penstock.text.answer.formats import (
    CHANNEL,
    DECLARED,
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormat,
    Part,
    ReasoningFormat,
    Slot,
    ToolFormat,
)

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["declared_formats", "read_response_template"]

MAX_TEMPLATE_CHARS: Final = 1 << 16
MAX_PATTERN_CHARS: Final = 1000
_FIELDS: Final = ("content", "tool_calls")
_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")
_KEYS: Final = ("version", "defaults", "fields", "start_anchor", "start_anchor_pattern")
_FIELD_KEYS: Final = (
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
)  # fmt: skip
_NEWLINE: Final = "\n"
_PIECE: Final = re.compile(
    r"\(\?P<(?P<group>\w{1,32})>(?:\\[wS.]|\[\^?(?:\\.|[^\]\\]){1,40}\]|\.)[+*]\??\)"
    r"|(?P<space>(?:\\[sn]|[ \n])[*+?]\??|\\s|\\n|\n)"
    r"|\(\?:(?P<options>(?:\\.|[^()\\])*)\)"
    r"|\\(?P<escaped>[^\w\s])"
    r"|(?P<plain>[^\\.^$*+?{}\[\]|()])(?![*+?{])",
    re.DOTALL,
)
"""The parts of a regular expression that are understood."""
_ALTERNATIVES: Final = re.compile(r"(?<!\\)\|")
_ONLY_ALTERNATIVES: Final = re.compile(r"(?:\\s[*+])?\(\?:((?:\\.|[^()\\])*)\)")
_Group = tuple[str]
_Pieces = list[str | _Group]
"""Literals, line breaks for whitespace, and names of groups."""


def _refused(where: str, expected: str, value: object) -> UnsupportedError:
    return UnsupportedError(f"response_template.{where}: expected {expected}, got {show(value)}", param="tool_format")


def _pieces(pattern: str, where: str, *, is_end: bool = False) -> _Pieces:
    """Return the parts of a regular expression.  At an end the first of alternatives counts; elsewhere there is one."""
    pieces: _Pieces = []
    at = 0
    while at < len(pattern):
        match = _PIECE.match(pattern, at) if len(pattern) <= MAX_PATTERN_CHARS else None
        if match is None:
            raise _refused(where, "literals, whitespace and named groups", pattern)
        at = match.end()
        if match["group"]:
            pieces.append((match["group"],))
        elif match["space"]:
            pieces.append(_NEWLINE)
        elif match["options"] is not None:
            options = [text for text in _ALTERNATIVES.split(match["options"]) if text not in ("", "$", r"\Z")]
            if len(options) > 1 and not is_end:
                raise _refused(where, "no alternatives within a pattern", pattern)
            pieces += _pieces(options[0], where) if options else []
        else:
            literal = match["escaped"] or match["plain"]
            is_more = pieces and isinstance(pieces[-1], str) and pieces[-1] != _NEWLINE
            if is_more:
                pieces[-1] = f"{pieces[-1]}{literal}"
            else:
                pieces.append(literal)
    return pieces


def _mark(field: Mapping[str, Any], name: str, where: str) -> tuple[_Pieces, tuple[str, ...]]:
    """Return the parts of the text that begins or ends a field, and other texts that do so as well."""
    value, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(pattern, str) and value is None:
        named, options = f"{where}.{name}_pattern", _ONLY_ALTERNATIVES.fullmatch(pattern)
        if name == "open" and options is not None:
            texts = [_literal(_pieces(text, named), named) for text in _ALTERNATIVES.split(options[1])]
            return list(texts[:1]), tuple(texts[1:])
        pieces = _pieces(pattern.removesuffix("$").removesuffix(r"\Z"), named, is_end=name == "close")
        while pieces and pieces[0] == _NEWLINE:
            del pieces[0]
        while pieces and pieces[-1] == _NEWLINE:
            del pieces[-1]
        return pieces, ()
    texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    if pattern is not None or not all(isinstance(text, str) and text for text in texts):
        raise _refused(f"{where}.{name}", "a text, a list of texts or a pattern", value if pattern is None else pattern)
    return list(texts[:1]), tuple(texts[1:])


def _literal(pieces: _Pieces, where: str) -> str:
    if not pieces or not all(isinstance(piece, str) for piece in pieces):
        raise _refused(where, "a text", pieces)
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _reasoning(field: Mapping[str, Any], where: str) -> ReasoningFormat:
    opening = _literal(_mark(field, "open", where)[0], f"{where}.open").strip()
    closing = _literal(_mark(field, "close", where)[0], f"{where}.close").strip()
    if field.get("content", "text") != "text" or "transform" in field:
        raise _refused(where, "a text", field.get("transform", field.get("content")))
    if opening.startswith(CHANNEL):
        return REASONING_FORMATS["harmony"]
    for form in REASONING_FORMATS.values():
        if (form.opening, form.closing) == (opening, closing):
            return form
    return ReasoningFormat(name=DECLARED, opening=opening, closing=closing, signs=())


def _references(field: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return where a call has its name and its arguments: a group, ``content`` or ``content.KEY``."""
    transform, is_each = field.get("transform"), field.get("transform_each") is True
    function = transform.get("function") if isinstance(transform, dict) else None
    if function == "{content}" and not is_each:
        return "content.name", "content.arguments"
    references = []
    for key in ("name", "arguments"):
        value = function.get(key) if isinstance(function, dict) else None
        if not isinstance(value, str) or not re.fullmatch(r"\{[\w.]+\}", value):
            raise _refused(f"{where}.transform", "a function with name and arguments", transform)
        references.append(f"content.{value[1:-1]}" if is_each else value[1:-1])
    return references[0], references[1]


def _body(field: Mapping[str, Any], arguments: str, where: str) -> tuple[Slot, dict[str, Any]]:
    """Return how arguments are written: a slot, and the fields of ToolFormat that belong to it."""
    kind, options = field.get("content", "text"), field.get("content_args") or {}
    if not isinstance(options, dict):
        raise _refused(f"{where}.content_args", "an object", options)
    where = f"{where}.content_args"
    parent, _, key = arguments.partition(".")
    if kind == "json" and parent == "content":
        marks = _string_marks(options, where)
        bare_keys = options.get("unquoted_keys", False) not in (False, None)
        if not (marks or bare_keys):
            return (Slot.CALL if key else Slot.ARGUMENTS), {"arguments_key": key or "arguments"}
        if key:
            raise _refused(where, "JSON as it is where the call has its name", options)
        return Slot.LAX, {"string_marks": marks, "bare_keys": bare_keys}
    if kind == "python-call-list":
        return Slot.PYTHON, {}
    if kind not in ("xml-inline", "kv-lines") or arguments != "content":
        names = "json, xml-inline, kv-lines or python-call-list"
        raise _refused(f"{where.removesuffix('_args')}", names, kind)
    reads_json = _reads_json(options, where)
    if kind == "xml-inline":
        return Slot.VALUES, {"value": _tag_parts(options, where), "reads_json": reads_json}
    between, behind = options.get("kv_sep", ":"), options.get("line_sep", _NEWLINE)
    if not (isinstance(between, str) and between.strip() and isinstance(behind, str) and behind):
        raise _refused(where, "texts in kv_sep and line_sep", options)
    if options.get("strip", True) is not True:
        raise _refused(f"{where}.strip", "true", options["strip"])
    shown = f"{between} " if between == ":" else between
    return Slot.LINES, {"value": ("", Slot.KEY, shown, Slot.VALUE, behind), "reads_json": reads_json}


def _string_marks(options: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    """Return the texts around the strings of a model's kind of JSON."""
    pairs = options.get("string_delims") or []
    is_list = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not is_list or not all(isinstance(text, str) and text for pair in pairs for text in pair):
        raise _refused(f"{where}.string_delims", "pairs of texts", pairs)
    return tuple((pair[0], pair[1]) for pair in pairs)


def _reads_json(options: Mapping[str, Any], where: str) -> bool:
    """Return True if the values of arguments are JSON where they can be."""
    parser = options.get("value_parser")
    name = parser.get("name", "text") if isinstance(parser, dict) else None if parser is not None else "text"
    others = parser.get("args") or {} if isinstance(parser, dict) else {}
    if name not in ("text", "json") or not isinstance(others, dict) or set(others) - {"allow_non_json"}:
        raise _refused(f"{where}.value_parser", "text or json", parser)
    return name == "json"


def _tag_parts(options: Mapping[str, Any], where: str) -> tuple[Part, ...]:
    """Return the parts of an argument that is written between tags."""
    parts: list[Part] = []
    for piece in _pieces(str(options.get("tag_pattern", "")), f"{where}.tag_pattern"):
        part = {("key",): Slot.KEY, ("value",): Slot.VALUE}.get(piece) if isinstance(piece, tuple) else piece
        if part is None:
            raise _refused(f"{where}.tag_pattern", "the groups key and value", piece)
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    if [isinstance(part, str) for part in parts] != [True, False, True, False, True]:
        raise _refused(f"{where}.tag_pattern", "texts around the key and the value", parts)
    return tuple(parts)


def _tools(field: Mapping[str, Any], where: str) -> ToolFormat:
    pieces, others = _mark(field, "open", where)
    ends = _mark(field, "close", where)[0]
    name, arguments = _references(field, where)
    slot, body = _body(field, arguments, where)
    groups = [piece for piece in pieces if isinstance(piece, tuple)]
    if pieces and str(pieces[0]).startswith(CHANNEL):
        return TOOL_FORMATS["harmony"]
    reads_to_end = slot in (Slot.VALUES, Slot.LINES, Slot.LAX)
    has_group = slot is Slot.ARGUMENTS or reads_to_end
    if groups != ([(name,)] if has_group else []) or not (has_group or slot is Slot.PYTHON or name == "content.name"):
        raise _refused(f"{where}.open", "a text, and the name of the function where the call has it", field)
    at = pieces.index(groups[0]) if groups else len(pieces)
    before = [str(piece) for piece in pieces[:at]]
    behind = "".join(str(piece) for piece in pieces[at + 1 :])
    if slot is Slot.LINES:  # whitespace behind the name counts for nothing, and without it the name would go on
        behind += _NEWLINE
    if not before:
        raise _refused(f"{where}.open", "a text before the name of the function", field)
    call: list[Part] = ["".join(before[1:]).strip()] if "".join(before[1:]).strip() else []
    call += [Slot.NAME] if groups else []
    call += [behind] if behind else []
    call.append(slot)
    marks = _literal(ends, f"{where}.close").split(_NEWLINE) if ends else [""]
    if slot in (Slot.LINES, Slot.LAX) and not marks[0]:
        raise _refused(f"{where}.close", "a text behind the arguments", field.get("close"))
    if reads_to_end and len(marks) > 1:
        call.append(marks[0])
    closing = (_NEWLINE if len(marks) > 1 else "") + marks[-1]
    return _known(
        ToolFormat(
            name=DECLARED,
            opening=before[0],
            openings=others,
            call=tuple(call),
            closing=closing,
            separator=_NEWLINE if field.get("repeats") and _may_follow_space(field) else "",
            repeats_opening=bool(field.get("repeats")),
            is_json_list=slot is Slot.CALL and field.get("transform_each") is True,
            **body,
        )
    )


def _may_follow_space(field: Mapping[str, Any]) -> bool:
    """Return True if the text that begins a call takes whitespace before it; elsewhere that would be content."""
    pattern = field.get("open_pattern")
    return isinstance(pattern, str) and pattern.startswith((r"\s", r"\n", _NEWLINE))


def _known(declared: ToolFormat) -> ToolFormat:
    """Return one of our formats if it has the same texts: it also has the whitespace that models write."""

    def texts(form: ToolFormat) -> tuple[Any, ...]:
        parts = (form.opening, *form.call, form.closing, *form.value)
        plain = [part.strip() if isinstance(part, str) else part for part in parts]
        return [part for part in plain if part != ""], form.arguments_key, form.is_list

    return next((form for form in TOOL_FORMATS.values() if texts(form) == texts(declared)), declared)


def read_response_template(text: str) -> AnswerFormat:
    """Return the formats of a ``response_template``, given as JSON.

    Raises UnsupportedError naming what is not known.
    """
    template = json.loads(text) if len(text) <= MAX_TEMPLATE_CHARS else None
    if not isinstance(template, dict) or template.get("version", 1) != 1:
        raise _refused("version", "an object of version 1", text[:100])
    fields = template.get("fields")
    if not isinstance(fields, dict) or set(template) - set(_KEYS):
        raise _refused("fields", f"an object, beside {', '.join(_KEYS)}", list(template))
    tools = reasoning = None
    for name, field in fields.items():
        where = f"fields.{name}"
        if not isinstance(field, dict) or set(field) - set(_FIELD_KEYS) or name not in (*_FIELDS, *_THOUGHTS):
            raise _refused(where, f"one of {', '.join((*_FIELDS, *_THOUGHTS))} with known keys", field)
        if name == "tool_calls":
            tools = _tools(field, where)
        elif name in _THOUGHTS:
            reasoning = _reasoning(field, where)
    _check_content(fields.get("content", {}), AnswerFormat(tools, reasoning))
    return AnswerFormat(tools, reasoning)


def _check_content(field: Mapping[str, Any], form: AnswerFormat) -> None:
    is_text = field.get("content", "text") == "text" and "transform" not in field
    has_open = "open" in field or "open_pattern" in field
    if not is_text or (has_open and not form.has_channels):
        raise _refused("fields.content", "a text without a marker before it", field)


@lru_cache(maxsize=32)
def _declared(text: str) -> AnswerFormat:
    try:
        return read_response_template(text)
    except (UnsupportedError, ValueError, RecursionError) as error:
        logging.getLogger("penstock").warning(
            "penstock: the formats of answers follow the chat template, because tokenizer_config.json has another "
            "description than this version reads: %s", error,
        )  # fmt: skip
        return AnswerFormat()


def declared_formats(tokenizer: Tokenizer) -> AnswerFormat:
    """Return the formats that a model's ``response_template`` describes; none without it.

    One that cannot be read is a warning, because the chat template shows the formats, too.
    """
    text = tokenizer.response_template
    return AnswerFormat() if not text else _declared(text)
