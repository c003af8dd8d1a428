"""The layout of a step: chunks as the flat arrays that a program runs, and whose its hidden rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.native import StepBatch
from penstock.engine.pages import FREED, PageTables
from penstock.engine.request import Request, RequestStatus
from penstock.engine.scheduler import Chunk
from penstock.errors import InternalError

if TYPE_CHECKING:
    from penstock.runtime.program import Program

__all__ = ["BatchLayout", "Step", "take_hidden"]


@dataclass(slots=True)
class Step:
    """The chunks of a step, the pages that their requests had when it began, and the requests that it samples."""

    chunks: list[Chunk]
    pages: list[PageTables | None]
    sampled: list[Request]

    def is_current(self, place: int) -> bool:
        """Return True unless the request of a chunk has ended or was preempted since the step began."""
        request = self.chunks[place].request
        return request.status is RequestStatus.RUNNING and request.pages is self.pages[place]


class BatchLayout:
    """Lays out steps.

    The page tables of running requests are kept as one array with a row for each slot, and only tables that changed are
    written: one in 32 decodes of a step.  A step with the same decodes as the last one reuses its batch object.

    ``num_groups``: number of page groups.  ``max_requests``: number of slots; one more row serves a request without a
    slot.
    ``max_pages``: the longest table.
    """

    def __init__(self, num_groups: int, max_requests: int, max_pages: int) -> None:
        self._tables = np.full((num_groups, max_requests + 1, max(1, max_pages)), FREED, np.int32)
        self._lengths = np.zeros(max_requests + 1, np.int32)
        self._owners: list[PageTables | None] = [None] * (max_requests + 1)
        self._versions = [0] * (max_requests + 1)
        self._decodes: list[tuple[PageTables | None, int]] = []  # of the last step if it had only decodes
        self._batch: StepBatch | None = None

    def lay_out(self, chunks: Sequence[Chunk]) -> StepBatch:
        """Return the arrays of one step: T tokens of B requests.

        ``output_rows`` names the last ``num_rows`` tokens of each chunk.  The arrays are valid until the next call.
        """
        batch = self._batch
        if batch is not None and self._repeats_last(chunks):
            batch.token_ids[:] = [chunk.request.token_at(chunk.start) for chunk in chunks]
            batch.positions[:] = [chunk.start for chunk in chunks]
            return batch
        batch = self._lay_out(chunks)
        only_decodes = all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks)
        tables = [chunk.request.pages for chunk in chunks] if only_decodes else []
        # Tables, not requests, which may end.
        self._decodes = [(pages, pages.version if pages else 0) for pages in tables]
        self._batch = batch if only_decodes else None
        return batch

    def _repeats_last(self, chunks: Sequence[Chunk]) -> bool:
        """Return True if all chunks are decodes of the last step's requests, with unchanged page tables."""
        if len(chunks) != len(self._decodes):
            return False
        for chunk, (pages, version) in zip(chunks, self._decodes, strict=True):
            if pages is None or chunk.request.pages is not pages or pages.version != version:
                return False
            if chunk.num_tokens != 1 or not chunk.samples:
                return False
        return True

    def _lay_out(self, chunks: Sequence[Chunk]) -> StepBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        for chunk in chunks:
            start, request = chunk.start, chunk.request
            if chunk.num_tokens == 1:
                token_ids.append(request.token_at(start))
                positions.append(start)
            else:
                stop = start + chunk.num_tokens
                token_ids += request.tokens(start, stop)
                positions += range(start, stop)
        starts = np.fromiter(accumulate((c.num_tokens for c in chunks), initial=0), np.int32, len(chunks) + 1)
        num_rows = [chunk.num_rows for chunk in chunks]
        if max(num_rows) <= 1:
            rows = starts[1:][np.array(num_rows, bool)] - np.int32(1)
        else:
            pairs = zip(starts[1:].tolist(), num_rows, strict=True)
            rows = np.array([row for stop, n in pairs for row in range(stop - n, stop)], np.int32)
        return StepBatch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            request_starts=starts,
            page_tables=self._page_tables(chunks),
            output_rows=rows,
            hidden=any(chunk.request.pooling is not None for chunk in chunks),
            logits=any(
                chunk.request.prompt_rows is not None or chunk.request.sampling.hook is not None for chunk in chunks
            ),
        )

    def _page_tables(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """Return the page of each 32 positions [groups, B, longest table]; -1 where there is none."""
        slots = []
        for chunk in chunks:
            slot, pages = chunk.request.slot, chunk.request.pages
            if pages is None:
                raise InternalError(f"batch: request {chunk.request.id} was scheduled without pages")
            if self._owners[slot] is not pages or self._versions[slot] != pages.version:
                self._copy(slot, pages)
            slots.append(slot)
        width = int(self._lengths[slots].max())
        arrays = np.empty((len(self._tables), len(slots), width), np.int32)
        for group, table in enumerate(self._tables):
            arrays[group] = table[slots, :width]
        return arrays

    def _copy(self, slot: int, pages: PageTables) -> None:
        old_len = int(self._lengths[slot])
        for group, table in enumerate(pages.tables):
            self._tables[group, slot, : len(table)] = table
            self._tables[group, slot, len(table) : old_len] = FREED
        self._lengths[slot] = max((len(table) for table in pages.tables), default=0)
        self._owners[slot] = pages
        self._versions[slot] = pages.version


def take_hidden(program: Program, chunks: Sequence[Chunk]) -> list[tuple[Request, InternalError | None]]:
    """Hand the hidden rows of a step to the requests with a pooling.

    Returns the requests whose prompt is complete, each with the error in its rows or None.
    """
    if all(chunk.request.pooling is None for chunk in chunks):
        return []
    hidden, start = program.hidden(), 0
    finished: list[tuple[Request, InternalError | None]] = []
    for chunk in chunks:
        stop, pooling = start + chunk.num_tokens, chunk.request.pooling
        if pooling is not None:
            pooling.take(hidden[start:stop], chunk.start)
            if chunk.start + chunk.num_tokens == chunk.request.num_tokens:
                finished.append((chunk.request, pooling.error()))
        start = stop
    return finished
