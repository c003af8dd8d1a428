"""A worker is lost after the first tokens of its answers: another one goes on, and the tokens are the same."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import InternalError, UnavailableError
from penstock.llm.llm import LLM
from penstock.serving.metrics import Metrics
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers import crash_tracker, remote_model
from penstock.serving.workers.crash_tracker import MAX_KILLS
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_connection import WorkerConnection
from penstock.serving.workers.worker_roles import DECODE, PREFILL, WorkerRoles
from tests.support.answer_reader import AnswerReader
from tests.support.errors import raises
from tests.support.faulty_worker import LATER
from tests.support.worker_processes import CALM, DEMO, HASTY, faulty, pids, service, tokens_of, until, wait_for_causes

GREEDY = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=11)
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "minLength": 60, "maxLength": 64} for name in ("first", "second")},
    "required": ["first", "second"],
    "additionalProperties": False,
}
CASES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "penalties": replace(SEEDED, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2, top_p=0.95),
    "several answers": replace(SEEDED, n=2, seed=12, min_p=0.02),
    "log-probabilities": replace(SEEDED, logprobs=2, prompt_logprobs=1, echo=True),
    "grammar": replace(SEEDED, json_schema=SCHEMA, max_tokens=300, ignore_eos=False),
    "regex": replace(SEEDED, regex="([a-z]{3} ){60}", seed=3, max_tokens=200, ignore_eos=False),
    "min_tokens": SamplingParams(max_tokens=200, min_tokens=150, temperature=1.5, seed=4),
    "n-grams": replace(GREEDY, no_repeat_ngram_size=2, logit_bias={300: 2.0}),
}
PROMPTS = {name: [5 + 3 * i, *range(20, 40 + 60 * (i % 2))] for i, name in enumerate(CASES)}
UNSEEDED = replace(GREEDY, temperature=1.0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too, a request waits for the cause of a loss and for the next worker."""
    wait_for_causes(monkeypatch)
    monkeypatch.setattr(remote_model, "_EMPTY_S", 600.0)


async def begun(readers: list[AnswerReader], num_tokens: int = 3) -> None:
    """Wait until each answer has so many tokens.  Deltas merge while a reader is behind, and say less."""
    await until(lambda: all(one.task.done() or sum(map(len, one.ids.values())) >= num_tokens for one in readers))


async def kill(backend: RemoteBackend, connection: WorkerConnection | None = None) -> int:
    """Kill a worker, by default the only one, and wait until the primary knows.

    Returns the number of requests that it had; on a busy machine some may have ended.
    """
    lost = connection or backend._connections[0]
    os.kill(lost.pid, signal.SIGKILL)
    await until(lost.gone.is_set)
    return lost.num_lost


