"""Round a matrix to the scheme's integers, with a weight for the error of each column.

The packer of the core minimises the plain squared error of 4-bit groups.  With weights, each column's error counts as
much as the inputs that it is multiplied with: the mean of their squares, as in llama.cpp's imatrix.  int8 rows have one
scale for all columns, so weights change nothing there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core import native
from penstock.core.layouts import F32, T16_I4G32
from penstock.core.native import QuantizedRows
from penstock.quant.exportable import round_exportable

if TYPE_CHECKING:
    from penstock.core.native import Context
    from penstock.quant.scheme import Scheme

__all__ = ["Floats", "fit_groups", "normalized", "round_weighted", "row_scales"]

Floats = NDArray[np.float32]
_MIN_WEIGHT: Final = 0.01


def row_scales(matrix: Floats) -> Floats:
    """Return the scale of each row: its largest magnitude becomes 127."""
    largest: Floats = np.abs(matrix).max(axis=1, initial=0)
    return largest / np.float32(127)


def round_weighted(context: Context, matrix: Floats, scheme: Scheme, weights: Floats | None) -> QuantizedRows:
    """Round float32 rows [rows, cols]; the squared error of column i counts ``weights[i]``.

    Raises InvalidArgumentError for rows that are not finite.
    """
    rows, cols = matrix.shape
    if scheme.exportable:
        return round_exportable(context, scheme, matrix, None if weights is None else normalized(weights))
    packed = np.zeros(native.layout_bytes(scheme.layout, rows, cols), np.uint8)
    source = np.ascontiguousarray(matrix, np.float32)
    if scheme.layout == T16_I4G32 and weights is not None:
        context.pack_weighted(source, packed, column_weights=normalized(weights))
    else:
        context.pack(scheme.layout, rows, cols, 0, rows, F32, source, packed)
    return context.unpack_quantized(scheme.layout, rows, cols, 0, rows, packed)


def normalized(weights: Floats) -> Floats:
    """Return weights whose mean is 1; ones if all are zero.

    A column counts at least a hundredth of the mean: texts other than the calibration data may have inputs there.
    """
    mean = float(weights.mean(dtype=np.float64))
    if mean <= 0:
        return np.ones_like(weights, np.float32)
    return np.ascontiguousarray(np.maximum(weights / mean, _MIN_WEIGHT), np.float32)


def fit_groups(context: Context, values: Floats, weights: Floats, *, even_offsets: bool = False) -> NDArray[np.int8]:
    """Return the step and the offset [rows, 2] of each row of one group [rows, up to 32], in units of its scale.

    ``even_offsets``: of ``Context.pack_weighted``.
    """
    rows, cols = values.shape
    packed = np.zeros(native.layout_bytes(T16_I4G32, rows, cols), np.uint8)
    ones = np.ones(rows, np.float32)
    context.pack_weighted(
        np.ascontiguousarray(values),
        packed,
        column_weights=normalized(weights),
        scales=ones,
        even_offsets=even_offsets,
    )
    groups = context.unpack_quantized(T16_I4G32, rows, cols, 0, rows, packed).groups
    return np.zeros((rows, 2), np.int8) if groups is None else groups[:, 0]
