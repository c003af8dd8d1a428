"""Packed weights as tensors: shape and dtype of a weight tensor determine its layout; unpacking is plain PyTorch.

    rows_f32, rows_f16, rows_bf16   [rows, cols], or [n] for a vector
    t16_f32, t16_f16                [tiles, cols, 16]
    t16_bf16                        [tiles, cols/2, 16, 2]
    t16_i8                          uint8 [tiles, 64 scale bytes + cols/4 * 64]
    t16_i4g32                       uint8 [tiles, 1 + cols/64 * 9, 64]: 64 scale bytes, then for each 64 columns 64
                                    bytes of steps and offsets and 2 x 256 bytes of 4-bit values

    t16_q8_0 and so on              uint8 [tiles, blocks, lines, 64], for each number of lines one (core.layouts.BLOCKS)
                                    or uint8 [tiles, blocks, n * lines, 64 / n], where another one has as many lines

A tile holds 16 rows.  Zeros pad the rows to a multiple of 16 and the columns to the layout's step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core import layouts
from penstock.errors import InvalidArgumentError
from penstock.ops.reference.blocks import unpack_blocks

__all__ = ["layout_of_tensor", "shape_packed", "unpack_integers", "unpack_weight"]

_ROWS = {torch.float32: layouts.ROWS_F32, torch.float16: layouts.ROWS_F16, torch.bfloat16: layouts.ROWS_BF16}
_TILES = {
    (torch.float32, 3): layouts.T16_F32,
    (torch.float16, 3): layouts.T16_F16,
    (torch.bfloat16, 4): layouts.T16_BF16,
    (torch.uint8, 2): layouts.T16_I8,
    (torch.uint8, 3): layouts.T16_I4G32,
}
_SCALE_BYTES = 64
_PARTS = {
    layouts.T16_MXFP4: 2, layouts.T16_IQ4_NL: 2, layouts.T16_NVFP4: 2,
    layouts.T16_TQ2_0: 4, layouts.T16_Q1_0: 4, layouts.T16_Q2_0: 8,
}  # fmt: skip
"""The parts of a line, which are lines of their own in the tensors of layouts with as many lines as another one."""
_PAIR_LINES = 9


def _lines(layout: int) -> tuple[int, int]:
    """Return the number and the bytes of the lines of a block in a tensor, which no other layout of blocks has."""
    parts = _PARTS.get(layout, 1)
    return layouts.BLOCKS[layout].tile_lines * parts, _SCALE_BYTES // parts


_BY_LINES = {_lines(layout): layout for layout in layouts.BLOCKS}


def layout_of_tensor(weight: Tensor) -> int:
    """Return the ``ps_layout`` number of a weight tensor, which its dtype and number of dimensions determine."""
    if weight.ndim <= 2 and weight.dtype in _ROWS:
        return _ROWS[weight.dtype]
    layout = _TILES.get((weight.dtype, weight.ndim))
    if weight.dtype == torch.uint8 and weight.ndim == 4:
        layout = _BY_LINES.get((weight.shape[2], weight.shape[3]))
    if layout is None:
        raise InvalidArgumentError(
            f"[weight] expected a float matrix or packed tiles, got {weight.dtype} with {weight.ndim} dimensions",
            param="weight",
        )
    return layout


def shape_packed(packed: Tensor, layout: int, rows: int) -> Tensor:
    """View the uint8 [num_bytes] of a packed weight as a tensor that ``layout_of_tensor`` recognises."""
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
        return packed.view(tiles, -1, _SCALE_BYTES)
    if layout in layouts.BLOCKS:
        return packed.view(tiles, -1, *_lines(layout))
    rows_dtypes = {number: dtype for dtype, number in _ROWS.items()}
    if layout not in rows_dtypes:
        raise InvalidArgumentError(f"[weight] layout: expected a known ps_layout, got {layout}", param="layout")
    return packed.view(rows_dtypes[layout]).view(rows, -1)


def unpack_weight(weight: Tensor, rows: int, cols: int) -> Tensor:
    """Return the values that a kernel computes with, float64 [rows, cols].

    ``rows`` and ``cols`` are the logical sizes, without padding.  Raises InvalidArgumentError when the tensor is
    smaller.
    """
    layout = layout_of_tensor(weight)
    if layout in _ROWS.values():
        values = weight.double().view(-1, weight.shape[-1])
    elif layout in (layouts.T16_F32, layouts.T16_F16):
        values = weight.double().permute(0, 2, 1).flatten(0, 1)
    elif layout == layouts.T16_BF16:
        values = weight.double().permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    elif layout in layouts.BLOCKS:
        values = unpack_blocks(weight, layout)
    else:
        integers, scale = unpack_integers(weight)
        values = integers * scale.unsqueeze(-1)
    if values.shape[0] < rows or values.shape[1] < cols:
        raise InvalidArgumentError(
            f"[weight] expected at least {rows} x {cols} values, got {list(values.shape)}", param="weight"
        )
    return values[:rows, :cols]


def unpack_integers(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers [rows, cols] and the row scales [rows] of an integer weight, with padding, as float64."""
    tiles = weight.shape[0]
    weight_bytes = weight.reshape(tiles, -1)
    scale = weight_bytes[:, :_SCALE_BYTES].contiguous().view(torch.float32).double()  # [tiles, 16]
    value_bytes = weight_bytes[:, _SCALE_BYTES:].contiguous()
    integers = _int4_of(value_bytes) if layout_of_tensor(weight) == layouts.T16_I4G32 else value_bytes.view(torch.int8)
    integers = integers.reshape(tiles, -1, 16, 4)  # [.., column / 4, row, column % 4]
    return integers.double().permute(0, 2, 1, 3).flatten(2).flatten(0, 1), scale.flatten()


def _int4_of(value_bytes: Tensor) -> Tensor:
    """Return the int8 values that 4-bit values stand for, in the order of t16_i8: [tiles, columns / 4, row, 4]."""
    tiles = value_bytes.shape[0]
    pairs = value_bytes.view(tiles, -1, _PAIR_LINES * _SCALE_BYTES)  # of groups of 32 columns
    lines = pairs[..., :_SCALE_BYTES].reshape(tiles, -1, 16, 2, 2).permute(0, 1, 3, 2, 4)  # [.., group, row, 2]
    step, offset = lines[..., 0], lines[..., 1]
    nibbles = pairs[..., _SCALE_BYTES:].reshape(tiles, -1, 2, 4, 16, 4)  # [.., group, j, row, i]: columns 4j+i, 16+4j+i
    columns = torch.stack((nibbles & 15, nibbles >> 4), dim=3)  # [.., group, half, j, row, i]
    values = columns * step[:, :, :, None, None, :, None] + offset[:, :, :, None, None, :, None]  # uint8: wraps around
    return values.view(torch.int8).reshape(tiles, -1, 16, 4)
