"""Models that are loading or lost their workers: every request is told to retry later."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.processes.supervision import SupervisionPolicy
from penstock.serving.grpc.listener import GrpcListener
from penstock.serving.http.app import make_app
from penstock.serving.http.listener import Listener
from penstock.serving.model_changes import Changes
from penstock.serving.proto import oip_pb2 as pb
from penstock.serving.settings import GatewayLimits, GatewaySettings
from penstock.serving.workers.remote_models import RemoteModels
from tests.support.admin_socket import admin
from tests.support.grpc_client import SERVICE
from tests.support.http_service import SECONDS
from tests.support.worker_processes import DEMO, faulty, pids, service, until

TEXT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "demo", "prompt": "a", "max_tokens": 1},
    "/v1/embeddings": {"model": "demo", "input": "a"},
    "/pooling": {"model": "demo", "input": "a"},
    "/tokenize": {"model": "demo", "prompt": "a"},
    "/detokenize": {"model": "demo", "tokens": [5]},
    "/v2/models/demo/infer": {
        "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}],
        "parameters": {"max_tokens": 1},
    },
    "/v2/models/demo/generate": {"text_input": "a", "max_tokens": 1},
}
SCORES = {"model": "demo", "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
IDS = {"model": "demo", "prompt": [5, 6], "max_tokens": 1}
RANKS: dict[str, dict[str, Any]] = {
    "/rerank": {"model": "demo", "query": "a", "documents": ["b"]},
    "/v1/rerank": {"model": "demo", "query": "a", "documents": ["b"]},
    "/score": {"model": "demo", "text_1": "a", "text_2": "b"},
    "/v1/score": {"model": "demo", "text_1": "a", "text_2": "b"},
    "/classify": {"model": "demo", "input": "a"},
    "/predict": {"model": "demo", "inputs": "a"},
}
NEEDS_NO_WORKER = {"/tokenize", "/detokenize"}


@dataclass
class Gateways:
    """Sends requests to the models of a service over HTTP and gRPC."""

    models: RemoteModels
    changes: Changes
    host: str
    channel: grpc.aio.Channel
    admin: Any

    async def ask(self, path: str, body: Any = None) -> tuple[int, Any, str | None]:
        """Return status, JSON and Retry-After of one request over HTTP."""

        def one() -> tuple[int, Any, str | None]:
            connection = http.client.HTTPConnection(self.host, timeout=SECONDS)
            try:
                headers = {"Content-Type": "application/json"}
                connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read() or b"{}"), answer.headers["Retry-After"]
            finally:
                connection.close()

        return await asyncio.to_thread(one)

    async def infer(self) -> str:
        """Return the status code of one request over gRPC."""
        request = pb.ModelInferRequest(model_name="demo")
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
        request.parameters["max_tokens"].int64_param = 1
        try:
            await self.channel.unary_unary(SERVICE + "ModelInfer")(request.SerializeToString(), timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


@asynccontextmanager
async def gateways(tmp_path: Path, **named: Any) -> AsyncIterator[Gateways]:
    """A service without models at first, with HTTP, gRPC and an admin socket."""
    async with service(**named) as running, admin(running.models, tmp_path / "admin.sock") as (asked, changes):
        settings = GatewaySettings(port=0, grpc_port=0, limits=GatewayLimits(body_s=SECONDS, write_s=SECONDS))
        gateway = make_app(running.models, settings)
        listeners = Listener(gateway, settings), GrpcListener(gateway.admission)
        host = listeners[0].open().removeprefix("http://")
        address = listeners[1].open()
        serving = asyncio.gather(*(one.serve() for one in listeners))
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield Gateways(running.models, changes, host, channel, asked)
        finally:
            for one in listeners:
                one.stop(at_once=True)
            await serving


def model(tmp_path: Path, is_there: bool) -> tuple[Path, Path]:
    """A bundle, and the file whose presence lets a worker of "waits" load it."""
    path = tmp_path / "demo.psm"
    path.symlink_to(DEMO)
    go = path.with_suffix(".go")
    if is_there:
        go.touch()
    return path, go


def test_requests_to_a_model_that_is_loading(tmp_path: Path) -> None:
    """503 with Retry-After on every route, and 404 after the load has failed."""
    path, go = model(tmp_path, is_there=False)

    async def main() -> None:
        async with gateways(tmp_path, command=faulty("waits")) as its:
            loading = asyncio.ensure_future(its.admin("POST", "/admin/models/load", {"path": str(path)}))
            await until(its.models.list)
            asked = {**TEXT, **RANKS, "/v1/chat/completions": CHAT}
            for route, body in (*asked.items(), ("/v1/completions", SCORES), ("/v1/completions", IDS)):
                status, told, after = await its.ask(route, body)
                assert (status, after) == (503, "1"), (route, body, told)
                assert "demo is still loading." in json.dumps(told)
            assert await its.infer() == "UNAVAILABLE"
            assert (await its.ask("/v1/models/demo"))[1]["state"] == "loading"
            assert (await its.ask("/v2/models/demo"))[0] == 503
            await its.changes.close()
            assert (await loading)[0] == 503
            for route, body in asked.items():
                assert (await its.ask(route, body))[0] == 404, route
            assert await its.infer() == "NOT_FOUND"
            go.touch()

    asyncio.run(main())


def test_a_worker_lost_before_the_first_request(tmp_path: Path) -> None:
    """The primary keeps a model's description while no worker is ready, and answers texts afterwards."""
    path, go = model(tmp_path, is_there=True)

    async def main() -> None:
        async with gateways(tmp_path, command=faulty("waits")) as its:
            assert (await its.admin("POST", "/admin/models/load", {"path": str(path)}))[0] == 200
            backend = its.models.get("demo")
            described = (await its.ask("/v1/models/demo"))[1]
            metadata = await its.ask("/v2/models/demo")
            go.unlink()
            os.kill(*pids(backend), signal.SIGKILL)
            await until(lambda: not backend.is_ready and not pids(backend))
            for route, body in TEXT.items():
                status, told, after = await its.ask(route, body)
                expected = (200, None) if route in NEEDS_NO_WORKER else (503, "1")
                assert (status, after) == expected, (route, told)
            assert (await its.ask("/v1/completions", SCORES))[0] == 503
            assert "chat template" in (await its.ask("/v1/chat/completions", CHAT))[1]["error"]["message"]
            assert await its.infer() == "UNAVAILABLE"
            assert (await its.ask("/v1/models/demo"))[1] == described | {"state": "loading", "is_ready": False}
            assert await its.ask("/v2/models/demo") == metadata
            index = (await its.ask("/v2/repository/index", {}))[1]
            assert [(one["version"], one["state"]) for one in index] == [("1", "LOADING")]
            go.touch()
            await until(lambda: backend.is_ready)
            for route, body in TEXT.items():
                status, told, _ = await its.ask(route, body)
                assert status == 200, (route, told)
            assert await its.infer() == "OK"

    asyncio.run(main())


