"""LocalBackend returns what the engine returns, and ended requests free the engine's memory."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock.engine.options import EngineOptions
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, NotFoundError, QueueFullError, UnavailableError
from penstock.llm.local_backend import LocalBackend, LocalModels
from tests.support.errors import raises
from tests.support.worker_processes import until

ENDLESS = SamplingParams(max_tokens=90_000, temperature=0, ignore_eos=True)
ROOMY = {"context_len": 100_000, "num_pages": 3200}


def all_free(llm) -> bool:
    return all(pool.num_free == pool.num_pages for pool in llm.engine.scheduler.ledger.pools)


def test_an_answer_is_the_engines(make_llm):
    params = SamplingParams(max_tokens=40, temperature=1, seed=3, ignore_eos=True, logprobs=1, n=2)
    whole = make_llm().generate("the cat sat", params)

    async def main() -> None:
        backend = LocalBackend(make_llm(), "cat", "/models/cat.psm")
        assert backend.tokenizer is not None
        assert (backend.card.source, backend.card.has_chat_template) == ("cat.psm", False)
        text, ids, logprobs, reasons = ["", ""], [[], []], [[], []], ["", ""]
        async with await backend.submit(backend.tokenizer.encode("the cat sat"), params) as answer:
            async for delta in answer:
                text[delta.index] += delta.text
                ids[delta.index] += delta.token_ids
                logprobs[delta.index] += delta.logprobs or []
                reasons[delta.index] = delta.finish_reason or ""
        assert text == [choice.text for choice in whole.choices]
        assert ids == [choice.token_ids for choice in whole.choices]
        assert logprobs == [choice.logprobs for choice in whole.choices]
        assert reasons == ["length", "length"]
        assert answer.seeds == {index: choice.seed for index, choice in enumerate(whole.choices)}
        assert answer.num_prompt_tokens == len(whole.prompt_token_ids)
        assert answer.timings["total_s"] > 0
        await backend.close()

    asyncio.run(main())


def test_leaving_cancelling_and_closing_free_the_memory(make_llm):
    llm = make_llm(**ROOMY)

    async def main() -> None:
        backend = LocalBackend(llm)
        async with await backend.submit([5, 6], ENDLESS) as answer:
            await anext(answer)
        await until(lambda: all_free(llm))

        async def read() -> None:
            async for _ in await backend.submit([5, 6], ENDLESS):
                pass

        task = asyncio.ensure_future(read())
        await until(lambda: llm.engine.scheduler.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: all_free(llm))
        answer = await backend.submit([5, 6], ENDLESS)
        await anext(answer)
        await backend.close()
        reasons = [delta.finish_reason async for delta in answer]
        assert reasons[-1] == "abort"
        with pytest.raises(UnavailableError):
            await backend.submit([5, 6], ENDLESS)

    asyncio.run(main())


def test_a_slow_reader_gets_larger_pieces(make_llm):
    params = SamplingParams(max_tokens=50, temperature=1, seed=3, ignore_eos=True, logprobs=0)

    async def main() -> None:
        backend = LocalBackend(make_llm())
        answer = await backend.submit([5, 6], params)
        await until(lambda: answer.is_over)
        deltas = [delta async for delta in answer]
        assert [len(delta.token_ids) for delta in deltas] == [50]
        assert len(deltas[0].logprobs or []) == 50
        assert deltas[0].finish_reason == "length"
        await backend.close()

    asyncio.run(main())


def test_scores_embeddings_and_refusals(make_llm):
    ids = list(range(5, 25))
    with make_llm() as alone:
        score, vectors = alone.score(ids, 1), [one.vector for one in alone.embed([ids, ids[3:]])]

    async def main() -> None:
        backend = LocalBackend(make_llm(options=EngineOptions(max_waiting=1), max_requests=1, **ROOMY))
        assert (await backend.score(ids, 1)).logprobs == score.logprobs
        found = await backend.embed([ids[3:]])
        np.testing.assert_array_equal(found[0].vector, vectors[1])
        with raises(InvalidArgumentError, param="prompt", match="10000"):
            await backend.submit([10_000], ENDLESS)
        with raises(InvalidArgumentError, param="pooling"):
            await backend.embed([ids], "sum")
        assert backend.has_room
        first, second = await backend.submit([5], ENDLESS), await backend.submit([6], ENDLESS)
        assert not backend.has_room
        with pytest.raises(QueueFullError):
            await backend.submit([7], ENDLESS)
        await first.aclose()
        await second.aclose()
        await backend.close()

    asyncio.run(main())


def test_models_by_name(make_llm):
    async def main() -> None:
        models = LocalModels([LocalBackend(make_llm(), "a"), LocalBackend(make_llm(), "b")])
        assert [one.name for one in models.list()] == ["a", "b"]
        assert models.get("b").card.name == "b"
        await models.unload("b")
        with raises(NotFoundError, match="'b'"):
            models.get("b")
        with raises(InvalidArgumentError, param="name"):
            await models.load("x.psm", "a")
        await models.close()
        assert models.is_draining

    asyncio.run(main())
