"""The arguments of an op, as its schema in the table writes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

__all__ = ["Argument", "parse_arguments"]


@dataclass(frozen=True)
class Argument:
    """An argument of a schema.  ``kind`` is "tensor", "weight" or "state", or "int", "float", "bool" or "str" for an
    attribute."""

    name: str
    kind: str
    optional: bool = False

    @property
    def is_attr(self) -> bool:
        """True for an attribute."""
        return self.kind not in ("tensor", "weight", "state")


@cache
def parse_arguments(schema: str) -> tuple[Argument, ...]:
    """Return the arguments of a schema of the op table, in order."""
    kinds = {"Tensor": "tensor", "Weight": "weight", "State": "state", "State(a!)": "state"}
    text = schema[1 : schema.index(") ->")]
    arguments = []
    for item in text.split(", "):
        if item != "*":
            type_name, name = item.split(" ")
            plain = type_name.removesuffix("?")
            arguments.append(Argument(name, kinds.get(plain, plain), plain != type_name))
    return tuple(arguments)
