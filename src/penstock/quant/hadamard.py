"""Rotation by blocks of a Hadamard matrix of 32 columns: one large value spreads over the values of its block.

A linear whose scheme has ``hadamard`` rotates its inputs before it rounds them, and its weights are rotated when they
are packed, so that the product stays what it was (QuaRot, Ashkboos et al., arXiv 2404.00456; blocks as in MR-GPTQ,
arXiv 2509.23202).  With the matrix ``H`` of Sylvester and fixed signs ``D``, an input becomes ``x D H / 4`` and a row
of a weight ``w D H / 8``; ``D`` keeps inputs that are all positive from adding up in one value.  Columns behind the
last whole block stay as they are.  Everything is float32, in the order of additions of docs/explanation/numerics.md.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.layouts import GROUP_LEN, HADAMARD_FACTORS

__all__ = ["ROTATIONS", "restore_weight", "rotate_inputs", "rotate_products", "rotate_weight", "spread_squares"]

ROTATIONS: Final = ("r1", "r2", "r1r2")
"""The rotations that ``calibration.rotate`` folds into the weights of a checkpoint."""
_CHUNK = 2048
"""Blocks that are rotated at once, in the processor's cache."""


def rotate_inputs(x: NDArray[Any]) -> NDArray[Any]:
    """Return ``x`` [..., columns] with each block times ``D H / 4``, in the type of ``x``."""
    return _per_block(x, before=True)


def rotate_weight(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a weight [rows, columns] that multiplies rotated inputs."""
    rotated: NDArray[np.float32] = rotate_inputs(weight)
    whole = weight.shape[1] // GROUP_LEN * GROUP_LEN
    rotated[:, :whole] *= np.float32(0.5)
    return rotated


def restore_weight(rotated: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weight that ``rotate_weight`` made the rotated one of, within the rounding of float32."""
    return _per_block(rotated, before=False)


def rotate_products(products: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of ``x^T x`` [columns, columns] of rotated inputs, from that of the inputs."""
    half: NDArray[Any] = rotate_inputs(products)
    return np.ascontiguousarray(rotate_inputs(np.ascontiguousarray(half.T)).T)


def spread_squares(squares: NDArray[Any]) -> NDArray[Any]:
    """Return the sums of squares of the columns of rotated inputs, if the columns of the inputs are uncorrelated."""
    whole = len(squares) // GROUP_LEN * GROUP_LEN
    spread = np.array(squares)
    spread[:whole] = np.repeat(squares[:whole].reshape(-1, GROUP_LEN).sum(axis=1) / 16, GROUP_LEN)
    return spread


def _per_block(x: NDArray[Any], *, before: bool) -> NDArray[Any]:
    """Multiply each block by the Hadamard matrix, and by the factors ``before`` or after it."""
    whole = x.shape[-1] // GROUP_LEN * GROUP_LEN
    result = np.array(x, order="C")
    blocks = np.ascontiguousarray(result[..., :whole]).reshape(-1, GROUP_LEN)
    factors = np.array(HADAMARD_FACTORS, x.dtype)[:, None]
    for start in range(0, len(blocks), _CHUNK):
        piece = blocks[start : start + _CHUNK]
        columns = np.ascontiguousarray(piece.T)  # the same column of all blocks lies together
        columns = columns * factors if before else columns
        for distance in (16, 8, 4, 2, 1):
            pairs = columns.reshape(GROUP_LEN // 2 // distance, 2, distance, -1)
            columns = np.empty_like(columns)
            sums = columns.reshape(pairs.shape)
            np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        piece[:] = (columns if before else columns * factors).T
    result[..., :whole] = blocks.reshape(*x.shape[:-1], whole)
    return result
