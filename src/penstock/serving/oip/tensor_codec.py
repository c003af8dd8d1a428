"""Tensors of the Open Inference Protocol as arrays: the code that all encodings share.

Each size in a request is compared with the received bytes before memory of that size is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.config import show
from penstock.json_schema import MisfitError
from penstock.tensors import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MAX_DIMS", "MAX_ELEMENTS", "MAX_NAME_CHARS", "MAX_TENSORS", "What", "as_float32", "bfloat16_of", "byte_array",
    "check_head", "check_id", "check_new", "frozen", "in_pieces", "raw_array", "raw_of", "wrong",
]  # fmt: skip

MAX_TENSORS: Final = 64
MAX_DIMS: Final = 16
MAX_NAME_CHARS: Final = 256
MAX_ID_CHARS: Final = 1024
MAX_ELEMENTS: Final = 1 << 20
"""The most elements of a BYTES tensor, because each is a Python object."""
_PIECE: Final = 1 << 14


def wrong(name: str, message: str, kind: str = "value") -> MisfitError:
    """Return the error for a tensor, by its name."""
    return MisfitError(name[:MAX_NAME_CHARS], message, kind)


class What:
    """The description of an input for error messages; it is only formatted if an error occurs."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return f"the input {show(self._name)}"


def check_id(request_id: str) -> None:
    """Raise MisfitError for an id that is too long."""
    if len(request_id) > MAX_ID_CHARS:
        raise MisfitError("id", f"id must have at most {MAX_ID_CHARS} characters, not {len(request_id)}")


def check_new(name: str, found: Any, index: int) -> None:
    """Raise MisfitError if the name of input ``index`` is invalid, or if an earlier input has the same name."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        what = f"inputs[{index}]"
        raise wrong(what, f"{what} must have a name of 1 to {MAX_NAME_CHARS} characters, not {show(name)}")
    if name in found:
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
    count, kind = check_head(name, datatype, shape), DTYPES[datatype]
    if datatype == "BYTES":
        return byte_array(_byte_elements(bytes(raw), name, count), shape)
    if len(raw) != count * kind.itemsize:
        raise wrong(
            name,
            f"the input {show(name)} has {show(count * kind.itemsize)} bytes by its shape and datatype, "
            f"but {len(raw)} were sent",
        )
    if datatype == "BOOL" and bytes(raw).translate(None, b"\0\1"):
        raise wrong(name, f"the input {show(name)} is BOOL: its bytes must be 0 or 1")
    return np.frombuffer(raw, kind).reshape(tuple(shape))


def _byte_elements(raw: bytes, name: str, count: int) -> list[bytes]:
    """Return the elements of a BYTES tensor, each of which is a 4-byte little-endian length and its bytes."""
    found, at, most = [], 0, len(raw)
    if most < 4 * count:
        raise wrong(name, f"the input {show(name)} has {count} elements by its shape, but only {most} bytes were sent")
    for index in range(count):
        begin = at + 4
        at = begin + int.from_bytes(raw[at:begin], "little")
        if begin > most or at > most:
            raise wrong(name, f"the input {show(name)} is truncated inside element {index} of {count}")
        found.append(raw[begin:at])
    if at != most:
        raise wrong(name, f"the input {show(name)} has {most - at} bytes after its {count} elements")
    return found


def byte_array(elements: Sequence[bytes], shape: Sequence[int]) -> NDArray[Any]:
    """Return a BYTES array with the given elements and shape."""
    array = np.empty(len(elements), DTYPES["BYTES"])
    array[:] = elements
    return frozen(array.reshape(tuple(shape)))


def in_pieces(values: Any) -> Iterator[Any]:
    """Yield slices of many elements, so that other threads can run between the conversions of slices."""
    return (values[at : at + _PIECE] for at in range(0, len(values), _PIECE))


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only and return it."""
    array.flags.writeable = False
    return array


def raw_of(datatype: str, array: NDArray[Any]) -> bytes:
    """Return the bytes of an array, in the format that ``raw_array`` reads."""
    if datatype != "BYTES":
        return array.astype(DTYPES[datatype], copy=False).tobytes()
    return b"".join(part for one in array.ravel().tolist() for part in (len(one).to_bytes(4, "little"), one))


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Convert BF16 bits to float32."""
    numbers: NDArray[np.float32] = (array.astype("<u4") << 16).view("<f4")
    return numbers


def bfloat16_of(array: NDArray[np.float32]) -> NDArray[Any]:
    """Convert finite float32 numbers to BF16 bits, rounding to the nearest, and to even in ties."""
    bits = array.view("<u4")
    rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded
