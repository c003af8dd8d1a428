"""What requests leave for the garbage collector, which stands everything still while it looks: nothing of ours."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from penstock.llm.answer import EventAnswer
from penstock.serving.grpc.listener import GrpcListener
from penstock.serving.http.app import make_app
from penstock.serving.http.listener import Listener
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.proto import wire_pb2 as wire
from penstock.serving.settings import GatewaySettings
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.worker import Worker
from penstock.serving.workers.worker_config import WorkerConfig
from tests.support.grpc_client import SERVICE
from tests.support.worker_processes import DEMO, OPTIONS, service, until

NUM = 12


class Clients:
    """Of both doors."""

    def __init__(self, models: Any, url: str, address: str) -> None:
        self.models = models
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.channel = grpc.aio.insecure_channel(address)

    async def http(self, num_read: int = -1, path: str = "completions", **fields: Any) -> bytes:
        prompt = {"messages": [{"role": "user", "content": "a"}]} if path == "chat/completions" else {"prompt": [7, 9]}
        data = json.dumps({**prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **fields}).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.read(num_read)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        return answer[9:12]

    def _message(self, **parameters: int) -> bytes:
        found = pb.ModelInferRequest()
        one = found.inputs.add(name="input_ids", datatype="INT32", shape=[2])
        one.contents.int_contents.extend([7, 9])
        for name, value in {"max_tokens": 3, **parameters}.items():
            found.parameters[name].int64_param = value
        found.parameters["ignore_eos"].bool_param = True
        return found.SerializeToString()

    async def grpc(self, **parameters: int) -> str:
        try:
            await self.channel.unary_unary(SERVICE + "ModelInfer")(self._message(**parameters))
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def stream(self, leaves: bool = False, **parameters: int) -> str:
        call = self.channel.stream_stream(SERVICE + "ModelStreamInfer")()
        await call.write(self._message(**parameters))
        if leaves:
            await call.read()
            call.cancel()
            return "left"
        await call.done_writing()
        async for data in call:
            found = pb.ModelStreamInferResponse.FromString(data)
        return found.infer_response.parameters["code"].string_param or "OK"


@asynccontextmanager
async def both_doors() -> AsyncIterator[tuple[Clients, Any]]:
    async with service() as running:
        backend = await running.models.load(str(DEMO))
        gateway = make_app(running.models, GatewaySettings(port=0, grpc_port=0))
        listeners = [Listener(gateway, gateway.settings), GrpcListener(gateway.admission)]
        clients = Clients(running.models, *(one.open() for one in listeners))
        serving = asyncio.gather(*(one.serve() for one in listeners))
        try:
            yield clients, backend
        finally:
            await clients.channel.close()
            for one in listeners:
                one.stop(at_once=True)
            await serving


def ours(kept: object) -> str:
    """What an object of this package is called; empty for others'."""
    code = getattr(kept, "f_code", None) or getattr(kept, "__code__", None) or getattr(kept, "cr_code", None)
    if code is not None:
        return f"{type(kept).__name__} of {code.co_qualname}" if "/penstock/" in code.co_filename else ""
    name = f"{type(kept).__module__}.{type(kept).__qualname__}"
    return name if name.startswith("penstock.") else ""


async def left_by(ask: Callable[[], Awaitable[Any]], expected: Any, backend: Any) -> Counter[str]:
    """Objects of ours that only a collection would end, after NUM requests."""
    await ask()
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM):
            found = await ask()
            assert expected is None or found == expected
        await until(lambda: all(one.num_open == 0 for one in backend.workers()))
        await asyncio.sleep(0.05)  # the ends of connections
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        return Counter(filter(None, map(ours, gc.garbage)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_requests_leave_nothing_to_the_garbage_collector(monkeypatch) -> None:
    async def main() -> None:
        async with both_doors() as (clients, backend):
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
                assert not await left_by(ask, expected, backend)
            (link,) = backend._connections
            most, link.max_open = link.max_open, -1  # as full as can be
            assert not await left_by(clients.http, b"429", backend)
            assert not await left_by(clients.grpc, "RESOURCE_EXHAUSTED", backend)
            assert not await left_by(clients.stream, "RESOURCE_EXHAUSTED", backend)
            link.max_open = most

            monkeypatch.setattr(EventAnswer, "_settle", lambda answer: answer.on_settled())  # it is not let go of
            found = await left_by(clients.http, b"200", backend)
            assert found[f"{Failover.__module__}.{Failover.__qualname__}"] == NUM, found

    asyncio.run(main())


COUNTED = """
import gc
from penstock.cli.main import main
from penstock.serving import service
from penstock.serving.workers import worker
started = service.startup_banner
def greeting(*given):
    print("frozen", gc.get_freeze_count(), "left", len(gc.get_objects()), flush=True)
    return started(*given)
service.startup_banner = greeting
main(["serve", {model!r}, "--port", "0", "--threads", "1"])
"""


def test_what_the_start_made_is_no_work_of_collections() -> None:
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


def test_what_a_worker_loaded_is_no_work_of_collections(monkeypatch) -> None:
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
