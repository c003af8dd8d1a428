"""AsyncLLM: the engine under asyncio, with the tokens of the engine alone."""

from __future__ import annotations

import asyncio
import gc
import threading
from types import SimpleNamespace

import pytest

from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import DeadlineError, FileAccessError, InternalError, InvalidArgumentError, QueueFullError
from penstock.llm.async_llm import AsyncLLM, AsyncStream
from penstock.llm.llm import LLM
from tests.support.engine_requests import PARAMS, PROMPTS, prompt_of, run_alone
from tests.support.errors import raises
from tests.support.fake_model import FILES
from tests.support.worker_processes import until

ENDLESS = SamplingParams(max_tokens=90_000, temperature=0, ignore_eos=True)
ROOMY = {"context_len": 100_000, "num_pages": 3200}


def all_free(llm) -> bool:
    return all(pool.num_free == pool.num_pages for pool in llm.engine.scheduler.ledger.pools)


def test_async_streams_match_single_requests(make_llm):
    async def main() -> list[list[int]]:
        async with AsyncLLM(make_llm()) as front:

            async def read(prompt, params) -> list[int]:
                ids: list[int] = []
                async for delta in await front.stream(prompt, params):
                    ids += delta.token_ids
                return ids

            return await asyncio.gather(*(read(p, s) for p, s in zip(PROMPTS, PARAMS, strict=True)))

    assert asyncio.run(main()) == run_alone(make_llm)


def test_text_comes_in_pieces_and_ends_with_a_reason(make_llm):
    params = SamplingParams(max_tokens=100, temperature=1.5, seed=3, ignore_eos=True)
    whole = make_llm(context_len=4096).generate("cat " * 600, params)

    async def main() -> None:
        async with AsyncLLM(make_llm(context_len=4096)) as front:
            stream = await front.stream("cat " * 600, params)
            deltas = [delta async for delta in stream]
            assert "".join(d.text for d in deltas) == whole.text
            assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
            assert stream.result().token_ids == whole.token_ids
            assert (await front.generate("cat " * 600, params)).text == whole.text

    asyncio.run(main())


def test_the_event_loop_goes_on_while_steps_run(make_llm):
    llm = make_llm()
    honest, entered, gate = llm.engine.program.step, threading.Event(), threading.Event()

    def slow(*arguments):
        entered.set()
        gate.wait(600)
        return honest(*arguments)

    llm.engine.program.step = slow

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            task = asyncio.ensure_future(front.generate([5, 6], SamplingParams(max_tokens=5, ignore_eos=True)))
            await until(entered.is_set)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not task.done()
            gate.set()
            assert len((await task).token_ids) == 5

    asyncio.run(main())


@pytest.mark.parametrize("call", ["embed", "score"])
def test_cancelling_a_score_frees_open_and_later_prompts(make_llm, call):
    """Two run and two wait.  The others find the queue full, and would run long after that."""
    llm = make_llm(max_requests=2, options=EngineOptions(max_waiting=2, prefix_cache=False), **ROOMY)
    prompts = [prompt_of(30_000, salt=i) for i in range(9)]
    honest, gate = llm.engine.program.step, threading.Event()

    def step(*arguments):
        if llm.engine.num_steps > 3:
            gate.wait(600)
        return honest(*arguments)

    llm.engine.program.step = step

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            task = asyncio.ensure_future(getattr(front, call)(prompts))
            await until(lambda: llm.engine.figures().num_steps > 3)
            task.cancel()
            for _ in range(10):  # turns of the loop, more than it takes to tell the engine
                await asyncio.sleep(0)
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: all_free(llm) and not llm.engine.has_work)
            await asyncio.sleep(0.1)
            assert not llm.engine.has_work  # none came after it
            assert llm.engine.num_steps < 30_000 // 64
            assert llm.engine.figures().num_finished.keys() == {"abort"}
            llm.engine.check_integrity()

    asyncio.run(main())


def test_cancelling_leaving_and_dropping_free_everything(make_llm):
    llm = make_llm(**ROOMY)

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            task = asyncio.ensure_future(front.generate(prompt_of(40), ENDLESS))
            await until(lambda: front.llm.engine.figures().num_output_tokens > 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: all_free(llm))

            async with await front.stream(prompt_of(40), ENDLESS) as stream:
                await stream.__anext__()
            await until(lambda: all_free(llm))
            assert stream.result().finish_reason == "abort"

            stream = await front.stream(prompt_of(40), ENDLESS)
            await stream.__anext__()
            del stream
            gc.collect()
            await until(lambda: all_free(llm))
            assert not llm.engine.scheduler.has_work
            llm.engine.check_integrity()

    asyncio.run(main())


