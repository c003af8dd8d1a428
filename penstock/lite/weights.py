"""Packing and unpacking of weights, and the file checksum: the core's own code.

A data argument is a C-contiguous numpy array of exactly the expected bytes, or an ``int`` address, which is trusted.
A row range counts rows of the whole weight; ``layout`` and ``src_dtype`` are numbers of ``ps_layout`` and ``ps_dtype``.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgumentError
from penstock.lite.library import check, library

if TYPE_CHECKING:
    from penstock.lite.core import Context

__all__ = ["crc32", "layout_bytes", "pack", "pack_quantized", "unpack", "unpack_quantized"]

Data: TypeAlias = npt.NDArray[Any] | int

_DTYPE_BYTES = {1: 4, 2: 2, 3: 2}
_T16_I8, _GROUP = 19, 32


def _address(data: Data, num_bytes: int, name: str, *, written: bool = False) -> int:
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


def _scales_shape(layout: int, num_rows: int, cols: int) -> tuple[int, ...]:
    return (num_rows,) if layout == _T16_I8 else (num_rows, -(-cols // _GROUP))


def pack(
    context: Context,
    layout: int,
    rows: int,
    cols: int,
    row_start: int,
    num_rows: int,
    src_dtype: int,
    src: Data,
    dst: Data,
) -> None:
    """Packs ``num_rows`` source rows as rows ``row_start``... of the weight whose zeroed memory is ``dst``."""
    source = _address(src, num_rows * cols * _DTYPE_BYTES.get(src_dtype, 0), "src")
    target = _address(dst, layout_bytes(layout, rows, cols), "dst", written=True)
    check(library().ps_pack(context.handle, layout, rows, cols, row_start, num_rows, src_dtype, source, target))


def pack_quantized(
    context: Context,
    layout: int,
    rows: int,
    cols: int,
    row_start: int,
    num_rows: int,
    q: Data,
    scales: Data,
    dst: Data,
) -> None:
    """Packs values that are quantized already: q int8 [num_rows, cols]; scales float32 [num_rows] (8 bit) or
    [num_rows, groups of 32] (4 bit, values that float16 holds)."""
    values = _address(q, num_rows * cols, "q")
    factors = _address(scales, 4 * int(np.prod(_scales_shape(layout, num_rows, cols))), "scales")
    target = _address(dst, layout_bytes(layout, rows, cols), "dst", written=True)
    check(library().ps_pack_quantized(context.handle, layout, rows, cols, row_start, num_rows, values, factors, target))


def unpack_quantized(
    context: Context, layout: int, rows: int, cols: int, row_start: int, num_rows: int, src: Data
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """The exact inverse of ``pack_quantized``: (q, scales)."""
    source = _address(src, layout_bytes(layout, rows, cols), "src")
    q = np.zeros((max(num_rows, 0), cols), np.int8)
    scales = np.zeros(_scales_shape(layout, max(num_rows, 0), cols), np.float32)
    status = library().ps_unpack_quantized(
        context.handle, layout, rows, cols, row_start, num_rows, source, q.ctypes.data, scales.ctypes.data
    )
    check(status)
    return q, scales


def unpack(
    context: Context, layout: int, rows: int, cols: int, row_start: int, num_rows: int, src: Data
) -> npt.NDArray[np.float32]:
    """The values that a kernel computes with, float32 [num_rows, cols]."""
    source = _address(src, layout_bytes(layout, rows, cols), "src")
    values = np.zeros((max(num_rows, 0), cols), np.float32)
    status = library().ps_unpack(context.handle, layout, rows, cols, row_start, num_rows, source, values.ctypes.data)
    check(status)
    return values


def crc32(data: bytes | bytearray | memoryview | npt.NDArray[Any], value: int = 0) -> int:
    """zlib's CRC-32 of a buffer, continued from ``value``; several times the speed of zlib's."""
    array = np.frombuffer(data, np.uint8)
    return int(library().ps_crc32(value, array.ctypes.data, array.nbytes))
