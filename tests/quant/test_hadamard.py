"""The rotation of blocks: against the matrix, against PyTorch bit for bit, and where a network may not have it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.core.layouts import HADAMARD_FACTORS
from penstock.nn.packing import pack_matrix
from penstock.ops.eager import ops
from penstock.ops.reference.linear import rotate_rows
from penstock.quant.hadamard import restore_weight, rotate_inputs, rotate_products, rotate_weight, spread_squares
from penstock.quant.scheme import find_scheme


def matrix() -> np.ndarray:
    """The rotation of one block, from the definition of Sylvester."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < 32:
        hadamard = np.kron(np.array([[1, 1], [1, -1]]), hadamard)
    return np.diag(HADAMARD_FACTORS) @ hadamard


def inputs(rows: int = 5, cols: int = 75) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(rows, cols)).astype(np.float32)


def test_blocks_are_multiplied_by_the_matrix() -> None:
    x = inputs()
    rotated = rotate_inputs(x)
    for start in (0, 32):
        assert rotated[:, start : start + 32] == pytest.approx(x[:, start : start + 32] @ matrix(), abs=1e-4)
    assert rotated[:, 64:].tobytes() == x[:, 64:].tobytes()
    assert np.abs(np.ones(32) @ matrix()).max() == 2  # a mean of 1 adds up to 8 in no column


def test_products_stay_what_they_were() -> None:
    x, weight = inputs(), inputs(7)
    rotated = rotate_weight(weight)
    assert rotate_inputs(x) @ rotated.T == pytest.approx(x @ weight.T, abs=1e-4)
    assert restore_weight(rotated) == pytest.approx(weight, abs=1e-6)


def test_sums_over_inputs_follow_the_rotation() -> None:
    x = inputs(4000).astype(np.float64)
    rotated = rotate_inputs(x)
    assert rotate_products(x.T @ x) == pytest.approx(rotated.T @ rotated, rel=1e-9, abs=1e-6)
    assert spread_squares(np.square(x).mean(axis=0)) == pytest.approx(np.square(rotated).mean(axis=0), rel=0.15)


@pytest.mark.parametrize("cols", [31, 32, 75, 160])
def test_numpy_and_pytorch_have_the_same_bits(cols: int) -> None:
    x = inputs(cols=cols)
    assert rotate_rows(torch.from_numpy(x)).numpy().tobytes() == rotate_inputs(x).tobytes()


def test_rotation_takes_away_the_loss_of_one_large_column() -> None:
    x, weight = inputs(16, 256), inputs(48, 256)
    x[:, 70] *= 50
    weight[:, 70] /= 50
    exact, errors = x.astype(np.float64) @ weight.T.astype(np.float64), {}
    for name in ("w8a8", "w8a8_h32"):
        row = find_scheme(name)
        packed = pack_matrix(torch.from_numpy(weight), row.layout, row.hadamard)
        y = ops.linear(torch.from_numpy(x), packed, None, out_features=48, scheme=name).numpy()
        errors[name] = float(np.linalg.norm(y - exact) / np.linalg.norm(exact))
    assert errors["w8a8_h32"] < 0.55 * errors["w8a8"]
