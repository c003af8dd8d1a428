"""A primary with a worker behind an HTTP and a gRPC listener, and clients of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from penstock.serving.grpc.listener import GrpcListener
from penstock.serving.http.app import make_app
from penstock.serving.http.listener import Listener
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewaySettings
from tests.support.grpc_client import SERVICE
from tests.support.worker_processes import DEMO, service


class Clients:
    """Clients of both listeners."""

    def __init__(self, models: Any, listener: Listener, url: str, address: str) -> None:
        self.models, self.listener = models, listener
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
async def both_listeners() -> AsyncIterator[tuple[Clients, Any]]:
    async with service() as running:
        backend = await running.models.load(str(DEMO))
        gateway = make_app(running.models, GatewaySettings(port=0, grpc_port=0))
        listener = Listener(gateway, gateway.settings)
        listeners = [listener, GrpcListener(gateway.admission)]
        clients = Clients(running.models, listener, *(one.open() for one in listeners))
        serving = asyncio.gather(*(one.serve() for one in listeners))
        try:
            yield clients, backend
        finally:
            await clients.channel.close()
            for one in listeners:
                one.stop(at_once=True)
            await serving
