"""A worker that is being drained hands its requests to others: the same tokens, none lost, repeated or failed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import UnavailableError
from penstock.llm.engine_thread import Started, StepEvent
from penstock.llm.llm import LLM
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.crash_tracker import CrashTracker
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.machines.remote_worker_server import RemoteWorkerSettings
from penstock.serving.workers.moving.delivered import Delivered
from penstock.serving.workers.worker_connection import OpenRequest, WorkerConnection
from tests.support.answer_reader import AnswerReader
from tests.support.joining_worker import TOKEN, joining_worker
from tests.support.worker_processes import CALM, DEMO, OPTIONS, faulty, pids, service, until

NUM_TOKENS = 120
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1, seed=11, top_p=0.9, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=12, n=2, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1, seed=13, echo=True, prompt_logprobs=1, ignore_eos=True),
]
PROMPTS = [[5 + 3 * i, *range(20, 60 + 60 * (i % 3))] for i in range(8)]


@pytest.fixture(scope="module")
def expected() -> list:
    with LLM(DEMO, threads=1) as llm:
        return [llm.generate(prompt, PARAMS[i % 4]) for i, prompt in enumerate(PROMPTS)]


def check(readers: list[AnswerReader], expected: list) -> None:
    for number, reader in enumerate(readers):
        reader.check(expected[number], str(number))
        seed = PARAMS[number % 4].seed
        assert seed is None or reader.seeds[0] == seed


def long(number: int) -> SamplingParams:
    """Parameters of an answer that is not complete when a test has seen enough of it."""
    return replace(PARAMS[number % 4], max_tokens=840)


async def left(readers: list[AnswerReader]) -> None:
    """Leave answers that are not complete."""
    for reader in readers:
        reader.task.cancel()
    ends = await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
    assert {type(end) for end in ends} == {asyncio.CancelledError}


def check_beginnings(readers: list[AnswerReader]) -> None:
    """Compare the answers that remain with those of an engine that runs each alone."""
    with LLM(DEMO, threads=1) as llm:
        for number, reader in enumerate(readers):
            num_tokens = max(len(ids) for ids in reader.ids.values())
            result = llm.generate(PROMPTS[number], replace(PARAMS[number % 4], max_tokens=num_tokens))
            for index, choice in enumerate(result.choices):
                ids = reader.ids[index]
                assert ids == choice.token_ids[: len(ids)], f"request {number}, answer {index}"
                assert reader.logprobs[index] == (choice.logprobs or [])[: len(ids)]
                assert choice.text.startswith(reader.text[index])


async def begun(readers: list[AnswerReader], num_deltas: int = 3) -> None:
    await until(lambda: all(reader.num_deltas >= num_deltas for reader in readers))


def moved(caplog: pytest.LogCaptureFixture) -> int:
    facts = [record.facts for record in caplog.records if hasattr(record, "facts")]
    return sum(one["num_moved"] for one in facts if one["event"] == "requests_moved")


def test_a_worker_too_many_hands_its_requests_over(expected, caplog) -> None:
    caplog.set_level("INFO", "penstock.serving")

    async def main() -> None:
        async with service(num_workers=2, supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            readers = [AnswerReader(backend, PROMPTS[i], PARAMS[i % 4]) for i in range(8)]
            await begun(readers)
            assert min(worker.num_open for worker in backend.workers()) > 0
            backend._group.resize(1)
            await until(lambda: len(pids(backend)) == 1)
            assert not all(reader.task.done() for reader in readers), "it does not wait for the ends of answers"
            assert 0 < moved(caplog) < 8
            await asyncio.gather(*(reader.task for reader in readers))
            check(readers, expected)
            assert backend.deaths() == {"signal": 0, "exit": 0, "hang": 0, "start": 0}

    asyncio.run(main())


def test_requests_move_to_new_workers_of_the_same_weights(caplog) -> None:
    caplog.set_level("INFO", "penstock.serving")

    async def main() -> list[AnswerReader]:
        async with service(supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            readers = [AnswerReader(backend, PROMPTS[i], long(i)) for i in range(4)]
            await begun(readers)
            await running.models.update("demo", str(DEMO))
            assert moved(caplog) == 4
            await begun(readers, max(reader.num_deltas for reader in readers) + 3)
            await until(lambda: backend.figures().num_cached_tokens >= 96 + 160)  # their pages were copied
            await left(readers)
            assert {reader.version for reader in readers} == {1}, "the weights with which the answers began"
            return readers

    check_beginnings(asyncio.run(main()))


def test_other_weights_do_not_go_on_with_an_answer(versions, caplog) -> None:
    caplog.set_level("INFO", "penstock.serving")

    async def main() -> None:
        async with service(supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(versions[0]), "model")
            readers = [AnswerReader(backend, PROMPTS[i], PARAMS[0]) for i in range(2)]
            await begun(readers)
            await running.models.update("model", str(versions[1]))
            assert all(reader.task.done() for reader in readers), "the old workers end after them"
            assert moved(caplog) == 0
            assert [len(reader.ids[0]) for reader in readers] == [NUM_TOKENS] * 2

    asyncio.run(main())


@pytest.mark.long
def test_waiting_requests_and_embeddings_move_too(expected) -> None:
    options = replace(OPTIONS, limits=replace(OPTIONS.limits, max_requests=2))

    async def main() -> None:
        async with service(num_workers=2, supervision=CALM, options=options, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            readers = [AnswerReader(backend, PROMPTS[i], PARAMS[i % 4], priority=i) for i in range(8)]
            await until(lambda: sum(worker.num_open for worker in backend.workers()) == 8)
            await until(lambda: any(reader.num_deltas for reader in readers))
            scores = [asyncio.ensure_future(backend.score(PROMPTS[i], 1)) for i in range(3)]
            await asyncio.sleep(0)
            backend._group.resize(1)
            await asyncio.gather(*(reader.task for reader in readers))
            check(readers, expected)
            assert len({len(one.logprobs) for one in await asyncio.gather(*scores)}) == 3
            await until(lambda: len(pids(backend)) == 1)

    asyncio.run(main())


@pytest.mark.parametrize("victim", ["source", "destination"])
def test_a_worker_that_dies_in_a_move_loses_no_request(expected, victim, tmp_path, caplog) -> None:
    """The destination is killed when it begins to compute what was moved; the source as soon as it handed over."""
    caplog.set_level("INFO", "penstock.serving")
    model = tmp_path / "demo.psm"
    model.symlink_to(DEMO)
    command = faulty("slow+resumed" if victim == "destination" else "slow")

    async def main() -> None:
        async with service(num_workers=2, supervision=CALM, command=command) as running:
            backend = await running.models.load(str(model))
            readers = [AnswerReader(backend, PROMPTS[0], PARAMS[0]), AnswerReader(backend, PROMPTS[1], PARAMS[1])]
            await begun(readers)
            both = backend._group.connections
            assert [one.num_open for one in both] == [1, 1]
            backend._group.resize(1)
            await until(lambda: any(not one.is_ready and not one.num_open for one in both))
            if victim == "source":
                with suppress(ProcessLookupError):
                    os.kill(next(one.pid for one in both if not one.is_ready), signal.SIGKILL)
            await asyncio.gather(*(reader.task for reader in readers))
            for number, reader in enumerate(readers):
                reader.check(expected[number], str(number))
            (told,) = [record.facts for record in caplog.records if "num_moved" in getattr(record, "facts", {})]
            assert told["num_moved"] == 1

    asyncio.run(main())


def test_a_leaving_worker_of_another_machine_hands_over(certificate, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "penstock.serving")
    remote = RemoteWorkerSettings("127.0.0.1", 0, *certificate, TOKEN)

    async def main() -> list[AnswerReader]:
        async with service(supervision=CALM, remote=remote, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            with joining_worker(running.primary.port, tmp_path, certificate[0]) as process:
                await until(lambda: len(backend.workers()) == 2)
                readers = [AnswerReader(backend, PROMPTS[i], long(i)) for i in range(4)]
                await begun(readers)
                assert backend._joined[0].num_open > 0
                process.send_signal(signal.SIGTERM)
                await until(lambda: process.poll() == 0)
                assert moved(caplog) > 0
                await begun(readers, max(reader.num_deltas for reader in readers) + 3)
                await left(readers)
                return readers

    check_beginnings(asyncio.run(main()))


def test_the_last_worker_keeps_its_requests(expected) -> None:
    async def main() -> None:
        async with service(supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            readers = [AnswerReader(backend, PROMPTS[i], PARAMS[i % 4]) for i in range(4)]
            await begun(readers)
            await running.models.unload("demo")
            assert all(reader.task.done() for reader in readers)
            check(readers, expected)

    asyncio.run(main())


def test_times_of_an_answer_of_two_workers() -> None:
    now = [100.0]
    delivered = Delivered(lambda: now[0])
    delivered.note(StepEvent(1, token_ids=[5], started=Started(3, 40, queued_s=0.5, prefill_s=1.5)))
    alone = StepEvent(1, 1, token_ids=[6], finish_reason="stop", timings={"total_s": 9.0})
    delivered.note(alone)
    delivered.has_moved = True
    now[0] = 104.0
    last = StepEvent(2, token_ids=[6, 7], finish_reason="stop", timings={"queued_s": 7.0}, is_last=True)
    delivered.note(last)
    assert alone.timings == {"total_s": 9.0}
    assert last.timings == {
        "queued_s": 0.5, "prefill_s": 1.5, "first_token_s": 2.0, "total_s": 6.0, "per_token_s": 2.0,
        "decode_tokens_per_s": 0.5,
    }  # fmt: skip


def test_a_hand_over_that_ends_late_leaves_the_next_one() -> None:
    """Its worker was lost, and the request moves from the next one already."""

    async def main() -> None:
        def choose(*_: object) -> None:
            raise UnavailableError("no worker")

        routes: Any = SimpleNamespace(crashes=CrashTracker(), choose=choose, can_take=lambda *_: False)
        message = pb.ToWorker(submit=pb.Submit(prompt_ids=[5]))
        request = Failover(routes, [5], RequestOptions(), lambda options: message)
        old, new = (OpenRequest(request.answer, message, lambda error: None) for _ in range(2))
        for current, is_moving in ((old, False), (new, True)):
            request._request, request._is_moving = current, True
            await request._hand_over(WorkerConnection("m", 7), old, for_role=False)
            assert request._is_moving is is_moving

    asyncio.run(main())
