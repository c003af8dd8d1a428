"""A worker may be a group of ranks: it answers as one process does, and it is planned, replaced and ended as one."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, OutOfMemoryError
from penstock.processes.supervision import SupervisionPolicy
from penstock.runtime.export_ranks import export_ranks
from penstock.serving.workers import memory_check
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker import open_llm
from penstock.serving.workers.worker_config import WorkerConfig
from tests.support.errors import raises
from tests.support.marks import mostly_long
from tests.support.worker_processes import (
    DEMO,
    HASTY,
    IMPATIENT,
    OPTIONS,
    pids,
    service,
    tokens_of,
    until,
    wait_for_causes,
)

PAIR = replace(OPTIONS, tensor_parallel_size=2)
STAGES = replace(OPTIONS, pipeline_parallel_size=2)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=200, temperature=1, seed=5, ignore_eos=True)
PROMPTS = [[number, 7, 9] for number in range(8)]


def ranks_of(backend: RemoteBackend) -> list[psutil.Process]:
    """The processes of the ranks other than 0, which are the workers themselves."""
    return [rank for pid in pids(backend) for rank in psutil.Process(pid).children()]


def are_gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


async def answers(backend: RemoteBackend, params: SamplingParams) -> list[list[int]]:
    return await asyncio.gather(*(tokens_of(backend, prompt, params) for prompt in PROMPTS))


@pytest.mark.long
def test_a_group_answers_as_one_process_does() -> None:
    async def main() -> None:
        found = []
        for options in (OPTIONS, PAIR, STAGES):
            async with service(options=options) as running:
                backend = await running.models.load(str(DEMO))
                found.append([await answers(backend, params) for params in (GREEDY, SEEDED)])
                ranks, plan = ranks_of(backend), backend.plans()[0]
                assert len(ranks) == options.layout.world - 1
                assert plan.num_ranks == options.layout.num_computing
            assert are_gone(ranks)
        assert found[0] == found[1] == found[2]

    asyncio.run(main())


@pytest.mark.long
@pytest.mark.parametrize("number", mostly_long([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL))
def test_a_rank_that_fails_ends_its_group_only(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker goes on with the requests of the group."""
    wait_for_causes(monkeypatch)

    async def main() -> None:
        supervision: SupervisionPolicy = HASTY if number == signal.SIGKILL else IMPATIENT
        async with service(options=PAIR, num_workers=2, supervision=supervision) as running:
            backend = await running.models.load(str(DEMO))
            expected = await answers(backend, SEEDED)
            for _ in range(3 if number == signal.SIGKILL else 1):
                asked = [asyncio.ensure_future(tokens_of(backend, prompt, SEEDED)) for prompt in PROMPTS]
                await until(lambda: all(worker.num_open for worker in backend.workers()))
                before = ranks_of(backend)
                victim = random.choice(before)
                worker = victim.parent()
                victim.send_signal(number)
                assert await asyncio.gather(*asked) == expected
                await until(lambda victim=victim, worker=worker: are_gone([victim, worker]))
                await until(lambda: [worker.status for worker in backend.workers()] == ["ready", "ready"])
                assert len(ranks_of(backend)) == 2
                assert await answers(backend, SEEDED) == expected

    asyncio.run(main())


@pytest.mark.long
def test_ranks_end_with_their_worker() -> None:
    async def main() -> None:
        async with service(options=PAIR, supervision=HASTY) as running:
            backend = await running.models.load(str(DEMO))
            before = ranks_of(backend)
            psutil.Process(pids(backend)[0]).kill()
            await until(lambda: are_gone(before))
            await until(lambda: backend.is_ready)
            assert len(await tokens_of(backend, [5], GREEDY)) == 12

    asyncio.run(main())


@pytest.mark.long
def test_weights_are_replaced_under_requests() -> None:
    async def main() -> None:
        async with service(options=PAIR) as running:
            backend = await running.models.load(str(DEMO))
            before = ranks_of(backend)
            asked = [asyncio.ensure_future(tokens_of(backend, prompt, SEEDED)) for prompt in PROMPTS]
            await until(lambda: any(worker.num_open for worker in backend.workers()))
            await running.models.update("demo", str(DEMO))
            assert [len(ids) for ids in await asyncio.gather(*asked)] == [200] * len(PROMPTS)
            await until(lambda: are_gone(before))
            assert (backend.card.version, len(ranks_of(backend))) == (2, 1)

    asyncio.run(main())


def test_a_group_is_planned_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig("", "", "demo", str(DEMO), options=PAIR)
    whole, group = (memory_check.fit_beside(replace(config, options=one))[1] for one in (OPTIONS, PAIR))
    assert len(group) == 2
    assert sum(plan.weight_bytes for plan in group) < 1.1 * whole[0].weight_bytes
    assert sum(plan.kv_bytes for plan in group) == whole[0].kv_bytes

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("penstock.runtime.ranks.open_ranks.RankGroup", opened)
    plans: list[object] = []
    with raises(OutOfMemoryError, code="out_of_memory"):
        open_llm(replace(config, reserved_bytes=2**50), plans.append)
    assert not plans


def test_a_folder_of_rank_bundles_is_served(tmp_path: Path) -> None:
    export_ranks(DEMO, tmp_path / "parts", 2)

    async def main() -> None:
        async with service(options=PAIR) as running:
            backend = await running.models.load(str(tmp_path / "parts"))
            assert len(await tokens_of(backend, [5], GREEDY)) == 12
        async with service(options=replace(OPTIONS, tensor_parallel_size=3)) as running:
            with raises(InvalidArgumentError, param="tensor_parallel_size", match="got 3"):
                await running.models.load(str(tmp_path / "parts"))

    asyncio.run(main())
