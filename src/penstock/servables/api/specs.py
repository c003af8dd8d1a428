"""What the tensors of a servable are: a datatype and the sizes of one instance, written "FP32[64]"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import InvalidArgumentError
from penstock.tensors import DTYPES

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Spec", "read_spec", "read_specs"]

TEXT: Final = "TEXT"
_WRITTEN: Final = re.compile(r"\s*([A-Z0-9]+)\s*\[([-0-9,\s]*)\]\s*")
_MAX_SIZES: Final = 16
_MAX_SIZE: Final = 1 << 31


@dataclass(frozen=True)
class Spec:
    """``datatype`` is the Open Inference Protocol's or TEXT; ``shape`` is that of one instance, -1 is any size."""

    datatype: str
    shape: tuple[int, ...]

    @cached_property
    def wire_datatype(self) -> str:
        """The protocol's name: TEXT goes as BYTES."""
        return "BYTES" if self.datatype == TEXT else self.datatype

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """numpy's; that of bytes and texts is object."""
        return DTYPES[self.wire_datatype]

    @cached_property
    def is_bytes(self) -> bool:
        """Whether elements differ in length."""
        return self.wire_datatype == "BYTES"

    @cached_property
    def is_fixed(self) -> bool:
        """Whether all sizes are known."""
        return -1 not in self.shape

    def takes(self, other: Spec) -> bool:
        """Whether a value of ``other`` can be one of this; what is any size is found when it runs."""
        return (
            self.datatype == other.datatype
            and len(self.shape) == len(other.shape)
            and all(a == b or -1 in (a, b) for a, b in zip(self.shape, other.shape, strict=True))
        )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an instance may have this shape."""
        if self.is_fixed:
            return shape == self.shape
        return len(shape) == len(self.shape) and all(a in (-1, b) for a, b in zip(self.shape, shape, strict=True))

    def __str__(self) -> str:
        return f"{self.datatype}[{','.join(map(str, self.shape))}]"


def read_spec(written: object, what: str) -> Spec:
    """A spec as it is written; InvalidArgumentError names ``what``."""
    found = _WRITTEN.fullmatch(written) if isinstance(written, str) else None
    if found is None:
        raise InvalidArgumentError(f'{what} must be like "FP32[64]" or "INT64[]", not {written!r:.100}')
    datatype, inside = found.groups()
    if datatype not in DTYPES and datatype != TEXT:
        raise InvalidArgumentError(f"{what}: {datatype} is no datatype; there are {', '.join(DTYPES)} and {TEXT}")
    try:
        shape = tuple(int(one) for one in inside.split(",")) if inside.strip() else ()
    except ValueError:
        raise InvalidArgumentError(f"{what}: sizes are whole numbers between commas, not {inside!r:.100}") from None
    if len(shape) > _MAX_SIZES or any(not (one == -1 or 1 <= one <= _MAX_SIZE) for one in shape):
        raise InvalidArgumentError(f"{what}: at most {_MAX_SIZES} sizes from 1 on, or -1 for any, not {inside!r:.100}")
    return Spec(datatype, shape)


def read_specs(written: object, what: str) -> dict[str, Spec]:
    """Specs by name, in their order; InvalidArgumentError names ``what`` and the name."""
    if not isinstance(written, Mapping) or not written:
        raise InvalidArgumentError(f'{what} must be like {{"image": "FP32[64]"}}, not {written!r:.100}')
    for name in written:
        if not isinstance(name, str) or not 0 < len(name) <= 128 or not name.isprintable():
            raise InvalidArgumentError(f"{what}: a name has 1 to 128 characters, unlike {name!r:.100}")
    return {name: read_spec(one, f"{what}[{name!r}]") for name, one in written.items()}
