"""Decode the JSON body of a request to a struct: bounds on its size, the parser, then msgspec.

msgspec checks what a struct declares.  This module finds the field at fault in msgspec's error, and tells clients what
was expected and what was found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_origin

import msgspec
from msgspec import inspect

from penstock.api_errors import FieldError, RefusalError
from penstock.config import parse_json, show
from penstock.errors import InvalidFileError
from penstock.serving.json_bounds import check_counts
from penstock.validation import nearest

__all__ = ["EMPTY", "check_refused", "converted", "decode_body", "field_error_of", "refused"]

T = TypeVar("T")
EMPTY: Final[Sequence[Any]] = (False, 0, "", [], {})
"""The empty values of JSON beside null."""
_WHY: Final = "why"
_ACCEPTED: Final = "accepted"
_MAX_PARAM_CHARS: Final = 200
_PYTHON_TYPES: Final[dict[type[inspect.Type], tuple[type, ...]]] = {
    inspect.NoneType: (type(None),),
    inspect.BoolType: (bool,),
    inspect.IntType: (int,),
    inspect.FloatType: (int, float),
    inspect.StrType: (str,),
    inspect.LiteralType: (str,),
    inspect.ListType: (list,),
    inspect.DictType: (dict,),
    inspect.StructType: (dict,),
}


@cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def refused(why: str = "", values: Sequence[Any] = EMPTY) -> Any:
    """Return the type of a field that is known, but not supported: it accepts null and ``values``.

    ``values`` ask for nothing: by default the empty ones, which some clients always send.  ``why`` says what to use
    instead.  ``check_refused`` checks the field, because msgspec has no type for it.
    """
    accepted = [None, *values]
    meta = msgspec.Meta(
        description=f"Not supported{': ' if why else ''}{why}.",
        extra={_WHY: why, _ACCEPTED: accepted},
        extra_json_schema={"enum": accepted},
    )
    return Annotated[Any, meta]


def check_refused(body: msgspec.Struct) -> None:
    """Raise ValueError if a refused field of a struct has a value that asks for something.

    While msgspec decodes, this becomes a ValidationError with the place of the struct, and ``field_error_of`` names the
    field.
    """
    for name, accepted in _refused_fields(type(body)):
        value = getattr(body, name)
        if value is not None and not _is_among(value, accepted):
            raise ValueError(name)


@cache
def _refused_fields(kind: type[msgspec.Struct]) -> list[tuple[str, Sequence[Any]]]:
    """Return the name of each refused field of a struct and the values that it accepts."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    extras = {name: _refusal_of(_type_info(type_)) for name, type_ in types.items() if get_origin(type_) is Annotated}
    return [(name, extra[_ACCEPTED]) for name, extra in extras.items() if extra is not None]


def _refusal_of(info: inspect.Type) -> dict[str, Any] | None:
    """Return what ``refused`` has noted about a type; None for another type."""
    extra = info.extra if isinstance(info, inspect.Metadata) else None
    return extra if extra is not None and _WHY in extra else None


def _is_among(value: Any, accepted: Sequence[Any]) -> bool:
    """Return True if JSON has the same value among ``accepted``; true is not 1, and false not 0."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in accepted)


def decode_body(data: bytes, kind: type[T]) -> T:
    """Return a body of JSON as a struct.  Raises RefusalError if it is not JSON, and FieldError."""
    try:
        check_counts(data, "body")
        value = parse_json(data, "body", max_values=len(data), lets_threads_run=True)
    except InvalidFileError as error:
        raise RefusalError(400, str(error), code="invalid_json") from None
    body: T = converted(value, kind)
    return body


def converted(value: Any, kind: Any, path: str = "") -> Any:
    """Return a JSON value as the type ``kind``; ``path`` is the path of the value in errors.  Raises FieldError.

    Integral floats count as integers, as in JSON schema.
    """
    try:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
        value = _with_integers(value, _type_info(kind))
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise field_error_of(error, value, kind, path) from None
    except UnicodeEncodeError as error:  # a value that parse_json did not check
        message = f"{path or 'body'}: the string {show(error.object)} has half a surrogate pair"
        raise FieldError(path, message) from None


def _alternative(info: inspect.Type, value: Any) -> inspect.Type:
    """Return the alternative of a union that has the type of ``value``; other types, and a union without one, as is."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):
        for type_info in info.types:
            if _has_type(own := _alternative(type_info, value), value):
                return own
    return info


def _has_type(info: inspect.Type, value: Any) -> bool:
    return type(value) in _PYTHON_TYPES.get(type(info), ())


def _with_integers(value: Any, info: inspect.Type) -> Any:
    """Return a value with each integral float as an integer where the type has an integer."""
    if type(value) is float and value.is_integer():
        return int(value) if isinstance(_alternative(info, 0), inspect.IntType) else value
    info = _alternative(info, value)
    if isinstance(info, inspect.StructType) and type(value) is dict:
        types = {field.encode_name: field.type for field in info.fields}
        return {name: _with_integers(item, types[name]) if name in types else item for name, item in value.items()}
    if isinstance(info, inspect.ListType) and type(value) is list:
        return [_with_integers(item, info.item_type) for item in value]
    return value


_AT: Final = re.compile(r" - at `(?:key` in `)?\$([^`]*)`\Z")
_STEP: Final = re.compile(r"\.(\w+)|\[([0-9]+)\]|(\[\.\.\.\])")


