"""One step as a network sees it: the tokens of several requests, flat."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from penstock.ops.eager import ops

__all__ = ["Batch", "gather_rows"]


class Batch(NamedTuple):
    """T tokens of B requests, all int32.

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
    """Rows ``rows`` [R] of x [T, dim]: [R, dim]."""
    y: Tensor = ops.gather_rows(x, rows)
    return y
