"""Round matrices to the blocks of Q4_K and Q6_K, which have 256 values each.

Q4_K: eight groups of 32 values d * s * q - m * t, with q from 0 to 15, the integers s and t from 0 to 63, and float16
numbers d and m for the block.  Q6_K: sixteen groups of 16 values d * s * q with q from -32 to 31 and s an int8.  For
each group several ranges are tried, and scale and minimum are fitted to the rounded values by least squares; then the
integer scales next to the best are tried.  Errors are squares of differences; each column may have a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidArgumentError

__all__ = ["BLOCK_LEN", "quantize_q4_k", "quantize_q6_k"]

Floats = NDArray[np.float32]
BLOCK_LEN: Final = 256
_PIECE_BLOCKS: Final = 4096
_SHRINKS_4: Final = np.linspace(0.72, 1.04, 17, dtype=np.float32)
"""Ranges that are tried, relative to that from the least to the largest value."""
_SHRINKS_6: Final = np.linspace(0.84, 1.02, 10, dtype=np.float32)
_STEPS: Final = (-1, 0, 1)


def quantize_q4_k(rows: Floats, column_weights: Floats | None = None) -> NDArray[np.uint8]:
    """Return the blocks [rows, bytes] of rows whose length is a multiple of 256.

    ``column_weights`` [columns], not negative: the squared error of a column counts so much; None counts all alike.
    """
    return _in_pieces(rows, column_weights, _q4_k)


def quantize_q6_k(rows: Floats, column_weights: Floats | None = None) -> NDArray[np.uint8]:
    """Return the blocks [rows, bytes] of rows whose length is a multiple of 256; arguments as of ``quantize_q4_k``."""
    return _in_pieces(rows, column_weights, _q6_k)


def _in_pieces(
    rows: Floats, column_weights: Floats | None, blocks_of: Callable[[Floats, Floats | None], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Return the blocks of rows; ``blocks_of`` gets the values of some blocks [n, 256] and the weights of each."""
    values = rows.reshape(-1, BLOCK_LEN)
    if not np.isfinite(values).all():
        raise InvalidArgumentError("expected finite values", param="dtype")
    weights = None if column_weights is None else column_weights.reshape(-1, BLOCK_LEN)
    places = np.arange(len(values))
    blocks = [
        blocks_of(values[own], None if weights is None else weights[places[own] % len(weights)])
        for own in (slice(start, start + _PIECE_BLOCKS) for start in range(0, len(values), _PIECE_BLOCKS))
    ]
    return np.concatenate(blocks).reshape(len(rows), -1)


def _divided(a: Floats, b: Floats) -> Floats:
    """Return a / b, and 0 where b is 0."""
    result: Floats = np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)
    return result


def _errors(x: Floats, scale: Floats, low: Floats, q: Floats, weights: Floats | None = None) -> Floats:
    """Return the squared error [..., 1] of scale * q - low, with q rounded for these two."""
    difference = scale * q - low - x
    result: Floats = np.einsum("...i,...i->...", _times(difference, weights), difference)[..., None]
    return result


def _times(values: Floats, weights: Floats | None) -> Floats:
    return values if weights is None else values * weights


def _rounded(x: Floats, scale: Floats, low: Floats, least: int, most: int) -> Floats:
    """Return the integers nearest to (x + low) / scale."""
    result: Floats = np.clip(np.rint(_divided(x + low, scale)), least, most)
    return result


def _fit_with_minimum(x: Floats, weights: Floats | None) -> tuple[Floats, Floats]:
    """Return scale and minimum [N, groups, 1] of groups x [N, groups, 32]: the values are scale * q - minimum."""
    least, most = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    count: Floats | int = x.shape[-1] if weights is None else weights.sum(-1, keepdims=True)
    total, best = _times(x, weights).sum(-1, keepdims=True), np.full((*x.shape[:-1], 1), np.inf, np.float32)
    scale, low = np.zeros_like(best), np.zeros_like(best)
    for shrink in _SHRINKS_4:
        q = _rounded(x, np.maximum(most - least, 0) * (shrink / np.float32(15)), -least * shrink, 0, 15)
        p = _times(q, weights)
        sum_q, sum_qq = p.sum(-1, keepdims=True), np.einsum("...i,...i->...", p, q)[..., None]
        sum_qx = np.einsum("...i,...i->...", p, x)[..., None]
        own = _divided(count * sum_qx - sum_q * total, count * sum_qq - sum_q * sum_q)
        own_low = _divided(own * sum_q - total, np.broadcast_to(np.float32(count), own.shape))
        is_below = own_low < 0  # a minimum above 0 has no form
        own = np.where(is_below, _divided(sum_qx, sum_qq), own)
        own, own_low = np.maximum(own, 0), np.where(is_below, np.float32(0), own_low)
        errors = _errors(x, own, own_low, _rounded(x, own, own_low, 0, 15), weights)
        is_better = errors < best
        best, scale = np.where(is_better, errors, best), np.where(is_better, own, scale)
        low = np.where(is_better, own_low, low)
    return scale, low


