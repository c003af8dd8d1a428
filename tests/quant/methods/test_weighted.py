"""Weighted lines: near the best of all lines, the same on every level, and plain where no weight says more."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core import native
from penstock.errors import InvalidArgumentError
from penstock.quant.matrix import concatenate_rows, quantize_rows
from penstock.quant.methods.weighted import round_weighted
from penstock.quant.scheme import SCHEMES
from tests.support.errors import raises

W4, W8 = SCHEMES["w4a8"], SCHEMES["w8a8"]


def matrix(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((rows, cols)).astype(np.float32)


def weights(cols: int) -> np.ndarray:
    return np.exp(np.random.default_rng(6).standard_normal(cols) * 2).astype(np.float32)


def integers(rows: native.QuantizedRows) -> np.ndarray:
    if rows.groups is None:
        return rows.q.astype(np.float64)
    cols = rows.q.shape[1]
    steps, offsets = rows.groups[..., 0].view(np.uint8).astype(np.float64), rows.groups[..., 1].astype(np.float64)
    return rows.q * np.repeat(steps, 32, axis=1)[:, :cols] + np.repeat(offsets, 32, axis=1)[:, :cols]


def errors(values: np.ndarray, rows: native.QuantizedRows, column_weights: np.ndarray) -> np.ndarray:
    """The weighted squared error of each row, in units of its scale."""
    scaled = values / rows.scales[:, None].astype(np.float64)
    return ((scaled - integers(rows)) ** 2 * column_weights).sum(axis=1)


def best_error(values: np.ndarray, column_weights: np.ndarray) -> float:
    """The least error of any line of one group, by trying all."""
    steps = np.arange(1, 18.0)[:, None, None]
    offsets = np.arange(-128, 128.0)[None, :, None]
    nibbles = np.clip(np.rint((values - offsets) / steps), 0, np.minimum(np.floor((127 - offsets) / steps), 15))
    return float((((values - nibbles * steps - offsets) ** 2) * column_weights).sum(axis=2).min())


def test_weighted_lines_are_nearly_the_best() -> None:
    values, column_weights = matrix(24, 32), weights(32)
    with native.Context(1) as context:
        rows = round_weighted(context, values, W4, column_weights)
        plain = concatenate_rows(list(quantize_rows(context, W4, values, "f32")))
    scaled = values / rows.scales[:, None]
    best = np.array([best_error(row, column_weights) for row in scaled])
    assert errors(values, rows, column_weights).sum() < 1.15 * best.sum()
    assert errors(values, rows, column_weights).sum() < 0.7 * errors(values, plain, column_weights).sum()


def test_weights_of_one_are_no_worse_than_none() -> None:
    values = matrix(16, 100)
    with native.Context(2) as context:
        rows = round_weighted(context, values, W4, np.ones(100, np.float32))
        zeros = round_weighted(context, values, W4, np.zeros(100, np.float32))
        plain = concatenate_rows(list(quantize_rows(context, W4, values, "f32")))
    assert (errors(values, rows, np.ones(100)) <= errors(values, plain, np.ones(100)) * (1 + 1e-6)).all()
    assert zeros.q.tobytes() == rows.q.tobytes()


def test_levels_and_threads_choose_the_same_lines() -> None:
    values, column_weights, found = matrix(50, 70), weights(70), set()
    column_weights[32:64] = 0  # a group without inputs
    for level, runnable in native.cpu_levels():
        for threads in (1, 3) if runnable else ():
            with native.Context(threads, level) as context:
                rows = round_weighted(context, values, W4, column_weights)
                assert rows.groups is not None
                found.add(rows.q.tobytes() + rows.scales.tobytes() + rows.groups.tobytes())
    assert len(found) == 1


def test_int8_rows_need_no_weights() -> None:
    values = matrix(5, 40)
    with native.Context(1) as context:
        rows = round_weighted(context, values, W8, weights(40))
        plain = concatenate_rows(list(quantize_rows(context, W8, values, "f32")))
    assert rows.q.tobytes() == plain.q.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_weights_that_are_no_weights_are_refused(value: float) -> None:
    column_weights = np.ones(40, np.float32)
    column_weights[3] = value
    packed = np.zeros(native.layout_bytes(W4.layout, 2, 40), np.uint8)
    with native.Context(1) as context, raises(InvalidArgumentError):
        context.pack_weighted(matrix(2, 40), packed, column_weights=column_weights)
