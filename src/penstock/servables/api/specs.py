"""The types of tensors in a servable: a datatype and the shape of one instance, written "FP32[64]"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidArgumentError
from penstock.tensors import DTYPES
from penstock.validation import refusal

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Spec", "parse_spec", "parse_specs"]

TEXT: Final = "TEXT"
_SPEC: Final = re.compile(r"\s*([A-Z0-9]+)\s*\[([-0-9,\s]*)\]\s*")
_MAX_RANK: Final = 16
_MAX_SIZE: Final = 1 << 31


@dataclass(frozen=True)
class Spec:
    """The type of a value.

    ``datatype``: a datatype of the Open Inference Protocol, or TEXT.  ``shape``: the shape of one instance without the
    batch dimension; -1 stands for any size.
    """

    datatype: str
    shape: tuple[int, ...]

    @cached_property
    def wire_datatype(self) -> str:
        """The protocol's name of the datatype: TEXT is sent as BYTES."""
        return "BYTES" if self.datatype == TEXT else self.datatype

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype; ``object`` for BYTES and TEXT."""
        return DTYPES[self.wire_datatype]

    @cached_property
    def is_bytes(self) -> bool:
        """Return True if the elements vary in length (BYTES and TEXT)."""
        return self.wire_datatype == "BYTES"

    @cached_property
    def is_fixed(self) -> bool:
        """Return True if every size of the shape is known."""
        return -1 not in self.shape

    def accepts(self, other: Spec) -> bool:
        """Return True if a value of type ``other`` may have this type.  A size of -1 is checked at run time."""
        return (
            self.datatype == other.datatype
            and len(self.shape) == len(other.shape)
            and all(a == b or -1 in (a, b) for a, b in zip(self.shape, other.shape, strict=True))
        )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if an instance may have this shape."""
        if self.is_fixed:
            return shape == self.shape
        return len(shape) == len(self.shape) and all(a in (-1, b) for a, b in zip(self.shape, shape, strict=True))

    def __str__(self) -> str:
        return f"{self.datatype}[{','.join(map(str, self.shape))}]"


def parse_spec(text: object, name: str) -> Spec:
    """Parse a type such as "FP32[64]"; raise InvalidArgumentError whose message starts with ``name``."""
    if isinstance(text, Spec):  # of a model: ``inputs=network.inputs``
        return text
    match = _SPEC.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidArgumentError(
            f'{name}: expected a type like "FP32[64]" or "INT64[]", got {text!r:.100}', param=name
        )
    datatype, sizes = match.groups()
    if datatype not in DTYPES and datatype != TEXT:
        raise InvalidArgumentError(
            f"{name}: unknown datatype {datatype}; expected one of {', '.join(DTYPES)}, {TEXT}", param=name
        )
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes.strip() else ()
    except ValueError:
        raise refusal(name, "integer sizes separated by commas", sizes) from None
    if len(shape) > _MAX_RANK or any(not (size == -1 or 1 <= size <= _MAX_SIZE) for size in shape):
        raise refusal(name, f"at most {_MAX_RANK} sizes, each positive or -1 for any", sizes)
    return Spec(datatype, shape)


def parse_specs(specs: object, field: str) -> dict[str, Spec]:
    """Parse types by name, in order; raise InvalidArgumentError whose message starts with ``field``."""
    if not isinstance(specs, Mapping) or not specs:
        raise InvalidArgumentError(
            f'{field}: expected a mapping like {{"image": "FP32[64]"}}, got {specs!r:.100}', param=field
        )
    for name in specs:
        if not isinstance(name, str) or not 0 < len(name) <= 128 or not name.isprintable():
            raise InvalidArgumentError(
                f"{field}: expected names of 1 to 128 printable characters, got {name!r:.100}", param=field
            )
    return {name: parse_spec(text, f"{field}[{name!r}]") for name, text in specs.items()}
