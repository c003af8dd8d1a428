"""Packed weights as tensors: the shape and dtype of a weight tensor tell its layout, and unpacking is plain PyTorch.

    rows_f32, rows_f16, rows_bf16   [rows, cols], or [n] for a vector
    t16_f32, t16_f16                [tiles, cols, 16]
    t16_bf16                        [tiles, cols/2, 16, 2]
    t16_i8                          uint8 [tiles, 64 scale bytes + 64 row-sum bytes + cols/4 * 64]
    t16_i4g32                       uint8 [tiles, cols/32, 32 scale bytes + 256]

A tile holds 16 rows.  Rows are padded to 16 and columns to the layout's step with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import InvalidArgumentError
from penstock.ops import layouts

__all__ = ["layout_of_tensor", "shape_packed", "unpack_weight"]

_ROWS = {torch.float32: layouts.ROWS_F32, torch.float16: layouts.ROWS_F16, torch.bfloat16: layouts.ROWS_BF16}
_TILES = {
    (torch.float32, 3): layouts.T16_F32,
    (torch.float16, 3): layouts.T16_F16,
    (torch.bfloat16, 4): layouts.T16_BF16,
    (torch.uint8, 2): layouts.T16_I8,
    (torch.uint8, 3): layouts.T16_I4G32,
}
_I8_HEADER_BYTES = 128
_I4_GROUP_BYTES = 288


def layout_of_tensor(weight: Tensor) -> int:
    """The ``ps_layout`` number of a weight tensor, read off its dtype and number of dimensions."""
    if weight.ndim <= 2 and weight.dtype in _ROWS:
        return _ROWS[weight.dtype]
    layout = _TILES.get((weight.dtype, weight.ndim))
    if layout is None:
        raise InvalidArgumentError(
            f"[weight] expected a float matrix or packed tiles, found {weight.dtype} with {weight.ndim} dimensions"
        )
    return layout


def shape_packed(packed: Tensor, layout: int, rows: int) -> Tensor:
    """Views the uint8 [num_bytes] of a packed weight as the tensor that ``layout_of_tensor`` recognises."""
    tiles = -(-rows // layouts.TILE_ROWS)
    if layout == layouts.T16_F32:
        return packed.view(torch.float32).view(tiles, -1, 16)
    if layout == layouts.T16_F16:
        return packed.view(torch.float16).view(tiles, -1, 16)
    if layout == layouts.T16_BF16:
        return packed.view(torch.bfloat16).view(tiles, -1, 16, 2)
    if layout == layouts.T16_I8:
        return packed.view(tiles, -1)
    if layout == layouts.T16_I4G32:
        return packed.view(tiles, -1, _I4_GROUP_BYTES)
    rows_dtypes = {number: dtype for dtype, number in _ROWS.items()}
    if layout not in rows_dtypes:
        raise InvalidArgumentError(f"[weight] layout: expected a ps_layout of numbers, found {layout}")
    return packed.view(rows_dtypes[layout]).view(rows, -1)


def unpack_weight(weight: Tensor, rows: int, cols: int) -> Tensor:
    """The values that a kernel computes with, float64 [rows, cols].

    ``rows`` and ``cols`` are logical: padding falls away.  Raises InvalidArgumentError when the tensor is smaller.
    """
    layout = layout_of_tensor(weight)
    if layout in _ROWS.values():
        values = weight.double().view(-1, weight.shape[-1])
    elif layout in (layouts.T16_F32, layouts.T16_F16):
        values = weight.double().permute(0, 2, 1).flatten(0, 1)
    elif layout == layouts.T16_BF16:
        values = weight.double().permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    elif layout == layouts.T16_I8:
        values = _unpack_i8(weight)
    else:
        values = _unpack_i4(weight)
    if values.shape[0] < rows or values.shape[1] < cols:
        raise InvalidArgumentError(f"[weight] expected at least {rows} x {cols} values, found {list(values.shape)}")
    return values[:rows, :cols]


def _unpack_i8(weight: Tensor) -> Tensor:
    tiles = weight.shape[0]
    scale = weight[:, :64].contiguous().view(torch.float32)  # [tiles, 16]
    q = weight[:, _I8_HEADER_BYTES:].contiguous().view(torch.int8).view(tiles, -1, 16, 4)
    values = q.double().permute(0, 2, 1, 3).flatten(2)  # [tiles, 16, cols]
    return (values * scale.double().unsqueeze(-1)).flatten(0, 1)


def _unpack_i4(weight: Tensor) -> Tensor:
    tiles, groups, _ = weight.shape
    scale = weight[..., :32].contiguous().view(torch.float16)  # [tiles, groups, 16]
    nibbles = weight[..., 32:].reshape(tiles, groups, 4, 16, 4)  # [.., j, row, i]: columns 4j+i and 16+4j+i
    low = (nibbles & 15).double() - 8
    high = (nibbles >> 4).double() - 8
    columns = torch.stack((low, high), dim=2)  # [tiles, groups, half, j, row, i]
    values = columns.permute(0, 1, 4, 2, 3, 5).reshape(tiles, groups, 16, 32)
    values = values * scale.double().unsqueeze(-1)
    return values.permute(0, 2, 1, 3).reshape(tiles * 16, groups * 32)
