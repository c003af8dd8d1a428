"""Processes that die without a batch at fault: idle, stopped, or while their replacement starts."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.api_errors import RefusalError
from penstock.errors import UnavailableError
from penstock.runtime.machine import OomKills
from penstock.servables.lifecycle.repository import ServableRepository
from penstock.servables.process import pool as pools
from penstock.servables.process.pool import Pool
from tests.support.errors import raises
from tests.support.servable_folders import ask, is_gone, pids, run, serving, until, write

STAGE = """
    servable.settings(workers={workers}, timeout_s=600, memory_limit_mib={limit})
    kept = []

    @servable.stage(outputs={{"y": "FP32[]"}}, batch_size=4)
    def go(x):
        if 1 in x: kept.append(bytearray(os.urandom(1 << 20)) * 300)
        if 2 in x or 3 in x:
            gate = "3" if 3 in x else "2"
            open({folder!r} + "/in" + gate, "w").close()
            while not os.path.exists({folder!r} + "/out" + gate): time.sleep(0.01)
        if 3 in x: raise ValueError("three")
        return x

    @servable.method(inputs={{"x": "FP32[]"}}, outputs={{"y": "FP32[]"}})
    def it(x):
        return go(x)
"""


def prepare(tmp_path: Path, workers: int = 1, limit: int | None = None) -> Path:
    write(tmp_path / "root", "one", STAGE.format(folder=str(tmp_path), workers=workers, limit=limit))
    return tmp_path / "root"


def pool_of(servables: ServableRepository) -> Pool:
    (one,) = servables.all()
    (version,) = one.versions.values()
    (found,) = version.pools
    return found


def begin(servables: ServableRepository, *x: float) -> asyncio.Task[Any]:
    return asyncio.ensure_future(ask(servables, "one", {"x": np.array(x, np.float32)}))


async def answer(task: asyncio.Task[Any]) -> list[float]:
    await until(task.done)
    found: list[float] = task.result()["y"].tolist()
    return found


class Gate:
    """Delays the start of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.gate, launch = False, asyncio.Event(), pools.start_servable_worker

        async def late(*given: Any) -> Any:
            self.is_reached = True
            await self.gate.wait()
            return await launch(*given)

        monkeypatch.setattr(pools, "start_servable_worker", late)


def test_idle_process_dies_before_its_replacement_starts(tmp_path: Path, monkeypatch) -> None:
    """The death is noticed at once, and new requests wait for the next process."""

    async def work() -> None:
        async with serving(prepare(tmp_path, limit=200)) as servables:
            gate = Gate(monkeypatch)
            assert await answer(begin(servables, 1)) == [1]
            await until(lambda: gate.is_reached)
            (pid,), pool = pids(servables), pool_of(servables)
            assert len(pool.free) == 1, "it goes on until the other one is there"
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not pool.free and not pool.pids)
            task = begin(servables, 5, 6)
            await asyncio.sleep(0.05)
            assert not task.done()
            gate.gate.set()
            assert await answer(task) == [5, 6]
            await until(lambda: pool.deaths["signal"] == 1)

    run(work)


def test_busy_process_dies_before_its_replacement_starts(tmp_path: Path, monkeypatch) -> None:
    """The request of a batch whose process crashes fails before the next process starts."""

    async def work() -> None:
        async with serving(prepare(tmp_path, limit=200)) as servables:
            gate = Gate(monkeypatch)
            assert await answer(begin(servables, 1)) == [1]
            task = begin(servables, 2)
            await until(lambda: gate.is_reached and (tmp_path / "in2").exists())
            os.kill(*pids(servables), signal.SIGSEGV)
            with raises(RefusalError, code="stage_died", match="stage go"):
                await answer(task)
            gate.gate.set()
            await until(lambda: pids(servables))
            assert await answer(begin(servables, 7)) == [7]

    run(work)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("x", [(2.0,), (2.0, 5.0)])
def test_a_batch_whose_process_is_killed_runs_again(tmp_path: Path, x: tuple[float, ...], number: int) -> None:
    """A signal from outside is no fault of its requests: they are answered by the next process."""

    async def work() -> None:
        async with serving(prepare(tmp_path)) as servables:
            tasks = [begin(servables, value) for value in x]
            await until((tmp_path / "in2").exists)
            (tmp_path / "in2").unlink()
            os.kill(*pids(servables), number)
            await until((tmp_path / "in2").exists)
            (tmp_path / "out2").touch()
            assert [await answer(task) for task in tasks] == [[value] for value in x]
            assert pool_of(servables).deaths == {"signal": 1}

    run(work)


