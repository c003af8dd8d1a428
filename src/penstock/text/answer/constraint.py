"""Grammars of answers that must call a tool, and of answers whose format begins behind the thoughts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from penstock.errors import InvalidArgumentError
from penstock.sampling_fields import MAX_GRAMMAR_CHARS
from penstock.text.answer.formats import (
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    START,
    OptionalPart,
    ReasoningFormat,
    Slot,
    ToolFormat,
)
from penstock.text.answer.values import value_types
from penstock.text.grammar.source import WHITESPACE

__all__ = ["calls_grammar", "calls_or_answer", "grammar_behind_thoughts"]

MAX_FURTHER_CALLS: Final = 31
MAX_RULE_CHARS: Final = 2 * MAX_GRAMMAR_CHARS
"""Parts count once where they are made and once in their rule."""
_IN_LINES: Final = "[ ]?"
"""The whitespace between two tokens of JSON where a line break ends the value."""
_OWN: Final = "penstock_"
"""The prefix of the names of rules that stand beside those of a user's grammar."""
_PLACES: Final = ("#/$defs/", "#/definitions/")
_IN_CALLS: Final = re.compile(r"[^\s\"'()\[\]{},=]+")
_Schema = Mapping[str, Any]


class _Rules:
    """The rules of a grammar in Lark.

    ``specials``: the ids of the texts that are special tokens of the model.  ``prefix``: what the names of all
    rules but ``start`` begin with.
    """

    def __init__(self, specials: Mapping[str, int], prefix: str = "") -> None:
        self._prefix = prefix
        self._specials = specials
        self._lines: list[str] = []
        self._num_chars = 0
        self._parts = re.compile("(" + "|".join(map(re.escape, specials)) + ")") if specials else None

    def add(self, name: str, body: str) -> str:
        """Add a rule; its name may end in attributes.  Return the name without them."""
        name = name if name == "start" else self._prefix + name
        self._lines.append(f"{name}: {body}")
        self.count(len(body))
        return name.partition("[")[0]

    def count(self, num_chars: int) -> None:
        """Count characters of a part, so that a grammar that becomes too long is not written first."""
        self._num_chars += num_chars
        if self._num_chars > MAX_RULE_CHARS:
            message = f"tools: expected a grammar of at most {MAX_GRAMMAR_CHARS} characters, got more; name fewer tools"
            raise InvalidArgumentError(message, param="tools")

    def number(self) -> int:
        """Return a number that is not in the name of an earlier rule."""
        return len(self._lines)

    def text(self, text: str) -> str:
        """Return the rule for ``text``.  Its special tokens are matched as tokens, not as their text."""
        parts = self._parts.split(text) if self._parts is not None else [text]
        return " ".join(f"<[{self._specials[p]}]>" if p in self._specials else _quoted(p) for p in parts if p)

    def up_to(self, text: str) -> str:
        """Return the rule for any text that ends with the first ``text``."""
        name = f"text{self.number()}"
        special = self._parts.search(text) if self._parts is not None else None
        if special is not None:  # the text before it cannot have it
            before = _escaped(text[: special.start()])
            return f"{self.add(name, f'/(?s:.*){before}/')} {self.text(text[special.start() :])}"
        return self.add(f"{name}[lazy]", f"/(?s:.*){_escaped(text)}/")

    def grammar(self) -> str:
        """Return the grammar."""
        return "\n".join(self._lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.sub(r"[^0-9A-Za-z_\x80-\U0010ffff]", lambda match: f"\\x{ord(match[0]):02x}", text)


def _json(rules: _Rules, schema: _Schema, root: _Schema | None = None, whitespace: str = WHITESPACE) -> str:
    """Return values of a schema, with the definitions of ``root`` that it refers to."""
    options = {"whitespace_pattern": whitespace}
    text = "%json " + json.dumps({**_definitions(schema, root or {}), **schema, "x-guidance": options})
    rules.count(len(text))
    return text


def _definitions(schema: _Schema, root: _Schema) -> dict[str, dict[str, Any]]:
    """Return the definitions in ``root`` that a schema refers to, directly or by another definition."""
    definitions: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, Mapping):
            continue
        waiting += node.values()
        target = node.get("$ref")
        if not isinstance(target, str) or not target.startswith(_PLACES):
            continue
        _, place, name = target.split("/", 2)
        listed = root.get(place)
        if not isinstance(listed, Mapping):
            continue
        name = name.partition("/")[0].replace("~1", "/").replace("~0", "~")
        if name in listed and name not in definitions.setdefault(place, {}):
            definitions[place][name] = listed[name]
            waiting.append(listed[name])
    return definitions


def _object(schema: _Schema) -> _Schema:
    """Return the schema of arguments, which are an object even if it says nothing of that."""
    types = schema.get("type", "object")
    if types is not None and "object" not in ([types] if isinstance(types, str) else types):
        message = f"tools: expected parameters of the type object, got {types!r:.100}"
        raise InvalidArgumentError(message, param="tools")
    return {**schema, "type": "object"}


