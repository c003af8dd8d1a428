"""Sizes and addresses of packed weights, and the checksum of files: the core's own code.

A data argument of ``Context.pack`` and its kin is a C-contiguous numpy array of exactly the expected bytes, or an
``int`` address, which is trusted.  A row range counts rows of the whole weight; ``layout`` and ``src_dtype`` are
numbers of ``ps_layout`` and ``ps_dtype``.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgumentError
from penstock.lite.library import check, library

__all__ = ["DTYPE_BYTES", "Data", "QuantizedRows", "crc32", "data_address", "groups_shape", "layout_bytes"]

Data: TypeAlias = npt.NDArray[Any] | int

DTYPE_BYTES = {1: 4, 2: 2, 3: 2}
_T16_I4G32, _GROUP = 22, 32


class QuantizedRows(NamedTuple):
    """Rows of an integer weight: a value is ``scale * q`` (8 bit) or ``scale * (step * q + offset)`` (4 bit).

    ``q`` int8 [rows, cols], -127 to 127 or 0 to 15; ``scales`` float32 [rows]; ``groups`` int8 [rows, groups, 2], the
    step (the bits of a uint8, 1 to 17) and the offset of each 32 columns, or None for 8 bit.
    """

    q: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    groups: npt.NDArray[np.int8] | None = None


def data_address(data: Data, num_bytes: int, name: str, *, written: bool = False) -> int:
    """The address of an argument; InvalidArgumentError names it when its bytes are not those expected."""
    if isinstance(data, int):
        return data
    if not data.flags.c_contiguous or (written and not data.flags.writeable):
        kind = "a C-contiguous, writable array" if written else "a C-contiguous array"
        raise InvalidArgumentError(f"{name}: expected {kind}")
    if data.nbytes != num_bytes:
        raise InvalidArgumentError(f"{name}: expected {num_bytes} bytes, found {data.nbytes}")
    return data.ctypes.data


def layout_bytes(layout: int, rows: int, cols: int) -> int:
    """Exact bytes of a weight of ``rows`` x ``cols``."""
    out = ctypes.c_int64()
    check(library().ps_layout_bytes(layout, rows, cols, ctypes.byref(out)))
    return out.value


def groups_shape(layout: int, num_rows: int, cols: int) -> tuple[int, int, int] | None:
    """The shape of a quantized weight's steps and offsets; None where it has none."""
    return (num_rows, -(-cols // _GROUP), 2) if layout == _T16_I4G32 else None


def crc32(data: bytes | bytearray | memoryview | npt.NDArray[Any], value: int = 0) -> int:
    """zlib's CRC-32 of a buffer, continued from ``value``; several times the speed of zlib's."""
    array = np.frombuffer(data, np.uint8)
    return int(library().ps_crc32(value, array.ctypes.data, array.nbytes))
