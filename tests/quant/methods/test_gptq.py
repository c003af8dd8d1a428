"""GPTQ against a plain implementation, which removes one column after the other from the inverse of the Hessian."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core import native
from penstock.errors import InvalidArgumentError
from penstock.quant.methods.gptq import DAMPING, gptq_round, inverse_factor
from penstock.quant.methods.weighted import fit_groups, round_weighted
from penstock.quant.scheme import SCHEMES
from tests.support.errors import raises


def layer(rows: int, cols: int, outliers: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and correlated inputs [tokens, cols]."""
    rng = np.random.default_rng(8)
    mix = np.eye(cols) + 0.1 * rng.standard_normal((cols, cols))
    x = rng.standard_normal((6 * cols, cols)) @ mix
    x[:, :3] *= 20 if outliers else 1
    return rng.standard_normal((rows, cols)).astype(np.float32), x.astype(np.float32)


def plain_gptq(matrix: np.ndarray, hessian: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """The integers for these lines by the formulas of the paper, in float64, without Cholesky factors and blocks."""
    cols = matrix.shape[1]
    damped = hessian.astype(np.float64) + DAMPING * np.diagonal(hessian).mean(dtype=np.float64) * np.eye(cols)
    inverse = np.linalg.inv(damped)
    wanted = matrix.astype(np.float64) / (np.abs(matrix).max(axis=1) / np.float32(127))[:, None]
    q = np.zeros(matrix.shape, np.int8)
    lines = np.zeros((1, 1, 2)) if groups is None else groups.astype(np.float64)
    for j in range(cols):
        if groups is None:
            rounded = np.clip(np.rint(wanted[:, j]), -127, 127)
            q[:, j] = rounded
        else:
            steps, offsets = lines[:, j // 32, 0], lines[:, j // 32, 1]
            top = np.minimum((127 - offsets) // steps, 15)
            q[:, j] = np.clip(np.rint((wanted[:, j] - offsets) / steps), 0, top)
            rounded = q[:, j] * steps + offsets
        error = (wanted[:, j] - rounded) / inverse[j, j]
        wanted -= np.outer(error, inverse[j])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1  # no longer read
    return q


@pytest.mark.parametrize("scheme", ["w4a8", "w8a8"])
@pytest.mark.parametrize("cols", [64, 300])
def test_integers_are_those_of_the_plain_form(scheme: str, cols: int) -> None:
    matrix, x = layer(24, cols)
    hessian = x.T @ x
    with native.Context(1) as context:
        rows = gptq_round(context, matrix, SCHEMES[scheme], hessian)
        group = fit_groups(context, matrix[:, :32] / rows.scales[:, None], np.diagonal(hessian)[:32])
    if rows.groups is not None:
        assert (rows.groups[:, 0] == group).all()
    expected = plain_gptq(matrix, hessian, rows.groups)
    assert (rows.q == expected).mean() > 0.998  # float32 may fall on the other side of a tie


def values_of(rows: native.QuantizedRows) -> np.ndarray:
    q = rows.q.astype(np.float32)
    if rows.groups is not None:
        wide = [np.repeat(part, 32, axis=1)[:, : q.shape[1]] for part in (rows.groups[..., 0], rows.groups[..., 1])]
        q = q * wide[0] + wide[1]
    return q * rows.scales[:, None]


@pytest.mark.parametrize("outliers", [False, True])
def test_the_output_changes_less_than_by_rounding(outliers: bool) -> None:
    matrix, x = layer(32, 128, outliers)
    w4 = SCHEMES["w4a8"]
    with native.Context(1) as context:
        plain = round_weighted(context, matrix, w4, None)
        weighted = round_weighted(context, matrix, w4, (x**2).mean(axis=0))
        gptq = gptq_round(context, matrix, w4, x.T @ x)
    errors = [float(np.linalg.norm(x @ (values_of(rows) - matrix).T)) for rows in (plain, weighted, gptq)]
    assert errors[2] < 0.85 * errors[1]
    assert errors[1] < (0.8 if outliers else 1.02) * errors[0]


def test_columns_without_inputs_keep_their_rounding() -> None:
    matrix, x = layer(8, 64)
    x[:, 40:] = 0
    with native.Context(1) as context:
        rows = gptq_round(context, matrix, SCHEMES["w4a8"], x.T @ x)
        zeros = gptq_round(context, np.zeros((8, 64), np.float32), SCHEMES["w4a8"], x.T @ x)
    assert np.abs(values_of(rows) - matrix)[:, 40:].mean() < 0.1
    assert not values_of(zeros).any()


def test_the_factor_is_of_the_inverse() -> None:
    _, x = layer(1, 300)
    upper, damping = inverse_factor(x.T @ x)
    damped = (x.T @ x).astype(np.float64)
    damped += DAMPING * np.diagonal(damped).mean() * np.eye(300)
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(300), atol=1e-6)
    assert damping == DAMPING


def test_hessians_without_factor_are_refused() -> None:
    broken = np.eye(4)
    broken[1, 2] = np.nan
    with raises(InvalidArgumentError, param="hessian"):
        inverse_factor(broken)
    with raises(InvalidArgumentError, param="hessian"):
        inverse_factor(np.array([[1.0, 1000.0], [1000.0, 1.0]]))
