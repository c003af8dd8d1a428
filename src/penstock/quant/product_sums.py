"""The sum of ``x^T x`` over the inputs of a linear, which GPTQ needs, in about half the memory of the matrix."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ProductSums"]

_BLOCK: Final = 512
_ITEM_BYTES: Final = 4


class ProductSums:
    """A sum of ``x^T x`` [cols, cols]: blocks of rows from the diagonal on, since the matrix is symmetric."""

    def __init__(self, cols: int) -> None:
        self._cols = cols
        self._blocks = [np.zeros((min(_BLOCK, cols - at), cols - at), np.float32) for at in range(0, cols, _BLOCK)]

    @staticmethod
    def num_bytes(cols: int) -> int:
        """Return the memory of a sum of so many columns."""
        return sum(min(_BLOCK, cols - at) * (cols - at) for at in range(0, cols, _BLOCK)) * _ITEM_BYTES

    def add(self, x: NDArray[np.float32]) -> None:
        """Add the products of inputs [tokens, cols]."""
        for at, block in zip(range(0, self._cols, _BLOCK), self._blocks, strict=True):
            block += x[:, at : at + len(block)].T @ x[:, at:]

    def diagonal(self) -> NDArray[np.float32]:
        """Return the sums of squares of the columns."""
        return np.concatenate([np.diagonal(block) for block in self._blocks])

    def matrix(self) -> NDArray[np.float32]:
        """Return the whole matrix."""
        whole = np.empty((self._cols, self._cols), np.float32)
        for at, block in zip(range(0, self._cols, _BLOCK), self._blocks, strict=True):
            end = at + len(block)
            whole[at:end, at:] = block
            whole[end:, at:end] = block[:, len(block) :].T
        return whole
