"""Weights of general networks' ops, packed as their kernels take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core import layouts
from penstock.core.native import CoreTensor
from penstock.core.weights import layout_bytes
from tests.support.general_ops import contexts

Array = npt.NDArray[Any]

_KEPT: list[Array] = []


def packed(layout: int, matrix: Array) -> CoreTensor:
    """Return a weight of this layout.  Its memory lives as long as the process."""
    rows, cols = matrix.shape
    source = np.ascontiguousarray(matrix, np.float32)
    memory = np.zeros(layout_bytes(layout, rows, cols), np.uint8)
    contexts()[1].pack(layout, rows, cols, 0, rows, layouts.F32, source, memory)
    _KEPT.append(memory)
    return CoreTensor(memory.ctypes.data, 0, (rows, cols), cols, layout)


def tiles(matrix: Array) -> CoreTensor:
    """Return a matrix as t16_f32."""
    return packed(layouts.T16_F32, matrix)


def vector(values: Array) -> CoreTensor:
    """Return a bias or a norm's weight."""
    return packed(layouts.ROWS_F32, np.asarray(values).reshape(1, -1))


def pad_rows(matrix: Array, rows: int) -> Array:
    """Return the blocks of ``rows`` rows of a matrix, each padded with zero to a multiple of 16 rows."""
    blocks = matrix.reshape(-1, rows, matrix.shape[1])
    return np.pad(blocks, ((0, 0), (0, -rows % 16), (0, 0))).reshape(-1, matrix.shape[1])


def conv_weight(weight: Array, groups: int = 1) -> CoreTensor:
    """Return a weight [out, kernel height, kernel width, channels of a group]."""
    out = weight.shape[0]
    if groups > 1 and groups == out and weight.shape[3] == 1:
        return packed(layouts.ROWS_F32, weight.reshape(out, -1).T)
    matrix = weight.reshape(out, -1)
    return tiles(matrix if groups == 1 else pad_rows(matrix, out // groups))
