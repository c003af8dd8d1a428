"""JSON schemas as the compiler needs them, with limits on what it takes long for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.validation import refusal

__all__ = ["prepared_schema"]

MAX_OPTIONAL: Final = 2000
"""Optional properties of a schema.  The compiler's time grows with their square: 0.7 s."""
MAX_PATTERNS: Final = 128
"""Names of ``patternProperties`` in a schema.  The compiler's time grows with their third power: 0.3 s."""
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE: Final = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_COUNTS: Final = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"
)  # fmt: skip
_YEAR: Final = r"([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR: Final = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
_DATE: Final = (
    f"({_YEAR}-(02-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(0[1-9]|[12][0-9]|30)|(0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_MINUTE: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+-]{_MINUTE})"
_OWN_FORMATS: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""The library would allow 29 February in every year, the year 0, and the second 60 in every minute, which programs that
read dates refuse."""
_SPECIFIED: Final = frozenset({
    "date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
"""The formats of JSON Schema.  Any other is a note for readers, such as ``password``."""


def prepared_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Change a schema so that the compiler enforces what it says, and return it.

    Raises InvalidArgumentError naming ``name`` if it has too many properties of a kind that takes long.
    """
    num_optional = num_patterns = 0
    for node in _schemas(schema):
        properties, required, patterns = node.get("properties"), node.get("required"), node.get("patternProperties")
        if isinstance(properties, dict):
            listed = {item for item in required if isinstance(item, str)} if isinstance(required, list) else set()
            num_optional += len(properties.keys() - listed)
        num_patterns += len(patterns) if isinstance(patterns, dict) else 0
        _prepare(node)
    if num_optional > MAX_OPTIONAL:
        raise refusal(name, f"at most {MAX_OPTIONAL} optional properties; list the others in required", num_optional)
    if num_patterns > MAX_PATTERNS:
        raise refusal(name, f"at most {MAX_PATTERNS} names in patternProperties", num_patterns)
    return schema


def _prepare(schema: dict[str, Any]) -> None:
    for count in _COUNTS:
        value = schema.get(count)
        if isinstance(value, float) and value.is_integer():
            schema[count] = int(value)
    form = schema.get("format")
    if not isinstance(form, str):
        return
    if form not in _SPECIFIED:
        del schema["format"]
    elif form in _OWN_FORMATS:
        all_of = schema.get("allOf", [])
        pattern = {"pattern": _OWN_FORMATS[form]}
        if "pattern" not in schema:
            schema.update(pattern)
        elif isinstance(all_of, list):
            schema["allOf"] = [*all_of, pattern]
        else:
            return  # the library names what is wrong
        del schema["format"]


def _schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and all those in it; each may be changed when it comes."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):  # the schemas of ``items`` in old drafts
            waiting += node
        if not isinstance(node, dict):
            continue
        for key in _MAPS:
            waiting += node[key].values() if isinstance(node.get(key), dict) else []
        for key in (*_LISTS, *_SINGLE):
            if key in node:
                waiting.append(node[key])
        yield node
