"""A matrix that another tool quantized: its exact values, and the blocks that a scheme computes with.

A block has 32 columns of a row: one float16 scale, and integers of 4 bits (``q4_0``, -8 to 7), of 4 bits from which a
zero point of the block is subtracted (``uint4``), or of 8 bits (``q8_0``, -128 to 127).  A matrix of integers with
float16 scales for 32 columns or more is exact in one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_LEN", "Blocks", "GroupedIntegers", "QuantizedMatrix", "group_index", "integer_scheme", "to_blocks"]

BLOCK_LEN: Final = 32
_PIECE_VALUES: Final = 1 << 22
_RANGES: Final = {"q4_0": (-8, 7), "uint4": (-16, 15), "q8_0": (-128, 127)}
_BLOCK_BYTES: Final = {"q4_0": 18, "uint4": 19, "q8_0": 34}

Floats: TypeAlias = NDArray[np.float32]
Halves: TypeAlias = NDArray[np.float16]


@dataclass(frozen=True)
class GroupedIntegers:
    """The value of column c of a row r is ``integers[r, c] * scales[r, group_of[c]]``.

    ``integers`` int16 [rows, cols], ``scales`` [rows, groups], ``group_of`` [cols].
    """

    integers: NDArray[np.int16]
    scales: Floats
    group_of: NDArray[np.int64]

    def rows(self, start: int, stop: int) -> GroupedIntegers:
        """Return a range of the rows."""
        return GroupedIntegers(self.integers[start:stop], self.scales[start:stop], self.group_of)

    def values(self) -> Floats:
        """Return the exact values, rounded once to float32."""
        with np.errstate(all="ignore"):  # a damaged scale may be infinite; the packer refuses the values
            return self.integers * self.scales[:, self.group_of]


Values: TypeAlias = GroupedIntegers | Floats


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of ``shape`` that ``read`` computes from the stored tensors ``tensors``.

    ``scheme``: whose blocks it becomes; None for rows that are not whole blocks.
    """

    shape: tuple[int, int]
    tensors: tuple[str, ...]
    scheme: str | None
    read: Callable[[], Values]

    def values(self) -> Floats:
        """Return the exact values, rounded once to float32."""
        data = self.read()
        return data.values() if isinstance(data, GroupedIntegers) else data


class Blocks(NamedTuple):
    """Blocks, uint8 [rows, bytes of a row], and their error: the norm of what they differ by, over that of the values.

    The error counts pieces of rows that are not exact; 0 if all are.
    """

    data: NDArray[np.uint8]
    error: float


def group_index(cols: int, group_len: int) -> NDArray[np.int64]:
    """Return the group of each column; ``group_len`` -1 is one group."""
    return np.arange(cols) // (group_len if group_len > 0 else max(cols, 1))


def integer_scheme(cols: int, group_of: NDArray[np.int64], bits: int, *, has_zero_points: bool) -> str | None:
    """Return the scheme for integers of ``bits`` bits with one scale and zero point for each group of columns.

    Without zero points half of the range is subtracted.  4-bit blocks need groups of whole blocks; all other integers
    become 8-bit blocks.
    """
    if cols % BLOCK_LEN or not cols:
        return None
    if bits != 4 or not _has_whole_blocks(group_of):
        return "q8_0"
    return "uint4" if has_zero_points else "q4_0"


def _has_whole_blocks(group_of: NDArray[np.int64]) -> bool:
    by_block = group_of.reshape(-1, BLOCK_LEN)
    return bool((by_block == by_block[:, :1]).all())


def to_blocks(data: Values, scheme: str) -> Blocks:
    """Return the blocks of ``scheme`` ("q4_0", "uint4" or "q8_0"), exact where the values are those of such blocks.

    Other values are rounded to the nearest of 8 bits, with a scale of the largest magnitude / 127 for 32 columns.
    """
    rows, cols = data.integers.shape if isinstance(data, GroupedIntegers) else data.shape
    row_bytes = cols // BLOCK_LEN * _BLOCK_BYTES[scheme]
    out = np.empty((rows, row_bytes), np.uint8)
    step = max(1, _PIECE_VALUES // max(cols, 1))
    squares = [0.0, 0.0]
    with np.errstate(all="ignore"):  # scales that are not finite: the packer refuses them, and names the row
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            piece = data.rows(start, stop) if isinstance(data, GroupedIntegers) else data[start:stop]
            integers, halves, is_exact = _exact(piece, scheme) or _rounded(piece)
            out[start:stop] = _stored(integers, halves, scheme)
            if not is_exact:
                values = piece.values() if isinstance(piece, GroupedIntegers) else piece
                carried = (integers * halves.astype(np.float32)[..., None]).reshape(values.shape)
                squares[0] += float(np.square(carried - values, dtype=np.float64).sum())
                squares[1] += float(np.square(values, dtype=np.float64).sum())
    return Blocks(out, float(np.sqrt(squares[0] / squares[1])) if squares[0] else 0.0)


def _exact(piece: Values, scheme: str) -> tuple[NDArray[np.int16], Halves, bool] | None:
    """Return integers [rows, blocks, 32] and scales [rows, blocks] that are stored; None if blocks cannot hold them.

    They are exact unless a scale is not a float16.
    """
    if not isinstance(piece, GroupedIntegers) or not _has_whole_blocks(piece.group_of):
        return None
    low, high = _RANGES[scheme]
    if piece.integers.size and (piece.integers.min() < low or piece.integers.max() > high):
        return None
    scales = piece.scales[:, piece.group_of[::BLOCK_LEN]]
    halves = scales.astype("<f2")
    integers = piece.integers.reshape(len(piece.integers), -1, BLOCK_LEN)
    return integers, halves, bool((halves.astype(np.float32) == scales).all())


def _rounded(piece: Values) -> tuple[NDArray[np.int16], Halves, bool]:
    values = piece.values() if isinstance(piece, GroupedIntegers) else piece
    blocks = values.reshape(len(values), -1, BLOCK_LEN)
    halves = (np.abs(blocks).max(axis=2, initial=0.0) / np.float32(127)).astype("<f2")
    scales = halves.astype(np.float32)[..., None]
    integers = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0))
    return np.clip(np.nan_to_num(integers), -127, 127).astype(np.int16), halves, False


def _stored(integers: NDArray[np.int16], halves: Halves, scheme: str) -> NDArray[np.uint8]:
    rows, num_blocks = halves.shape
    head = np.ascontiguousarray(halves).view(np.uint8).reshape(rows, num_blocks, 2)
    if scheme == "q8_0":
        body = integers.astype(np.int8).view(np.uint8)
        return np.concatenate([head, body], axis=2).reshape(rows, -1)
    if scheme == "uint4":  # of the zero points that a block may have had, the least
        zeros = np.maximum(0, -integers.min(axis=2, keepdims=True))
        head = np.concatenate([head, zeros.astype(np.uint8)], axis=2)
    else:
        zeros = np.int16(8)
    nibbles = (integers + zeros).astype(np.uint8)
    body = nibbles[..., : BLOCK_LEN // 2] | nibbles[..., BLOCK_LEN // 2 :] << 4
    return np.concatenate([head, body], axis=2).reshape(rows, -1)
