"""Tensors of the Open Inference Protocol as arrays: the code that all encodings share.

Each size in a request is compared with the received bytes before memory of that size is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import FieldError
from penstock.config import show
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
"""The most elements of a BYTES tensor, because each is a Python object."""
_PIECE: Final = 1 << 14


def wrong(name: str, message: str, kind: str = "value") -> FieldError:
    """Return the error for a tensor, by its name."""
    return FieldError(name[:MAX_NAME_CHARS], message, kind)


class What:
    """The description of an input for error messages; it is only formatted if an error occurs."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return f"the input {show(self._name)}"


def check_id(request_id: str) -> None:
    """Raise FieldError for an id that is too long."""
    if len(request_id) > MAX_ID_CHARS:
        raise FieldError("id", f"id must have at most {MAX_ID_CHARS} characters, not {len(request_id)}")


def check_new(name: str, names: Any, index: int) -> None:
    """Raise FieldError if the name of input ``index`` is invalid, or if an earlier input has the same name."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        what = f"inputs[{index}]"
        raise wrong(what, f"{what} must have a name of 1 to {MAX_NAME_CHARS} characters, not {show(name)}")
    if name in names:
        raise wrong(name, f"the input {show(name)} appears twice")


def check_head(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Check an input's datatype and shape; return its number of elements, without allocating memory for them."""
    if datatype in DTYPES and len(shape) <= MAX_DIMS and datatype != "BYTES":
        sizes = tuple(shape)
        count = math.prod(sizes)
        if count > 0 and min(sizes, default=1) > 0:  # the fast path for nearly all inputs
            return count
    what = What(name)
    if datatype not in DTYPES:
        raise wrong(name, f"{what} must have a datatype among {', '.join(DTYPES)}, not {show(datatype)}")
    if len(shape) > MAX_DIMS:  # a message can contain millions of sizes
        raise wrong(name, f"{what} must have at most {MAX_DIMS} dimensions, not {len(shape)}")
    if any(size < 0 for size in shape):
        raise wrong(name, f"{what} must have a shape without negative sizes, not {show([*shape])}")
    count = math.prod(shape)
    if datatype == "BYTES" and count > MAX_ELEMENTS:
        raise wrong(name, f"{what} has {show(count)} elements by its shape; the maximum for BYTES is {MAX_ELEMENTS}")
    if count == 0 and max(shape) > MAX_ELEMENTS:  # a reader that multiplies the other sizes could overflow
        raise wrong(name, f"{what} has no elements, but its shape has a size of {show(max(shape))}")
    return count


def raw_array(name: str, datatype: str, shape: Sequence[int], raw: memoryview | bytes) -> NDArray[Any]:
    """Return the array for little-endian bytes in row-major order; except for BYTES it shares their memory."""
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
    """Return a BYTES array with the given elements and shape."""
    return frozen(bytes_array(elements, shape))


def in_pieces(values: Any) -> Iterator[Any]:
    """Yield slices of many elements, so that other threads can run between the conversions of slices."""
    return (values[at : at + _PIECE] for at in range(0, len(values), _PIECE))


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only and return it."""
    array.flags.writeable = False
    return array