def test_a_worker_lost_as_soon_as_it_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load is complete, and only the description is left of the model."""
    path, go = model(tmp_path, is_there=True)

    async def main() -> None:
        async with gateways(tmp_path, command=faulty("waits")) as its:
            loading = asyncio.ensure_future(its.models.load(str(path)))
            await until(its.models.list)
            backend = its.models.get("demo")

            def lose() -> None:
                go.unlink(missing_ok=True)
                for link in backend._all_connections or ():
                    os.kill(link.pid, signal.SIGKILL)
                    link.fail("planted")

            monkeypatch.setattr("penstock.serving.workers.worker_group.WorkerGroup._on_change", lose, raising=False)
            await loading
            lose()
            await until(lambda: not pids(backend))
            assert backend.tokenizer is not None
            assert backend.card.vocab_size > 0
            assert (await its.ask("/tokenize", TEXT["/tokenize"]))[0] == 200
            go.touch()

    asyncio.run(main())


@pytest.mark.long
def test_a_race_of_loads_gives_no_false_refusal(tmp_path: Path) -> None:
    """Models are loaded and unloaded through the admin socket under traffic: only 200, 404 and 503 occur."""
    num_loads = 6

    async def main() -> None:
        async with gateways(tmp_path, supervision=SupervisionPolicy(drain_s=SECONDS)) as its:
            found: dict[str, set[Any]] = {}
            is_over = False

            async def traffic(route: str, body: Any) -> None:
                while not is_over:
                    status, told, after = await its.ask(route, body)
                    text = told.get("error", {}) if status != 200 else ""
                    text = text.get("message", "") if isinstance(text, dict) else text
                    found.setdefault(route, set()).add((status, text if status not in (200, 404, 503) else ""))
                    assert status != 503 or after is not None

            async def rpcs() -> None:
                while not is_over:
                    found.setdefault("gRPC", set()).add(await its.infer())

            tasks = [asyncio.ensure_future(traffic(*one)) for one in TEXT.items()]
            tasks.append(asyncio.ensure_future(rpcs()))
            for _ in range(num_loads):
                status, told = await its.admin("POST", "/admin/models/load", {"path": str(DEMO)})
                assert status == 200, told
                await its.ask("/tokenize", TEXT["/tokenize"])
                assert (await its.admin("POST", "/admin/models/demo/unload"))[0] == 200
            is_over = True
            await asyncio.gather(*tasks)
            assert found.pop("gRPC") <= {"OK", "NOT_FOUND", "UNAVAILABLE"}
            assert {status for ones in found.values() for status in ones} <= {(200, ""), (404, ""), (503, "")}
            assert {(200, ""), (503, "")} <= {status for ones in found.values() for status in ones}

    asyncio.run(main())


def test_reasons_of_crashes_are_only_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients get a sentence without the path of the missing file."""
    path, _ = model(tmp_path, is_there=True)

    async def main() -> None:
        supervision = SupervisionPolicy(min_pause_s=0.01, max_pause_s=0.05)
        async with gateways(tmp_path, command=faulty("waits"), supervision=supervision) as its:
            backend = await its.models.load(str(path))
            path.unlink()
            os.kill(*pids(backend), signal.SIGKILL)
            await until(lambda: backend.state == "failed")
            answers = [await its.ask(route, body) for route, body in TEXT.items()]
            assert {status for status, _, _ in answers} == {200, 503}
            told = [answer for status, answer, _ in answers if status == 503]
            assert "demo is not ready: its workers crash again and again" in json.dumps(told)
            told += [(await its.ask(one))[1] for one in ("/status", "/v1/models", "/v2/models/demo")]
            told.append((await its.ask("/v2/repository/index", {}))[1])
            assert str(tmp_path) not in json.dumps(told)
            assert "demo.psm" in json.dumps(told), "what failed is said by the file's name"
            path.symlink_to(DEMO)
            await until(lambda: backend.is_ready)

    asyncio.run(main())
    assert str(path) in caplog.text
