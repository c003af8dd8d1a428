"""Servable workers on another machine: it shares batches, and may leave or be lost; nothing hangs or gets lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.api_errors import RefusalError
from penstock.errors import InvalidArgumentError, PenstockError, UnavailableError
from penstock.processes.frames import FrameStream
from penstock.servables.lifecycle.repository import ServableRepository
from penstock.servables.machines.joined_machines import JoinedMachines
from penstock.servables.machines.servable_host import ServableHost, find_versions, offer_of
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.pool import Pool
from penstock.servables.process.worker_main import MAX_FRAME_BYTES
from tests.support.errors import raises
from tests.support.servable_folders import ask, run, serving, until, write

STAGE = """
    servable.settings(timeout_s={timeout_s})
    where = os.path.basename(os.path.dirname(os.path.dirname(__file__)))

    @servable.stage(outputs={{"place": "TEXT[]"}})
    def go(text):
        if text.startswith("die"): os._exit(7)
        if text.startswith("hang"): time.sleep(600)
        if text.startswith("fail"): raise ValueError("no")
        if text.startswith("wait"):
            open(os.path.join({folder!r}, text + "-" + where), "w").close()
            while not os.path.exists(os.path.join({folder!r}, "go")): time.sleep(0.01)
        return where

    @servable.method(inputs={{"text": "TEXT[]"}}, outputs={{"place": "TEXT[]"}})
    def it(text):
        return go(text)
