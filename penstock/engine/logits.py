"""The logits of a prompt, one row per position: for tests, scoring and perplexity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.engine import Engine, interrupt_after
from penstock.engine.pages import PageTables
from penstock.engine.request import Request
from penstock.engine.scheduler import Chunk, Scheduler
from penstock.errors import InternalError

__all__ = ["prompt_logits"]


def prompt_logits(engine: Engine, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits [len, vocab] float32; row i scores the token after ``token_ids[: i + 1]``.

    The prompt runs in chunks between the engine's steps, on pages of its own; the youngest running requests make
    room when pages are short, and are computed again.
    """
    ids = engine.check_prompt(token_ids, answer_len=0)
    program, limits = engine.program, engine.program.limits
    chunk_len = min(limits.max_rows or limits.max_requests, engine.scheduler.max_chunk)
    logits = np.empty((len(ids), program.info.vocab_size), np.float32)
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
                    logits[start:stop] = program.logits()
                    scheduler.ledger.slide(pages, stop)
        finally:
            scheduler.ledger.close(pages)
    return logits


def _make_room(scheduler: Scheduler, pages: PageTables, num_tokens: int) -> None:
    while not scheduler.ledger.grow(pages, num_tokens):
        if not scheduler.running:
            raise InternalError(f"no pages for {num_tokens} tokens although nothing runs")
        scheduler.preempt(scheduler.running[-1])