def field_error_of(error: msgspec.ValidationError, value: Any, kind: Any, path: str = "") -> FieldError:
    """Return msgspec's error about a value of a ``kind`` as ours, with the path of the field at fault.

    An unknown, a refused and a missing field of an object are reported in this order, before its values.
    """
    at, info = _AT.search(str(error)), _type_info(kind)
    for name, index, entry in _STEP.findall(at[1]) if at else ():
        info = _alternative(info, value)
        if isinstance(info, inspect.StructType):
            misfit = _member_error(info, value, path)
            if misfit is not None:
                return misfit
            info = next(field.type for field in info.fields if field.encode_name == name)
            value, path = value[name], f"{path}.{name}" if path else name
        elif isinstance(info, inspect.ListType):
            info, value, path = info.item_type, value[int(index)], f"{path}[{index}]"
        elif isinstance(info, inspect.DictType) and entry:
            info = info.value_type
            key = next(key for key, item in value.items() if not _fits(info, item))
            value, path = value[key], f"{path}[{show(key)}]"
    own = _alternative(info, value)
    misfit = _member_error(own, value, path) if isinstance(own, inspect.StructType) else None
    return misfit or _value_error(info, value, path)


def _member_error(info: inspect.StructType, value: Any, path: str) -> FieldError | None:
    """Return the error about an unknown, refused or missing field of an object, if it has one."""
    if not isinstance(value, dict):
        return None
    fields, prefix = {field.encode_name: field for field in info.fields}, f"{path}." if path else ""
    for name in value:
        if name not in fields:
            near = nearest(name[:_MAX_PARAM_CHARS], fields)
            hint = f" Did you mean {prefix}{near}?" if near else ""
            message = f"Unknown field of {info.cls.__name__}: {prefix}{show(name)[1:-1]}.{hint}"
            return FieldError(f"{prefix}{name}"[:_MAX_PARAM_CHARS], message, "unknown")
    for name, item in value.items():
        refusal = _refusal_of(fields[name].type)
        if refusal is not None and not _is_among(item, refusal[_ACCEPTED]):
            why = refusal[_WHY]
            message = f"{prefix}{name} is not supported{': ' if why else ''}{why}"
            return FieldError(f"{prefix}{name}", message, "unsupported")
    for name, field in fields.items():
        if field.required and name not in value:
            return FieldError(f"{prefix}{name}", f"{prefix}{name} is missing", "missing")
    return None


def _fits(info: inspect.Type, value: Any) -> bool:
    """Return True if a value has the type and, if it is a number, is within the bounds."""
    own = _alternative(info, value)
    if not _has_type(own, value):
        return False
    if isinstance(own, (inspect.IntType, inspect.FloatType)):
        return (own.ge is None or own.ge <= value) and (own.le is None or value <= own.le)
    return True


def _value_error(info: inspect.Type, value: Any, path: str) -> FieldError:
    """Return the error about a value whose type, length or bounds are wrong."""
    own, name = _alternative(info, value), path or "body"
    if isinstance(own, (inspect.StrType, inspect.ListType, inspect.DictType)) and _has_type(own, value):
        low, high, count = own.min_length or 0, own.max_length, len(value)
        if count < low or (high is not None and count > high):
            if high == 0:  # another type is meant, which some clients replace by []
                return FieldError(path, f"{name}: expected {_expected(info)}, got {show(value)}")
            if isinstance(own, inspect.ListType) and value and not _fits(own.item_type, value[0]):
                return _value_error(own.item_type, value[0], f"{path}[0]")  # a wrong type before a wrong length
            what, unit = _LENGTHS[type(own)]
            span = f"{low} or more" if high is None else f"{low} to {high}"
            return FieldError(path, f"{name}: expected {what} of {span} {unit}, got {count}")
    if isinstance(own, inspect.DictType) and isinstance(value, dict):
        pattern = _key_pattern(own)
        key = next((key for key in value if re.search(pattern, key) is None), "")
        return FieldError(path, f"{name}: expected an object whose keys match {_shown(pattern)}, got {show(key)}")
    return FieldError(path, f"{name}: expected {_expected(own)}, got {show(value)}")


def _key_pattern(info: inspect.DictType) -> str:
    """Return the pattern of the keys of an object; "" matches any."""
    key = _alternative(info.key_type, "")
    pattern = key.pattern if isinstance(key, inspect.StrType) else None
    return pattern or ""


def _shown(pattern: str) -> str:
    return pattern.removeprefix("^").removesuffix(r"\Z")


_LENGTHS: Final = {
    inspect.StrType: ("a string", "characters"),
    inspect.ListType: ("a list", "items"),
    inspect.DictType: ("an object", "entries"),
}


def _expected(info: inspect.Type) -> str:
    """Return the values of a type in words."""
    match info:
        case inspect.Metadata():
            return _expected(info.type)
        case inspect.UnionType():
            return " or ".join(
                _expected(alternative)
                for alternative in info.types
                if not isinstance(alternative, inspect.NoneType) and getattr(alternative, "max_length", None) != 0
            )
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() if info.le is not None:
            return f"an integer from {info.ge} to {info.le}"
        case inspect.IntType():
            return "an integer"
        case inspect.FloatType() if info.le is not None and info.gt is not None:
            return f"a number above {info.gt:g}, at most {info.le:g}"
        case inspect.FloatType() if info.le is not None:
            return f"a number from {info.ge:g} to {info.le:g}"
        case inspect.FloatType():
            return "a number"
        case inspect.StrType() if info.pattern is not None:
            return f"a string that matches {_shown(info.pattern)}"
        case inspect.StrType():
            return "a string"
        case inspect.LiteralType():
            return " or ".join(f'"{value}"' for value in info.values)
        case inspect.ListType():
            return "a list of strings" if isinstance(_alternative(info.item_type, ""), inspect.StrType) else "a list"
        case inspect.DictType() | inspect.StructType():
            return "an object"
    return "null"