def test_closing_ends_what_runs(make_llm):
    llm = make_llm(**ROOMY)

    async def main() -> None:
        front = AsyncLLM(llm)
        stream = await front.stream(prompt_of(40), ENDLESS)
        await stream.__anext__()
        reader = asyncio.ensure_future(anext_to_the_end(stream))
        await front.close()
        await front.close()
        assert (await reader).finish_reason == "abort"
        with raises(InvalidArgumentError, code="closed"):
            await front.stream([5])

    async def anext_to_the_end(stream):
        async for _ in stream:
            pass
        return stream.result()

    asyncio.run(main())
    assert not [t for t in threading.enumerate() if t.name == "penstock-engine"]


def test_a_full_queue_refuses_and_errors_reach_their_reader(make_llm):
    llm = make_llm(max_requests=1, options=EngineOptions(max_waiting=2), **ROOMY)

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            first = await front.stream(prompt_of(5), ENDLESS)
            await first.__anext__()
            waiting = [await front.stream(prompt_of(5), SamplingParams(max_tokens=2)) for _ in range(2)]
            with raises(QueueFullError, code="queue_full", match="2 "):
                await front.stream(prompt_of(5))
            llm.engine.program.fail_next = InternalError("planted")
            with pytest.raises(InternalError, match="planted"):
                async for _ in first:
                    pass
            for stream in waiting:
                async for _ in stream:
                    pass
                assert len(stream.result().token_ids) == 2

    asyncio.run(main())


def test_an_engine_error_reaches_all_streams_and_ends_there(make_llm):
    llm = make_llm(**ROOMY)

    def broken(request):
        raise RuntimeError("planted")

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            first = await front.stream(prompt_of(5), ENDLESS)
            await first.__anext__()
            llm.engine.scheduler.add = broken
            second = await front.stream(prompt_of(6), ENDLESS)
            for stream in (first, second):
                with pytest.raises(InternalError, match="planted"):
                    await asyncio.wait_for(read(stream), 600)
            assert len((await front.generate(prompt_of(5), PARAMS[0])).token_ids) == 40

    async def read(stream) -> None:
        async for _ in stream:
            pass

    asyncio.run(main())


def test_a_deadline_ends_a_request_wherever_it_stands(make_llm, later):
    llm = make_llm(max_requests=1, **ROOMY)

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            running = await front.stream(prompt_of(5), ENDLESS, RequestOptions(deadline_s=900))
            await anext(running)
            waiting = await front.stream(prompt_of(5), ENDLESS, RequestOptions(deadline_s=800))
            later.ahead = 901.0
            with raises(DeadlineError, param="deadline_s", match="800 .* waiting"):
                async for _ in waiting:
                    pass
            with raises(DeadlineError, param="deadline_s", match=r"had \d+ tokens"):
                async for _ in running:
                    pass
            assert all_free(llm)

    asyncio.run(main())


def test_a_cancelled_or_repeated_close_closes_once(make_llm):
    async def main(cancel: bool) -> None:
        front = AsyncLLM(make_llm(**ROOMY))
        stream = await front.stream(prompt_of(5), ENDLESS)
        await stream.__anext__()
        first = asyncio.ensure_future(front.close())
        await asyncio.sleep(0)
        if cancel:
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        await front.close()
        assert front.llm.engine.is_closed
        assert stream.result().finish_reason == "abort"
        if not cancel:
            await first

    for cancel in (False, True):
        asyncio.run(main(cancel))


def test_a_cancelled_close_finishes_in_the_background(make_llm):
    llm = make_llm(**ROOMY)

    async def main() -> None:
        front = AsyncLLM(llm)
        await front.stream(prompt_of(5), ENDLESS)
        closing = asyncio.ensure_future(front.close())
        await asyncio.sleep(0)
        closing.cancel()

    asyncio.run(main())
    assert llm.engine.is_closed


