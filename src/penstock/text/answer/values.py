"""Values of tool calls: objects of JSON, calls in Python, and texts whose type the tool's schema says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from keyword import iskeyword
from typing import Any, Final

from penstock.text.answer.incoming import NotACall

__all__ = [
    "ARGUMENTS_KEYS", "MAX_CALLS", "PythonNames", "arguments_text", "bare_value", "json_object", "json_value",
    "lax_text", "lax_value", "line_values", "python_calls", "typed_value", "value_types",
]  # fmt: skip

MAX_PYTHON_CHARS: Final = 1 << 16
MAX_CALLS: Final = 128
MAX_SCHEMAS: Final = 256
ARGUMENTS_KEYS: Final = ("arguments", "parameters")
_NAMES: Final = {"true": True, "false": False, "null": None}


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def json_value(text: str) -> Any:
    """Return a value of JSON.  Raises NotACall."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise NotACall from None


def json_object(value: Any) -> dict[str, Any]:
    """Return arguments as an object.  A text with an object of JSON counts as the object.  Raises NotACall."""
    if isinstance(value, str):
        value = json_value(value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotACall
    return value


_BARE_KEY: Final = r"(?<=[{,])(?P<before>\s*)(?P<key>\w+)(?=\s*:)"
_QUOTED: Final = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)
_Marks = Sequence[tuple[str, str]]


def lax_value(text: str, marks: _Marks, *, bare_keys: bool) -> Any:
    """Return a value of JSON with ``marks`` around strings, and with keys without quotes if ``bare_keys``.

    Between marks each character stands for itself.  Raises NotACall.
    """
    closings = dict(marks)
    pattern = re.compile("|".join([*map(re.escape, closings), '"', *([_BARE_KEY] if bare_keys else [])]))
    parts, at = [], 0
    while (match := pattern.search(text, at)) is not None:
        parts.append(text[at : match.start()])
        if match[0] in closings:
            end = text.find(closings[match[0]], match.end())
            parts.append(json.dumps(text[match.end() : end]))
            at = end + len(closings[match[0]]) if end >= 0 else -1
        elif match[0] == '"':
            quoted = _QUOTED.match(text, match.start())
            parts.append(quoted[0] if quoted is not None else "")
            at = quoted.end() if quoted is not None else -1
        else:
            parts.append(f'{match["before"]}"{match["key"]}"')
            at = match.end()
        if at < 0:  # a string that does not end
            raise NotACall
    return json_value("".join([*parts, text[at:]]))


def lax_text(value: Any, marks: _Marks, *, bare_keys: bool) -> str:
    """Return the text that ``lax_value`` reads as a value."""
    if isinstance(value, str) and marks and marks[0][1] not in value:
        return f"{marks[0][0]}{value}{marks[0][1]}"
    if isinstance(value, list):
        return f"[{','.join(lax_text(item, marks, bare_keys=bare_keys) for item in value)}]"
    if isinstance(value, dict):
        keys = [key if bare_keys and re.fullmatch(r"\w+", key) else json.dumps(key) for key in value]
        texts = [lax_text(item, marks, bare_keys=bare_keys) for item in value.values()]
        return f"{{{','.join(map(':'.join, zip(keys, texts, strict=True)))}}}"
    return json.dumps(value, ensure_ascii=False)


def line_values(text: str, between: str, behind: str) -> dict[str, str]:
    """Return the values of keys, with ``between`` behind each key and ``behind`` between the pairs.

    What has no key is left out, and whitespace around keys and values does not count.
    """
    pairs = [line.split(between.strip() or between, 1) for line in text.split(behind)]
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


