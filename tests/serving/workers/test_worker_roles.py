"""Prefill and decode apart: a request begins in a worker for prefill, and one for decode goes on with its answer."""

from __future__ import annotations

import asyncio
import os
import signal
from random import Random
from types import SimpleNamespace

import pytest

from penstock.cli.main import main as penstock
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError
from penstock.llm.llm import LLM
from penstock.serving.metrics import Metrics
from penstock.serving.workers.worker_roles import (
    DECODE,
    NO_ROLES,
    PREFILL,
    WorkerRoles,
    of_role,
    role_for,
    takes_over,
    warn_of_roles,
)
from tests.support.errors import raises
from tests.support.worker_processes import DEMO, HASTY, pids, service, until, wait_for_causes

PARAMS = [
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1, seed=11, top_p=0.9, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.8, seed=12, n=2, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=1, temperature=1, seed=13, prompt_logprobs=1),
]
PROMPTS = [[5 + 3 * i, *range(20, 60 + 40 * (i % 3))] for i in range(8)]
ROLES = WorkerRoles(1, 1)
CHAOS = int(os.environ.get("PENSTOCK_CHAOS", "1"))


@pytest.fixture(scope="module")
def expected() -> list:
    with LLM(DEMO, threads=1) as llm:
        return [llm.generate(prompt, PARAMS[i % 4]) for i, prompt in enumerate(PROMPTS)]


async def ask(backend, number: int, salt: str = "") -> list[list[int]]:
    params = PARAMS[number % 4]
    ids: list[list[int]] = [[] for _ in range(params.n)]
    async with await backend.submit(PROMPTS[number], params, RequestOptions(cache_salt=salt)) as answer:
        async for delta in answer:
            ids[delta.index] += delta.token_ids
    return ids


async def ask_all(backend, expected: list) -> None:
    found = await asyncio.gather(*(ask(backend, number) for number in range(len(PROMPTS))))
    assert found == [[choice.token_ids for choice in result.choices] for result in expected]


def by_role(backend, role: str):
    (found,) = [one for one in backend._connections if one.role == role]
    return found


def test_answers_go_on_in_a_worker_for_decode(expected: list) -> None:
    async def main() -> None:
        async with service(roles=ROLES) as running:
            backend = await running.models.load(str(DEMO))
            prefill, decode = by_role(backend, PREFILL), by_role(backend, DECODE)
            assert prefill.copies_pages
            assert not backend.hands_over(prefill, prefill)
            await ask_all(backend, expected)
            long = [i for i, prompt in enumerate(PROMPTS) if len(prompt) >= 64 and PARAMS[i % 4].max_tokens > 1]
            assert prefill.num_moved == len(long)
            assert decode.num_moved == 0
            assert decode.num_sent >= len(long)
            await backend.score(PROMPTS[2])
            text = Metrics(running.models).text().decode()
            assert 'penstock:workers_ready_by_role{model_name="demo",role="decode"} 1' in text
            assert [worker.role for worker in backend.workers()] == [PREFILL, DECODE]

    asyncio.run(main())


def test_the_other_role_does_the_work_of_a_lost_one(expected: list) -> None:
    async def main() -> None:
        async with service(roles=ROLES, supervision=HASTY) as running:
            backend = await running.models.load(str(DEMO))
            for role in (DECODE, PREFILL):
                lost = by_role(backend, role)
                os.kill(lost.pid, signal.SIGKILL)
                await until(lost.gone.is_set)
                await ask_all(backend, expected)  # by the other one, or by the one that takes its place
                await until(lambda: len(pids(backend)) == 2)
                assert sorted(worker.role for worker in backend.workers()) == [DECODE, PREFILL]

    asyncio.run(main())


def test_without_a_place_answers_stay_where_they_began(expected: list) -> None:
    async def main() -> None:
        async with service(roles=ROLES) as running:
            backend = await running.models.load(str(DEMO))
            decode = by_role(backend, DECODE)
            decode.status = "draining"
            await ask_all(backend, expected)
            assert by_role_num_moved(backend) == 0
            decode.status = "ready"
            await ask_all(backend, expected)
            assert by_role_num_moved(backend) > 0

    asyncio.run(main())


def by_role_num_moved(backend) -> int:
    return sum(one.num_moved for one in backend._all_connections if one.role == PREFILL)


