"""Grammars that are made to take long, much memory, or a compiler down, drawn from seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from penstock.text.grammar.source import GrammarSource

__all__ = ["hostile_grammar"]

_LETTERS = "abcxyz019_-. /\\\"'[](){}|*+?^$&~<>:;,#%\n\t\0\x7fäß日本\u2028\ufeff\U0001f600"


def _size(rng: random.Random, most: int) -> int:
    """Most are small, a few reach ``most``."""
    return max(1, round(most ** rng.random()))


def _text(rng: random.Random, most: int = 12) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randrange(most)))


def _regex(rng: random.Random, depth: int = 4) -> str:
    if depth == 0:
        return rng.choice(["a", "b", ".", "[a-z]", r"\d", r"\w", r"\p{L}", "[^x]", "é", "(?i:k)", r"\x{1f600}"])
    part = _regex(rng, depth - 1)
    match rng.randrange(7):
        case 0:
            return f"({part}){rng.choice('*+?')}"
        case 1:
            low = _size(rng, 3000)
            return f"({part}){{{low},{rng.choice(['', str(low), str(low + _size(rng, 3000))])}}}"
        case 2:
            return f"({part}|{_regex(rng, depth - 1)})"
        case 3:
            return f"({part}{_regex(rng, depth - 1)})"
        case 4:
            return f".*{part}.{{{_size(rng, 60)}}}"
        case 5:
            return "|".join(f"{part}{index}" for index in range(_size(rng, 300)))
    return f"({part})" * _size(rng, 40)


def _nested_regex(rng: random.Random) -> str:
    count = _size(rng, 20_000)
    opening, closing = rng.choice([("(", ")"), ("(?:", ")*"), ("(a|", ")"), ("(", "){1,9}"), ("[", "]")])
    return opening * count + "a" + closing * count


def _broken(rng: random.Random, text: str) -> str:
    """Return a text with a few characters more, fewer, or others."""
    chars = list(text[:2000])
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(chars) + 1)
        chars[at : at + rng.randrange(3)] = _text(rng, 4)
    return "".join(chars) or "x"


def _leaf(rng: random.Random) -> Any:
    match rng.randrange(9):
        case 0:
            return {"type": "string", "pattern": _regex(rng, rng.randrange(4))}
        case 1:
            return {"type": "string", "maxLength": _size(rng, 10**7), "minLength": _size(rng, 10**4)}
        case 2:
            return {"type": "array", "minItems": _size(rng, 10**5), "items": rng.choice([True, {"type": "null"}])}
        case 3:
            return {"type": rng.choice(["number", "integer"]), "minimum": rng.randrange(-(10**30), 10**30)}
        case 4:
            return {"type": "number", "multipleOf": rng.random() ** 9, "maximum": _size(rng, 10**15)}
        case 5:
            return {"enum": [_text(rng, 40) for _ in range(_size(rng, 2000))]}
        case 6:
            return {"format": rng.choice(["date", "uri", "email", "ipv6", "hostname", "uuid", _text(rng)])}
        case 7:
            return {"const": json.loads("[" * (depth := _size(rng, 60)) + "]" * depth)}
    return rng.choice([True, False, {}, {"type": "object"}, {"type": "string"}, None, 5, [], {"type": _text(rng)}])


def _schema(rng: random.Random, depth: int = 3) -> Any:
    if depth == 0:
        return _leaf(rng)
    count = _size(rng, 400 if depth == 1 else 12)
    match rng.randrange(10):
        case 0:
            return {rng.choice(["anyOf", "oneOf", "allOf"]): [_schema(rng, depth - 1) for _ in range(count)]}
        case 1:
            names = [_text(rng) or "x" for _ in range(count)]
            return {"type": "object", "properties": {n: _schema(rng, depth - 1) for n in names}, "required": names[:9]}
        case 2:
            patterns = {f"^{_regex(rng, 1)}{index}$": _schema(rng, depth - 1) for index in range(count)}
            return {"patternProperties": patterns, "additionalProperties": rng.choice([True, False])}
        case 3:
            return {"type": "array", "prefixItems": [_schema(rng, depth - 1) for _ in range(count)], "items": False}
        case 4:
            shared = {f"p{index}": {"type": "string"} for index in range(count)}
            return {"allOf": [{"properties": shared, "minProperties": index} for index in range(_size(rng, 60))]}
        case 5:  # 2 ** count alternatives
            halves = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
            return {"$defs": {**halves, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}
        case 6:
            ref = rng.choice(["#", "#/$defs/a", "#/allOf/0", "#/$defs/" + "a" * 500, "https://example.com/x"])
            return {"$defs": {"a": {rng.choice(["allOf", "anyOf"]): [{"$ref": ref}, {"$ref": "#"}]}}, "$ref": ref}
        case 7:
            both = [{"anyOf": [{"const": i}, _schema(rng, depth - 1)]} for i in range(_size(rng, 14))]
            return {"allOf": both}
        case 8:
            return {"type": "object", "minProperties": _size(rng, 500), "maxProperties": _size(rng, 10**6)}
    return {_text(rng): _schema(rng, depth - 1), "not": _schema(rng, depth - 1)}


def _nested_schema(rng: random.Random) -> str:
    opening, closing = rng.choice([
        ('{"items":', "}"), ('{"anyOf":[{"type":"null"},', "]}"), ('{"allOf":[', "]}"), ('{"properties":{"a":', "}}"),
        ('{"oneOf":[{"type":"null"},', "]}"), ("[", "]"), ('{"not":', "}"),
    ])  # fmt: skip
    depth = _size(rng, 5000)
    return opening * depth + "{}" + closing * depth


def _many_properties(rng: random.Random) -> str:
    count = _size(rng, 16_000)
    properties = {f"p{index}": rng.choice([True, {}, {"type": "null"}]) for index in range(count)}
    return json.dumps({rng.choice(["properties", "patternProperties", "$defs"]): properties})


def _wide_schema(rng: random.Random) -> str:
    count = _size(rng, 4000)
    parts = [{"properties": {f"p{index}": True}} for index in range(count)]
    return json.dumps({rng.choice(["allOf", "anyOf", "oneOf", "prefixItems"]): parts})


def _rules(rng: random.Random) -> list[str]:
    """Rules of a random grammar without their arrow, of which the first is the start."""
    count = _size(rng, 60)
    names = [f"r{index}" for index in range(count)]

    def item() -> str:
        part = rng.choice([rng.choice(names), '"a"', '"b"', "[a-z]", '""', f"({rng.choice(names)} {rng.choice(names)})"])
        return part + rng.choice(["", "", "*", "+", "?", f"{{{_size(rng, 5000)},}}", f"{{0,{_size(rng, 10**6)}}}"])

    return [" | ".join(" ".join(item() for _ in range(rng.randrange(1, 5))) for _ in range(_size(rng, 30))) for _ in names]


def _gbnf(rng: random.Random) -> str:
    rules = _rules(rng)
    return "root ::= r0\n" + "\n".join(f"r{index} ::= {body}" for index, body in enumerate(rules))


def _lark(rng: random.Random) -> str:
    rules = [body.replace("[a-z]", "/[a-z]+/") for body in _rules(rng)]
    text = "start: r0\n" + "\n".join(f"r{index}: {body}" for index, body in enumerate(rules))
    match rng.randrange(6):
        case 0:
            return f"{text}\n{_text(rng, 30)}"
        case 1:
            regex = _regex(rng).replace("/", "")
            return f"start: r0 T\nr0: T | r0 r0 | r0 T r0\nT: /{regex}/"
        case 2:
            return f"start: %json {json.dumps(_schema(rng))}"
        case 3:
            count = _size(rng, 400)
            chain = "\n".join(f"T{index}: T{index + 1} T{index + 1}" for index in range(count))
            return f"start: T0\n{chain}\nT{count}: /a/"
        case 4:
            return f"start: /{_regex(rng, 2)}/ & /{_regex(rng, 2)}/ | ~/{_regex(rng, 2)}/\nA: /{_regex(rng, 2)}/ & ~/a+/"
    return text


_KINDS: list[Callable[[random.Random], tuple[str, str]]] = [
    lambda rng: ("regex", _regex(rng)),
    lambda rng: ("regex", _nested_regex(rng)),
    lambda rng: ("regex", _broken(rng, _regex(rng, 3))),
    lambda rng: ("regex", f"{_text(rng)}.*{_text(rng)}" + "(.*a)" * _size(rng, 30)),
    lambda rng: ("json_schema", json.dumps(_schema(rng))),
    lambda rng: ("json_schema", json.dumps(_schema(rng, 2), ensure_ascii=False)),
    lambda rng: ("json_schema", _broken(rng, json.dumps(_schema(rng, 2)))),
    lambda rng: ("json_schema", _nested_schema(rng)),
    lambda rng: ("json_schema", _many_properties(rng)),
    lambda rng: ("json_schema", _wide_schema(rng)),
    lambda rng: ("grammar", _gbnf(rng)),
    lambda rng: ("grammar", _lark(rng)),
    lambda rng: ("grammar", _lark(rng)),
    lambda rng: ("grammar", _broken(rng, _gbnf(rng))),
    lambda rng: ("grammar", _broken(rng, _lark(rng))),
    lambda rng: ("choice", json.dumps([_text(rng, 200) or "x" for _ in range(_size(rng, 1000))])),
]


def hostile_grammar(seed: int) -> GrammarSource:
    """Return a grammar as a request may have it; its checked values may refuse it first."""
    rng = random.Random(seed)
    field, text = _KINDS[seed % len(_KINDS)](rng)
    return GrammarSource(field, text)
