"""Every position of a prompt: its logits, or how likely its tokens are."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from penstock.engine.engine import Engine
from penstock.engine.interrupt import interrupt_after
from penstock.engine.pages import PageTables
from penstock.engine.request import Request, TokenLogprobs
from penstock.engine.sampler import row_error, row_logprobs
from penstock.engine.scheduler import Chunk, Scheduler
from penstock.errors import InternalError
from penstock.lite.arrays import ROW_OK
from penstock.lite.core import Sampling

__all__ = ["prompt_logits", "prompt_logprobs"]


def prompt_logits(engine: Engine, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits [len, vocab] float32; row i scores the token after ``token_ids[: i + 1]``."""
    ids = engine.check_prompt(token_ids, answer_len=0)
    logits = np.empty((len(ids), engine.program.info.vocab_size), np.float32)
    with closing(_prompt_steps(engine, ids)) as steps:
        for start, stop in steps:
            logits[start:stop] = engine.program.logits()
    return logits


def prompt_logprobs(engine: Engine, token_ids: Sequence[int], num_top: int = 0) -> list[TokenLogprobs | None]:
    """The log-probability of each token given those before, with the ``num_top`` likeliest; None for the first.

    The logits themselves stay in native memory.  InternalError when they are not finite.
    """
    ids = engine.check_prompt(token_ids, answer_len=0)
    found: list[TokenLogprobs | None] = [None]
    with closing(_prompt_steps(engine, ids)) as steps:
        for start, stop in steps:
            rows = engine.program.sample(_scoring(ids[start + 1 : stop + 1], stop - start, num_top))
            for row in range(min(stop, len(ids) - 1) - start):
                if rows.status[row] != ROW_OK:
                    raise row_error(int(rows.status[row]))
                found.append(row_logprobs(rows, row, num_top))
    return found


def _scoring(targets: Sequence[int], num_rows: int, num_top: int) -> Sampling:
    """Rows that score a token each; the row of the last token has none and is not looked at."""
    target = np.zeros(num_rows, np.int32)
    target[: len(targets)] = targets
    return Sampling(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        seed=np.zeros(num_rows, np.uint64),
        counter=np.zeros((num_rows, 2), np.int64),
        target=target,
        num_logprobs=np.full(num_rows, num_top, np.int32),
        per_row=True,
    )


def _prompt_steps(engine: Engine, ids: list[int]) -> Generator[tuple[int, int]]:
    """Runs the prompt in chunks between the engine's steps, on pages of its own; yields each chunk while its logits are
    there.  The youngest running requests make room when pages are short, and are computed again.
    """
    program, limits = engine.program, engine.program.limits
    chunk_len = min(limits.max_rows or limits.max_requests, engine.scheduler.max_chunk)
    with engine.between_steps() as scheduler:
        pages = scheduler.ledger.open()
        try:
            for start in range(0, len(ids), chunk_len):
                stop = min(len(ids), start + chunk_len)
                with interrupt_after():
                    _make_room(scheduler, pages, stop)
                    request = Request(-1, ids, 0, num_computed=start, pages=pages)
                    chunk = Chunk(request, start, stop - start, samples=False)
                    program.run(engine.layout.lay_out([chunk], every_row=True))
                yield start, stop
                scheduler.ledger.slide(pages, stop)
        finally:
            scheduler.ledger.close(pages)


def _make_room(scheduler: Scheduler, pages: PageTables, num_tokens: int) -> None:
    while not scheduler.ledger.grow(pages, num_tokens):
        if not scheduler.running:
            raise InternalError(f"no pages for {num_tokens} tokens although nothing runs")
        scheduler.preempt(scheduler.running[-1])
