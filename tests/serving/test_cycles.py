"""What requests leave for the garbage collector, which stands everything still while it looks: nothing of ours."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.llm.answer import EventAnswer
from penstock.serving.proto import wire_pb2 as wire
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.worker import Worker
from penstock.serving.workers.worker_config import WorkerConfig
from tests.support.both_listeners import Clients, both_listeners
from tests.support.worker_processes import DEMO, OPTIONS, until

NUM = 12
PACKAGE = f"{Path(penstock.__file__).parent}/"


def ours(kept: object) -> str:
    """What an object of this package is called; empty for others'."""
    code = getattr(kept, "f_code", None) or getattr(kept, "__code__", None) or getattr(kept, "cr_code", None)
    if code is not None:
        return f"{type(kept).__name__} of {code.co_qualname}" if code.co_filename.startswith(PACKAGE) else ""
    name = f"{type(kept).__module__}.{type(kept).__qualname__}"
    return name if name.startswith("penstock.") else ""


async def left_by(ask: Callable[[], Awaitable[Any]], expected: Any, clients: Clients, backend: Any) -> Counter[str]:
    """Objects of ours that only a collection would end, after NUM requests."""
    await ask()

    def is_over() -> bool:
        is_open = clients.listener.connections or any(one.num_open for one in backend.workers())
        return not is_open and asyncio.all_tasks() <= tasks

    tasks = asyncio.all_tasks()
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM):
            found = await ask()
            assert expected is None or found == expected
        await until(is_over, "the end of all connections and of what served them")
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        return Counter(filter(None, map(ours, gc.garbage)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Objects of other tests, which a collection would take a second to traverse, are left out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.long
def test_requests_leave_nothing_to_the_garbage_collector(monkeypatch, frozen_heap) -> None:
    async def main() -> None:
        async with both_listeners() as (clients, backend):
            kinds: list[tuple[Callable[[], Awaitable[Any]], Any]] = [
                (clients.http, b"200"),
                (lambda: clients.http(stream=True), b"200"),
                (lambda: clients.http(n=2), b"200"),
                (lambda: clients.http(prompt=[[1], [2], [3]]), b"200"),
                (lambda: clients.http(echo=True, max_tokens=0), b"200"),
                (lambda: clients.http(temperature=-1), b"400"),
                (lambda: clients.http(num_read=20, stream=True, max_tokens=2000), b"200"),
                (clients.grpc, "OK"),
                (lambda: clients.grpc(max_tokens=-1), "INVALID_ARGUMENT"),
                (clients.stream, "OK"),
                (lambda: clients.stream(n=-1), "INVALID_ARGUMENT"),
                (lambda: clients.stream(leaves=True, max_tokens=2000), None),
            ]
            for ask, expected in kinds:
                assert not await left_by(ask, expected, clients, backend)
            (link,) = backend._connections
            most, link.max_open = link.max_open, -1  # as full as can be
            assert not await left_by(clients.http, b"429", clients, backend)
            assert not await left_by(clients.grpc, "RESOURCE_EXHAUSTED", clients, backend)
            assert not await left_by(clients.stream, "RESOURCE_EXHAUSTED", clients, backend)
            link.max_open = most

            monkeypatch.setattr(EventAnswer, "_settle", lambda answer: answer.on_settled())  # it is not let go of
            found = await left_by(clients.http, b"200", clients, backend)
            assert found[f"{Failover.__module__}.{Failover.__qualname__}"] == NUM, found

    asyncio.run(main())


COUNTED = """
import gc
from penstock.cli.main import main
from penstock.serving import service
from penstock.serving.workers import worker
started = service.startup_banner
def banner(*given):
    print("frozen", gc.get_freeze_count(), "left", len(gc.get_objects()), flush=True)
    return started(*given)
service.startup_banner = banner
main(["serve", {model!r}, "--port", "0", "--threads", "1"])
"""


def test_objects_of_the_start_are_frozen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COUNTED.format(model=str(DEMO))], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"frozen (\d+) left (\d+)\n", process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert found is not None
    frozen, left = map(int, found.groups())
    assert frozen > 10_000 > 10 * left


def test_objects_of_a_worker_are_frozen_before_ready(monkeypatch) -> None:
    """Before it is ready: then steps begin, which would wait."""
    frozen: list[int] = []

    class Stream:
        def __init__(self) -> None:
            self.frozen_at_ready = -1
            self._ready = asyncio.Event()

        def send(self, message: wire.FromWorker) -> None:
            if message.HasField("ready"):
                self.frozen_at_ready = len(frozen)
                self._ready.set()

        async def read(self) -> wire.ToWorker:
            await self._ready.wait()
            return wire.ToWorker(stop=wire.Stop())

    async def main() -> None:
        stream = Stream()
        config = WorkerConfig("unix:", "", "demo", str(DEMO), 1, "never", 0, OPTIONS)
        assert await Worker(config, stream).run() == 0
        assert stream.frozen_at_ready == 1

    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    asyncio.run(main())
