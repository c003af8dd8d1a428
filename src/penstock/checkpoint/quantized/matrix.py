"""A matrix that another tool quantized: its exact values, and the blocks that a scheme computes with.

A block has 32 columns of a row: one float16 scale, and integers of 4 bits (``q4_0``, -8 to 7), of 4 bits from which a
zero point of the block is subtracted (``uint4``), or of 8 bits (``q8_0``, -128 to 127).  A matrix of integers with
float16 scales for 32 columns or more is exact in one of them.  8-bit integers with one scale for a row are exact as
they are (``w8a8``, ``w8a16``).  4-bit floats have blocks of their own (``nvfp4``), and
so have ternary integers (``tq2_0``, 256 columns), both with float32 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.quantized.float8_values import float8_values
from penstock.core.native import QuantizedRows
from penstock.errors import InternalError

__all__ = [
    "BLOCK_LEN", "TERNARY_BLOCK_LEN", "Blocks", "Float4Groups", "GroupedIntegers", "QuantizedMatrix", "TernaryIntegers",
    "group_index", "integer_scheme", "to_blocks",
]  # fmt: skip

BLOCK_LEN: Final = 32
TERNARY_BLOCK_LEN: Final = 256
_PIECE_VALUES: Final = 1 << 22
_RANGES: Final = {"q4_0": (-8, 7), "uint4": (-16, 15), "q8_0": (-128, 127)}
_FLOAT4: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The values of E2M1 (OCP Microscaling Formats, version 1.0)."""
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


@dataclass(frozen=True)
class Float4Groups:
    """4-bit floats (E2M1), two a byte of ``codes`` uint8 [rows, cols / 2], the first in the low half.

    16 columns share an E4M3 without a sign of ``scales`` uint8 [rows, cols / 16], and all values ``factor``.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    factor: np.float32

    def values(self) -> Floats:
        """Return the values: the product of both scales, rounded to float32, times the float, rounded again."""
        rows, num_bytes = self.codes.shape
        floats = np.empty((rows, num_bytes, 2), np.float32)
        floats[..., 0], floats[..., 1] = _FLOAT4[self.codes & 15], _FLOAT4[self.codes >> 4]
        scales = float8_values()[self.scales] * self.factor
        values: Floats = (floats.reshape(rows, -1, 16) * scales[..., None]).reshape(rows, -1)
        return values

    def blocks(self) -> NDArray[np.uint8]:
        """Return blocks of 32 columns, uint8 [rows, bytes]: the factor, two scales, and nibbles as in ``q4_0``."""
        rows = len(self.codes)
        pairs = self.codes.reshape(rows, -1, 2, 8)
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows, -1, 2, 16)
        body = nibbles[:, :, 0] | nibbles[:, :, 1] << np.uint8(4)
        head = np.broadcast_to(np.array([self.factor], "<f4").view(np.uint8), (*body.shape[:2], 4))
        return np.concatenate([head, self.scales.reshape(rows, -1, 2), body], axis=2).reshape(rows, -1)


@dataclass(frozen=True)
class TernaryIntegers:
    """The value of a ``codes`` uint8 [rows, cols], 0 to 3, less 1, times ``factor``."""

    codes: NDArray[np.uint8]
    factor: np.float32

    def values(self) -> Floats:
        """Return the values, rounded once to float32."""
        return (self.codes.astype(np.float32) - np.float32(1)) * self.factor

    def blocks(self) -> NDArray[np.uint8]:
        """Return blocks of 256 columns, uint8 [rows, bytes]: the factor, then the bits as GGUF's TQ2_0 has them."""
        rows = len(self.codes)
        codes = self.codes.reshape(rows, -1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
        body = np.bitwise_or.reduce(codes, axis=3).reshape(rows, -1, TERNARY_BLOCK_LEN // 4)
        head = np.broadcast_to(np.array([self.factor], "<f4").view(np.uint8), (*body.shape[:2], 4))
        return np.concatenate([head, body], axis=2).reshape(rows, -1)


Values: TypeAlias = GroupedIntegers | Float4Groups | TernaryIntegers | Floats


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of ``shape`` that ``read`` computes from the stored tensors ``tensors``.

    ``scheme``: whose blocks it becomes, or "w8a8" or "w8a16" for 8-bit integers with one scale for a row, which stay as
    they are; None for rows that are not whole blocks.
    """

    shape: tuple[int, int]
    tensors: tuple[str, ...]
    scheme: str | None
    read: Callable[[], Values]

    def values(self) -> Floats:
        """Return the exact values, rounded once to float32."""
        data = self.read()
        return data if isinstance(data, np.ndarray) else data.values()

    def rows(self) -> QuantizedRows:
        """Return the integers and scales of a matrix whose scheme is one of rows."""
        data = self.read()
        if not isinstance(data, GroupedIntegers):
            raise InternalError("expected integers with a scale for each row, got other values")
        return QuantizedRows(data.integers.astype(np.int8), np.ascontiguousarray(data.scales[:, 0]))


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

    4-bit floats and ternary integers have blocks of their own.  Other values are rounded to the nearest of 8 bits, with
    a scale of the largest magnitude / 127 for 32 columns.
    """
    if isinstance(data, Float4Groups | TernaryIntegers):
        return Blocks(data.blocks(), 0.0)
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


def _exact(piece: GroupedIntegers | Floats, scheme: str) -> tuple[NDArray[np.int16], Halves, bool] | None:
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


def _rounded(piece: GroupedIntegers | Floats) -> tuple[NDArray[np.int16], Halves, bool]:
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
