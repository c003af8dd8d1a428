"""Clients of every route get the answer of an undisturbed service when its worker is killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import grpc
import pytest

from penstock.serving.grpc.listener import GrpcListener
from penstock.serving.http.app import make_app
from penstock.serving.http.listener import Listener
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewaySettings
from tests.support.grpc_client import SERVICE
from tests.support.services import TEMPLATE
from tests.support.worker_processes import CALM, DEMO, faulty, service, until, wait_for_causes

WORDS = {"type": "string", "minLength": 60, "maxLength": 64}
PARAMETERS = {"type": "object", "properties": {"a": WORDS, "b": WORDS}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS | {"additionalProperties": False}}}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 200, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], "temperature": 1.0, "seed": 7, "max_tokens": 400}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole completion": ("/v1/completions", {"prompt": [7, 9], "n": 2, "logprobs": 1, **SAMPLED}),
    "streamed completion": (
        "/v1/completions",
        {
            "prompt": [7, 9],
            "stream": True,
            "stream_options": {"include_usage": True},
            "frequency_penalty": 0.5,
            **SAMPLED,
        },
    ),
    "streamed tool call": (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "stream": True},
    ),
    "generate": ("/v2/models/demo/generate", {"text_input": "def f", "parameters": SAMPLED}),
}


class RouteClients:
    """Sends the requests of ``BODIES`` over HTTP, and one over gRPC whole and streamed."""

    def __init__(self, url: str, address: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self.channel = grpc.aio.insecure_channel(address)

    async def ask_all(self) -> list[Any]:
        """Return all answers without what differs between equal requests."""
        return await asyncio.gather(*(self._http(*one) for one in BODIES.values()), self._whole(), self._streamed())

    async def _http(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head, _, answer = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200"), answer
        return merged(answer.decode()) if body.get("stream") else without_ids(json.loads(answer))

    def _message(self) -> bytes:
        message = pb.ModelInferRequest()
        tensor = message.inputs.add(name="input_ids", datatype="INT32", shape=[2])
        tensor.contents.int_contents.extend([7, 9])
        message.parameters["max_tokens"].int64_param = 200
        message.parameters["seed"].int64_param = 6
        message.parameters["ignore_eos"].bool_param = True
        return message.SerializeToString()

    async def _whole(self) -> list[tuple[str, bytes]]:
        data = await self.channel.unary_unary(SERVICE + "ModelInfer")(self._message())
        return outputs(pb.ModelInferResponse.FromString(data))

    async def _streamed(self) -> bytes:
        call = self.channel.stream_stream(SERVICE + "ModelStreamInfer")()
        await call.write(self._message())
        await call.done_writing()
        text = b""
        async for data in call:
            response = pb.ModelStreamInferResponse.FromString(data)
            assert not response.error_message
            text += dict(outputs(response.infer_response)).get("text_output", b"")[4:]
        return text


def outputs(response: pb.ModelInferResponse) -> list[tuple[str, bytes]]:
    return [(one.name, data) for one, data in zip(response.outputs, response.raw_output_contents, strict=True)]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name not in ("id", "created")}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def merged(events: str) -> dict[str, Any]:
    """Return a stream's parts by field, put together: workers differ in how many tokens come at a time."""
    found: dict[str, Any] = {"": ""}
    for line in events.split("data: ")[1:]:
        text = line.split("\n", 1)[0].strip()
        event = {} if text == "[DONE]" else json.loads(text)
        assert "error" not in event
        found["usage"] = event.get("usage") or found.get("usage")
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            calls = "".join(call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ())
            names = "".join(call["function"].get("name") or "" for call in delta.get("tool_calls") or ())
            found[""] += choice.get("text") or delta.get("content") or ""
            found["calls"], found["names"] = found.get("calls", "") + calls, found.get("names", "") + names
            found["reason"] = choice["finish_reason"]
    return found


def test_every_route_goes_on_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_causes(monkeypatch)

    async def main() -> None:
        async with service(supervision=CALM, command=faulty("slow")) as running:
            backend = await running.models.load(str(DEMO))
            backend.tokenizer.chat_templates["default"] = TEMPLATE  # the demo has none
            gateway = make_app(running.models, GatewaySettings(port=0, grpc_port=0, tool_format="hermes"))
            listeners = [Listener(gateway, gateway.settings), GrpcListener(gateway.admission)]
            clients = RouteClients(*(one.open() for one in listeners))
            serving = asyncio.gather(*(one.serve() for one in listeners))
            try:
                expected = await clients.ask_all()
                (worker,) = backend._connections
                num_sent = worker.num_sent + len(BODIES) + 2
                asked = asyncio.ensure_future(clients.ask_all())
                await until(
                    lambda: (
                        asked.done()
                        or (
                            worker.num_sent == num_sent
                            and all(one.delivered.num_tokens > 2 for one in worker._open.values())
                        )
                    )
                )
                os.kill(worker.pid, signal.SIGKILL)
                await until(worker.gone.is_set)
                assert await asked == expected
                assert worker.num_lost > 0
                assert backend.lost_requests() == {"retried": 0, "continued": worker.num_lost, "failed": 0}
                tools = expected[list(BODIES).index("streamed tool call")]
                assert (tools["names"], set(json.loads(tools["calls"]))) == ("look", {"a", "b"})
            finally:
                await clients.channel.close()
                for one in listeners:
                    one.stop(at_once=True)
                await serving

    asyncio.run(main())