def test_a_request_whose_processes_are_killed_is_retriable(tmp_path: Path) -> None:
    """After two processes it may be the reason: the client is told to send it again later."""

    async def work() -> None:
        async with serving(prepare(tmp_path)) as servables:
            task = begin(servables, 2)
            for _ in range(2):
                await until((tmp_path / "in2").exists)
                (tmp_path / "in2").unlink()
                os.kill(*pids(servables), signal.SIGKILL)
            with pytest.raises(UnavailableError) as told:
                await answer(task)
            assert (told.value.code, told.value.retry_after_s) == ("unavailable", 1.0)
            (tmp_path / "out2").touch()
            await until(lambda: pids(servables))
            assert await answer(begin(servables, 2)) == [2]

    run(work)


def test_a_kill_for_lack_of_memory_is_the_requests_fault(tmp_path: Path, monkeypatch) -> None:
    async def work() -> None:
        async with serving(prepare(tmp_path)) as servables:
            monkeypatch.setattr(OomKills, "look", lambda _: True)
            task = begin(servables, 2)
            await until((tmp_path / "in2").exists)
            os.kill(*pids(servables), signal.SIGKILL)
            with raises(RefusalError, code="stage_died", match="no memory left"):
                await answer(task)

    run(work)


def test_replacement_dies_while_the_old_process_works(tmp_path: Path) -> None:
    """The next process starts at once, whatever the old one still has to do."""

    async def work() -> None:
        async with serving(prepare(tmp_path, limit=200)) as servables:
            (old,) = pids(servables)
            pool, first = pool_of(servables), begin(servables, 1)
            await until(lambda: not pool.free)  # else they would share a batch
            several = first, begin(servables, 2)
            assert await answer(several[0]) == [1]
            await until(lambda: (tmp_path / "in2").exists() and len(pids(servables)) == 2)
            (new,) = {*pids(servables)} - {old}
            os.kill(new, signal.SIGKILL)
            await until(lambda: is_gone(new) and len(pids(servables)) == 2)
            assert await answer(begin(servables, 8)) == [8]
            assert not several[1].done()
            (tmp_path / "out2").touch()
            assert await answer(several[1]) == [2]
            await until(lambda: is_gone(old) and len(pids(servables)) == 1)

    run(work)


@pytest.mark.parametrize("workers", [1, 2])
def test_unread_batch_runs_in_another_process(tmp_path: Path, workers: int) -> None:
    """The batch was sent to a stopped process, which died without reading it."""

    async def work() -> None:
        async with serving(prepare(tmp_path, workers)) as servables:
            assert await answer(begin(servables, 4)) == [4]  # so there is a place in a batch before
            pool = pool_of(servables)
            pid = pool.free[-1].process.pid
            os.kill(pid, signal.SIGSTOP)
            task = begin(servables, 5, 6)
            await until(lambda: any(one.batch is not None and one.process.pid == pid for one in pool.workers))
            os.kill(pid, signal.SIGKILL)
            assert await answer(task) == [5, 6]

    run(work)


def test_request_after_an_idle_death_uses_the_other_process(tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(prepare(tmp_path, 2)) as servables:
            pool = pool_of(servables)
            pid, other = (pool.free[place].process.pid for place in (-1, 0))
            os.kill(pid, signal.SIGKILL)
            select.select([pool.free[-1].process._stream._socket], [], [])  # its end, which the event loop has not seen
            assert {one.process.pid for one in pool.free} == {pid, other}
            task = begin(servables, 5)
            for _ in range(2):  # a batch is sent at the end of the turn in which its requests came
                await asyncio.sleep(0)
            assert [one.process.pid for one in pool.workers if one.batch is not None] == [other]
            assert await answer(task) == [5]

    run(work)


def test_rest_of_a_failed_batch_is_answered(tmp_path: Path) -> None:
    """In a batch of two requests, the one at fault is cancelled meanwhile."""

    async def work() -> None:
        async with serving(prepare(tmp_path)) as servables:
            first = begin(servables, 2)
            await until((tmp_path / "in2").exists)
            together = begin(servables, 3), begin(servables, 5)
            await asyncio.sleep(0)
            (tmp_path / "out2").touch()
            assert await answer(first) == [2]
            await until((tmp_path / "in3").exists)
            together[0].cancel()
            await asyncio.wait(together[:1])
            (tmp_path / "out3").touch()
            assert await answer(together[1]) == [5]

    run(work)
