"""Tensors as bytes: row-major, little-endian, each element of BYTES behind its length in four bytes.

The Open Inference Protocol defines this form ("binary tensor data").  BF16 is held as its bits in uint16.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.tensors.types import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "bfloat16_to_float32", "bytes_array", "decode_array", "decode_elements", "encode_array", "encode_elements",
    "float32_to_bfloat16",
]  # fmt: skip

_LENGTH: Final = struct.Struct("<I")
_FEW: Final = 32
"""The number of elements below which single assignments are faster than one of the whole list."""


def encode_elements(elements: Iterable[bytes]) -> bytes:
    """Return each element of BYTES behind its length."""
    parts: list[bytes] = []
    for element in elements:
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def decode_elements(raw: bytes, count: int) -> list[bytes]:
    """Return ``count`` elements of BYTES; raise ValueError if ``raw`` does not contain exactly that many."""
    size, unpack = len(raw), _LENGTH.unpack_from
    if size < 4 * count:
        raise ValueError(f"has {count} elements by its shape, but only {size} bytes")
    elements: list[bytes] = []
    end = 0
    for index in range(count):
        begin = end + 4
        if begin <= size:
            end = begin + unpack(raw, end)[0]
        if begin > size or end > size:
            raise ValueError(f"ends inside element {index} of {count}")
        elements.append(raw[begin:end])
    if end != size:
        raise ValueError(f"has {size - end} bytes after its {count} elements")
    return elements


def bytes_array(elements: Sequence[bytes], shape: Sequence[int]) -> NDArray[Any]:
    """Return an array of BYTES with the given shape, which must have as many elements."""
    array = np.empty(len(elements), DTYPES["BYTES"])
    if len(elements) < _FEW:
        for index, element in enumerate(elements):
            array[index] = element
    else:
        array[:] = elements
    return array.reshape(tuple(shape))


def encode_array(datatype: str, array: NDArray[Any]) -> bytes:
    """Return the bytes of an array, cast to the dtype of ``datatype``."""
    if datatype == "BYTES":
        return encode_elements(array.ravel().tolist())
    return array.astype(DTYPES[datatype], copy=False).tobytes()


def decode_array(datatype: str, shape: Sequence[int], count: int, raw: memoryview | bytes) -> NDArray[Any]:
    """Return the array of ``count`` elements in ``raw``; except for BYTES it shares their memory.

    The caller bounds ``shape``, whose product is ``count``.  Raises ValueError if ``raw`` does not fit.
    """
    if datatype == "BYTES":
        return bytes_array(decode_elements(bytes(raw), count), shape)
    dtype = DTYPES[datatype]
    if len(raw) != count * dtype.itemsize:
        raise ValueError(f"has {count * dtype.itemsize} bytes by its shape and datatype, but {len(raw)} were sent")
    return np.frombuffer(raw, dtype).reshape(tuple(shape))


def bfloat16_to_float32(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Convert BF16's bits to float32, which represents every value exactly."""
    numbers: NDArray[np.float32] = (bits.astype("<u4") << 16).view("<f4")
    return numbers


def float32_to_bfloat16(numbers: NDArray[np.float32]) -> NDArray[Any]:
    """Convert finite float32 numbers to BF16's bits, rounding to nearest, ties to even."""
    bits = numbers.view("<u4")
    rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded
