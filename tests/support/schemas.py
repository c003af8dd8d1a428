"""JSON schemas of many kinds, for answers of models with random weights."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


SHORT: Schema = {"type": "string", "maxLength": 6}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "const": {"const": {"a": [1, "x"]}},
    "enum": {"enum": ["red", "green", 3, None, [1]]},
    "types": {"type": ["boolean", "null"]},
    "integer bounds": {"type": "integer", "minimum": -3, "maximum": 12},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    "number bounds": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    "string lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "array": {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, DIGIT], "items": False, "minItems": 2},
    "nested arrays": {"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 2},
    "object": _object(name=SHORT, age=DIGIT),
    "optional": {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "additionalProperties": False},
    "nested": _object(a=_object(b=_object(c={"type": "boolean"}))),
    "in unicode": _object(größe=DIGIT, 日本={"type": "boolean"}),
    "reference": {"$defs": {"digit": DIGIT}, **_object(a={"$ref": "#/$defs/digit"}, b={"$ref": "#/$defs/digit"})},
    "recursion": {
        "$defs": {"node": {
            "type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["next"], "additionalProperties": False,
        }},
        "$ref": "#/$defs/node",
    },
    "any of": {"anyOf": [DIGIT, {"type": "boolean"}, _object(x=DIGIT)]},
    "one of": {"oneOf": [_object(kind={"const": "a"}, a=DIGIT), _object(kind={"const": "b"}, b=DIGIT)]},
    "all of": {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 9}]},
    "map": {
        "type": "object", "patternProperties": {"^k[0-9]$": DIGIT}, "additionalProperties": False, "maxProperties": 2,
    },
    "escapes": {"enum": ['"quoted"', "back\\slash", "line\nbreak", "é\u2028"]},
    "a title": {"title": "T", "description": "d", "examples": [1], "default": 0, "$comment": "c", **DIGIT},
    "of pydantic": {
        "title": "Person", "type": "object", "additionalProperties": False,
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 4},
            "age": {"anyOf": [DIGIT, {"type": "null"}], "default": None},
            "tags": {"type": "array", "items": SHORT, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
    },
}  # fmt: skip


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema whose answers are short, drawn from ``rng``."""
    kinds = ["integer", "string", "boolean", "enum", "const", "pattern"] + ["array", "object", "any"] * (depth > 0)
    match rng.choice(kinds):
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(40)}
        case "string":
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(5)}
        case "boolean":
            return {"type": rng.choice(["boolean", "null", ["null", "boolean"]])}
        case "enum":
            return {"enum": [rng.choice([rng.randrange(99), f"word {rng.randrange(9)}", None, True]) for _ in range(4)]}
        case "const":
            return {"const": {"k": [rng.randrange(9), "é"]}}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^(x|yy)z?$", "^[0-9]+[.][0-9]{2}$"])}
        case "array":
            low = rng.randrange(2)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}
        case "any":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    names = [f"p{index}" for index in range(rng.randrange(4))]
    return {
        "type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7], "additionalProperties": False,
    }  # fmt: skip


def random_answer(schema: Schema, rng: random.Random) -> Any:
    """An answer that follows a schema of ``random_schema``, or nearly does: one place in eight is something else."""
    if rng.random() < 0.12:
        return rng.choice([None, True, 7, -60, "", "abc", "word 1", "y", [], [1, "x"], {}, {"p0": 1}, {"k": [1, "é"]}])
    if "anyOf" in schema:
        return random_answer(rng.choice(schema["anyOf"]), rng)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema["enum"]) if "enum" in schema else schema["const"]
    if "pattern" in schema:
        return rng.choice(["a", "cab", "x", "yyz", "xz", "12.50", "7.00", "abca", "zz"])
    match schema["type"]:
        case "integer":
            return rng.randrange(schema["minimum"] - 1, schema["maximum"] + 2)
        case "string":
            return "".join(rng.choice('ab é"\\\n日') for _ in range(rng.randrange(schema["maxLength"] + 2)))
        case "array":
            return [random_answer(schema["items"], rng) for _ in range(rng.randrange(schema["maxItems"] + 2))]
        case "object":
            properties = schema["properties"].items()
            return {name: random_answer(own, rng) for name, own in properties if rng.random() < 0.9}
    return rng.choice([None, True, False])
