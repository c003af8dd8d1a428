"""Busy servable workers: cancelled, timed out, too large, ended with everything that they started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.api_errors import RefusalError
from penstock.errors import DeadlineError, QueueFullError, UnavailableError
from penstock.servables.process import pool
from penstock.servables.schedule.unit_queue import UnitBatch
from tests.support.servable_folders import Host, is_gone, pids, request, write
from tests.support.worker_processes import until

GATES = """
    servable.settings(workers=1, timeout_s={timeout_s}, memory_limit_mib={limit})
    kept = []

    @servable.stage(outputs={{"y": "FP32[]", "pid": "INT64[]"}})
    def gate(x):
        if x == 1:
            open({folder!r} + "/in", "w").close()
            while not os.path.exists({folder!r} + "/out"): time.sleep(0.01)
        if x == 2: kept.append(bytearray(os.urandom(1 << 20)) * 300)
        if x == 3: threading.Thread(target=time.sleep, args=(1000,)).start()
        if x == 4 and os.fork() == 0: time.sleep(1000)
        if x == 5:
            while True: time.sleep(1000)
        return x, os.getpid()

    @servable.method(inputs={{"x": "FP32[]"}}, outputs={{"y": "FP32[]", "pid": "INT64[]"}})
    def run(x):
        return gate(x)
"""


@pytest.fixture
def gated(tmp_path) -> Iterator:
    hosts = []

    def make(timeout_s: float = 600, limit: int | None = None) -> Host:
        (tmp_path / "root").mkdir()
        write(tmp_path / "root", "gates", GATES.format(folder=str(tmp_path), timeout_s=timeout_s, limit=limit))
        hosts.append(Host(tmp_path / "root"))
        return hosts[0]

    yield make
    for one in hosts:
        one.close()


def test_requests_are_cancelled_queued_and_running(gated, tmp_path) -> None:
    host = gated()
    method = host.servables.find("gates")

    async def storm():
        first = asyncio.ensure_future(method.infer(request({"x": np.array([1.0])})))
        await until((tmp_path / "in").exists)
        queued = [asyncio.ensure_future(method.infer(request({"x": np.full(3, 10.0 + n)}))) for n in range(4)]
        late = asyncio.ensure_future(method.infer(request({"x": np.array([7.0])}, deadline_s=1e-3)))
        with pytest.raises(DeadlineError):
            await late
        first.cancel()
        for one in queued[1:3]:
            one.cancel()
        gone = await asyncio.gather(first, *queued[1:3], return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in gone)
        (tmp_path / "out").touch()
        left = await asyncio.gather(queued[0], queued[3])
        return [one.outputs[0].array.tolist() for one in left]

    assert host.do(storm()) == [[10.0] * 3, [13.0] * 3]
    assert method.statistics.num_cancelled == 3
    assert method.statistics.num_fail == 1


ORDER = """
    servable.settings(max_waiting=3)
    calls = []

    @servable.stage(outputs={{"call": "INT64[]"}}, batch_size=1)
    def note(x):
        if x[0] == 1:
            open({folder!r} + "/in", "w").close()
            while not os.path.exists({folder!r} + "/out"): time.sleep(0.01)
        calls.append(x[0])
        return np.array([len(calls)])

    @servable.method(inputs={{"x": "FP32[]"}}, outputs={{"call": "INT64[]"}})
    def run(x):
        return note(x)
"""


def test_lower_priorities_go_first_and_a_full_queue_refuses(tmp_path) -> None:
    """Three may wait; a fourth is refused at once and counted."""
    write(tmp_path / "root", "order", ORDER.format(folder=str(tmp_path)))
    host = Host(tmp_path / "root")
    method = host.servables.find("order")

    async def storm():
        def begin(priority: int, x: float = 0.0):
            return asyncio.ensure_future(method.infer(request({"x": np.array([x])}, priority=priority)))

        first = begin(9, 1.0)
        await until((tmp_path / "in").exists)
        several = [begin(5), begin(-1), begin(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await begin(-5)
        (tmp_path / "out").touch()
        return [int(one.outputs[0].array[0]) for one in await asyncio.gather(first, *several)]

    try:
        assert host.do(storm()) == [1, 4, 2, 3]
        assert (method.statistics.num_rejected, method.statistics.num_success) == (1, 4)
    finally:
        host.close()


def test_hanging_stage_is_killed_others_answered(gated) -> None:
    host = gated(timeout_s=3)
    before = pids(host.servables)

    async def storm():
        method = host.servables.find("gates")
        several = [10.0, 5.0, 11.0, 12.0]
        return await asyncio.gather(
            *(method.infer(request({"x": np.array([one])})) for one in several), return_exceptions=True
        )

    found = host.do(storm())
    refused = found.pop(1)
    assert isinstance(refused, RefusalError), refused
    assert (refused.status, refused.code) == (504, "stage_hung")
    assert "gate" in str(refused)
    assert [one.outputs[0].array.tolist() for one in found] == [[10.0], [11.0], [12.0]]
    assert all(map(is_gone, before))


def test_a_process_that_grows_is_replaced_between_batches(gated) -> None:
    host = gated(limit=400)
    before = pids(host.servables)
    found = host.ask("gates", x=np.array([2.0, 2.0]))
    assert found["y"].tolist() == [2.0, 2.0]

    async def replaced() -> None:
        # The pool lists both processes until it has seen the old one end.
        await until(lambda: len(pids(host.servables)) == 1 and is_gone(before[0]))

    host.do(replaced())
    assert pids(host.servables) != before
    assert host.ask("gates", x=np.array([3.0]))["pid"].tolist() == pids(host.servables)


def test_far_too_large_process_ends_without_replacement(gated, monkeypatch, caplog) -> None:
    """Requests are refused at once, as when processes die, until a process starts again."""
    host = gated(limit=400)
    launch = pool.start_servable_worker

    async def none(*_: object) -> None:
        raise UnavailableError("/planted/file: No such file or directory")

    monkeypatch.setattr(pool, "start_servable_worker", none)
    assert host.ask("gates", x=np.array([2.0, 2.0, 2.0]))["y"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(UnavailableError) as raised:
        host.ask("gates", x=np.array([10.0]))
    assert str(raised.value).endswith("the processes crash repeatedly; retry later")
    assert "/planted/file" in caplog.text
    assert pids(host.servables) == []
    monkeypatch.setattr(pool, "start_servable_worker", launch)
    host.do(until(lambda: pids(host.servables)))
    assert host.ask("gates", x=np.array([10.0]))["y"].tolist() == [10.0]


def test_unsendable_batch_fails_and_the_process_stays(gated, monkeypatch) -> None:
    host = gated()
    message = UnitBatch.message

    def broken(flight: UnitBatch) -> object:
        monkeypatch.setattr(UnitBatch, "message", message)
        raise ValueError("planted")

    monkeypatch.setattr(UnitBatch, "message", broken)
    with pytest.raises(ValueError, match="planted"):
        host.ask("gates", x=np.array([10.0]))
    assert host.ask("gates", x=np.array([11.0]))["y"].tolist() == [11.0]


def test_threads_and_children_end_with_their_process(gated) -> None:
    host = gated()
    host.ask("gates", x=np.array([3.0]))
    child = host.ask("gates", x=np.array([4.0]))["pid"][0]
    group = pids(host.servables)
    assert group == [child]
    host.do(host.servables.unload("gates"))
    assert is_gone(child)
    assert not pids(host.servables)
