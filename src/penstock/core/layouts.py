"""The numbers of ``ps_dtype`` and ``ps_layout`` (core/include/penstock.h), and the sizes of a weight's tiles."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BF16", "F16", "F32", "FLOAT_DTYPES", "GROUP_LEN", "I8", "I32", "I64", "ROWS_BF16", "ROWS_F16", "ROWS_F32",
    "ROWS_I32", "T16_BF16", "T16_F16", "T16_F32", "T16_I4G32", "T16_I8", "TILE_ROWS", "U8",
]  # fmt: skip

F32: Final = 1
F16: Final = 2
BF16: Final = 3
I8: Final = 4
I32: Final = 5
U8: Final = 6
I64: Final = 7
FLOAT_DTYPES: Final = {"f32": F32, "f16": F16, "bf16": BF16}
"""The element types that a weight can be packed from, by name."""

ROWS_F32: Final = 1
ROWS_F16: Final = 2
ROWS_BF16: Final = 3
ROWS_I32: Final = 4
T16_F32: Final = 16
T16_F16: Final = 17
T16_BF16: Final = 18
T16_I8: Final = 21
T16_I4G32: Final = 22

TILE_ROWS: Final = 16
"""Rows of a tile in every ``T16`` layout."""
GROUP_LEN: Final = 32
"""Columns that share a step and an offset in a 4-bit weight."""
