"""Lays a step out as the flat arrays that a program reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from penstock.engine.pages import FREED
from penstock.engine.scheduler import Chunk
from penstock.errors import InternalError
from penstock.lite.core import StepBatch

__all__ = ["lay_out"]


def lay_out(chunks: Sequence[Chunk], *, every_row: bool = False) -> StepBatch:
    """The arrays of one step, T tokens of B requests.

    ``output_rows`` names the last token of each chunk that samples; with ``every_row`` each token of the step.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    for chunk in chunks:
        stop = chunk.start + chunk.num_tokens
        token_ids += chunk.request.tokens(chunk.start, stop)
        positions += range(chunk.start, stop)
    starts = np.fromiter(accumulate((c.num_tokens for c in chunks), initial=0), np.int32, len(chunks) + 1)
    if every_row:
        rows = np.arange(len(token_ids), dtype=np.int32)
    else:
        rows = np.array([end - 1 for c, end in zip(chunks, starts[1:], strict=True) if c.samples], np.int32)
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        request_starts=starts,
        page_tables=_page_tables(chunks),
        output_rows=rows,
    )


def _page_tables(chunks: Sequence[Chunk]) -> np.ndarray:
    """[groups, B, widest]: the page of each 32 positions, -1 where there is none."""
    tables = []
    for chunk in chunks:
        if chunk.request.pages is None:
            raise InternalError(f"batch: request {chunk.request.id} is scheduled without pages")
        tables.append(chunk.request.pages.tables)
    width = max((len(table) for groups in tables for table in groups), default=1)
    arrays = np.full((len(tables[0]), len(tables), max(1, width)), FREED, np.int32)
    for row, groups in enumerate(tables):
        for group, table in enumerate(groups):
            arrays[group, row, : len(table)] = table
    return arrays
