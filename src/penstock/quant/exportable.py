"""Integers that GGUF files can hold exactly: float16 scales, and lines with even offsets from -126 to 0.

An int8 row with such a scale has the values of Q8_0.  A line ``scale * (step * q + offset)`` has those of a group of
Q4_K, ``d * sc * q - dmin * m``, with d = scale, sc = step, dmin = 2 * scale and m = -offset / 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core import native
from penstock.core.layouts import F32, T16_I4G32
from penstock.core.native import QuantizedRows
from penstock.core.weights import check_finite
from penstock.errors import InvalidArgumentError

if TYPE_CHECKING:
    from penstock.core.native import Context
    from penstock.quant.scheme import Scheme

__all__ = ["LEAST_OFFSET", "MAX_SCALE", "half_scales", "round_exportable"]

LEAST_OFFSET: Final = -126
MAX_SCALE: Final = 32752.0
"""Twice this is the largest float16."""


def half_scales(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the least float16 scale of each row with which no magnitude is above 127.

    Raises InvalidArgumentError for rows whose scale would be above ``MAX_SCALE``.
    """
    exact = np.abs(matrix).max(axis=1, initial=0) / np.float32(127)
    if not (exact <= MAX_SCALE).all():
        row = int(np.argmin(exact <= MAX_SCALE))
        raise InvalidArgumentError(
            f"exportable: expected magnitudes up to {127 * MAX_SCALE:g}, got {exact[row] * 127:g} in row {row}",
            param="exportable",
        )
    half = exact.astype(np.float16)
    half = np.where(half.astype(np.float32) < exact, np.nextafter(half, np.float16(np.inf)), half)
    scales: NDArray[np.float32] = half.astype(np.float32)
    return scales


def round_exportable(
    context: Context, scheme: Scheme, matrix: NDArray[np.float32], weights: NDArray[np.float32] | None = None
) -> QuantizedRows:
    """Round float32 rows [rows, cols] to integers that a GGUF file can hold.

    ``weights`` [cols]: what the squared error of each column counts; None: all the same.  Raises InvalidArgumentError
    for values that are not finite.
    """
    source = np.ascontiguousarray(matrix, np.float32)
    check_finite(source, F32)
    scales, (rows, cols) = half_scales(source), source.shape
    if scheme.layout == T16_I4G32:
        packed = np.zeros(native.layout_bytes(scheme.layout, rows, cols), np.uint8)
        context.pack_weighted(source, packed, column_weights=weights, scales=scales, even_offsets=True)
        return context.unpack_quantized(scheme.layout, rows, cols, 0, rows, packed)
    divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
    return QuantizedRows(np.clip(np.rint(source / divisors), -127, 127).astype(np.int8), scales)
