"""Quantize one matrix to integers and scales, in runs of rows, with the packer that also makes bundles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core import native
from penstock.core.layouts import FLOAT_DTYPES, TILE_ROWS
from penstock.core.native import QuantizedRows
from penstock.core.weights import to_float32
from penstock.quant.exportable import round_exportable
from penstock.quant.hadamard import restore_weight, rotate_weight
from penstock.quant.scheme import GROUP_LEN, Scheme

if TYPE_CHECKING:
    from penstock.core.native import Context

__all__ = ["concatenate_rows", "group_shape", "quantize_rows", "stored_values", "values_of"]

_PIECE_VALUES: Final = 1 << 23


def quantize_rows(context: Context, scheme: Scheme, matrix: NDArray[Any], dtype: str) -> Iterator[QuantizedRows]:
    """Quantize a matrix and yield it in runs of rows.

    ``matrix`` [rows, cols] holds float32, or the bits of ``dtype`` "f16" or "bf16" as uint16.  The packer rounds the
    rows and they are unpacked again, so that packing the result gives the same bytes as packing the matrix.  A scheme
    with ``hadamard`` has the rows rotated first; one that is ``exportable`` has integers for GGUF files.
    """
    rows, cols = matrix.shape
    step = max(TILE_ROWS, _PIECE_VALUES // max(cols, 1) // TILE_ROWS * TILE_ROWS)
    for start in range(0, rows, step):
        piece = matrix[start : start + step]
        num_rows = len(piece)
        if scheme.exportable:
            yield round_exportable(context, scheme, to_float32(piece, dtype))
            continue
        if scheme.hadamard:
            piece, dtype = rotate_weight(to_float32(piece, dtype)), "f32"
        packed = np.zeros(native.layout_bytes(scheme.layout, num_rows, cols), np.uint8)
        source = np.ascontiguousarray(piece)
        native.pack(context, scheme.layout, num_rows, cols, 0, num_rows, FLOAT_DTYPES[dtype], source, packed)
        yield native.unpack_quantized(context, scheme.layout, num_rows, cols, 0, num_rows, packed)


def concatenate_rows(pieces: Sequence[QuantizedRows]) -> QuantizedRows:
    """Concatenate runs of rows."""
    groups = [piece.groups for piece in pieces if piece.groups is not None]
    return QuantizedRows(
        np.concatenate([piece.q for piece in pieces]),
        np.concatenate([piece.scales for piece in pieces]),
        np.concatenate(groups) if groups else None,
    )


def values_of(rows: QuantizedRows, scheme: Scheme) -> NDArray[np.float32]:
    """Return the float32 values that a kernel computes with, those of a rotated weight as they were before."""
    integers = rows.q.astype(np.float32)
    if rows.groups is not None:
        steps, offsets = rows.groups[..., 0].view(np.uint8), rows.groups[..., 1]
        wide = [np.repeat(part, GROUP_LEN, axis=1)[:, : rows.q.shape[1]] for part in (steps, offsets)]
        integers = integers * wide[0] + wide[1]
    values = np.multiply(integers, rows.scales[:, None], dtype=np.float32)
    return restore_weight(values) if scheme.hadamard else values


def stored_values(scheme: Scheme, values: NDArray[np.int8]) -> NDArray[Any]:
    """Return values as a checkpoint stores them: int8 unchanged; 4-bit values two per byte, the even column in the low
    half."""
    if scheme.weight_bits == 8:
        return values
    rows, cols = values.shape
    even = np.zeros((rows, cols + cols % 2), np.uint8)
    even[:, :cols] = values.view(np.uint8)
    pairs: NDArray[np.uint8] = even[:, 0::2] | (even[:, 1::2] << np.uint8(4))
    return pairs


def group_shape(rows: int, cols: int) -> tuple[int, int, int]:
    """Return the shape of the steps and offsets of a 4-bit matrix."""
    return (rows, -(-cols // GROUP_LEN), 2)
