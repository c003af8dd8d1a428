"""Pooling: the hidden rows of a prompt as one vector.

A request with a pooling goes through the scheduler like any other and ends with its prompt.  Its rows are added one by
one in the order of its tokens, so the vector has the same bits however the prompt was chunked or batched.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.pooling import head as pooling_head
from penstock.checkpoint.pooling.head import ALL_ROWS, PoolingHead
from penstock.config import check_choice, check_flag, check_integer
from penstock.errors import InternalError, InvalidArgumentError, UnsupportedError

__all__ = ["POOLINGS", "Pooling", "check_embedding", "check_heads", "keeps_rows", "shorten"]

POOLINGS: Final = ("auto", *pooling_head.POOLINGS, ALL_ROWS)


class Pooling:
    """Collects a request's hidden rows: the "mean" or the "max" of all rows, the "last" one or the first ("cls").

    "auto" is what ``head`` says, with the layers behind it; "mean" without a head.  "all" keeps the rows apart.
    """

    def __init__(self, kind: str, head: PoolingHead | None = None) -> None:
        self._head = (head or PoolingHead()) if kind == "auto" else PoolingHead(kind)
        self._kind = self._head.pooling
        self.takes_all = self._kind != "last"
        self._total: NDArray[np.floating[Any]] = np.zeros(0)
        self._num_rows = 0

    def take(self, rows: NDArray[np.floating[Any]], start: int) -> None:
        """Add rows [len, hidden_size] of the tokens from position ``start`` on.

        ``start`` 0 begins again, because a preempted request computes its prompt again.
        """
        if self._head.pools_layers:
            rows = np.array([self._head.apply(row.astype(np.float64)) for row in rows])
        if self._kind == ALL_ROWS:
            self._total = np.concatenate((self._total, rows)) if start else np.array(rows)
        elif self._kind == "last" or (self._kind == "cls" and start == 0):
            self._total, self._num_rows = rows[-1 if self._kind == "last" else 0].astype(np.float64), 1
        elif self._kind == "max":
            highest = rows.max(axis=0).astype(np.float64)
            self._total, self._num_rows = highest if start == 0 else np.maximum(self._total, highest), 1
        elif self._kind == "mean":
            # NumPy adds along the first axis row by row, so the sum does not depend on how the rows were chunked.
            self._num_rows = len(rows) + (self._num_rows if start else 0)
            if start:
                rows = np.concatenate((self._total[None], rows))
            self._total = np.add.reduce(rows, axis=0, dtype=np.float64)

    def error(self) -> InternalError | None:
        """Return the error to end the request with if the rows are not finite."""
        if np.isfinite(self._total).all():
            return None
        return InternalError("The model's hidden rows are not finite: its weights or its keys and values are damaged.")

    def vector(self, normalize: bool | None = None) -> NDArray[np.float32]:
        """Return the vector: the pooled row [hidden_size], or what the layers of the head make of it.

        With "all" rows it is a matrix, with a row for each token.  ``normalize`` scales each row to length 1 unless all
        of it is zero; None does what the head says.
        """
        if self._kind == ALL_ROWS:
            is_unit = self._head.normalize if normalize is None else normalize
            rows = [self._head.apply(row.astype(np.float64)) for row in self._total]
            return np.array([_unit(row) for row in rows] if is_unit else rows, np.float32)
        pooled = self._total / self._num_rows
        vector = pooled if self._head.pools_layers else self._head.apply(pooled)
        if self._head.normalize if normalize is None else normalize:
            vector = _unit(vector)
        return vector.astype(np.float32)


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    unit: NDArray[np.float64] = vector / (np.sqrt(np.sum(vector * vector)) or 1.0)
    return unit


def shorten(vector: NDArray[np.float32], dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """Return the first ``dimensions`` elements of a vector, for models trained so (Kusupati et al., arXiv 2205.13147).

    ``normalize`` scales them to length 1.  None returns the whole vector.  Raises InvalidArgumentError for a number
    that is not from 1 to the length of the vector.
    """
    if dimensions is None:
        return vector
    if vector.ndim > 1:
        raise InvalidArgumentError(
            "dimensions: expected None with pooling='all', which makes no vector", param="dimensions"
        )
    short = vector[: check_integer("dimensions", dimensions, 1, len(vector))]
    return _unit(short.astype(np.float64)).astype(np.float32) if normalize else short.copy()


def keeps_rows(kind: str, head: PoolingHead | None) -> bool:
    """Return True for a pooling whose result has a row for each token."""
    return (head.pooling if kind == "auto" and head is not None else kind) == ALL_ROWS


def check_heads(pooling: Pooling | None, hidden_size: int, has_language_head: bool) -> None:
    """Raise UnsupportedError for a pooling without hidden rows, and for none without a language-model head."""
    if pooling is None and not has_language_head:
        raise UnsupportedError(
            "The model has no language-model head: it has no logits of tokens. Use embed, classify or rerank.",
            param="model",
        )
    if pooling is not None and not hidden_size:
        raise UnsupportedError(
            "embed: this network has no hidden rows, because its head does not select rows from those of all tokens",
            param="embed",
        )


def check_embedding(pooling: object, normalize: Any) -> None:
    """Raise InvalidArgumentError for an unknown ``pooling``, or a ``normalize`` that is not a bool or None."""
    check_choice("pooling", pooling, POOLINGS)
    if normalize is not None:
        check_flag("normalize", normalize)
