"""Which requests count as causes of a worker's crash."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from penstock.engine.options import RequestOptions
from penstock.llm.answer import EventAnswer
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.crash_tracker import CrashTracker
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.worker_connection import LostWorkerError, OpenRequest, WorkerConnection


def test_requests_behind_a_possibly_ended_one_are_suspects() -> None:
    """Two run, and the worker crashes in the first step of an urgent third: the end of one of the two was not heard."""

    async def main() -> None:
        lost: dict[int, bool] = {}
        link = WorkerConnection("m", 0)
        link.get_ready(pb.Ready(plan=pb.Plan(max_requests=2)), None)
        for number in range(6):
            message = pb.ToWorker(submit=pb.Submit(options=pb.Options(priority=-100 if number == 5 else 0)))
            request = OpenRequest(
                EventAnswer(lambda: None),
                message,
                lambda error, number=number: lost.update({number: error.was_running}),
            )
            request.taken.set_result(None)
            request.answer.has_begun = number < 2
            link.begin(request)
        link.fail("it crashed")
        assert lost == {0: True, 1: True, 2: True, 3: False, 4: False, 5: True}

    asyncio.run(main())


def test_waiting_during_three_crashes_counts_as_one() -> None:
    tracker = CrashTracker()
    assert [tracker.add_wait(b"x", worker) for worker in ("1", "1", "2", "3", "4", "5", "6")] == [0, 0, 0, 1, 1, 1, 2]
    tracker.clear(b"x")
    assert tracker.add_wait(b"x", "7") == 0


def test_a_crash_counts_once_for_equal_requests() -> None:
    tracker = CrashTracker()
    assert [tracker.add(b"x", "first"), tracker.add(b"x", "first"), tracker.add(b"y", "first")] == [1, 1, 1]
    assert [tracker.add(b"x", "second"), tracker.num_crashes(b"x"), tracker.num_crashes(b"z")] == [2, 2, 0]
    tracker.clear(b"x")
    assert tracker.num_crashes(b"x") == 0


def test_lost_machines_are_no_requests_fault() -> None:
    """Workers of a cluster are gone before it is known why: until then a request is suspected, but not refused."""

    async def main() -> None:
        routes: Any = SimpleNamespace(crashes=CrashTracker())
        request = Failover(
            routes, [5], RequestOptions(), lambda options: pb.ToWorker(submit=pb.Submit(options=options))
        )
        lost = LostWorkerError("gone", was_running=True)
        counts = []
        for has_crashed in (False, False, True, False, True, True):
            request._connection = WorkerConnection("m", 7, is_remote=True)
            counts.append(request._count_crash(lost))
            assert not request._connection.explained.is_set()
            request._connection.note_cause(has_crashed)
            assert request._connection.explained.is_set()
        assert counts == [1, 1, 1, 1, 1, 2], "refused with the second crash"
        request._connection = WorkerConnection("m", 0, is_remote=True)  # nothing will say why it went
        assert request._count_crash(lost) == 4

    asyncio.run(main())
