"""Pooling: the hidden rows of a prompt as one vector.

A request with a pooling goes through the scheduler like any other and ends with its prompt.  Its rows are added one by
one in the order of its tokens, so the vector has the same bits however the prompt was chunked or batched.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.config import check_choice, check_flag
from penstock.errors import InternalError

__all__ = ["POOLINGS", "Pooling", "check_embedding"]

POOLINGS: Final = ("mean", "last")


class Pooling:
    """Collects a request's hidden rows: the "mean" of all rows, or the "last" one."""

    def __init__(self, kind: str) -> None:
        self.takes_all = kind == "mean"
        self._total: NDArray[np.float64] = np.zeros(0)
        self._num_rows = 0

    def take(self, rows: NDArray[np.float32], start: int) -> None:
        """Add rows [len, hidden_size] of the tokens from position ``start`` on.

        ``start`` 0 begins again, because a preempted request computes its prompt again.
        """
        if not self.takes_all:
            self._total, self._num_rows = rows[-1].astype(np.float64), 1
            return
        if start == 0:
            self._total, self._num_rows = np.zeros(rows.shape[1]), 0
        for row in rows:  # one after another: the result of a vectorized sum would depend on the number of rows
            self._total += row
        self._num_rows += len(rows)

    def error(self) -> InternalError | None:
        """Return the error to end the request with if the rows are not finite."""
        if np.isfinite(self._total).all():
            return None
        return InternalError("The model's hidden rows are not finite: its weights or its keys and values are damaged.")

    def vector(self, normalize: bool) -> NDArray[np.float32]:
        """Return the pooled row [hidden_size]; ``normalize`` scales it to length 1 unless all of it is zero."""
        vector = self._total / self._num_rows
        if normalize:
            vector /= np.sqrt(np.sum(vector * vector)) or 1.0
        return vector.astype(np.float32)


def check_embedding(pooling: object, normalize: object) -> None:
    """Raise InvalidArgumentError for an unknown ``pooling``, or a ``normalize`` that is not a bool."""
    check_choice("pooling", pooling, POOLINGS)
    check_flag("normalize", normalize)
