"""Which packed layout each linear scheme reads, by the numbers of ``ps_layout``.  Knows no tensors."""

from __future__ import annotations

from typing import Final

from penstock.errors import InvalidArgumentError

__all__ = [
    "GROUP_COLS",
    "LAYOUT_OF_SCHEME",
    "ROWS_BF16",
    "ROWS_F16",
    "ROWS_F32",
    "T16_BF16",
    "T16_F16",
    "T16_F32",
    "T16_I4G32",
    "T16_I8",
    "TILE_ROWS",
    "head_scheme",
    "layout_of_scheme",
]

ROWS_F32: Final = 1
ROWS_F16: Final = 2
ROWS_BF16: Final = 3
T16_F32: Final = 16
T16_F16: Final = 17
T16_BF16: Final = 18
T16_I8: Final = 19
T16_I4G32: Final = 20

TILE_ROWS: Final = 16
GROUP_COLS: Final = 32

LAYOUT_OF_SCHEME: Final = {
    "f32": T16_F32,
    "f16": T16_F16,
    "bf16": T16_BF16,
    "w8a16": T16_I8,
    "w8a8": T16_I8,
    "w4a16": T16_I4G32,
    "w4a8": T16_I4G32,
}


def layout_of_scheme(scheme: str) -> int:
    """The layout of a linear's weight under ``scheme``; InvalidArgumentError names an unknown scheme."""
    if scheme not in LAYOUT_OF_SCHEME:
        raise InvalidArgumentError(f"[linear] scheme: expected one of {', '.join(LAYOUT_OF_SCHEME)}, found {scheme!r}")
    return LAYOUT_OF_SCHEME[scheme]


def head_scheme(scheme: str) -> str:
    """The scheme of the output head: 8 bit where the rest is 4 bit, for the head decides every token."""
    return {"w4a16": "w8a16", "w4a8": "w8a8"}.get(scheme, scheme)