def test_answers_go_on_in_the_next_worker() -> None:
    """The stop string is held back when its worker is killed, and complete or broken off later."""
    prompt, stop_prompt = PROMPTS["greedy"], [300, 301, 302]
    with LLM(DEMO, threads=1) as llm:
        text = llm.generate(stop_prompt, SEEDED).text
        stops = {"stop": text[1:-8], "no stop": text[1:-8] + "\0"}
        cases = CASES | {name: replace(SEEDED, stop=[stop]) for name, stop in stops.items()}
        prompts = PROMPTS | dict.fromkeys(stops, stop_prompt)
        expected = {name: llm.generate(prompts[name], params) for name, params in cases.items()}
        assert (expected["stop"].text, expected["no stop"].text) == (text[:1], text)

    async def main() -> AnswerReader:
        async with service(supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            readers = {name: AnswerReader(backend, prompts[name], params) for name, params in cases.items()}
            unseeded = AnswerReader(backend, prompt, UNSEEDED)
            num_continued = 0
            for num_tokens in (3, 8):
                await begun([*readers.values(), unseeded], num_tokens)
                num_continued += await kill(backend)
                await until(lambda num=num_continued: backend.lost_requests()["continued"] == num)
            await asyncio.gather(unseeded.task, *(one.task for one in readers.values()))
            for name, reader in readers.items():
                reader.check(expected[name], name)
            assert num_continued > 0
            assert backend.lost_requests() == {"retried": 0, "continued": num_continued, "failed": 0}
            text = Metrics(running.models).text().decode()
            line = 'penstock:lost_worker_requests_total{model_name="demo",outcome="continued"}'
            assert f"{line} {num_continued}" in text
            return unseeded

    unseeded = asyncio.run(main())
    with LLM(DEMO, threads=1) as llm:
        unseeded.check(llm.generate(prompt, replace(UNSEEDED, seed=unseeded.seeds[0])), "unseeded")


def test_an_answer_that_shows_nothing_yet_is_sent_again() -> None:
    """The best of several answers is known at their end."""
    params = replace(SEEDED, best_of=3, n=1)

    async def main() -> None:
        async with service(supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            reader = AnswerReader(backend, [5, 6], params)
            await until(lambda: reader.task.done() or getattr(backend.figures(), "num_running", 0) == 3)
            num_retried = await kill(backend)
            await reader.task
            reader.check(expected)
            assert backend.lost_requests() == {"retried": num_retried, "continued": 0, "failed": 0}

    with LLM(DEMO, threads=1) as llm:
        expected = llm.generate([5, 6], params)
    asyncio.run(main())


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_answers_of_both_roles_go_on(role: str) -> None:
    """The prompts are long enough to be handed over after the first token."""
    prompts = [[5 + i, *range(20, 120)] for i in range(4)]

    async def main() -> None:
        async with service(roles=WorkerRoles(1, 1), supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            prefill = next(one for one in backend._connections if one.role == PREFILL)
            decode = next(one for one in backend._connections if one.role == DECODE)
            decode.status = "draining" if role == PREFILL else "ready"  # the answers stay where they began
            readers = [AnswerReader(backend, prompt, SEEDED) for prompt in prompts]
            lost = prefill if role == PREFILL else decode
            await until(lambda: lost.num_open == sum(not one.task.done() for one in readers))
            await begun(readers)
            decode.status = "ready"
            num_continued = await kill(backend, lost)
            await asyncio.gather(*(one.task for one in readers))
            for reader, result in zip(readers, expected, strict=True):
                reader.check(result)
            assert backend.lost_requests() == {"retried": 0, "continued": num_continued, "failed": 0}

    with LLM(DEMO, threads=1) as llm:
        expected = llm.generate(prompts, SEEDED)
    asyncio.run(main())


def test_a_worker_lost_right_after_its_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two are lost before the request has learned that they accepted it; the first one is for prefill."""
    real_put, num_lost = WorkerConnection._put, 0

    def put(connection: WorkerConnection, message: pb.StepEvent) -> None:
        nonlocal num_lost
        real_put(connection, message)
        if connection.num_open and num_lost < 2:
            num_lost += 1
            os.kill(connection.pid, signal.SIGKILL)
            connection.fail("the link broke")

    async def main() -> None:
        async with service(roles=WorkerRoles(1, 1), supervision=HASTY, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            monkeypatch.setattr(WorkerConnection, "_put", put)
            reader = AnswerReader(backend, [5, *range(20, 120)], SEEDED)
            await reader.task
            reader.check(expected)
            assert num_lost == 2
            assert backend.lost_requests() == {"retried": 0, "continued": 2, "failed": 0}

    with LLM(DEMO, threads=1) as llm:
        expected = llm.generate([5, *range(20, 120)], SEEDED)
    asyncio.run(main())


def test_the_workers_lost_with_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request runs alone after the third kill, until long after the fourth."""
    monkeypatch.setattr(crash_tracker, "_MARGIN_TOKENS", 10_000)

    async def main() -> None:
        async with service(num_workers=2, supervision=HASTY, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            reader = AnswerReader(backend, [5, 6], replace(SEEDED, max_tokens=3000))
            for _ in range(MAX_KILLS + 1):
                seen = len(reader.ids[0])
                await until(lambda seen=seen: len(reader.ids[0]) > seen)
                await kill(backend, next(one for one in backend._connections if one.num_open))
            with raises(UnavailableError) as refused:
                await reader.task
            assert refused.value.retry_after_s > 0
            assert backend.deaths()["signal"] == MAX_KILLS + 1
            assert backend.lost_requests() == {"retried": 0, "continued": MAX_KILLS, "failed": 1}

    asyncio.run(main())


def test_a_crash_late_in_an_answer_costs_only_its_request() -> None:
    """The request crashes each worker after three tokens; those beside it go on with the right tokens."""
    params = replace(GREEDY, max_tokens=12)
    prompts = [[number, 3] for number in range(4)]

    async def main() -> None:
        async with service(num_workers=2, supervision=HASTY, command=faulty("tokens")) as running:
            backend = await running.models.load(str(DEMO))
            innocent = [asyncio.ensure_future(tokens_of(backend, prompt, params)) for prompt in prompts]
            with pytest.raises(InternalError):
                await tokens_of(backend, [LATER, 5], params)
            assert await asyncio.gather(*innocent) == [result.token_ids for result in expected]
            assert 2 <= backend.deaths()["signal"] <= 3
            assert backend.lost_requests()["failed"] == 1

    with LLM(DEMO, threads=1) as llm:
        expected = llm.generate(prompts, params)
    asyncio.run(main())


def test_replaced_weights_do_not_go_on_with_an_answer(versions: list[Path]) -> None:
    """Only the worker that is being drained has those of the answer."""

    async def main() -> None:
        async with service(supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(versions[0]), "model")
            reader = AnswerReader(backend, [5, 6], replace(GREEDY, max_tokens=3000))
            await begun([reader])
            old = backend._connections[0]
            updating = asyncio.ensure_future(running.models.update("model", str(versions[1])))
            await until(lambda: old.status == "draining")
            await kill(backend, old)
            with raises(UnavailableError):
                await reader.task
            await updating
            assert backend.lost_requests() == {"retried": 0, "continued": 0, "failed": 1}
            assert len(pids(backend)) == 1

    asyncio.run(main())


def test_a_client_that_leaves_ends_the_wait_for_a_worker(versions: list[Path]) -> None:
    """Its request waits for the next worker, which loads; then nothing is sent there."""
    go = versions[0].with_suffix(".go")

    async def main() -> None:
        async with service(supervision=CALM, command=faulty("waits+slow")) as running:
            go.touch()
            backend = await running.models.load(str(versions[0]), "model")
            answer = await backend.submit([5, 6], GREEDY, RequestOptions(client="a"))
            go.unlink()
            await kill(backend)
            answer.close()
            go.touch()
            await until(lambda: backend.is_ready)
            assert backend.workers()[0].num_open == 0
            assert backend.lost_requests() == {"retried": 0, "continued": 0, "failed": 0}
            assert len(await tokens_of(backend, [5], GREEDY)) == GREEDY.max_tokens

    asyncio.run(main())
