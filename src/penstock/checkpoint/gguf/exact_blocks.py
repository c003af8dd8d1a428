"""Blocks of GGUF that hold the integers of a folder of ``penstock quantize --exportable`` exactly.

Lines become Q4_K (``quant.exportable``), or where rows are no whole blocks of 256 Q8_0, whose integers are the points
of the lines; int8 rows become Q8_0, and a head in blocks stays Q6_K.  Rows without whole blocks of 32 become float32.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.k_blocks import BLOCK_LEN
from penstock.config import show
from penstock.core.native import QuantizedRows
from penstock.errors import UnsupportedError
from penstock.quant.exportable import LEAST_OFFSET, MAX_SCALE
from penstock.quant.matrix import values_of
from penstock.quant.mixed_schemes import HEAD_BLOCKS
from penstock.quant.scheme import GROUP_LEN, find_scheme

__all__ = ["exact_blocks", "exact_kind"]

_SHORT_LEN: Final = 32
_SCHEMES: Final = {4: "w4a8", 8: "w8a8"}


def exact_kind(checkpoint: Checkpoint, name: str) -> str:
    """Return the element type that holds a quantized tensor exactly: "q4_k", "q8_0", "q6_k" or "f32".

    Raises UnsupportedError, which names the tensor, for integers that no blocks hold.
    """
    if checkpoint.block_scheme(name) is not None:
        return HEAD_BLOCKS
    cols = checkpoint.logical_shape(name)[1]
    if cols % _SHORT_LEN:
        return "f32"
    has_lines = f"{name}_groups" in checkpoint.tensors
    is_exact = _has_half_scales(checkpoint.read(f"{name}_scale"))
    if has_lines and is_exact and cols % BLOCK_LEN == 0:
        offsets = checkpoint.read(f"{name}_groups")[..., 1]
        is_exact = bool(((offsets >= LEAST_OFFSET) & (offsets <= 0) & (offsets % 2 == 0)).all())
    if not is_exact:
        raise UnsupportedError(
            f"source: expected a folder of `penstock quantize --exportable` for a GGUF file, got integers of tensor "
            f"{show(name)} that its blocks cannot hold",
            param="source",
        )
    return "q4_k" if has_lines and cols % BLOCK_LEN == 0 else "q8_0"


def _has_half_scales(scales: NDArray[np.float32]) -> bool:
    is_small = bool((np.abs(scales) <= MAX_SCALE).all())  # not NaN either
    return is_small and bool((scales.astype(np.float16).astype(np.float32) == scales).all())


def exact_blocks(checkpoint: Checkpoint, name: str, kind: str) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Return the blocks [rows, bytes] of a quantized tensor in its ``exact_kind``, or its values for "f32"."""
    if kind == HEAD_BLOCKS:
        return checkpoint.read_blocks(name)
    rows = checkpoint.read_quantized(name, checkpoint.logical_shape(name)[1])
    if kind == "q4_k" and rows.groups is not None:
        return _q4_k(rows, rows.groups)
    if kind == "q8_0":
        return _q8_0(rows)
    return values_of(rows, find_scheme(_SCHEMES[8 if rows.groups is None else 4]))


def _q8_0(rows: QuantizedRows) -> NDArray[np.uint8]:
    integers = rows.q.astype(np.int16)
    if rows.groups is not None:
        lines = np.repeat(rows.groups.astype(np.int16), GROUP_LEN, axis=1)
        integers = integers * lines[..., 0] + lines[..., 1]
    num_rows, cols = integers.shape
    blocks = np.empty((num_rows, cols // _SHORT_LEN, 2 + _SHORT_LEN), np.uint8)
    blocks[..., :2] = rows.scales.astype("<f2").view(np.uint8).reshape(num_rows, 1, 2)
    blocks[..., 2:] = integers.astype(np.int8).view(np.uint8).reshape(num_rows, -1, _SHORT_LEN)
    return blocks.reshape(num_rows, -1)


def _q4_k(rows: QuantizedRows, groups: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return blocks of 144 bytes: d, dmin, sc and m of six bits for eight groups, and nibbles."""
    num_rows, num_blocks = len(rows.q), rows.q.shape[1] // BLOCK_LEN
    blocks = np.empty((num_rows, num_blocks, 144), np.uint8)
    units = np.stack([rows.scales, 2 * rows.scales], axis=1).astype("<f2").view(np.uint8)
    blocks[..., :4] = units.reshape(num_rows, 1, 4)
    steps = groups[..., 0].view(np.uint8).reshape(num_rows, num_blocks, 8)
    lows = (groups[..., 1].astype(np.int16) // -2).astype(np.uint8).reshape(num_rows, num_blocks, 8)
    blocks[..., 4:8] = steps[..., :4] | steps[..., 4:] >> 4 << 6
    blocks[..., 8:12] = lows[..., :4] | lows[..., 4:] >> 4 << 6
    blocks[..., 12:16] = (steps[..., 4:] & 15) | (lows[..., 4:] & 15) << 4
    pairs = rows.q.view(np.uint8).reshape(num_rows, num_blocks, 4, 2, GROUP_LEN)
    blocks[..., 16:] = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(num_rows, num_blocks, -1)
    return blocks.reshape(num_rows, -1)
