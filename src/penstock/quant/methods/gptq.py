"""GPTQ (Frantar et al., arXiv 2210.17323) for the integers of Penstock's schemes.

Columns are rounded from left to right.  The error of a column is spread over the columns that are not yet rounded, so
that the output of the layer changes least for the inputs that the Hessian ``sum x^T x`` was made of.  The line of each
group of 32 columns is fitted when its first column is reached, to the values that are then wanted there, with the
diagonal of the Hessian as the weights of the columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.layouts import F32
from penstock.core.native import QuantizedRows
from penstock.core.weights import check_finite
from penstock.errors import InvalidArgumentError
from penstock.quant.exportable import half_scales
from penstock.quant.methods.weighted import Floats, fit_groups, row_scales
from penstock.quant.scheme import GROUP_LEN

if TYPE_CHECKING:
    from penstock.core.native import Context
    from penstock.quant.scheme import Scheme

__all__ = ["DAMPING", "gptq_round", "inverse_factor"]

DAMPING: Final = 0.01
_MAX_DAMPING: Final = 1.0
_BLOCK: Final = 128
_FACTOR_BLOCK: Final = 256
_MAX_NIBBLE: Final = 15


def inverse_factor(hessian: NDArray[Any], damping: float = DAMPING) -> tuple[NDArray[np.float64], float]:
    """Return the upper triangular U with ``U^T U = (H + d I)^-1``, and the damping that it took.

    ``d`` is ``damping`` times the mean of the diagonal.  A column that never had an input has only the damping.  The
    damping is raised tenfold until the matrix is positive definite; InvalidArgumentError if it never is.  Everything is
    computed in one float64 matrix, which is the largest one of GPTQ.
    """
    diagonal = np.array(np.diagonal(hessian), np.float64)
    mean = float(diagonal.mean())
    if not np.isfinite(hessian).all() or mean < 0:
        raise InvalidArgumentError("hessian: expected finite sums, got NaN or infinity", param="hessian")
    mean = mean or 1.0
    diagonal[diagonal <= 0] = mean
    matrix = np.empty(hessian.shape, np.float64)
    while damping <= _MAX_DAMPING:
        matrix[:] = hessian
        np.fill_diagonal(matrix, diagonal + damping * mean)
        try:
            _factorize(matrix)
        except np.linalg.LinAlgError:
            damping *= 10
            continue
        _invert_upper(matrix)
        return matrix, damping
    raise InvalidArgumentError("hessian: expected a positive definite matrix", param="hessian")


def _blocks(size: int) -> list[slice]:
    """Return the columns of each block."""
    return [slice(start, min(start + _FACTOR_BLOCK, size)) for start in range(0, size, _FACTOR_BLOCK)]


def _factorize(matrix: NDArray[np.float64]) -> None:
    """Replace a symmetric matrix by the upper triangular V with ``V V^T`` equal to it."""
    blocks = _blocks(len(matrix))
    for number, own in reversed(list(enumerate(blocks))):
        lower = np.linalg.cholesky(matrix[own, own][::-1, ::-1])
        matrix[own, own] = corner = lower[::-1, ::-1]
        matrix[own, : own.start] = 0
        above = matrix[: own.start, own] = matrix[: own.start, own] @ np.linalg.inv(corner).T
        for other in blocks[:number]:
            matrix[: other.stop, other] -= above[: other.stop] @ above[other].T


def _invert_upper(matrix: NDArray[np.float64]) -> None:
    """Replace an upper triangular matrix by its inverse."""
    blocks = _blocks(len(matrix))
    for number, own in enumerate(blocks):
        corner = np.triu(np.linalg.inv(matrix[own, own]))
        for other in blocks[:number]:  # those above it are inverted already, and its own rows from here on are not
            column = matrix[other, other.start : own.start] @ matrix[other.start : own.start, own]
            matrix[other, own] = -column @ corner
        matrix[own, own] = corner


def gptq_round(
    context: Context,
    matrix: Floats,
    scheme: Scheme,
    hessian: NDArray[Any],
    factor: NDArray[np.float64] | None = None,
) -> QuantizedRows:
    """Round rows to the scheme's integers with GPTQ.

    ``matrix`` float32 [rows, cols]; ``hessian`` [cols, cols] is the sum of ``x^T x``.  ``factor``: the result of
    ``inverse_factor``, for a Hessian that several matrices share.  Raises InvalidArgumentError for values that are not
    finite.
    """
    cols = matrix.shape[1]
    if hessian.shape != (cols, cols):
        raise InvalidArgumentError(f"hessian: expected [{cols}, {cols}], got {list(hessian.shape)}", param="hessian")
    check_finite(np.ascontiguousarray(matrix), F32)
    upper = (inverse_factor(hessian)[0] if factor is None else factor).astype(np.float32)
    scales = half_scales(matrix) if scheme.exportable else row_scales(matrix)
    divisors = np.where(scales > 0, scales, np.float32(np.inf))[:, None]
    rounding = _Rounding(context, (matrix / divisors).astype(np.float32), np.diagonal(hessian), scheme)
    for start in range(0, cols, _BLOCK):
        rounding.block(start, min(start + _BLOCK, cols), upper)
    groups = np.stack(rounding.groups, axis=1) if rounding.groups else None
    return QuantizedRows(rounding.q, scales, groups)


class _Rounding:
    """The state of one matrix: values in units of the rows' scales, columns rounded from left to right.

    Values and errors are [columns, rows], so that a column is contiguous.
    """

    def __init__(self, context: Context, values: Floats, weights: NDArray[Any], scheme: Scheme) -> None:
        self._context = context
        self._values = np.ascontiguousarray(values.T)
        self._weights = np.where(weights > 0, weights, weights.mean()).astype(np.float32)  # as inverse_factor has it
        self._has_lines, self._even_offsets = scheme.weight_bits == 4, scheme.exportable
        self._steps = self._offsets = self._tops = np.zeros(0, np.float32)
        self._q = np.empty(self._values.shape, np.int8)
        self.groups: list[NDArray[np.int8]] = []

    @property
    def q(self) -> NDArray[np.int8]:
        """The integers [rows, columns]."""
        return np.ascontiguousarray(self._q.T)

    def block(self, start: int, end: int, upper: Floats) -> None:
        """Round the columns of a block, and spread their errors over those after it."""
        values, errors = self._values, np.empty((end - start, self._values.shape[1]), np.float32)
        for first in range(start, end, GROUP_LEN):
            last = min(first + GROUP_LEN, end)
            if self._has_lines:
                self._fit(first, last)
            for column in range(first, last):
                error = (values[column] - self._round(column)) / upper[column, column]
                errors[column - start] = error
                values[column + 1 : last] -= upper[column, column + 1 : last, None] * error
            values[last:end] -= upper[first:last, last:end].T @ errors[first - start : last - start]
        if end < len(values):
            values[end:] -= upper[start:end, end:].T @ errors

    def _fit(self, first: int, last: int) -> None:
        """Choose the lines of a group for the values that are wanted there now."""
        part = slice(first, last)
        even = self._even_offsets
        groups = fit_groups(self._context, self._values[part].T, self._weights[part], even_offsets=even)
        self._steps = groups[:, 0].view(np.uint8).astype(np.float32)
        self._offsets = groups[:, 1].astype(np.float32)
        self._tops = np.minimum(np.floor((np.float32(127) - self._offsets) / self._steps), np.float32(_MAX_NIBBLE))
        self.groups.append(groups)

    def _round(self, column: int) -> Floats:
        """Round one column, and return the values that it then has."""
        wanted = self._values[column]
        if not self._has_lines:
            rounded: Floats = np.clip(np.rint(wanted), np.float32(-127), np.float32(127))
            self._q[column] = rounded
            return rounded
        nibbles = np.clip(np.rint((wanted - self._offsets) / self._steps), np.float32(0), self._tops)
        self._q[column] = nibbles
        values: Floats = nibbles * self._steps + self._offsets
        return values