def _best_steps(
    x: Floats, units: tuple[Floats, Floats], start: tuple[Floats, Floats], weights: Floats | None
) -> tuple[Floats, Floats]:
    """Return the integers of scale and minimum next to ``start`` with the least error; ``units`` multiply them."""
    best, result = np.full((*x.shape[:-1], 1), np.inf, np.float32), start
    for step in _STEPS:
        for low_step in _STEPS:
            s, t = (np.clip(old + by, 0, 63) for old, by in zip(start, (step, low_step), strict=True))
            scale, low = s * units[0], t * units[1]
            errors = _errors(x, scale, low, _rounded(x, scale, low, 0, 15), weights)
            is_better = errors < best
            best = np.where(is_better, errors, best)
            result = (np.where(is_better, s, result[0]), np.where(is_better, t, result[1]))
    return result


def _half(values: Floats) -> Floats:
    """Return the nearest float16 numbers; InvalidArgumentError for those that are none."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = values.astype(np.float16).astype(np.float32)
    if not np.isfinite(half).all():
        raise InvalidArgumentError("expected values whose scales are float16, got larger ones", param="dtype")
    return half


def _q4_k(values: Floats, column_weights: Floats | None) -> NDArray[np.uint8]:
    x = values.reshape(-1, 8, 32)
    weights = None if column_weights is None else column_weights.reshape(-1, 8, 32)
    scale, low = _fit_with_minimum(x, weights)
    units = (_half(scale.max(1, keepdims=True) / np.float32(63)), _half(low.max(1, keepdims=True) / np.float32(63)))
    steps = tuple(np.clip(np.rint(_divided(part, unit)), 0, 63) for part, unit in zip((scale, low), units, strict=True))
    s, t = _best_steps(x, units, (steps[0], steps[1]), weights)
    q = _rounded(x, s * units[0], t * units[1], 0, 15).astype(np.uint8)
    blocks = np.empty((len(x), 144), np.uint8)
    for at, unit in zip((0, 2), units, strict=True):
        blocks[:, at : at + 2] = unit.reshape(-1, 1).astype("<f2").view(np.uint8)
    first, second = s[..., 0].astype(np.uint8), t[..., 0].astype(np.uint8)
    blocks[:, 4:8] = first[:, :4] | (first[:, 4:] >> 4 << 6)
    blocks[:, 8:12] = second[:, :4] | (second[:, 4:] >> 4 << 6)
    blocks[:, 12:16] = (first[:, 4:] & 15) | (second[:, 4:] & 15) << 4
    pairs = q.reshape(-1, 4, 2, 32)
    blocks[:, 16:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return blocks


def _q6_k(values: Floats, column_weights: Floats | None) -> NDArray[np.uint8]:
    x = values.reshape(-1, 16, 16)
    weights = None if column_weights is None else column_weights.reshape(-1, 16, 16)
    at = np.abs(x).argmax(-1)[..., None]
    most = np.take_along_axis(x, at, -1)  # with its sign: the largest value becomes -32 times the scale
    zero, best = np.zeros_like(most), np.full(most.shape, np.inf, np.float32)
    scale = zero
    for shrink in _SHRINKS_6:
        q = _rounded(x, most * (shrink / np.float32(-32)), zero, -32, 31)
        p = _times(q, weights)
        own = _divided(np.einsum("...i,...i->...", p, x), np.einsum("...i,...i->...", p, q))[..., None]
        errors = _errors(x, own, zero, _rounded(x, own, zero, -32, 31), weights)
        is_better = errors < best
        best, scale = np.where(is_better, errors, best), np.where(is_better, own, scale)
    unit = _half(np.abs(scale).max(1, keepdims=True) / np.float32(127))
    nearest, best, s = np.rint(_divided(scale, unit)), np.full(most.shape, np.inf, np.float32), zero
    for step in _STEPS:
        own = np.clip(nearest + step, -128, 127)
        errors = _errors(x, own * unit, zero, _rounded(x, own * unit, zero, -32, 31), weights)
        is_better = errors < best
        best, s = np.where(is_better, errors, best), np.where(is_better, own, s)
    bits = (_rounded(x, s * unit, zero, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    blocks = np.empty((len(x), 210), np.uint8)
    blocks[:, :128] = ((bits[:, :, :2] & 15) | (bits[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = bits >> 4
    joined = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    blocks[:, 128:192] = joined.reshape(-1, 64)
    blocks[:, 192:208] = s[..., 0].astype(np.int8).view(np.uint8)
    blocks[:, 208:] = unit.reshape(-1, 1).astype("<f2").view(np.uint8)
    return blocks
