"""Stages that fork or write to the stream: no other request gets a wrong result, and none waits forever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.api_errors import RefusalError
from penstock.errors import UnavailableError
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.servable_worker import ServableWorker
from tests.support.errors import raises
from tests.support.marks import mostly_long
from tests.support.servable_folders import Host, is_gone, pids, request, until, write

ECHO = """
    servable.settings(workers={workers}, timeout_s=60)
    libc = ctypes.CDLL(None)

    def stream():
        "The descriptor of the stream to the primary: the only unix socket that is connected."
        import socket, stat
        for name in os.listdir("/proc/self/fd"):
            try:
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as one:
                        if one.family == socket.AF_UNIX and one.type & 1: return int(name)
            except OSError:
                pass

    def hostile(x):
        {body}

    @servable.stage(outputs={{"y": "FP32[3]"}}{options})
    def echo(x):
        if (x < 0).any(): hostile(x)
        return x

    @servable.method(inputs={{"x": "FP32[3]"}}, outputs={{"y": "FP32[3]"}})
    def run(x):
        return echo(x)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator:
    made: list[Host] = []

    def make(body: str, workers: int = 1, options: str = "") -> Host:
        write(tmp_path / "root", "echo", ECHO.format(body=body, workers=workers, options=options))
        made.append(Host(tmp_path / "root"))
        return made[0]

    yield make
    for one in made:
        one.close()


def storm(host: Host, count: int = 200) -> tuple[int, list[Exception], list[Exception]]:
    """Ask many at once, every tenth hostile: wrong answers, refusals of the hostile and of the others."""

    async def ask(number: int) -> Any:
        values = np.full((1, 3), -number if number % 10 == 0 else number, np.float32)
        await asyncio.sleep(number * 0.002)
        try:
            (tensor,) = (await host.servables.find("echo").infer(request({"x": values}))).outputs
        except (RefusalError, UnavailableError) as error:
            return error
        return tensor.array.tolist() == values.tolist()

    async def all_of_them() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*(ask(n) for n in range(1, count))), 120)

    found = dict(enumerate(host.do(all_of_them()), 1))
    errors = {number: one for number, one in found.items() if isinstance(one, Exception)}
    hostile = [one for number, one in errors.items() if number % 10 == 0]
    return [*found.values()].count(False), hostile, [one for number, one in errors.items() if number % 10]


FORKS = {
    "python": "os.fork()",
    "late child": "os.fork() or time.sleep(0.01)",
    "late parent": "os.fork() and time.sleep(0.01)",
    "the C library": "libc.fork()",
    "a child that outlives": "libc.fork() or time.sleep(0.05)",
    "several": "[os.fork() for _ in range(2)]",
    "the child raises": 'if not os.fork(): raise ValueError("child")',
    "the child exits": "if not os.fork(): sys.exit(3)",
    "a new session": "os.fork() or os.setsid()",
}


@pytest.mark.parametrize("batches", mostly_long([False, True], True))
@pytest.mark.parametrize("how", FORKS)
def test_a_fork_that_returns_twice_answers_once(hosts, how: str, batches: bool) -> None:
    host = hosts(FORKS[how], options=", batch_size=4" if batches else "")
    before = pids(host.servables)
    assert storm(host, 100) == (0, [], [])
    assert pids(host.servables) == before
    host.do(until(lambda: children_at_work(before[0]) == 0))


def children_at_work(pid: int) -> int:
    return sum(one.status() != psutil.STATUS_ZOMBIE for one in psutil.Process(pid).children(recursive=True))


def test_a_servable_that_forks_while_it_is_loaded(tmp_path: Path) -> None:
    """Both sides come to the end of the file: one of them is the process of the servable."""
    text = ECHO.format(body="pass", workers=1, options="") + "\n    os.fork()\n    os.fork()\n"
    write(tmp_path / "root", "echo", text)
    host = Host(tmp_path / "root")
    try:
        before = pids(host.servables)
        assert storm(host, 50) == (0, [], [])
        assert pids(host.servables) == before
    finally:
        host.close()


def frame(result: pb.Result) -> bytes:
    data = pb.FromStage(result=result).SerializeToString()
    return len(data).to_bytes(4, "little") + data


def wrong(number: int) -> bytes:
    """A result that could be taken for that of another batch."""
    found = pb.Result(number=number)
    found.outputs.add(data=np.full(3, 7, "<f4").tobytes())
    return frame(found)


