"""A Program without a model: logits are a hash of the request's whole token history, read back from its pages.

Each step writes its tokens and positions into the pages it was given and reads the history of every output row
back through the page table.  A wrong page, a wrong position, a page given up too early or shared by mistake
changes the hash and so the tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import Context, Sampled, Sampling, StepBatch, sample_logits
from penstock.runtime.program import PAGE_TOKENS, ProgramInfo, ProgramLimits

_MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """One step of a 64-bit hash (splitmix64)."""
    state = (state * 0x9E3779B97F4A7C15 + value + 0x1234567) & _MASK
    state ^= state >> 29
    return (state * 0xBF58476D1CE4E5B9) & _MASK


class FakeProgram:
    """Implements ``penstock.runtime.program.Program`` in numpy; tokens are drawn by the core.

    ``windows``: one per page group; a windowed group hashes the window's tokens alone.
    """

    def __init__(
        self, *, vocab_size: int = 97, context_len: int = 512, windows: tuple[int, ...] = (0,), limits: ProgramLimits
    ) -> None:
        self._info = ProgramInfo(
            network="fake",
            scheme="f32",
            mode="graph",
            vocab_size=vocab_size,
            context_len=context_len,
            page_windows=windows,
            weight_bytes=1,
            weight_bytes_per_token=1,
            num_threads=1,
            cpu_level="generic",
        )
        self._limits = limits
        self._context = Context(1)
        self._pages = np.full((len(windows), limits.num_pages, PAGE_TOKENS, 2), -1, np.int64)
        self._logits = np.zeros((0, vocab_size), np.float32)
        self.closed = False
        self.num_runs = 0
        self.num_tokens_run = 0
        self.fail_next: Exception | None = None
        self.spoil_row: int | None = None  # of the next run: its logits become NaN
        self.hidden_size = 8
        self.spoil_hidden: int | None = None  # of the next hidden rows asked for
        self._batch: StepBatch | None = None

    @property
    def info(self) -> ProgramInfo:
        return replace(self._info, hidden_size=self.hidden_size)

    @property
    def limits(self) -> ProgramLimits:
        return self._limits

    def run(self, batch: StepBatch) -> None:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.num_runs += 1
        self.num_tokens_run += len(batch.token_ids)
        self._check(batch)
        self._batch = batch
        self._logits = np.zeros((len(batch.output_rows), self._info.vocab_size), np.float32)
        rows = {int(token): row for row, token in enumerate(batch.output_rows)}
        for request in range(len(batch.request_starts) - 1):
            tables = batch.page_tables[:, request, :]
            for index in range(batch.request_starts[request], batch.request_starts[request + 1]):
                position, token = int(batch.positions[index]), int(batch.token_ids[index])
                for group in range(len(tables)):
                    page = tables[group, position // PAGE_TOKENS]
                    assert page >= 0, "a token's own page was given up"
                    self._pages[group, page, position % PAGE_TOKENS] = (token, position)
                if index in rows:
                    self._logits[rows[index]] = self._hash_logits(tables, position)
        if self.spoil_row is not None:
            self._logits[self.spoil_row] = np.nan
            self.spoil_row = None

    def _check(self, batch: StepBatch) -> None:
        limits, num_tokens = self._limits, len(batch.token_ids)
        assert 1 <= num_tokens <= limits.max_tokens
        assert len(batch.positions) == num_tokens
        assert len(batch.request_starts) - 1 <= limits.max_requests
        assert len(batch.output_rows) <= (limits.max_rows or limits.max_requests)
        assert batch.request_starts[0] == 0
        assert batch.request_starts[-1] == num_tokens
        assert (np.diff(batch.request_starts) > 0).all()
        assert batch.page_tables.shape[:2] == (len(self._info.page_windows), len(batch.request_starts) - 1)
        assert batch.page_tables.max() < limits.num_pages
        assert ((batch.token_ids >= 0) & (batch.token_ids < self._info.vocab_size)).all()
        for array in (batch.token_ids, batch.positions, batch.request_starts, batch.page_tables, batch.output_rows):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        for group, window in enumerate(self._info.page_windows):
            self._check_group(batch, batch.page_tables[group], window)

    @staticmethod
    def _check_group(batch: StepBatch, tables: NDArray[np.int32], window: int) -> None:
        """A page that the step writes belongs to one request alone."""
        read: set[int] = set()
        written: list[int] = []
        for request, table in enumerate(tables):
            start, stop = batch.request_starts[request : request + 2]
            begin, end = int(batch.positions[start]), int(batch.positions[stop - 1])
            oldest = max(0, begin - window + 1) if window else 0
            first, border = oldest // PAGE_TOKENS, begin // PAGE_TOKENS
            read.update(table[first:border].tolist())
            written += table[border : end // PAGE_TOKENS + 1].tolist()
        assert len(set(written)) == len(written), "two requests write one page"
        assert not read & set(written), "a page is read and written by one step"

    def hidden(self) -> NDArray[np.float32]:
        """Rows of all tokens, made of the last step's pages like the logits."""
        batch = self._batch
        assert batch is not None
        starts = batch.request_starts
        requests = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        rows = [
            np.random.default_rng(self._hash(batch.page_tables[:, request, :], int(position)))
            for request, position in zip(requests, batch.positions, strict=True)
        ]
        hidden = np.array([row.standard_normal(self.hidden_size) for row in rows]).astype(np.float32)
        if self.spoil_hidden is not None:
            hidden[self.spoil_hidden] = np.nan
            self.spoil_hidden = None
        return hidden

    def _hash_logits(self, tables: NDArray[np.int32], position: int) -> NDArray[np.float32]:
        values = np.random.default_rng(self._hash(tables, position)).standard_normal(self._info.vocab_size)
        return (values * 3).astype(np.float32)

    def _hash(self, tables: NDArray[np.int32], position: int) -> int:
        state = 0
        for group, window in enumerate(self._info.page_windows):
            first = max(0, position - window + 1) if window else 0
            for p in range(first, position + 1):
                page = tables[group, p // PAGE_TOKENS]
                assert page >= 0, f"position {p} is in the window of {position} but its page was given up"
                token, stored = self._pages[group, page, p % PAGE_TOKENS]
                assert stored == p, f"position {p} holds what was written for position {stored}"
                state = mix(mix(state, int(token)), group)
        return state

    def logits(self) -> NDArray[np.float32]:
        return self._logits

    def sample(self, sampling: Sampling) -> Sampled:
        assert len(sampling.temperature) == len(self._logits)
        return sample_logits(self._context, self._logits, sampling)

    def step(self, batch: StepBatch, sampling: Sampling) -> Sampled:
        self.run(batch)
        return self.sample(sampling)

    def page_memory(self) -> list[list[NDArray[np.uint8]]]:
        return [[pages.reshape(len(pages), -1).view(np.uint8)] for pages in self._pages]

    def end_exchanges(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
