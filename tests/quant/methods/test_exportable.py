"""Integers that GGUF files can hold: float16 scales, even offsets, and little more error than without these bounds."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core import native
from penstock.errors import InvalidArgumentError
from penstock.quant.exportable import half_scales, round_exportable
from penstock.quant.matrix import concatenate_rows, quantize_rows, values_of
from penstock.quant.methods.gptq import gptq_round
from penstock.quant.methods.weighted import round_weighted
from penstock.quant.scheme import Scheme, quantizing_scheme
from tests.support.errors import raises


def matrix(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((rows, cols)).astype(np.float32) * np.float32(0.02)


def column_weights(cols: int) -> np.ndarray:
    return np.exp(np.random.default_rng(6).standard_normal(cols)).astype(np.float32)


def rounded(context: native.Context, values: np.ndarray, scheme: Scheme, method: str) -> native.QuantizedRows:
    if method == "rtn":
        return concatenate_rows(list(quantize_rows(context, scheme, values, "f32")))
    weights = column_weights(values.shape[1])
    if method == "imatrix":
        return round_weighted(context, values, scheme, weights)
    return gptq_round(context, values, scheme, np.diag(weights))


@pytest.mark.parametrize("method", ["rtn", "imatrix", "gptq"])
@pytest.mark.parametrize("scheme", ["w4a8", "w8a16"])
@pytest.mark.parametrize("cols", [512, 70])
def test_scales_are_float16_and_offsets_even(method: str, scheme: str, cols: int) -> None:
    values = matrix(37, cols)
    with native.Context() as context:
        own = rounded(context, values, quantizing_scheme(scheme, exportable=True), method)
        free = rounded(context, values, quantizing_scheme(scheme), method)
    assert np.array_equal(own.scales.astype(np.float16).astype(np.float32), own.scales)
    assert (np.abs(values).max(axis=1) <= 127 * own.scales).all()
    roots = 1 if method == "rtn" else np.sqrt(column_weights(cols))
    errors = [np.linalg.norm((values_of(rows, quantizing_scheme(scheme)) - values) * roots) for rows in (free, own)]
    assert 0 < errors[1] < 1.05 * errors[0]
    if own.groups is not None:
        offsets = own.groups[..., 1]
        assert (offsets % 2 == 0).all()
        assert offsets.min() >= -126
        assert offsets.max() <= 0
        assert free.groups is not None
        assert (free.groups[..., 1] % 2 == 1).any()


def test_rows_above_zero_have_lines() -> None:
    """Their least value is no offset, which is never above 0."""
    values = np.abs(matrix(16, 64)) + np.float32(0.01)
    values[0] = 0
    with native.Context() as context:
        rows = round_exportable(context, quantizing_scheme("w4a8", exportable=True), values)
    assert rows.groups is not None
    assert rows.groups[..., 1].max() <= 0
    found = values_of(rows, quantizing_scheme("w4a8"))
    assert not found[0].any()
    assert np.linalg.norm(found - values) < 0.06 * np.linalg.norm(values)


def test_levels_choose_the_same_lines() -> None:
    scheme, values = quantizing_scheme("w4a8", exportable=True), matrix(37, 160)
    results = []
    for level, runnable in native.cpu_levels():
        if runnable:
            with native.Context(1, level) as context:
                results.append(round_exportable(context, scheme, values))
    assert len(results) > 1
    for rows in results[1:]:
        for own, first in zip(rows, results[0], strict=True):
            assert np.array_equal(own, first)


def test_small_and_large_rows() -> None:
    values = np.array([[1e-9, 0], [0, 0], [127 * 32752, 1]], np.float32)
    assert half_scales(values).tolist() == [2**-24, 0, 32752]
    with native.Context() as context:
        rows = round_exportable(context, quantizing_scheme("w8a8", exportable=True), values[:2])
        assert rows.q.tolist() == [[0, 0], [0, 0]]
        for bad, param in ((values * 2, "exportable"), (values * np.nan, "values")):
            with raises(InvalidArgumentError, param=param):
                round_exportable(context, quantizing_scheme("w8a8", exportable=True), bad)