def _properties(schema: _Schema) -> Iterator[tuple[str, _Schema, bool]]:
    """Yield the name and the schema of each argument, and whether it is required; those that are come first."""
    listed, properties = schema.get("required"), schema.get("properties")
    required = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
    for is_required in (True, False):
        for name, value in properties.items() if isinstance(properties, Mapping) else ():
            if (name in required) is is_required:
                yield name, value if isinstance(value, Mapping) else {}, is_required


def _values(rules: _Rules, form: ToolFormat, schema: _Schema) -> str:
    """Return the arguments of a call that are written one by one."""
    items = []
    for name, value, is_required in _properties(schema):
        before, _, between, _, after = form.value
        item = rules.text(f"{before}{name}{between}") + " " + _bare_value(rules, value, schema, str(after))
        items.append(f"({item})" if is_required else f"({item})?")
    return " ".join(items) or '""'


def _bare_value(rules: _Rules, value: _Schema, root: _Schema, end: str) -> str:
    """Return a value that is written without quotes if it is a string, and the text behind it."""
    names = value["enum"] if isinstance(value.get("enum"), list) else [value["const"]] if "const" in value else None
    if names is not None:
        texts = [name if isinstance(name, str) else json.dumps(name) for name in names]
        return f"({' | '.join(map(_quoted, texts))}) {rules.text(end)}"
    if "string" in value_types(value, root):
        closing = end.rstrip("\n") or end
        return rules.up_to(closing) + (f" {rules.text(end[len(closing) :])}" if end != closing else "")
    whitespace = _IN_LINES if end == "\n" else WHITESPACE
    return f"{_json(rules, value, root, whitespace)} {rules.text(end)}"


def _python_arguments(rules: _Rules, schema: _Schema) -> str:
    """Return keyword arguments of a call in Python."""
    return _listed(rules, schema, '", "', lambda name, value: f"{_quoted(name + '=')} {_json(rules, value, schema)}")


def _lax_arguments(rules: _Rules, form: ToolFormat, schema: _Schema) -> str:
    """Return the members of an object as ``Slot.LAX`` has it.  What is in a value itself is plain JSON."""

    def member(name: str, value: _Schema) -> str:
        key = name if form.bare_keys and re.fullmatch(r"\w+", name) else json.dumps(name)
        if not form.string_marks or value_types(value, schema) != {"string"}:
            return f"{_quoted(key + ':')} {_json(rules, value, schema)}"
        opening, closing = form.string_marks[0]
        return f"{rules.text(key + ':' + opening)} {_bare_value(rules, value, schema, closing)}"

    return _listed(rules, schema, '","', member)


def _listed(rules: _Rules, schema: _Schema, comma: str, write: Callable[[str, _Schema], str]) -> str:
    """Return arguments with ``comma`` between them, in the order of the schema.

    There is one rule for each, which ``write`` makes, and one for those that may follow it.
    """
    number = rules.number()
    parts: list[tuple[str, bool]] = []
    for name, value, is_required in _properties(schema):
        parts.append((rules.add(f"part{number}_{len(parts)}", write(name, value)), is_required))
    num_required = sum(is_required for _, is_required in parts)
    if num_required:
        others = " ".join(f"({comma} {part})?" for part, _ in parts[num_required:])
        return f" {comma} ".join(part for part, _ in parts[:num_required]) + " " + others
    options, rest = [], ""
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index][0]
        options.append(f"{part} {rest}")
        rest = rules.add(f"rest{number}_{index}", f"({comma} {part})? {rest}")
    return f"({' | '.join(reversed(options))})?" if options else '""'


def _check_python_names(name: str, schema: _Schema) -> None:
    """Refuse a tool whose calls the parser would not read.  Raises InvalidArgumentError."""
    for text in (name, *(key for key, _, _ in _properties(schema))):
        if _IN_CALLS.fullmatch(text) is None:
            message = (
                "tools: this model writes calls in Python: expected a name without spaces, quotes and brackets, got "
                f"{text!r:.100}"
            )
            raise InvalidArgumentError(message, param="tools")


def _call(rules: _Rules, form: ToolFormat, name: str, schema: _Schema) -> str:
    """Return the call of one tool, without the texts around it."""
    parts = []
    for part in form.call:
        if part is Slot.CALL:
            head = f"{{{json.dumps('name')}: {json.dumps(name)}, {json.dumps(form.arguments_key)}: "
            parts.append(f'{_quoted(head)} {_json(rules, _object(schema))} "}}"')
        elif part is Slot.PYTHON:
            _check_python_names(name, schema)
            parts.append(f'{_quoted(name + "(")} {_python_arguments(rules, schema)} ")"')
        elif part is Slot.NAME:
            parts.append(_quoted(name))
        elif part is Slot.ARGUMENTS:
            parts.append(_json(rules, _object(schema)))
        elif part is Slot.LAX:
            parts.append(f'"{{" {_lax_arguments(rules, form, schema)} "}}"')
        elif part in (Slot.VALUES, Slot.LINES):
            parts.append(_values(rules, form, schema))
        elif isinstance(part, str):
            parts.append(rules.text(part))
        elif isinstance(part, OptionalPart) and part.parts[0] == "[ARGS]":
            parts.append(rules.text("[ARGS]"))
    return " ".join(parts)


