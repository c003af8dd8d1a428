"""The input of a network: one step, with the tokens of several requests in flat arrays."""

from __future__ import annotations

from typing import NamedTuple

from penstock.nn.base import Tensor
from penstock.ops.call import ops

__all__ = ["Batch", "gather_rows"]


class Batch(NamedTuple):
    """T tokens of B requests; every tensor is int32.

    token_ids       [T]
    positions       [T]; ascending by one within a request
    request_starts  [B + 1]; first 0, last T
    page_tables     [page groups, B, width]; the pages that hold a request's keys and values
    output_rows     [R]; the tokens whose logits are wanted
    """

    token_ids: Tensor
    positions: Tensor
    request_starts: Tensor
    page_tables: Tensor
    output_rows: Tensor


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of x [T, dim] that ``rows`` [R] selects: [R, dim]."""
    y: Tensor = ops.gather_rows(x, rows)
    return y