READY = pb.FromStage(ready=pb.Ready()).SerializeToString()
WRITES = {
    "another result": f"os.write(stream(), {wrong(0)!r})",
    "of a batch that comes": f"os.write(stream(), {wrong(1 << 40)!r})",
    "several": f"os.write(stream(), {wrong(0)!r} * 3)",
    "later, by a thread": f"threading.Timer(0.01, os.write, (stream(), {wrong(0)!r})).start()",
    "later, by a child": f"""
        descriptor = os.dup(stream())
        if not libc.fork():
            time.sleep(0.01)
            os.write(descriptor, {wrong(0)!r})
            os._exit(0)
    """,
    "a piece of a frame": f"os.write(stream(), {wrong(0)[:9]!r})",
    "ready again": f"os.write(stream(), {len(READY).to_bytes(4, 'little') + READY!r})",
    "a frame of 4 GB": "os.write(stream(), b'\\xff' * 4)",
    "text": "os.write(stream(), b'progress: 100 %\\n')",
    "nothing more": "os.close(stream())",
    "no descriptors": "os.closerange(3, 1024)",
}


@pytest.mark.long
@pytest.mark.parametrize("how", mostly_long(WRITES, "another result", "later, by a child"))
def test_foreign_result_ends_the_process(hosts, how: str) -> None:
    """The others are answered, or told that the process died with their batch.

    What comes later may come between two batches: then no request is lost.
    """
    host = hosts(WRITES[how].strip())
    before = pids(host.servables)
    num_wrong, hostile, others = storm(host, 100)
    assert num_wrong == 0
    assert {one.code for one in (*hostile, *others) if isinstance(one, RefusalError)} <= {"stage_died"}
    assert len(hostile) + len(others) > 0 or how.startswith("later")
    assert all(map(is_gone, before))
    host.do(until(lambda: pids(host.servables)))
    assert host.ask("echo", x=np.ones((1, 3)))["y"].tolist() == [[1, 1, 1]]


@pytest.mark.long
def test_stray_bytes_in_a_frame_are_detected(tmp_path: Path) -> None:
    """Bytes that get into a result shift the rest, and may cut off a piece that reads as fields nobody knows."""
    text = """
        @servable.stage(outputs={"y": "UINT8[4099]"})
        def fields(x):
            "Pairs, and three bytes at the end, that read as fields with the number 15."
            return np.frombuffer(b"".join(b"\\x78%c" % (n % 128) for n in range(2048)) + b"\\x78\\x81\\x01", "u1")

        @servable.method(inputs={"x": "FP32[]"}, outputs={"y": "UINT8[4099]"})
        def run(x):
            return fields(x)
    """
    write(tmp_path / "root", "fields", text)
    host = Host(tmp_path / "root")
    expected = [byte for n in range(2048) for byte in (0x78, n % 128)] + [0x78, 0x81, 1]

    async def ask(insert: bytes) -> Any:
        (pool,) = next(iter(host.servables.all()[0].versions.values())).pools
        stream = pool.workers[0].process._stream
        parse = stream._parse
        stream._parse = lambda data: parse((data[:1000] + insert + data[1000:])[: len(data)])
        return (await host.servables.find("fields").infer(request({"x": np.array([5.0])}))).outputs[0].array[0].tolist()

    try:
        assert host.do(ask(b"")) == expected
        for size in range(3, 24):
            with raises(RefusalError, code="stage_died"):
                host.do(ask(bytes([0x78, 1] * size)[:size]))
            host.do(until(lambda: pids(host.servables)))
    finally:
        host.close()


def test_a_result_names_its_batch(hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary does not match results by their order in the stream."""
    host = hosts("pass")
    heard = ServableWorker._on_message
    messages: list[pb.FromStage] = []

    def note(process: ServableWorker, message: pb.FromStage) -> None:
        messages.append(message)
        heard(process, message)

    monkeypatch.setattr(ServableWorker, "_on_message", note)
    (pool,) = next(iter(host.servables.all()[0].versions.values())).pools
    pool.workers[0].process._stream.listen(pool.workers[0].process._on_message)
    for _ in range(3):
        host.ask("echo", x=np.ones((1, 3)))
    assert [one.result.number for one in messages] == [1, 2, 3]
