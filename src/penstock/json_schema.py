"""Shapes of JSON values: each shape checks a value and generates the JSON schema of the check.

A shape's ``check`` returns the value as a Python object, or raises MisfitError with the path of the field.  ``schema``
returns the same rule as JSON schema (2020-12), so that ``/openapi.json`` always agrees with the checks.
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
    """Raised for a value that does not have its shape.

    ``path`` is the path of the field, ``kind`` is "missing", "unknown", "unsupported" or "value".  ``is_length``: the
    value has the right type, but is too long or too short.
    """

    def __init__(self, path: str, message: str, kind: str = "value", *, is_length: bool = False) -> None:
        super().__init__(message)
        self.path, self.kind, self.is_length = path, kind, is_length


class Shape(Protocol):
    """The set of values that a field may have."""

    def check(self, value: Any, path: str) -> Any:
        """Return the value as a Python object; raise MisfitError with ``path`` or a path below it."""

    def schema(self) -> Schema:
        """Return the shape as JSON schema."""


def _expected(path: str, expected: str, found: object) -> MisfitError:
    return MisfitError(path, f"{path or 'body'} must be {expected}, not {show(found)}")


@dataclass(frozen=True)
class Anything:
    """Any value; used in responses, which are not checked."""

    def check(self, value: Any, path: str) -> Any:
        """Return the value."""
        return value

    def schema(self) -> Schema:
        """Return an empty schema."""
        return {}


@dataclass(frozen=True)
class Nothing:
    """Only null: a field that is known, but not supported.  ``why`` says what to use instead."""

    why: str = ""

    def check(self, value: Any, path: str) -> None:
        """Return None; raise MisfitError for any other value."""
        if value is not None:
            raise MisfitError(path, f"{path} is not supported{': ' if self.why else ''}{self.why}", "unsupported")

    def schema(self) -> Schema:
        """Return the schema of null."""
        return {"type": "null"}


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def check(self, value: Any, path: str) -> bool:
        """Return the flag."""
        if not isinstance(value, bool):
            raise _expected(path, "true or false", value)
        return value

    def schema(self) -> Schema:
        """Return the schema of a boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Whole:
    """An integer within bounds; 2.0 counts as an integer, as in JSON schema."""

    low: int
    high: int

    def check(self, value: Any, path: str) -> int:
        """Return the number as int."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not self.low <= value <= self.high:
            raise _expected(path, f"a whole number from {self.low} to {self.high}", value)
        return value

    def schema(self) -> Schema:
        """Return the schema of an integer."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Number:
    """A number within bounds."""

    low: float
    high: float

    def check(self, value: Any, path: str) -> float:
        """Return the number as float."""
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            raise _expected(path, f"a number from {self.low:g} to {self.high:g}", value)
        return float(value)

    def schema(self) -> Schema:
        """Return the schema of a number."""
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Text:
    """A string of ``low`` to ``high`` characters that matches ``pattern`` as a whole, if there is one."""

    low: int = 0
    high: int | None = None
    pattern: str | None = None

    def check(self, value: Any, path: str) -> str:
        """Return the string."""
        if not isinstance(value, str):
            raise _expected(path, "a string", value)
        if len(value) < self.low or (self.high is not None and len(value) > self.high):
            most = " or more" if self.high is None else f" to {self.high}"
            message = f"{path} must be a string of {self.low}{most} characters, not of {len(value)}"
            raise MisfitError(path, message, is_length=True)
        if self.pattern is not None and re.fullmatch(self.pattern, value) is None:
            raise _expected(path, f"a string that matches {self.pattern}", value)
        return value

    def schema(self) -> Schema:
        """Return the schema of a string."""
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
    """One of a fixed set of strings."""

    values: tuple[str, ...]

    def check(self, value: Any, path: str) -> str:
        """Return the string."""
        if not isinstance(value, str) or value not in self.values:
            raise _expected(path, " or ".join(f'"{one}"' for one in self.values), value)
        return value

    def schema(self) -> Schema:
        """Return the schema of an enumeration."""
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True)
class Items:
    """A list of ``low`` to ``high`` values of one shape."""

    of: Shape
    low: int
    high: int | None

    def check(self, value: Any, path: str) -> list[Any]:
        """Return the values, each checked."""
        if not isinstance(value, list):
            raise _expected(path, "a list", value)
        if len(value) < self.low or (self.high is not None and len(value) > self.high):
            if value:  # report a wrong type before a wrong length
                self.of.check(value[0], f"{path}[0]")
            most = "or more" if self.high is None else f"to {self.high}"
            message = f"{path} must be a list of {self.low} {most} items, not of {len(value)}"
            raise MisfitError(path, message, is_length=True)
        of = self.of
        if isinstance(of, Whole) and value and _are_whole(value, of):
            return value  # a fast path for token ids, which may be many
        return [of.check(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def schema(self) -> Schema:
        """Return the schema of an array."""
        found: Schema = {"type": "array", "items": self.of.schema()}
        if self.low:
            found["minItems"] = self.low
        if self.high is not None:
            found["maxItems"] = self.high
        return found


def _are_whole(values: list[Any], of: Whole) -> bool:
    """Return True if all values are integers within bounds; it works in slices, so that other threads can run."""
    for at in range(0, len(values), _PIECE):
        piece = values[at : at + _PIECE]
        if set(map(type, piece)) != {int} or min(piece) < of.low or max(piece) > of.high:
            return False
    return True


@dataclass(frozen=True)
class Entries:
    """An object with free keys: at most ``high`` entries, each key matching the pattern ``key``."""

    key: str
    of: Shape
    high: int

    def check(self, value: Any, path: str) -> dict[str, Any]:
        """Return the keys with their checked values."""
        if not isinstance(value, dict):
            raise _expected(path, "an object", value)
        if len(value) > self.high:
            raise MisfitError(path, f"{path} must have at most {self.high} entries, not {len(value)}")
        for name in value:
            if re.fullmatch(self.key, name) is None:
                raise _expected(path, f"an object whose keys match {self.key}", name)
        return {name: self.of.check(item, f"{path}[{show(name)}]") for name, item in value.items()}

    def schema(self) -> Schema:
        """Return the schema of an object."""
        return {
            "type": "object",
            "patternProperties": {f"^{self.key}$": self.of.schema()},
            "additionalProperties": False,
            "maxProperties": self.high,
        }


def _reach(path: str) -> tuple[list[int], int]:
    """Return how far a check got before it stopped at a path: the list indices that it reached, then the depth."""
    return [int(number) for number in re.findall(r"\[([0-9]+)\]", path)], len(path)


def _telling(misfit: MisfitError) -> tuple[bool, list[int], int]:
    """Return the rank of an error among those of all alternatives; the most informative one has the greatest rank."""
    return (misfit.is_length, *_reach(misfit.path))


@dataclass(frozen=True)
class Either:
    """One of several shapes; ``expected`` describes them for the error message."""

    shapes: tuple[Shape, ...]
    expected: str

    def check(self, value: Any, path: str) -> Any:
        """Return the result of the first shape that accepts the value.

        If no shape accepts it, the error is that of a shape whose type matches and whose length does not, or else of
        the shape whose check got furthest.
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
            deepest = None  # its traceback holds this frame, which would be a reference cycle

    def schema(self) -> Schema:
        """Return the schema of the alternatives."""
        return {"anyOf": [shape.schema() for shape in self.shapes]}


@dataclass(frozen=True)
class Members:
    """An object with the named fields and no others.  A null field counts as absent unless it is ``required``.

    ``notes`` are the descriptions of fields.  ``title`` is the name of the schema.
    """

    title: str
    fields: Mapping[str, Shape]
    required: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    def check(self, value: Any, path: str) -> dict[str, Any]:
        """Return the fields that are present, checked; raise MisfitError for a missing or an unknown field."""
        if not isinstance(value, dict):
            raise _expected(path, "an object", value)
        prefix, found = f"{path}." if path else "", {}
        for name in value:
            if name not in self.fields:
                raise MisfitError(
                    f"{prefix}{name}"[:200], f"Unknown field of {self.title}: {prefix}{show(name)[1:-1]}.", "unknown"
                )
        for name, item in value.items():  # checked before missing fields, because it is the more helpful error
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
        """Return the schema of an object without further fields."""
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
    """Return the shape of a value or null, for response fields that are always present."""
    return Either((shape, Nothing()), "null or a value")


NOTHING: Final = Nothing()
