"""Processes that stall or are stopped for a while: which get requests, and which are ended."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from penstock.engine.params import SamplingParams
from penstock.llm.answer import EventAnswer
from penstock.processes.frames import FrameStream
from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers import worker_connection as link_module
from penstock.serving.workers.heartbeat import Heartbeat
from penstock.serving.workers.worker_connection import FRESH_S, OpenRequest, WorkerConnection
from tests.support.command import environment
from tests.support.worker_processes import DEMO, faulty, pids, service, still, tokens_of, until

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_heartbeat_counts_only_time_the_worker_ran() -> None:
    clock = Clock()
    heartbeat = Heartbeat(0.0, clock)

    def look(seconds: float, iteration_start: float) -> float:
        clock.now += seconds
        return round(heartbeat.look(iteration_start), 6)

    assert look(0.5, 100.4) == 0.1
    assert [look(0.5, 100.4) for _ in range(4)] == [0.6, 1.1, 1.6, 2.1], "an engine without progress"
    assert heartbeat.longest_s == 0.0, "an iteration that has not ended does not count"
    turned = clock.now
    assert (look(0.5, turned), round(heartbeat.longest_s, 6)) == (0.5, 4.2)
    assert look(3600.0, turned) == 1.5, "the process was stopped during an iteration"
    assert look(3600.0, clock.now) == 1.0, "or right after one"
    assert round(heartbeat.longest_s, 6) == 4.2


def test_a_worker_is_fresh_while_it_sends_and_progresses(monkeypatch) -> None:
    clock = Clock()

    async def main() -> None:
        monkeypatch.setattr(link_module.time, "monotonic", clock)
        link = WorkerConnection("m", 0)
        assert not link.is_fresh
        link.get_ready(pb.Ready(), None)
        assert link.is_fresh
        clock.now += FRESH_S + 0.1
        assert not link.is_fresh, "it sent nothing"
        link.on_message(pb.FromWorker(heartbeat=pb.Heartbeat(iteration_age_s=FRESH_S - 0.1)))
        assert link.is_fresh
        link.on_message(pb.FromWorker(heartbeat=pb.Heartbeat(iteration_age_s=FRESH_S + 0.1)))
        assert not link.is_fresh, "it sends, but its engine makes no progress"
        link.on_message(pb.FromWorker(heartbeat=pb.Heartbeat(iteration_age_s=20.0, longest_iteration_s=18.0)))
        assert link.is_fresh, "an iteration of this model may take that long"
        link.on_message(pb.FromWorker(step=pb.Step()))
        link.drain()
        assert not link.is_fresh

    asyncio.run(main())


def test_aborted_unsent_requests_are_dropped() -> None:
    """A worker reads nothing while clients send and abort requests."""

    async def main() -> None:
        link = WorkerConnection("m", 0)
        link.get_ready(pb.Ready(), None)
        requests = [OpenRequest(EventAnswer(lambda: None), pb.ToWorker(submit=pb.Submit()), None) for _ in range(3)]
        for request in requests:
            link.begin(request)
        link.abort(requests[1])
        assert [message.submit.key for message in link._unsent] == [requests[0].key, requests[2].key]
        here, there = socket.socketpair()
        link.send_over(FrameStream(here, pb.FromWorker.FromString, 1 << 20))
        worker = FrameStream(there, pb.ToWorker.FromString, 1 << 20)
        assert [(await worker.read()).submit.key for _ in range(2)] == [requests[0].key, requests[2].key]
        link.abort(requests[0])  # the worker has it, so it is told
        assert (await worker.read()).abort.key == requests[0].key
        assert link.num_open == 1
        link.fail("over")
        worker.close()

    asyncio.run(main())


def test_a_stalled_worker_gets_no_requests_before_it_is_ended(monkeypatch) -> None:
    async def main() -> None:
        async with service(supervision=SupervisionPolicy(hang_s=1000.0), num_workers=2, fresh_s=1.5) as running:
            backend = await running.models.load(str(DEMO))
            first, second = (psutil.Process(pid) for pid in pids(backend))
            links = backend._group.connections
            with monkeypatch.context() as patched:  # the second one counts as heard of, also on a machine that stands
                patched.setattr(links[1], "_note_iteration", lambda age_s: None)
                links[1]._last_message = math.inf
                await until(lambda: still(first) and not links[0].is_fresh)
                assert backend.is_ready
                asking = asyncio.gather(*(tokens_of(backend, [5, number], GREEDY) for number in range(6)))
                await until(asking.done)
                assert all(len(ids) == 8 for ids in asking.result())
            links[1].reset_heartbeat()
            await until(lambda: still(first) and still(second) and not backend.is_ready)
            assert backend.state == "ready", "no worker is given up"
            asked = asyncio.ensure_future(tokens_of(backend, [5], GREEDY))
            await until(lambda: any(worker.num_open for worker in backend.workers()))
            first.resume()
            second.resume()
            assert len(await asked) == 8
            await until(lambda: all(link.is_fresh for link in links))
            assert pids(backend) == [first.pid, second.pid]

    asyncio.run(main())


SCRIPT = """
import asyncio, sys
from penstock.cluster.placement.local import LocalPlacement
from penstock.engine.params import SamplingParams
from penstock.processes.frames import FrameStream
from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_models import RemoteModels

async def main():
    primary = Primary(SupervisionPolicy(hang_s=6.0), placement=LocalPlacement(sys.argv[2:]))
    await primary.open()
    models = RemoteModels(primary)
    backend = await models.load(sys.argv[1])
    print(backend.workers()[0].pid, flush=True)
    async with await backend.submit([253], SamplingParams(max_tokens=4, ignore_eos=True)) as answer:
        print("asked", flush=True)
        await answer.whole()
    print(backend.workers()[0].pid, sum(backend.deaths().values()), flush=True)
    await models.close()
    await primary.close()

asyncio.run(main())
"""


@pytest.mark.long
def test_a_stopped_and_continued_service_keeps_its_workers(tmp_path) -> None:
    """Ctrl-Z and fg in the middle of a step, for longer than ``hang_s``."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, DEMO, *faulty("tokens")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(tmp_path)),
        start_new_session=True,
    )
    try:
        worker = int(process.stdout.readline())
        both = [process.pid, worker]
        assert process.stdout.readline() == "asked\n"
        stopped = time.monotonic()
        while time.monotonic() < stopped + 6.5:
            for pid in both:  # also one that somebody let go on
                os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)
        for pid in both:
            os.kill(pid, signal.SIGCONT)
        assert process.stdout.readline().split() == [str(worker), "0"]
        assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
