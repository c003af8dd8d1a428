"""The messages between a pool and another machine, which a test plays: starts, batches, ends and losses."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence

import pytest

from penstock.errors import UnavailableError
from penstock.processes.frames import FrameStream
from penstock.processes.supervision import SupervisionPolicy
from penstock.servables.api.settings import Settings
from penstock.servables.machines import servable_machine
from penstock.servables.machines.servable_machine import ServableMachine
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.pool import Pool
from tests.support.servable_folders import until

SUPERVISION = SupervisionPolicy(load_s=60.0, min_pause_s=0.01, max_pause_s=0.02)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines of these tests send no heartbeats."""
    monkeypatch.setattr(servable_machine, "SILENT_S", 600.0)


class Batch:
    """A batch that notes how it ends."""

    num_parts = 1
    stage_names: Sequence[str] = ("go",)
    is_abandoned = False

    def __init__(self) -> None:
        self.began = 0.0
        self.end: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def message(self) -> pb.ToStage:
        self.began = time.monotonic()
        return pb.ToStage(batch=pb.Batch(unit=0))

    def complete(self, result: pb.Result) -> None:
        self.end.set_result("complete")

    def fail(self, error: Exception) -> None:
        self.end.set_result(error)

    def process_lost(self, position: tuple[int, int], is_hung: bool, why: str) -> None:
        self.end.set_result((position, is_hung))

    def process_killed(self, why: str) -> None:
        self.end.set_result("killed")

    def machine_lost(self, why: str) -> None:
        self.end.set_result("lost")


class Machine:
    """A machine that has joined, and its end of the connection."""

    def __init__(self, pool: Pool) -> None:
        own, other = socket.socketpair()
        self.machine = ServableMachine(FrameStream(own, pb.FromMachine.FromString, 1 << 20), "there", 1, {})
        self.stream = FrameStream(other, pb.ToMachine.FromString, 1 << 20)
        self.serving = asyncio.ensure_future(self.machine.serve())
        pool.join(self.machine)

    async def receive(self, kind: str) -> pb.ToMachine:
        """Return the next message, which has this kind."""
        message = await asyncio.wait_for(self.stream.read(), 300)
        assert message is not None
        assert message.WhichOneof("what") == kind
        return message

    async def leave(self) -> None:
        self.stream.close()
        await asyncio.wait_for(self.serving, 300)


def make_pool(timeout_s: float = 600.0) -> Pool:
    return Pool("one", pb.Start(servable="one", version="1"), 1, Settings(timeout_s=timeout_s), SUPERVISION)


async def begin(pool: Pool) -> Batch:
    """Run a batch in the process that is about to be ready."""
    await until(lambda: pool.free)
    batch = Batch()
    pool.run(batch)
    return batch


def test_a_process_that_fails_to_start_is_started_again() -> None:
    async def work() -> None:
        pool = make_pool()
        there = Machine(pool)
        first = await there.receive("start")
        there.stream.send(
            pb.FromMachine(process=first.process, failed=pb.Failed(text="no")),
            pb.FromMachine(process=first.process, ended=pb.Ended(cause="exit")),
        )
        second = await there.receive("start")
        there.stream.send(pb.FromMachine(process=second.process, ended=pb.Ended(cause="exit", why="early")))
        third = await there.receive("start")
        there.stream.send(pb.FromMachine(process=third.process, ready=pb.Ready()))
        batch = await begin(pool)
        number = (await there.receive("batch")).batch.number
        there.stream.send(pb.FromMachine(process=third.process, result=pb.Result(number=number)))
        assert await batch.end == "complete"
        assert pool.deaths == {"start": 2}
        await there.leave()
        await until(lambda: not pool.workers)

    asyncio.run(work())


def test_a_batch_that_takes_too_long_ends_its_process() -> None:
    async def work() -> None:
        pool = make_pool(0.1)
        there = Machine(pool)
        number = (await there.receive("start")).process
        there.stream.send(pb.FromMachine(process=number, ready=pb.Ready()))
        batch = await begin(pool)
        await there.receive("batch")
        assert (await there.receive("end")).process == number
        ended = pb.Ended(cause="signal", has_begun=True, stage=0, instance=2)
        there.stream.send(pb.FromMachine(process=number, ended=ended))
        assert await batch.end == ((0, 2), True)
        await there.receive("start")
        await there.leave()

    asyncio.run(work())


@pytest.mark.parametrize("how", ["closes", "another result"])
def test_a_batch_of_a_lost_machine_is_told_so(how: str) -> None:
    async def work() -> None:
        pool = make_pool()
        there = Machine(pool)
        number = (await there.receive("start")).process
        there.stream.send(pb.FromMachine(process=number, ready=pb.Ready()))
        batch = await begin(pool)
        await there.receive("batch")
        if how == "closes":
            there.stream.close()
        else:
            there.stream.send(pb.FromMachine(process=number, result=pb.Result(number=77)))
        assert await batch.end == "lost"
        await there.leave()
        await until(lambda: not pool.workers)
        with pytest.raises(UnavailableError, match="there has left"):
            await there.machine.start(pb.Start(), 60)

    asyncio.run(work())


def test_a_pool_that_stops_ends_a_start() -> None:
    async def work() -> None:
        pool = make_pool()
        there = Machine(pool)
        number = (await there.receive("start")).process
        stopping = asyncio.ensure_future(pool.stop())
        assert (await there.receive("end")).process == number
        there.stream.send(pb.FromMachine(process=number, ended=pb.Ended(cause="exit")))
        await asyncio.wait_for(stopping, 300)
        pool.join(there.machine)
        await there.leave()
        assert not pool.workers

    asyncio.run(work())
