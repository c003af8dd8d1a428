"""Sizes and addresses of packed weights, the check for finite values, and the checksum of files.

A data argument of ``Context.pack`` and the related methods is a C-contiguous numpy array of exactly the expected
size, or an ``int`` address, which is trusted.  A row range counts rows of the whole weight.  ``layout`` and
``src_dtype`` are numbers of ``ps_layout`` and ``ps_dtype``.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core.layouts import BF16, F16, F32, GROUP_LEN, T16_I4G32
from penstock.core.library import check, library
from penstock.errors import InvalidArgumentError

__all__ = [
    "DTYPE_BYTES", "Data", "QuantizedRows", "check_finite", "crc32", "data_address", "groups_shape", "layout_bytes",
    "to_float32",
]  # fmt: skip

Data: TypeAlias = npt.NDArray[Any] | int

DTYPE_BYTES: Final = {F32: 4, F16: 2, BF16: 2}
_INFINITY: Final = {F32: 0x7F800000, F16: 0x7C00, BF16: 0x7F80}
"""The bits of infinity by ``ps_dtype``; the bits of a NaN are greater."""
_PIECE_BYTES: Final = 1 << 19


class QuantizedRows(NamedTuple):
    """Rows of an integer weight: a value is ``scale * q`` (8 bit) or ``scale * (step * q + offset)`` (4 bit).

    ``q`` int8 [rows, cols]: -128 to 127 for 8 bit (rounding gives -127 or more), 0 to 15 for 4 bit.
    ``scales`` float32 [rows].
    ``groups`` int8 [rows, groups, 2]: the step (the bits of a uint8, 1 to 17) and the offset of each group of 32
    columns; None for 8 bit.
    """

    q: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    groups: npt.NDArray[np.int8] | None = None


def data_address(data: Data, num_bytes: int, name: str, *, written: bool = False) -> int:
    """Return the address of an argument; InvalidArgumentError names it unless it has ``num_bytes`` contiguous bytes."""
    if isinstance(data, int):
        return data
    if not data.flags.c_contiguous or (written and not data.flags.writeable):
        kind = "a C-contiguous, writable array" if written else "a C-contiguous array"
        raise InvalidArgumentError(f"{name}: expected {kind}", param=name)
    if data.nbytes != num_bytes:
        raise InvalidArgumentError(f"{name}: expected {num_bytes} bytes, got {data.nbytes}", param=name)
    return data.ctypes.data


def layout_bytes(layout: int, rows: int, cols: int) -> int:
    """Return the exact size in bytes of a weight of ``rows`` x ``cols``."""
    out = ctypes.c_int64()
    check(library().ps_layout_bytes(layout, rows, cols, ctypes.byref(out)))
    return out.value


def groups_shape(layout: int, num_rows: int, cols: int) -> tuple[int, int, int] | None:
    """Return the shape of a quantized weight's steps and offsets; None for a layout without them."""
    return (num_rows, -(-cols // GROUP_LEN), 2) if layout == T16_I4G32 else None


def to_float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Return the float32 values of an array of ``dtype``; f16 and bf16 come as uint16 bits."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "f16":
        return values.view(np.float16).astype(np.float32)
    return values.view(np.float32)


def check_finite(values: npt.NDArray[Any], dtype: int, first_row: int = 0) -> None:
    """Raise InvalidArgumentError, with its place, for the first element that is NaN or infinite.

    ``values`` have the type ``dtype`` (a ``ps_dtype``), or are its bits.  They are rows ``first_row``... of a tensor.
    """
    infinity, num_bytes = _INFINITY[dtype], DTYPE_BYTES[dtype]
    sign = 1 << (8 * num_bytes - 1)
    bits = values.reshape(-1).view(f"u{num_bytes}")
    step = _PIECE_BYTES // num_bytes
    for start in range(0, bits.size, step):
        piece = bits[start : start + step]
        # Positive infinities and NaNs are the greatest signed integers, negative ones the greatest unsigned integers:
        # two reductions find both without a temporary array.
        if piece.view(f"i{num_bytes}").max() < infinity and piece.max() < sign + infinity:
            continue
        offset = int(np.flatnonzero((piece & infinity) == infinity)[0])
        place = [int(index) for index in np.unravel_index(start + offset, values.shape)]
        place[0] += first_row
        bits_found = int(piece[offset])
        what = "NaN" if bits_found & (sign - 1) > infinity else "-infinity" if bits_found & sign else "infinity"
        raise InvalidArgumentError(f"expected finite values, got {what} at {place}", param="values")


def crc32(data: bytes | bytearray | memoryview | npt.NDArray[Any], value: int = 0) -> int:
    """Return zlib's CRC-32 of a buffer, continued from ``value``.  It is several times as fast as zlib's own."""
    array = np.frombuffer(data, np.uint8)
    return int(library().ps_crc32(value, array.ctypes.data, array.nbytes))
