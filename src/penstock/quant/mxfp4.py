"""Read weights in MXFP4 (OCP Microscaling Formats, version 1.0): 4-bit floats, 32 of which share a power of two.

Every value is exact in bfloat16.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidFileError

__all__ = ["BLOCK_BYTES", "BLOCK_LEN", "mxfp4_to_bf16", "mxfp4_to_gguf"]

BLOCK_LEN: Final = 32
"""The number of values that share a scale."""

BLOCK_BYTES: Final = 16

_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS: Final = 127
_NAN_SCALE: Final = 255


@cache
def _pairs() -> NDArray[np.uint32]:
    """Return the two values of a byte under each scale, [256, 256]: bf16 bits, the low half of the byte first."""
    values = np.array([*_VALUES, *(-value for value in _VALUES)], np.float32)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(values, np.arange(256)[:, None] - _BIAS).astype(np.float32)
    bits = scaled.view(np.uint32) >> np.uint32(16)
    byte = np.arange(256)
    return bits[:, byte & 15] | bits[:, byte >> 4] << np.uint32(16)


def mxfp4_to_bf16(blocks: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bf16 bits [rows, 32 * groups] of ``blocks`` [rows, groups, 16] uint8 and ``scales`` [rows, groups].

    A byte holds two values, the first in its low half.  A scale s stands for 2^(s - 127).  Raises InvalidFileError for
    the scale 255, which means NaN.
    """
    if (scales == _NAN_SCALE).any():
        raise InvalidFileError("scales: expected exponents from 0 to 254, got 255, which means NaN", param="scales")
    pairs = _pairs()[scales[..., None], blocks]
    bits: NDArray[np.uint16] = pairs.astype("<u4").view("<u2").reshape(len(blocks), -1)
    return bits


def mxfp4_to_gguf(blocks: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the blocks of GGUF's type MXFP4, [rows, 17 * groups], of the arguments of ``mxfp4_to_bf16``.

    A block is the scale, then 16 bytes whose low halves are the first 16 values.
    """
    values = np.empty((*blocks.shape[:-1], BLOCK_LEN), np.uint8)
    values[..., 0::2], values[..., 1::2] = blocks & 15, blocks >> 4
    packed = np.empty((*blocks.shape[:-1], 1 + BLOCK_BYTES), np.uint8)
    packed[..., 0] = scales
    packed[..., 1:] = values[..., :BLOCK_BYTES] | values[..., BLOCK_BYTES:] << 4
    return packed.reshape(len(blocks), -1)