class PythonNames:
    """The names of tools and arguments that Python does not allow, such as ``get-weather``."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        names = dict.fromkeys(name for name in tools if not all(map(_is_plain, name.split("."))))
        for schema in tools.values():
            properties = schema.get("properties")
            names |= dict.fromkeys(name for name in (properties or ()) if not _is_plain(name))
        self._names = tuple(names)
        others = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        self._pattern = re.compile(rf"{_PYTHON_STRING}|(?<![\w.:/-])(?:{others})(?=\s*[=(])", re.DOTALL)

    def hide(self, text: str) -> str:
        """Return calls with names that Python allows instead."""
        if not self._names:
            return text
        ids = {name: f"{_HIDDEN}{index}" for index, name in enumerate(self._names)}
        return self._pattern.sub(lambda match: ids.get(match[0], match[0]), text)

    def show(self, name: str) -> str:
        """Return the name that another one stands for."""
        return self._names[int(name.removeprefix(_HIDDEN))] if name.startswith(_HIDDEN) else name


_HIDDEN: Final = "penstock_hidden_"
_PYTHON_STRING: Final = r"""\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"""


def _is_plain(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name) and not name.startswith(_HIDDEN)


def python_calls(text: str, names: PythonNames) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the arguments of each call in a Python list, or of one call.  Raises NotACall."""
    if len(text) > MAX_PYTHON_CHARS or _HIDDEN in text:
        raise NotACall
    try:
        tree = ast.parse(names.hide(text.strip()), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        if not nodes or len(nodes) > MAX_CALLS:
            raise NotACall
        return [_python_call(node, names) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall from None


def _python_call(node: ast.expr, names: PythonNames) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise NotACall
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NotACall
        arguments[names.show(keyword.arg)] = _python_value(keyword.value)
    return names.show(ast.unparse(node.func)), arguments


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name() if node.id in _NAMES:
            return _NAMES[node.id]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return [_python_value(item) for item in node.elts]
        case ast.Dict():
            keys = [_python_value(key) if key is not None else None for key in node.keys]
            if not all(isinstance(key, str) for key in keys):
                raise NotACall
            return dict(zip(keys, map(_python_value, node.values), strict=True))
    raise NotACall


def typed_value(text: str, schema: object, root: Mapping[str, Any]) -> Any:
    """Return the value of an argument that is written as bare text, by its JSON schema in the schema ``root``.

    A text that is not of the type stays a text.  Without a type it is a text.
    """
    kinds = value_types(schema, root)
    if text.strip() in ("null", "None") and "null" in kinds:
        return None
    if not kinds or "string" in kinds:
        return text
    plain = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        return json_value(plain)
    except NotACall:
        return text


def bare_value(text: str, schema: object, root: Mapping[str, Any], *, reads_json: bool) -> Any:
    """Return the value of an argument as ``typed_value`` does; with ``reads_json`` one of JSON if it is."""
    if reads_json:
        with suppress(NotACall):
            value = json_value(text)
            return typed_value(value, schema, root) if isinstance(value, str) else value
    return typed_value(text, schema, root)


_KINDS: Final[dict[type, str]] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"
}  # fmt: skip


def value_types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a JSON schema in the schema ``root`` names; empty if it names none.

    Every schema behind a reference is looked at once, and at most ``MAX_SCHEMAS`` of them.
    """
    types: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting and len(seen) < MAX_SCHEMAS:
        node = waiting.pop()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        types |= _own_types(node)
        for key in ("anyOf", "oneOf"):
            options = node.get(key)
            waiting += options[:MAX_SCHEMAS] if isinstance(options, list) else ()
        target = node.get("$ref")
        if isinstance(target, str) and target.startswith("#/"):
            place, _, name = target[2:].partition("/")
            definitions = root.get(place)
            waiting.append(definitions.get(name) if isinstance(definitions, Mapping) else None)
    return types


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names itself, or those of the values that it lists."""
    types = schema.get("type")
    listed = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    names = {kind for kind in listed if isinstance(kind, str)}
    if names:
        return names
    values = schema.get("enum")
    values = values if isinstance(values, list) else [schema["const"]] if "const" in schema else []
    return {_KINDS[type(value)] for value in values if type(value) in _KINDS}


def arguments_text(arguments: dict[str, Any]) -> str:
    """Return arguments as OpenAI's API has them: the text of an object of JSON.  Raises NotACall for infinities."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can write
        return json.dumps(arguments)
    except (ValueError, RecursionError):
        raise NotACall from None
    return text
