"""Requests that come together begin together: who waits for whom, and for how long at most."""

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

ROUNDS = 20  # of the event loop: more than anything here takes that does not wait for the clock


class Clock:
    """The event loop's, which tests move."""

    def __init__(self) -> None:
        self.now = 100.0
        loop = asyncio.get_running_loop()
        loop.time = types.MethodType(lambda _: self.now, loop)  # type: ignore[method-assign]

    async def rounds(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for _ in range(ROUNDS):
            await asyncio.sleep(0)


def test_nobody_waits_where_nobody_else_is_coming() -> None:
    async def main() -> None:
        clock, arrivals, called = Clock(), Arrivals(), []
        arrivals.settle(lambda: called.append(clock.now))
        assert not called, "what came in the same round of the loop goes with it"
        await clock.rounds()
        assert called == [100.0]

    asyncio.run(main())


def test_it_waits_for_connections_that_were_just_opened_until_they_speak() -> None:
    async def main() -> None:
        clock, arrivals, called = Clock(), Arrivals(), []
        for name in ("a", "b"):
            arrivals.opened(name)
        arrivals.settle(lambda: called.append(clock.now))
        await clock.rounds(0.001)
        arrivals.spoke("a")
        await clock.rounds(0.001)
        assert not called
        assert arrivals.num_expected == 1
        arrivals.spoke("b")
        await clock.rounds(0.001)
        assert called
        assert arrivals.num_expected == 0

    asyncio.run(main())


def test_who_says_nothing_is_not_waited_for() -> None:
    async def main() -> None:
        clock, arrivals, called = Clock(), Arrivals(), []
        arrivals.opened("silent")
        await clock.rounds(FRESH_S + 0.0001)
        assert arrivals.num_expected == 0
        assert not arrivals._fresh, "nothing is kept of it"
        arrivals.settle(lambda: called.append(clock.now))
        await clock.rounds()
        assert called

    asyncio.run(main())


def test_nobody_waits_longer_than_the_bound_whoever_connects() -> None:
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
    """Settles when the test says so."""

    def settle(self, callback: Callable[[], None]) -> None:
        self.callback = callback


def test_a_resting_worker_is_sent_together_what_comes_together() -> None:
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
        link.abort(requests[1])  # it never leaves
        assert len(link._unsent) == 2
        arrivals.callback()
        reader = FrameStream(there, pb.ToWorker.FromString, 1 << 20)
        await until(lambda: reader._unread)
        assert [one.submit.key for one in reader._unread] == [requests[0].key, requests[2].key], "in one write"
        reader._unread.clear()
        link.begin(requests[3])  # the worker has work: nothing is held back
        await until(lambda: reader._unread)
        assert [one.submit.key for one in reader._unread] == [requests[3].key]
        link.fail("over")
        arrivals.callback()  # late, of a link that is gone: nothing happens
        reader.close()

    asyncio.run(main())
