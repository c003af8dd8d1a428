"""Tensors of the Open Inference Protocol as arrays: what every form of them has in common.

Every size that a request names is compared with the bytes that it brings before anything is made of that size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.config import show
from penstock.json_schema import MisfitError
from penstock.tensors import DTYPES
from penstock.tensors.codec import bytes_array, decode_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MAX_DIMS", "MAX_ELEMENTS", "MAX_NAME_CHARS", "MAX_TENSORS", "What", "byte_array",
    "check_head", "check_id", "check_new", "frozen", "in_pieces", "raw_array", "wrong",
]  # fmt: skip

MAX_TENSORS: Final = 64
MAX_DIMS: Final = 16
MAX_NAME_CHARS: Final = 256
MAX_ID_CHARS: Final = 1024
MAX_ELEMENTS: Final = 1 << 20
"""Elements of BYTES, each of which is an object, however few bytes it has."""
_PIECE: Final = 1 << 14


def wrong(name: str, message: str, kind: str = "value") -> MisfitError:
    """A tensor that does not fit, by its name."""
    return MisfitError(name[:MAX_NAME_CHARS], message, kind)


class What:
    """An input as messages call it, which most requests never need."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return f"the input {show(self._name)}"


def check_id(request_id: str) -> None:
    """MisfitError for an id without end."""
    if len(request_id) > MAX_ID_CHARS:
        raise MisfitError("id", f"id must have at most {MAX_ID_CHARS} characters, not {len(request_id)}")


def check_new(name: str, found: Any, index: int) -> None:
    """MisfitError for input ``index`` when its name cannot be one, or is among those found before it."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        what = f"inputs[{index}]"
        raise wrong(what, f"{what} must have a name of 1 to {MAX_NAME_CHARS} characters: {show(name)}")
    if name in found:
        raise wrong(name, f"the input {show(name)} is there twice")


def check_head(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements an input says that it has; nothing is made of that size."""
    if datatype in DTYPES and len(shape) <= MAX_DIMS and datatype != "BYTES":
        sizes = tuple(shape)
        count = math.prod(sizes)
        if count > 0 and min(sizes, default=1) > 0:  # nearly all
            return count
    what = What(name)
    if datatype not in DTYPES:
        raise wrong(name, f"{what} must have one of the datatypes {', '.join(DTYPES)}, not {show(datatype)}")
    if len(shape) > MAX_DIMS:  # millions of them fit into a message
        raise wrong(name, f"{what} must have a shape of up to {MAX_DIMS} sizes, not {len(shape)}")
    if any(size < 0 for size in shape):
        raise wrong(name, f"{what} must have a shape of sizes from 0 on, not {show([*shape])}")
    count = math.prod(shape)
    if datatype == "BYTES" and count > MAX_ELEMENTS:
        raise wrong(name, f"{what} has {show(count)} elements by its shape; BYTES may have {MAX_ELEMENTS}")
    if count == 0 and max(shape) > MAX_ELEMENTS:  # no elements, yet sizes that whoever copies it may multiply
        raise wrong(name, f"{what} has no elements, but a size of {show(max(shape))} in its shape")
    return count


def raw_array(name: str, datatype: str, shape: Sequence[int], raw: memoryview | bytes) -> NDArray[Any]:
    """The array over bytes in row-major order, the lowest first; it shares their memory, but for BYTES."""
    count = check_head(name, datatype, shape)
    try:
        array = decode_array(datatype, shape, count, raw)
    except ValueError as error:
        raise wrong(name, f"the input {show(name)} {error}") from None
    if datatype == "BYTES":
        return frozen(array)
    if datatype == "BOOL" and bytes(raw).translate(None, b"\0\1"):
        raise wrong(name, f"the input {show(name)} is BOOL: its bytes must be 0 or 1")
    return array


def byte_array(elements: Sequence[bytes], shape: Sequence[int]) -> NDArray[Any]:
    """An array of BYTES, as many as ``shape`` has."""
    return frozen(bytes_array(elements, shape))


def in_pieces(values: Any) -> Iterator[Any]:
    """Slices of many elements: a thread that makes a million objects in one call lets no other run meanwhile."""
    return (values[at : at + _PIECE] for at in range(0, len(values), _PIECE))


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The array, which nobody may write to from now on."""
    array.flags.writeable = False
    return array
