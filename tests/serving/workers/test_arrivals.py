"""Requests that arrive together begin together: how long the first one waits for the others."""

from __future__ import annotations

import asyncio
import socket
import types
from collections.abc import Callable

from penstock.llm.answer import EventAnswer
from penstock.processes.frames import FrameStream
from penstock.serving.arrivals import FRESH_S, MAX_S, Arrivals
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.worker_connection import OpenRequest, WorkerConnection
from tests.support.worker_processes import until

ROUNDS = 20  # of the event loop: more than anything takes that does not wait for the clock


class Clock:
    """The event loop's clock, which tests move."""

    def __init__(self) -> None:
        self.now = 100.0
        loop = asyncio.get_running_loop()
        loop.time = types.MethodType(lambda _: self.now, loop)  # type: ignore[method-assign]

    async def rounds(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for _ in range(ROUNDS):
            await asyncio.sleep(0)


def test_a_request_does_not_wait_without_other_arrivals() -> None:
    async def main() -> None:
        clock, arrivals, called = Clock(), Arrivals(), []
        arrivals.settle(lambda: called.append(clock.now))
        assert not called, "requests of the same round of the loop go together"
        await clock.rounds()
        assert called == [100.0]

    asyncio.run(main())


def test_requests_wait_for_connections_just_opened() -> None:
    async def main() -> None:
        clock, arrivals, called = Clock(), Arrivals(), []
        for name in ("a", "b"):
            arrivals.opened(name)
        arrivals.settle(lambda: called.append(clock.now))
        await clock.rounds(0.001)
        arrivals.on_received("a")
        await clock.rounds(0.001)
        assert not called
        assert arrivals.num_expected == 1
        arrivals.on_received("b")
        await clock.rounds()
        assert called, "it need not look at the clock"
        assert arrivals.num_expected == 0

    asyncio.run(main())


def test_silent_connections_are_not_waited_for() -> None:
    async def main() -> None:
        clock, arrivals, called = Clock(), Arrivals(), []
        arrivals.opened("silent")
        await clock.rounds(FRESH_S + 0.0001)
        assert arrivals.num_expected == 0
        assert not arrivals._fresh, "it is forgotten"
        arrivals.settle(lambda: called.append(clock.now))
        await clock.rounds()
        assert called

    asyncio.run(main())


def test_the_wait_for_arrivals_is_bounded() -> None:
    async def main() -> None:
        clock, arrivals, called = Clock(), Arrivals(), []
        arrivals.settle(lambda: called.append(clock.now))
        for number in range(1000):
            arrivals.opened(number)
            await clock.rounds(0.001)
            if called:
                break
        assert called
        assert called[0] <= 100.0 + MAX_S + 0.002

    asyncio.run(main())


def submit() -> OpenRequest:
    return OpenRequest(EventAnswer(lambda: None), pb.ToWorker(submit=pb.Submit(request_id="r")), lambda error: None)


class Held(Arrivals):
    """Settles when the test calls ``callback``."""

    def settle(self, callback: Callable[[], None]) -> None:
        self.callback = callback


def test_an_idle_worker_gets_simultaneous_requests_in_one_write() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        there.setblocking(False)
        arrivals = Held()
        link = WorkerConnection("m", 0, arrivals)
        link.get_ready(pb.Ready(), None)
        stream = FrameStream(here, pb.FromWorker.FromString, 1 << 20)
        link.send_over(stream)
        requests = [submit() for _ in range(4)]
        for request in requests[:3]:
            link.begin(request)
        link.abort(requests[1])  # it is never sent
        assert len(link._unsent) == 2
        arrivals.callback()
        reader = FrameStream(there, pb.ToWorker.FromString, 1 << 20)
        await until(lambda: reader._unread)
        assert [one.submit.key for one in reader._unread] == [requests[0].key, requests[2].key], "in one write"
        reader._unread.clear()
        link.begin(requests[3])  # the worker is busy: requests are sent at once
        await until(lambda: reader._unread)
        assert [one.submit.key for one in reader._unread] == [requests[3].key]
        link.fail("over")
        arrivals.callback()  # late, for a lost connection: nothing happens
        reader.close()

    asyncio.run(main())