def _calls(rules: _Rules, form: ToolFormat, tools: Mapping[str, _Schema], *, is_parallel: bool) -> str:
    options = [rules.add(f"call{rules.number()}", _call(rules, form, *tool)) for tool in tools.items()]
    calls = rules.add("call", " | ".join(options))
    opening, closing = rules.text(form.opening), rules.text(form.closing)
    is_list = form.is_list
    if form.repeats_opening and not is_list:
        calls, opening, closing = f"({opening} {calls} {closing})", "", ""
    separator = ", " if is_list else form.separator
    if is_parallel and not form.has_channels:
        calls = f"{calls} ({rules.text(separator)} {calls}){{0,{MAX_FURTHER_CALLS}}}"
    if is_list:
        space = '" "?' if opening else ""  # tokens of SentencePiece begin with it
        return f'{opening} {space} "[" {calls} "]" {closing}'
    return f"{opening} {calls} {closing}"


def _thoughts(rules: _Rules, reasoning: ReasoningFormat, *, has_begun: bool) -> str:
    """Return the thoughts, which may be missing unless the prompt has begun them."""
    if reasoning.has_channels:
        rest = f"{rules.up_to(reasoning.closing)} {rules.text(f'{START}assistant')}"
        return rest if has_begun else f"({rules.text(reasoning.head)} {rest})?"
    body = f"{rules.up_to(reasoning.closing)} /\\n{{0,2}}/"
    return body if has_begun else f"({rules.text(reasoning.opening)} {body})?"


def calls_grammar(
    form: ToolFormat,
    tools: Mapping[str, _Schema],
    *,
    reasoning: ReasoningFormat | None = None,
    is_reasoning: bool = False,
    is_parallel: bool = True,
    specials: Mapping[str, int] | None = None,
) -> str:
    """Return a grammar in Lark of answers that call one of ``tools``, the schemas of arguments by name.

    ``reasoning``: the format of the thoughts before the calls; ``is_reasoning``: the prompt has begun them.
    ``is_parallel``: more than one call is allowed.  ``specials``: the ids of the markers that are special tokens.
    """
    rules = _Rules(specials or {})
    before = "" if reasoning is None else _thoughts(rules, reasoning, has_begun=is_reasoning)
    calls = rules.add("calls", _calls(rules, form, tools, is_parallel=is_parallel))
    rules.add("start", f"{before} {calls}".strip())
    return rules.grammar()


_LARK_PART: Final = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>|[A-Za-z_]\w*', re.DOTALL
)
"""Texts, comments, regular expressions, special tokens and names of a grammar in Lark."""


def _renamed(match: re.Match[str]) -> str:
    return f"{_OWN}answer" if match[0] == "start" else match[0]


def grammar_behind_thoughts(
    lark: str, reasoning: ReasoningFormat, specials: Mapping[str, int], *, has_begun: bool
) -> str:
    """Return a grammar whose answers have thoughts before those of ``lark``.

    ``has_begun``: the prompt has begun the thoughts; otherwise they may be missing.
    """
    rules = _Rules(specials, prefix=_OWN)
    head = _final_head(rules) if reasoning.has_channels else ""
    rules.add("start", f"{_thoughts(rules, reasoning, has_begun=has_begun)} {head} {_OWN}answer")
    return f"{_LARK_PART.sub(_renamed, lark)}\n{rules.grammar()}"


def _final_head(rules: _Rules) -> str:
    """Return the header of the channel that has the answer."""
    return f"{rules.text(f'{CHANNEL}final')} ({rules.text(f' {CONSTRAIN}json')})? {rules.text(MESSAGE)}"


def calls_or_answer(
    lark: str,
    form: ToolFormat,
    tools: Mapping[str, _Schema],
    *,
    thoughts: ReasoningFormat | None,
    is_reasoning: bool,
    is_parallel: bool,
    specials: Mapping[str, int],
) -> str:
    """Return a grammar of answers that call one of ``tools``, or that follow ``lark``.

    ``thoughts``: the format of the thoughts before both; ``is_reasoning``: the prompt has begun them.
    """
    rules = _Rules(specials, prefix=_OWN)
    before = "" if thoughts is None else _thoughts(rules, thoughts, has_begun=is_reasoning)
    head = _final_head(rules) if form.has_channels else ""
    calls = rules.add("calls", _calls(rules, form, tools, is_parallel=is_parallel))
    rules.add("start", f"{before} ({calls} | {head} {_OWN}answer)".strip())
    return f"{_LARK_PART.sub(_renamed, lark)}\n{rules.grammar()}"