def test_chat_and_score_are_those_of_the_llm(make_llm):
    files = FILES | {"chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"}
    messages = [{"role": "user", "content": "the cat"}]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    plain = make_llm(files=files)

    async def main() -> None:
        async with AsyncLLM(make_llm(files=files)) as front:
            stream = await front.stream(prompt_of(5), SamplingParams(max_tokens=90, ignore_eos=True))
            assert (await front.chat(messages, params)).token_ids == plain.chat(messages, params).token_ids
            assert await front.score(["the cat", [5, 6]], 2) == plain.score(["the cat", [5, 6]], 2)
            late = RequestOptions(deadline_s=1e-9)
            for call in (
                front.chat(messages, params, late),
                front.score("the", options=late),
                front.embed("the", options=late),
            ):
                with pytest.raises(DeadlineError):
                    await call
            stream.abort()
        for call in (front.chat(messages), front.score("the")):
            with raises(InvalidArgumentError, code="closed"):
                await call

    asyncio.run(main())


def test_a_second_event_loop_is_refused_and_may_close_it(make_llm):
    llm = make_llm(**ROOMY)

    async def begin():
        front = AsyncLLM(llm)
        await front.stream(prompt_of(5), ENDLESS)
        return front, AsyncStream(SimpleNamespace(is_ready=False), threading.Event())

    async def go_on(front, without_news) -> None:
        calls = (front.stream([5]), front.generate([5]), front.score("the"), front.embed("the"), anext(without_news))
        for call in calls:
            with raises(InvalidArgumentError, code="other_event_loop"):
                await call
        await front.close()

    asyncio.run(go_on(*asyncio.run(begin())))
    assert llm.engine.is_closed


def test_threads_beside_the_event_loop_are_served_too(make_llm):
    llm = make_llm(**ROOMY)
    prompt = prompt_of(50, 4)
    expected = make_llm().logits(prompt).tobytes()

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            stream = await front.stream(prompt_of(5), ENDLESS)
            await stream.__anext__()
            logits = await asyncio.wait_for(asyncio.to_thread(llm.logits, prompt), 600)
            assert logits.tobytes() == expected
            result = await asyncio.wait_for(asyncio.to_thread(llm.generate, prompt, PARAMS[0]), 600)
            assert len(result.token_ids) == 40
            with raises(InvalidArgumentError, param="llm", match="AsyncLLM"):
                AsyncLLM(llm)
            stream.abort()

    asyncio.run(main())


def test_an_aborted_or_abandoned_stream_has_its_result(make_llm):
    async def main() -> None:
        async with AsyncLLM(make_llm(**ROOMY)) as front:
            beside = await front.stream(PROMPTS[0], ENDLESS)  # so that a step is running at any moment
            for leaves in [True, False] * 10:
                async with await front.stream(PROMPTS[1], ENDLESS) as stream:
                    taken = [(await anext(stream)).token_ids for _ in range(3)]
                    if not leaves:
                        stream.abort()
                        assert stream.result().finish_reason == "abort"
                result = stream.result()
                assert result.finish_reason == "abort"
                given = [token for ids in taken for token in ids]
                assert list(result.token_ids[: len(given)]) == given
            beside.abort()

    asyncio.run(main())


def test_an_aborted_stream_has_its_result_during_foreign_steps(make_llm):
    with make_llm(**ROOMY) as llm:
        running = llm.stream(PROMPTS[0], ENDLESS)
        thread = threading.Thread(target=lambda: list(running))
        thread.start()
        for _ in range(20):
            stream = llm.stream(PROMPTS[1], ENDLESS)
            next(stream)
            stream.abort()
            assert stream.result().finish_reason == "abort"
        running.abort()
        thread.join()


def test_an_async_llm_takes_an_open_llm_in_a_loop(make_llm) -> None:
    async def of_a_path() -> AsyncLLM:
        return AsyncLLM("model.psm")

    with raises(FileAccessError, param="model", match=r"model\.psm"):
        asyncio.run(of_a_path())
    with raises(InvalidArgumentError, code="no_event_loop"):
        AsyncLLM(make_llm())


@pytest.mark.parametrize("network", [AsyncLLM, 7, b"net.py:Net"])
def test_a_network_is_given_by_its_file(network: object) -> None:
    with raises(InvalidArgumentError, param="network", match=r"'file\.py:Class'"):
        LLM("model.psm", network=network)


def test_a_network_without_a_model_is_refused_by_name() -> None:
    for make in (LLM, lambda **given: asyncio.run(AsyncLLM.open(**given))):
        with raises(InvalidArgumentError, param="network", match=r"'file\.py:Class', got .*Async"):
            make(network=AsyncLLM)
        with raises(InvalidArgumentError, param="model", match="''"):
            make()
