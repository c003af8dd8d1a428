"""Packing of numbers into tiles, byte by byte beside numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.core import native
from penstock.core.layouts import FLOAT_DTYPES, T16_BF16, T16_F16, T16_F32
from penstock.core.native import Context

LAYOUTS = {"f32": T16_F32, "f16": T16_F16, "bf16": T16_BF16}
SHAPES = [(16, 64), (37, 32), (5, 1), (33, 15), (16, 17), (48, 95)]


def bf16_of(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even; a NaN keeps its upper bits and becomes quiet."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def numbers(dtype: str, rows: int, cols: int) -> NDArray[np.generic]:
    """Any bits, but no NaN in float16, which levels round in two ways."""
    bits = np.random.default_rng(cols).integers(0, 1 << 32, (rows, cols), np.uint32)
    bits[bits & 0x7F000000 == 0x7F000000] ^= np.uint32(0x40000000)  # a 256th of them is enough to be NaN
    bits.flat[::7] = np.random.default_rng(rows).standard_normal(bits.flat[::7].size, np.float32).view(np.uint32)
    if dtype == "f32":
        bits.flat[::11] = 0x7F800001  # signals
        return bits.view(np.float32)
    halves = (bits >> 16).astype(np.uint16)
    if dtype == "bf16":
        halves.flat[::11] = 0x7F81
        return halves
    return np.where(halves & 0x7C00 == 0x7C00, halves & 0xFC00, halves).astype(np.uint16).view(np.float16)


def expected_words(dtype: str, layout: str, source: NDArray[np.generic]) -> NDArray[np.generic]:
    with np.errstate(over="ignore", invalid="ignore"):
        values = (source.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else source.astype(np.float32)
        if layout == "f32":
            return source.view(np.uint32) if dtype == "f32" else values.view(np.uint32)
        return bf16_of(values) if layout == "bf16" else values.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["f32", "f16", "bf16"])
def test_packed_numbers_are_those_of_numpy(dtype: str, layout: str, context: Context) -> None:
    for rows, cols in SHAPES:
        source = numbers(dtype, rows, cols)
        if layout == "f16" and dtype != "f16":
            source[np.isnan(expected_words(dtype, "f32", source).view(np.float32))] = 0
        words, pair = expected_words(dtype, layout, source), 2 if layout == "bf16" else 1
        padded = np.zeros((-(-rows // 16) * 16, -(-cols // pair) * pair), words.dtype)
        padded[:rows, :cols] = words
        tiles = padded.reshape(-1, 16, padded.shape[1] // pair, pair).transpose(0, 2, 1, 3)
        packed = np.zeros(native.layout_bytes(LAYOUTS[layout], rows, cols), np.uint8)
        first = rows // 3  # rows in two calls, not in order
        for start, end in ((first, rows), (0, first)):
            part = np.ascontiguousarray(source[start:end])
            at = (LAYOUTS[layout], rows, cols, start, end - start, FLOAT_DTYPES[dtype])
            native.pack(context, *at, part, packed)
        assert packed.tobytes() == tiles.tobytes(), (rows, cols)


def test_packed_bf16_keeps_all_but_signals(context: Context) -> None:
    source = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024)
    packed = np.zeros(native.layout_bytes(T16_BF16, 64, 1024), np.uint8)
    native.pack(context, T16_BF16, 64, 1024, 0, 64, FLOAT_DTYPES["bf16"], source, packed)
    rows = packed.view(np.uint16).reshape(4, 512, 16, 2).transpose(0, 2, 1, 3).reshape(64, 1024)
    is_nan = source & 0x7FFF > 0x7F80
    assert (rows == np.where(is_nan, source | 0x40, source)).all()
