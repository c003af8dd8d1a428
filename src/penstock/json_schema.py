"""What a JSON value may be: one description that checks a value and writes its JSON schema.

A shape's ``check`` gives the value as Python wants it, or raises MisfitError with the path of the field.  ``schema``
says the same in JSON schema (2020-12), so that ``/openapi.json`` cannot differ from what is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from penstock.config import show

__all__ = [
    "NOTHING", "Anything", "Choice", "Either", "Entries", "Flag", "Items", "Members", "MisfitError", "Nothing",
    "Number", "Shape", "Text", "Whole", "optional",
]  # fmt: skip

Schema = dict[str, Any]
_PIECE: Final = 1 << 14


class MisfitError(Exception):
    """A value that does not fit, and the path of its field; ``kind``: "missing", "unknown", "unsupported", "value".

    ``is_length``: the value is of the right type, but too long or too short.
    """

    def __init__(self, path: str, message: str, kind: str = "value", *, is_length: bool = False) -> None:
        super().__init__(message)
        self.path, self.kind, self.is_length = path, kind, is_length


class Shape(Protocol):
    """What one value may be."""

    def check(self, value: Any, path: str) -> Any:
        """The value as Python wants it; MisfitError names ``path`` or what lies below it."""

    def schema(self) -> Schema:
        """The same as JSON schema."""


def _expected(path: str, expected: str, found: object) -> MisfitError:
    return MisfitError(path, f"{path or 'the body'} must be {expected}, not {show(found)}")


@dataclass(frozen=True)
class Anything:
    """Any value at all: of answers, where nothing is checked."""

    def check(self, value: Any, path: str) -> Any:
        """The value."""
        return value

    def schema(self) -> Schema:
        """An empty one."""
        return {}


@dataclass(frozen=True)
class Nothing:
    """null alone.  ``why`` says what the field would be for."""

    why: str = ""

    def check(self, value: Any, path: str) -> None:
        """None; anything else is not supported."""
        if value is not None:
            raise MisfitError(path, f"{path} is not supported{': ' if self.why else ''}{self.why}", "unsupported")

    def schema(self) -> Schema:
        """null."""
        return {"type": "null"}


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def check(self, value: Any, path: str) -> bool:
        """The flag."""
        if not isinstance(value, bool):
            raise _expected(path, "true or false", value)
        return value

    def schema(self) -> Schema:
        """A boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Whole:
    """A whole number within bounds; 2.0 is one, as JSON schema has it."""

    low: int
    high: int

    def check(self, value: Any, path: str) -> int:
        """The number as int."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            raise _expected(path, f"a whole number from {self.low} to {self.high}", value)
        return value

    def schema(self) -> Schema:
        """An integer."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Number:
    """A number within bounds."""

    low: float
    high: float

    def check(self, value: Any, path: str) -> float:
        """The number as float."""
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            raise _expected(path, f"a number from {self.low:g} to {self.high:g}", value)
        return float(value)

    def schema(self) -> Schema:
        """A number."""
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Text:
    """A text of so many characters, all of which match ``pattern`` if there is one."""

    low: int = 0
    high: int | None = None
    pattern: str | None = None

    def check(self, value: Any, path: str) -> str:
        """The text."""
        if not isinstance(value, str):
            raise _expected(path, "a text", value)
        if len(value) < self.low or (self.high is not None and len(value) > self.high):
            most = " or more" if self.high is None else f" to {self.high}"
            message = f"{path} must be a string of {self.low}{most} characters, not of {len(value)}"
            raise MisfitError(path, message, is_length=True)
        if self.pattern is not None and re.fullmatch(self.pattern, value) is None:
            raise _expected(path, f"a text like {self.pattern}", value)
        return value

    def schema(self) -> Schema:
        """A string."""
        found: Schema = {"type": "string"}
        if self.low:
            found["minLength"] = self.low
        if self.high is not None:
            found["maxLength"] = self.high
        if self.pattern is not None:
            found["pattern"] = f"^{self.pattern}$"
        return found


