"""Sampling numbers of a step's rows as arrays.  The drawing itself is native code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.request import Request
from penstock.errors import InternalError, InvalidArgumentError, PenstockError
from penstock.lite.arrays import ROW_NOT_FINITE, ROW_OK
from penstock.lite.core import Sampled, Sampling

__all__ = ["accept_row", "sampling_arrays"]


def sampling_arrays(requests: Sequence[Request]) -> Sampling:
    """One row per request that samples in this step, R in all.

    The random number of a token is a function of (seed, sample index, position) alone.
    """
    numbers = [request.sampling for request in requests]
    return Sampling(
        temperature=np.array([n.temperature for n in numbers], np.float32),
        top_k=np.array([n.top_k for n in numbers], np.int32),
        top_p=np.array([n.top_p for n in numbers], np.float32),
        seed=np.array([n.seed for n in numbers], np.uint64),
        counter=np.array([(0, request.num_tokens) for request in requests], np.int64).reshape(-1, 2),
        num_logprobs=np.full(len(numbers), -1, np.int32),
        per_row=True,
    )


def accept_row(request: Request, rows: Sampled, index: int) -> None:
    """Give a request the token of its row; raises when the row failed."""
    if rows.status[index] != ROW_OK:
        raise _row_error(int(rows.status[index]))
    request.accept(int(rows.ids[index]))


def _row_error(status: int) -> PenstockError:
    if status == ROW_NOT_FINITE:
        return InternalError("the model's logits are not finite: its weights or its keys and values are damaged")
    return InvalidArgumentError("no token is allowed here: all are forbidden or outside the allowed ones")
