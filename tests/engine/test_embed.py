"""Embeddings through the engine: the same vector in any batch, and no pages left behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock.engine.options import EngineOptions
from penstock.engine.params import SamplingParams
from penstock.engine.pooling import Pooling
from penstock.errors import InternalError, InvalidArgumentError, UnsupportedError
from penstock.llm.async_llm import AsyncLLM
from penstock.llm.llm import LLM
from tests.support.engine_requests import PROMPTS, params_of, prompt_of
from tests.support.errors import raises


def vectors(llm: LLM, prompts=PROMPTS, pooling: str = "mean") -> list[bytes]:
    return [one.vector.tobytes() for one in llm.embed(prompts, pooling)]


def alone(make_llm, pooling: str = "mean", **options) -> list[bytes]:
    llm = make_llm(max_tokens=512, **options)
    return [llm.embed(prompt, pooling).vector.tobytes() for prompt in PROMPTS]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("windows", [pytest.param((0,), marks=pytest.mark.long), (0, 33)])
def test_batch_chunks_and_preemption_match_single(make_llm, pooling, windows):
    expected = alone(make_llm, pooling, windows=windows)
    assert len(set(expected)) == len(PROMPTS)
    assert vectors(make_llm(windows=windows), PROMPTS, pooling) == expected
    assert vectors(make_llm(windows=windows, max_tokens=8, max_chunk=7), PROMPTS, pooling) == expected
    short = make_llm(windows=windows, num_pages=12, context_len=384, max_chunk=20)
    llm, beside = short, [short.stream(prompt_of(20, 90 + i), params_of(0, 200)) for i in range(3)]
    assert vectors(llm, PROMPTS, pooling) == expected
    for stream in beside:
        assert list(stream)
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("width", [2, 3, 17, 64, 384])
@pytest.mark.parametrize("count", [1, 2, 9, 130, 600])
def test_the_mean_adds_row_by_row_however_chunked(width, count):
    draw = np.random.default_rng(width * count)
    rows = (draw.standard_normal((count, width)) * np.exp(5 * draw.standard_normal((count, width)))).astype(np.float32)
    total = np.zeros(width)
    for row in rows:
        total += row
    for chunk in (1, 7, 64, 1000):
        mean = Pooling("mean")
        for start in range(0, count, chunk):
            mean.take(rows[start : start + chunk], start)
        assert mean.vector().tobytes() == (total / count).astype(np.float32).tobytes()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_cached_matches_uncached(make_llm, pooling):
    """The last row is computed after shared pages.  The mean needs every row, so it shares none but leaves its own."""
    llm = make_llm(max_tokens=512)
    first, second = llm.embed(PROMPTS, pooling), llm.embed(PROMPTS, pooling)
    assert [one.vector.tobytes() for one in first] == alone(make_llm, pooling)
    assert [one.vector.tobytes() for one in second] == [one.vector.tobytes() for one in first]
    shared = [(len(prompt) - 1) // 32 * 32 for prompt in PROMPTS]
    assert [one.num_cached_tokens for one in second] == ([0] * len(PROMPTS) if pooling == "mean" else shared)
    result = llm.generate(PROMPTS[-1], SamplingParams(max_tokens=1))
    assert result.num_cached_tokens == shared[-1]


def test_pooling_takes_mean_or_last_and_normalizes(make_llm):
    llm = make_llm()
    rows = np.concatenate([llm.embed(PROMPTS[5][: i + 1], "last").vector[None] for i in range(len(PROMPTS[5]))])
    mean = llm.embed(PROMPTS[5])
    assert mean.token_ids == PROMPTS[5]
    assert mean.vector.dtype == np.float32
    np.testing.assert_allclose(mean.vector, rows.mean(0), rtol=1e-6, atol=1e-7)
    unit = llm.embed(PROMPTS[5], normalize=True).vector
    np.testing.assert_allclose(unit, mean.vector / np.linalg.norm(mean.vector), rtol=1e-6)
    assert not Pooled(np.zeros((2, 3), np.float32)).vector(True).any()


class Pooled(Pooling):
    """Rows that were collected."""

    def __init__(self, rows) -> None:
        super().__init__("mean")
        self.take(rows, 0)


def test_answers_go_on_beside_embeddings(make_llm):
    expected = make_llm().generate(PROMPTS, [params_of(i) for i in range(len(PROMPTS))])
    llm = make_llm()
    streams = [llm.stream(prompt, params_of(i)) for i, prompt in enumerate(PROMPTS)]
    assert vectors(llm) == alone(make_llm)
    assert [[t for delta in stream for t in delta.token_ids] for stream in streams] == [r.token_ids for r in expected]


def test_more_prompts_than_may_wait_are_fed_as_room_comes(make_llm):
    llm = make_llm(max_requests=2, options=EngineOptions(max_waiting=3))
    prompts = [prompt_of(5, salt) for salt in range(40)]
    assert vectors(llm, prompts) == vectors(make_llm(), prompts)
    beside = [llm.stream(prompt_of(9, salt), params_of(0, 30)) for salt in range(3)]  # the queue is full
    assert vectors(llm, prompts) == vectors(make_llm(), prompts)
    assert [sum(len(delta.token_ids) for delta in stream) for stream in beside] == [30] * 3


def test_texts_are_embedded_up_to_a_whole_context(make_llm):
    llm = make_llm()
    one = llm.embed("the cat")
    assert one.vector.tobytes() == llm.embed(llm.tokenizer.encode("the cat")).vector.tobytes()
    assert llm.embed([3] * llm.engine.max_len).vector.shape == (8,)


def test_wrong_embedding_arguments_are_refused_by_name(make_llm):
    llm = make_llm()
    with raises(InvalidArgumentError, param="pooling", match="'sum'"):
        llm.embed("the", "sum")
    with raises(InvalidArgumentError, param="normalize"):
        llm.embed("the", normalize=1)
    with raises(InvalidArgumentError, param="prompt", match="holds 512"):
        llm.embed([3] * 513)
    llm.engine.program.hidden_size = 0
    with raises(UnsupportedError, param="embed"):
        llm.embed("the")


def test_damaged_rows_end_only_their_request(make_llm):
    llm = make_llm()
    llm.engine.program.spoil_hidden = 40  # a row of the second prompt
    stream = llm.stream(prompt_of(30, 7), params_of(0, 3))
    with pytest.raises(InternalError, match="hidden rows"):
        llm.embed([prompt_of(5, 1), prompt_of(20, 2)])
    assert sum(len(delta.token_ids) for delta in stream) == 3
    assert np.isfinite(llm.embed(prompt_of(20, 2)).vector).all()


def test_async_embeddings_are_those_of_the_engine(make_llm):
    async def main() -> list[bytes]:
        async with AsyncLLM(make_llm()) as front:
            stream = await front.stream(prompt_of(9), params_of(0, 60))
            found = [one.vector.tobytes() for one in await front.embed(PROMPTS)]
            async for _ in stream:
                pass
            assert len(stream.result().token_ids) == 60
            return found

    assert asyncio.run(main()) == alone(make_llm)