@dataclass(frozen=True)
class Choice:
    """One of a few texts."""

    values: tuple[str, ...]

    def check(self, value: Any, path: str) -> str:
        """The text."""
        if not isinstance(value, str) or value not in self.values:
            raise _expected(path, " or ".join(f'"{one}"' for one in self.values), value)
        return value

    def schema(self) -> Schema:
        """A string of an enumeration."""
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True)
class Items:
    """A list of so many values of one shape."""

    of: Shape
    low: int
    high: int | None

    def check(self, value: Any, path: str) -> list[Any]:
        """The values, each checked."""
        if not isinstance(value, list):
            raise _expected(path, "a list", value)
        if len(value) < self.low or (self.high is not None and len(value) > self.high):
            if value:  # a list of something else is not too long, but wrong
                self.of.check(value[0], f"{path}[0]")
            most = "or more" if self.high is None else f"to {self.high}"
            message = f"{path} must be a list of {self.low} {most} items, not of {len(value)}"
            raise MisfitError(path, message, is_length=True)
        of = self.of
        if isinstance(of, Whole) and value and _are_whole(value, of):
            return value  # token ids, of which there may be many
        return [of.check(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def schema(self) -> Schema:
        """An array."""
        found: Schema = {"type": "array", "items": self.of.schema()}
        if self.low:
            found["minItems"] = self.low
        if self.high is not None:
            found["maxItems"] = self.high
        return found


def _are_whole(values: list[Any], of: Whole) -> bool:
    """Whether all are integers within bounds; looked at in pieces, between which other threads may run."""
    for at in range(0, len(values), _PIECE):
        piece = values[at : at + _PIECE]
        if set(map(type, piece)) != {int} or min(piece) < of.low or max(piece) > of.high:
            return False
    return True


@dataclass(frozen=True)
class Entries:
    """An object whose keys are no names of fields: at most ``high`` of them, each like ``key``."""

    key: str
    of: Shape
    high: int

    def check(self, value: Any, path: str) -> dict[str, Any]:
        """Keys and checked values."""
        if not isinstance(value, dict):
            raise _expected(path, "an object", value)
        if len(value) > self.high:
            raise MisfitError(path, f"{path} must have at most {self.high} entries, not {len(value)}")
        for name in value:
            if re.fullmatch(self.key, name) is None:
                raise _expected(path, f"an object whose keys are like {self.key}", name)
        return {name: self.of.check(item, f"{path}[{show(name)}]") for name, item in value.items()}

    def schema(self) -> Schema:
        """An object."""
        return {
            "type": "object",
            "patternProperties": {f"^{self.key}$": self.of.schema()},
            "additionalProperties": False,
            "maxProperties": self.high,
        }


def _reach(path: str) -> tuple[list[int], int]:
    """How far a check came that stopped at a path: by the items of lists that it had passed, then by depth."""
    return [int(number) for number in re.findall(r"\[([0-9]+)\]", path)], len(path)


def _telling(misfit: MisfitError) -> tuple[bool, list[int], int]:
    """How much an error of one alternative says about the value; more is greater."""
    return (misfit.is_length, *_reach(misfit.path))


@dataclass(frozen=True)
class Either:
    """One of several shapes; ``expected`` names them in words."""

    shapes: tuple[Shape, ...]
    expected: str

    def check(self, value: Any, path: str) -> Any:
        """What the first shape that fits makes of it.

        Of those that do not, one whose type fits and whose length does not speaks, else the one that came furthest.
        """
        deepest: MisfitError | None = None
        try:
            for shape in self.shapes:
                try:
                    return shape.check(value, path)
                except MisfitError as misfit:
                    is_telling = misfit.is_length or misfit.path != path
                    if is_telling and (deepest is None or _telling(misfit) > _telling(deepest)):
                        deepest = misfit
            raise deepest or _expected(path, self.expected, value)
        finally:
            deepest = None  # whose frames hold this one

    def schema(self) -> Schema:
        """Any of the schemas."""
        return {"anyOf": [shape.schema() for shape in self.shapes]}


@dataclass(frozen=True)
class Members:
    """An object with named fields and no others.  A field that is null counts as absent unless it is ``required``.

    ``notes`` say what a field is for.  ``title`` names the schema.
    """

    title: str
    fields: Mapping[str, Shape]
    required: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def check(self, value: Any, path: str) -> dict[str, Any]:
        """The fields that were given, checked; MisfitError for one that is missing or not known."""
        if not isinstance(value, dict):
            raise _expected(path, "an object", value)
        prefix, found = f"{path}." if path else "", {}
        for name in value:
            if name not in self.fields:
                raise MisfitError(
                    f"{prefix}{name}"[:200], f"{prefix}{show(name)[1:-1]} is not a field of {self.title}", "unknown"
                )
        for name, item in value.items():  # before what is missing: it says more of what was meant
            if isinstance(self.fields[name], Nothing):
                self.fields[name].check(item, f"{prefix}{name}")
        for name in self.required:
            if name not in value:
                raise MisfitError(f"{prefix}{name}", f"{prefix}{name} is missing", "missing")
        for name, item in value.items():
            if item is not None or name in self.required:
                found[name] = self.fields[name].check(item, f"{prefix}{name}")
        return found

    def schema(self) -> Schema:
        """An object without other fields."""
        properties = {}
        for name, shape in self.fields.items():
            one = shape.schema() if name in self.required else _or_null(shape.schema())
            if name in self.notes:
                one = {"description": self.notes[name], **one}
            properties[name] = one
        found: Schema = {"title": self.title, "type": "object", "properties": properties, "additionalProperties": False}
        if self.required:
            found["required"] = list(self.required)
        return found


def _or_null(schema: Schema) -> Schema:
    if not schema or schema.get("type") == "null":
        return schema
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "enum" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    if isinstance(schema.get("type"), str) and schema["type"] not in ("object", "array"):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def optional(shape: Shape) -> Either:
    """The shape, or null: for fields of answers that are always there."""
    return Either((shape, Nothing()), "null or such a value")


NOTHING: Final = Nothing()