@pytest.mark.long
def test_kills_of_both_roles_change_no_answer(expected: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic goes on while workers of both roles are killed; PENSTOCK_CHAOS=n kills n times as many."""
    random = Random(7)
    wait_for_causes(monkeypatch)

    async def main() -> None:
        async with service(roles=WorkerRoles(2, 2), supervision=HASTY) as running:
            backend = await running.models.load(str(DEMO))
            is_over, counts = asyncio.Event(), {"answers": 0}

            async def client(number: int) -> None:
                while not is_over.is_set():
                    salt = f"{number}-{counts['answers']}"  # else one request loses many workers
                    found = await ask(backend, number, salt)
                    assert found == [choice.token_ids for choice in expected[number].choices]
                    counts["answers"] += 1

            clients = [asyncio.ensure_future(client(number)) for number in range(len(PROMPTS))]
            for kill in range(6 * CHAOS):
                wanted = counts["answers"] + 2 * len(PROMPTS)
                await until(lambda wanted=wanted: counts["answers"] >= wanted or any(one.done() for one in clients))
                role = (PREFILL, DECODE)[kill % 2]
                ready = [one for one in backend._connections if one.role == role]
                if ready:
                    os.kill(random.choice(ready).pid, signal.SIGKILL)
            is_over.set()
            await asyncio.gather(*clients)
            lost = backend.lost_requests()
            assert lost["continued"]
            assert not lost["failed"]
            print(f"kills {6 * CHAOS}, {counts}, of lost workers {lost}")

    asyncio.run(main())


def test_a_drained_worker_is_replaced_by_one_of_its_role() -> None:
    async def main() -> None:
        async with service(roles=ROLES) as running:
            backend = await running.models.load(str(DEMO))
            await running.models.drain_worker("demo", by_role(backend, PREFILL).name, replaces=True)
            assert sorted(worker.role for worker in backend.workers()) == [DECODE, PREFILL]

    asyncio.run(main())


def test_one_role_needs_the_other() -> None:
    with raises(InvalidArgumentError, param="decode_workers"):
        WorkerRoles(1, 0)
    with raises(InvalidArgumentError, param="prefill_workers"):
        WorkerRoles(0, 2)
    assert [WorkerRoles(1, 2).role_of(number) for number in range(3)] == [PREFILL, DECODE, DECODE]
    assert [role_for(63, has_begun=False), role_for(64, has_begun=False)] == [DECODE, PREFILL]
    assert role_for(640, has_begun=True) == DECODE


def worker(role: str, **facts: bool) -> SimpleNamespace:
    return SimpleNamespace(
        **({"role": role, "copies_pages": True, "is_fresh": True, "has_place": True, "has_room": True} | facts)
    )


def test_only_copied_pages_are_handed_over() -> None:
    source = worker(PREFILL)
    assert all(takes_over(source, worker(role)) for role in (DECODE, ""))
    assert not any(
        takes_over(source, other)
        for other in (
            source, worker(PREFILL), worker(DECODE, copies_pages=False), worker(DECODE, has_place=False),
            worker(DECODE, is_fresh=False),
        )
    )  # fmt: skip
    assert not takes_over(worker(PREFILL, copies_pages=False), worker(DECODE))
    assert not takes_over(worker(""), worker(DECODE))


def test_workers_without_copies_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_roles("demo", ROLES, [worker(PREFILL), worker(DECODE)])
    warn_of_roles("demo", NO_ROLES, [worker("", copies_pages=False)])
    assert not caplog.records
    warn_of_roles("demo", ROLES, [worker(PREFILL, copies_pages=False), worker(DECODE)])
    assert [record.facts["event"] for record in caplog.records] == ["roles_without_copies"]


def test_a_full_role_leaves_its_work_to_the_other() -> None:
    free, full, decode = worker(PREFILL), worker(PREFILL, has_room=False), worker(DECODE)
    assert of_role([free, full, decode], PREFILL) == [free, full]
    assert of_role([full, decode], PREFILL) == [decode]
    assert of_role([decode], PREFILL) == [decode]
    full_decode = worker(DECODE, has_room=False)
    assert of_role([full, full_decode], PREFILL) == [full]
    assert of_role([full_decode], PREFILL) == [full_decode]


def test_drained_workers_leave_one_of_each_role() -> None:
    assert WorkerRoles(2, 3).without(PREFILL) == WorkerRoles(1, 3)
    assert WorkerRoles(2, 3).without(DECODE) == WorkerRoles(2, 2)
    assert WorkerRoles(1, 1).without(DECODE) == WorkerRoles(1, 1)
    assert NO_ROLES.without("") == NO_ROLES


@pytest.mark.parametrize(
    "option", ["--workers=2", "--replicas=1..2", "--tp=2", "--pp=2", "--cp=2", "--no-prefix-cache"]
)
def test_options_that_roles_exclude_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert penstock(["serve", str(DEMO), "--prefill-workers", "1", option]) == 2
    assert option.split("=")[0] in capsys.readouterr().err
