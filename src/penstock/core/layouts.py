"""The numbers of the core's enums (core/include/penstock.h), the sizes of a weight's tiles, and those of KV pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BF16",
    "BLOCKS",
    "BOOL",
    "F16",
    "F32",
    "FLOAT_DTYPES",
    "GENERAL_NETWORK",
    "GROUP_LEN",
    "HADAMARD_FACTORS",
    "I8",
    "I32",
    "I64",
    "KV_LAYOUTS",
    "KV_NUMBERS",
    "PAGE_TOKENS",
    "PARTITION_PAGES",
    "ROWS_BF16",
    "ROWS_BOOL",
    "ROWS_F16",
    "ROWS_F32",
    "ROWS_I8",
    "ROWS_I32",
    "ROWS_I64",
    "ROWS_U8",
    "STATE_F32",
    "T16_BF16",
    "T16_F16",
    "T16_F32",
    "T16_I4G32",
    "T16_I8",
    "T16_IQ4_NL",
    "T16_IQ4_XS",
    "T16_MXFP4",
    "T16_NVFP4",
    "T16_Q1_0",
    "T16_Q2_0",
    "T16_Q2_K",
    "T16_Q3_K",
    "T16_Q4_0",
    "T16_Q4_1",
    "T16_Q4_K",
    "T16_Q5_0",
    "T16_Q5_1",
    "T16_Q5_K",
    "T16_Q6_K",
    "T16_Q8_0",
    "T16_TQ1_0",
    "T16_TQ2_0",
    "T16_UINT4",
    "TILE_ROWS",
    "U8",
    "BlockLayout",
    "kv_layout_of",
    "pages_by_group",
    "pages_for",
    "whole_partitions",
]  # fmt: skip

F32: Final = 1
F16: Final = 2
BF16: Final = 3
I8: Final = 4
I32: Final = 5
U8: Final = 6
I64: Final = 7
BOOL: Final = 8
FLOAT_DTYPES: Final = {"f32": F32, "f16": F16, "bf16": BF16}
"""The element types that a weight can be packed from, by name."""

ROWS_F32: Final = 1
ROWS_F16: Final = 2
ROWS_BF16: Final = 3
ROWS_I32: Final = 4
ROWS_I64: Final = 5
ROWS_I8: Final = 6
ROWS_U8: Final = 7
ROWS_BOOL: Final = 8
T16_F32: Final = 16
T16_F16: Final = 17
T16_BF16: Final = 18
T16_I8: Final = 21
T16_I4G32: Final = 22
T16_Q8_0: Final = 23
T16_Q4_0: Final = 24
T16_Q4_K: Final = 25
T16_Q5_K: Final = 26
T16_Q6_K: Final = 27
T16_MXFP4: Final = 28
T16_UINT4: Final = 29
T16_Q4_1: Final = 30
T16_Q5_0: Final = 31
T16_Q5_1: Final = 32
T16_IQ4_NL: Final = 33
T16_IQ4_XS: Final = 34
T16_Q2_K: Final = 35
T16_Q3_K: Final = 36
T16_NVFP4: Final = 37
T16_TQ2_0: Final = 38
T16_TQ1_0: Final = 39
T16_Q2_0: Final = 40
T16_Q1_0: Final = 41


class BlockLayout(NamedTuple):
    """A layout of GGUF's blocks, or of values of other tools' folders, which are packed in the same way.

    ``block_len`` values take ``block_bytes`` bytes in a file (of NVFP4, TQ1_0 and TQ2_0 with float32 scales).  A tile
    has ``tile_lines`` lines of 64 bytes for each ``tile_columns`` columns.
    """

    block_len: int
    block_bytes: int
    tile_columns: int
    tile_lines: int


BLOCKS: Final = {
    T16_Q8_0: BlockLayout(32, 34, 64, 17),
    T16_Q4_0: BlockLayout(32, 18, 64, 9),
    T16_Q4_K: BlockLayout(256, 144, 256, 37),
    T16_Q5_K: BlockLayout(256, 176, 256, 45),
    T16_Q6_K: BlockLayout(256, 210, 256, 53),
    T16_MXFP4: BlockLayout(32, 17, 128, 17),
    T16_UINT4: BlockLayout(32, 19, 128, 19),
    T16_Q4_1: BlockLayout(32, 20, 64, 10),
    T16_Q5_0: BlockLayout(32, 22, 64, 11),
    T16_Q5_1: BlockLayout(32, 24, 64, 12),
    T16_IQ4_NL: BlockLayout(32, 18, 64, 9),
    T16_IQ4_XS: BlockLayout(256, 136, 256, 35),
    T16_Q2_K: BlockLayout(256, 84, 256, 21),
    T16_Q3_K: BlockLayout(256, 110, 256, 29),
    T16_NVFP4: BlockLayout(32, 22, 256, 37),
    T16_TQ2_0: BlockLayout(256, 68, 256, 17),
    T16_TQ1_0: BlockLayout(256, 56, 256, 14),
    T16_Q2_0: BlockLayout(64, 18, 128, 9),
    T16_Q1_0: BlockLayout(128, 18, 256, 9),
}
"""The layouts of blocks by their numbers."""

TILE_ROWS: Final = 16
"""Rows of a tile in every ``T16`` layout."""
GROUP_LEN: Final = 32
"""Columns that share a step and an offset in a 4-bit weight."""
HADAMARD_FACTORS: Final = tuple(-0.25 if lane % 16 in (3, 7, 11, 12, 13, 14) else 0.25 for lane in range(GROUP_LEN))
"""The factors of the columns of a group before its rotation (core/kernels/rows/hadamard.h): a quarter, with signs that
no row of the Hadamard matrix resembles, a bent sequence."""

PAGE_TOKENS: Final = 32
"""The number of tokens in a KV page (``PS_PAGE_TOKENS``)."""
PARTITION_PAGES: Final = 8
"""The number of pages in a partition, whose results attention adds up in order (docs/explanation/numerics.md)."""

KV_LAYOUTS: Final = ("auto", "f32", "bf16", "int8", "int4")
"""The formats of keys and values; "auto" lets the core choose: f32 under the scheme f32, else bf16."""

STATE_F32: Final = 16
"""The number of the layout of recurrent states (``PS_STATE_F32``)."""

GENERAL_NETWORK: Final = 1
"""``ModelInfo.kind`` of a general network."""

KV_NUMBERS: Final = {"f32": 1, "bf16": 2, "int8": 3, "int4": 4}
"""The numbers of ``ps_kv_layout`` by name."""


def pages_for(num_tokens: int) -> int:
    """Return the number of pages that ``num_tokens`` tokens of one request need."""
    return -(-num_tokens // PAGE_TOKENS)


def pages_by_group(
    windows: Sequence[int], num_pages: int, max_requests: int, max_tokens: int, num_ranks: int = 1
) -> tuple[int, ...]:
    """Return the pages of each page group, at most ``num_pages``, from the window of its layers in tokens.

    A group without a window (0) keeps every position.  A request with a window holds the pages that its next tokens
    see, so a step of ``max_tokens`` tokens of ``max_requests`` requests needs a bounded number.  The windows count
    twice: the rest is for the prefix cache.  Of pages that are dealt out to several ranks each has as many, because all
    windows may lie on one of them.
    """
    # n tokens behind a window of w lie in at most (n + w - 2) / 32 + 2 pages.
    needed = (2 * max_requests * (pages_for(window - 2) + 2) + pages_for(max_tokens) for window in windows)
    counts = zip(windows, needed, strict=True)
    return tuple(min(num_pages, count * num_ranks) if window else num_pages for window, count in counts)


def whole_partitions(num_pages: int, num_ranks: int) -> int:
    """Return ``num_pages``, rounded up so that each of several ranks has equally many whole partitions of them."""
    unit = PARTITION_PAGES * num_ranks if num_ranks > 1 else 1
    return -(-num_pages // unit) * unit


def kv_layout_of(kv_layout: str, scheme: str) -> str:
    """Return the format that ``kv_layout`` means under a scheme: resolves "auto" and returns others unchanged."""
    if kv_layout != "auto":
        return kv_layout
    from penstock.core.library import library  # imported here: the engine's page planning must not load the core

    number = library().ps_auto_kv_layout(scheme.encode())
    return next(name for name, layout in KV_NUMBERS.items() if layout == number)