"""


def prepare(tmp_path: Path, timeout_s: float = 600.0) -> None:
    """Write the servable for the service (folder "here"), and copy it for the machine ("there")."""
    write(tmp_path / "here", "one", STAGE.format(folder=str(tmp_path), timeout_s=timeout_s))
    shutil.copytree(tmp_path / "here", tmp_path / "there")


class Machine:
    """A machine in this process: its host, and both ends of its connection."""

    def __init__(self, machines: JoinedMachines, root: Path, num_processes: int = 1) -> None:
        own, other = socket.socketpair()
        sources = find_versions([root])
        self.stream = FrameStream(own, pb.ToMachine.FromString, MAX_FRAME_BYTES)
        self.host = ServableHost(self.stream, sources)
        self._served = FrameStream(other, pb.FromMachine.FromString, MAX_FRAME_BYTES)
        self._serving = asyncio.ensure_future(self._serve(machines))
        self.running = asyncio.ensure_future(self.host.run(offer_of(sources, "there", num_processes)))

    async def _serve(self, machines: JoinedMachines) -> None:
        """Serve it as the port for workers does."""
        try:
            await machines.serve(self._served, "address")
        except PenstockError as error:
            refusal = pb.Refusal(text=str(error), may_retry=isinstance(error, UnavailableError))
            self._served.send(pb.ToMachine(refusal=refusal))

    async def ended(self) -> None:
        """Wait until both sides have ended."""
        await asyncio.wait((self.running, self._serving), timeout=300)
        assert self.running.done()
        assert self._serving.done()
        self._served.close()


@asynccontextmanager
async def both(tmp_path: Path) -> AsyncIterator[tuple[ServableRepository, Machine, Pool]]:
    """A service with a machine that has joined and is ready."""
    async with serving(tmp_path / "here") as servables:
        machine = Machine(JoinedMachines(servables), tmp_path / "there")
        (pool,) = servables.all()[0].versions[1].pools
        try:
            await until(lambda: len(pool.workers) == 2)
            yield servables, machine, pool
        finally:
            machine.stream.close()
            await machine.ended()


def begin(servables: ServableRepository, text: str) -> asyncio.Task[Any]:
    return asyncio.ensure_future(ask(servables, "one", {"text": [text]}))


async def place(task: asyncio.Task[Any]) -> str:
    return str((await asyncio.wait_for(task, 300))["place"][0].decode())


def test_a_machine_shares_the_load_and_leaves(tmp_path: Path) -> None:
    """A batch goes there when the process here is busy; what runs there when the machine leaves ends first."""
    prepare(tmp_path)

    async def work() -> None:
        async with both(tmp_path) as (servables, machine, pool):
            assert await place(begin(servables, "a")) == "here"
            several = [begin(servables, "wait0"), begin(servables, "wait1")]
            await until((tmp_path / "wait0-here").exists)
            await until((tmp_path / "wait1-there").exists)
            machine.host.leave()
            await until(lambda: any(worker.is_retired for worker in pool.workers))
            (tmp_path / "go").touch()
            assert [await place(task) for task in several] == ["here", "there"]
            await machine.ended()
            assert machine.running.exception() is None
            assert [worker.process.is_joined for worker in pool.workers] == [False]
            assert sum(pool.deaths.values()) == 0
            assert await place(begin(servables, "b")) == "here"

    run(work)


def test_batches_of_a_lost_machine_run_elsewhere(tmp_path: Path) -> None:
    prepare(tmp_path)

    async def work() -> None:
        async with both(tmp_path) as (servables, machine, pool):
            several = [begin(servables, "wait0"), begin(servables, "wait1")]
            await until((tmp_path / "wait1-there").exists)
            (batch,) = [worker.batch for worker in pool.workers if worker.process.is_joined]
            machine.stream.close()
            await until(lambda: len(pool.workers) == 1)
            (tmp_path / "go").touch()
            assert [await place(task) for task in several] == ["here", "here"]
            third = begin(servables, "wait2")
            await asyncio.sleep(0)
            batch.pieces = ((third_job(pool), 0, 1),)
            batch.machine_lost("the connection ended")
            with pytest.raises(UnavailableError, match="go: the connection ended"):
                await place(third)

    run(work)


def third_job(pool: Pool) -> Any:
    """Return the job of the only batch that runs."""
    (batch,) = [worker.batch for worker in pool.workers if worker.batch is not None]
    return batch.pieces[0][0]


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "there" / "one" / "1" / "weights").write_text("other")
    write(tmp_path / "more", "two", "")

    async def refusal(servables: ServableRepository, name: str) -> str:
        machine = Machine(JoinedMachines(servables), tmp_path / name)
        await asyncio.wait((machine.running,), timeout=300)
        machine.stream.close()
        await machine.ended()
        error = machine.running.exception()
        assert isinstance(error, InvalidArgumentError)
        return str(error)

    async def work() -> None:
        async with serving(tmp_path / "here") as servables:
            text = await refusal(servables, "there")
            assert text.startswith("one 1: its files on this machine differ from those of the service (SHA-256 ")
            assert "\n" not in text
            assert "the service runs (one 1); this machine has none" in await refusal(servables, "more")

    run(work)
    with raises(InvalidArgumentError, param="folders"):
        find_versions([tmp_path / "there" / "one" / "1"])


@pytest.mark.long
@pytest.mark.parametrize("how", ["die", "fail", "killed", "hang"])
def test_failures_there_are_those_of_a_process_here(tmp_path: Path, how: str) -> None:
    prepare(tmp_path, 5.0 if how == "hang" else 600.0)

    async def work() -> None:
        async with both(tmp_path) as (servables, machine, pool):
            waiting = begin(servables, "wait0")
            await until((tmp_path / "wait0-here").exists)
            failing = begin(servables, "wait1" if how == "killed" else how)
            if how == "killed":
                await until((tmp_path / "wait1-there").exists)
                (process,) = machine.host._processes.values()
                os.kill(process.pid, signal.SIGKILL)
                (tmp_path / "go").touch()
                assert await place(failing) in ("here", "there"), "it runs again"
            else:
                code = {"fail": "stage_failed", "hang": "stage_hung"}.get(how, "stage_died")
                with raises(RefusalError, code=code, match="stage go"):
                    await place(failing)
            (tmp_path / "go").touch()
            await asyncio.gather(waiting, return_exceptions=True)  # with "hang" it takes too long, too
            await until(lambda: len(pool.workers) == 2)
            assert await place(begin(servables, "a")) in ("here", "there")

    run(work)


@pytest.mark.long
def test_versions_loaded_later_run_there_too(tmp_path: Path) -> None:
    prepare(tmp_path)
    for name in ("here", "there"):
        (tmp_path / name / "one" / "2").mkdir()
        (tmp_path / name / "one" / "3").mkdir()
    (tmp_path / "there" / "one" / "3" / "weights").write_text("other")

    async def work() -> None:
        async with serving(tmp_path / "here") as servables:
            await servables.load("one", {"versions": "1"})
            machine = Machine(JoinedMachines(servables), tmp_path / "there", 2)
            try:
                await until(lambda: len(servables.all()[0].versions[1].pools[0].workers) == 3)
                await servables.load("one", {"versions": "2,3"})
                versions = servables.all()[0].versions
                await until(lambda: len(versions[2].pools[0].workers) == 3)
                await until(lambda: len(machine.host._processes) == 2)
                assert len(versions[3].pools[0].workers) == 1
            finally:
                machine.stream.close()
                await machine.ended()

    run(work)
