"""The numbers of ``ps_layout`` for code that lies below the graph.  Knows no tensors."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ROWS_BF16",
    "ROWS_F16",
    "ROWS_F32",
    "T16_BF16",
    "T16_F16",
    "T16_F32",
    "T16_I4G32",
    "T16_I8",
    "TILE_ROWS",
]

ROWS_F32: Final = 1
ROWS_F16: Final = 2
ROWS_BF16: Final = 3
T16_F32: Final = 16
T16_F16: Final = 17
T16_BF16: Final = 18
T16_I8: Final = 21
T16_I4G32: Final = 22

TILE_ROWS: Final = 16
