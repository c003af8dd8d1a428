"""Steps with the same decodes reuse their arrays, with the values that new arrays would have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.engine.batch import BatchLayout
from penstock.engine.pages import PageLedger, PageTables
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request
from penstock.engine.sampler import SamplingRows
from penstock.engine.scheduler import Chunk
from penstock.runtime.program import PAGE_TOKENS

VOCAB = 97


def running(number: int, num_tokens: int, ledger: PageLedger, **sampling: object) -> Request:
    resolved = replace(ResolvedSampling(), seed=number, **sampling)  # type: ignore[arg-type]
    request = Request(number, list(range(1, num_tokens + 1)), 100, resolved)
    request.slot, request.pages = number, ledger.open()
    assert ledger.grow(request.pages, num_tokens)
    return request


def decode(request: Request, ledger: PageLedger) -> Chunk:
    """Append a token and return the chunk that computes it."""
    request.output_ids.append(7 * request.num_tokens % VOCAB)
    assert request.pages is not None
    assert ledger.grow(request.pages, request.num_tokens)
    return Chunk(request, request.num_tokens - 1, 1, True, 1)


def same_arrays(left: object, right: object, names: tuple[str, ...]) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


BATCH = ("token_ids", "positions", "request_starts", "page_tables", "output_rows")
ROWS = ("temperature", "top_k", "top_p", "seed", "counter", "num_logprobs")


def test_decodes_reuse_the_batch_until_a_new_page():
    ledger = PageLedger(64, (0, 40))
    requests = [running(0, 3, ledger), running(1, PAGE_TOKENS - 5, ledger)]
    layout, batches = BatchLayout(2, 4, 8), []
    for _ in range(2 * PAGE_TOKENS):
        chunks = [decode(request, ledger) for request in requests]
        batch = layout.lay_out(chunks)
        assert same_arrays(batch, BatchLayout(2, 4, 8).lay_out(chunks), BATCH)
        batches.append(batch)
    assert len({id(batch) for batch in batches}) == 1 + 4  # each request begins two pages


@pytest.mark.parametrize("change", ["order", "fewer", "prompt", "silent", "pages"])
def test_a_step_of_another_kind_is_laid_out_afresh(change):
    ledger = PageLedger(64, (0,))
    requests = [running(0, 3, ledger), running(1, 9, ledger)]
    layout = BatchLayout(1, 4, 8)
    first = layout.lay_out([decode(request, ledger) for request in requests])
    chunks = [decode(request, ledger) for request in requests]
    if change == "order":
        chunks.reverse()
    elif change == "fewer":
        chunks.pop()
    elif change == "prompt":
        chunks[0] = Chunk(requests[0], 1, requests[0].num_tokens - 1, True, 1)
    elif change == "silent":
        chunks[0] = replace(chunks[0], samples=False, num_rows=0)
    else:  # preempted in between, and computed again in as many other pages
        old = requests[0].pages
        assert old is not None
        requests[0].pages = PageTables([[page + 9 for page in old.tables[0]]], version=old.version)
    again = layout.lay_out(chunks)
    assert again is not first
    assert same_arrays(again, BatchLayout(1, 4, 8).lay_out(chunks), BATCH)
    assert not same_arrays(again, first, BATCH)


def test_rows_of_the_same_requests_reuse_their_arrays():
    ledger = PageLedger(64, (0,))
    requests = [running(0, 3, ledger, temperature=0.5), running(1, 9, ledger)]
    rows = SamplingRows(VOCAB)
    first = rows.of(requests)
    for request in requests:
        decode(request, ledger)
    again = rows.of(requests)
    assert again is first
    assert same_arrays(again, SamplingRows(VOCAB).of(requests), ROWS)
    assert again.counter.tolist() == [[0, 4], [0, 10]]
    assert rows.of(requests[::-1]) is not first


def test_rows_with_penalties_are_made_afresh():
    """Their history grows with each token."""
    ledger = PageLedger(64, (0,))
    request = running(0, 3, ledger, repetition_penalty=1.5)
    rows = SamplingRows(VOCAB)
    first = rows.of([request])
    decode(request, ledger)
    again = rows.of([request])
    assert first.penalties is not None
    assert again.penalties is not None
    assert len(again.penalties.history) == len(first.penalties.history) + 1
