"""A service in this process: the gateway on a free port, over models that tests give it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.llm.llm import LLM
from penstock.llm.local_backend import LocalBackend, LocalModels
from penstock.serving.http.app import make_app
from penstock.serving.http.listener import Listener
from penstock.serving.settings import GatewaySettings
from penstock.serving.traces import Traces
from penstock.tensors import Methods
from tests.support.waiting import until as until  # with the services

SECONDS = 600.0  # of waiting for what must come: more than a machine may stand still

KEY = "a-key-of-twenty-chars"
ROOMY = {"context_len": 100_000, "num_pages": 3200}
ENDLESS = {"prompt": "the cat", "max_tokens": 90_000, "ignore_eos": True, "temperature": 0}


class Service:
    """A running service; ``models``, ``gateway`` and ``listener`` belong to its own thread's event loop."""

    def __init__(
        self,
        llms: Mapping[str, LLM],
        settings: GatewaySettings | None = None,
        traces: Traces | None = None,
        methods: Methods | None = None,
    ) -> None:
        self.llms, self.methods = llms, methods
        self._traces = traces
        self._settings = replace(settings or GatewaySettings(), port=0)
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="service")
        self._thread.start()
        assert self._started.wait(SECONDS)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
            self._started.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.models = LocalModels([LocalBackend(llm, name) for name, llm in self.llms.items()])
        try:
            self.gateway = make_app(self.models, self._settings, self._traces, methods=self.methods)
            self.listener = Listener(self.gateway, self._settings)
            self.url = self.listener.open()
            listeners = [self.listener]
            if self._settings.grpc_port is not None:
                from penstock.serving.grpc.listener import GrpcListener

                self.grpc = GrpcListener(self.gateway.admission)
                self.grpc_address = self.grpc.open()
                listeners.append(self.grpc)
            self._listeners = listeners
            serving = asyncio.gather(*(one.serve() for one in listeners))
            self._started.set()
            await serving
        finally:
            await self.models.close()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the service's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(self.address, SECONDS)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, and body of one request; a body that is no bytes is sent as JSON."""
        given = {"Content-Type": "application/json"} if body is not None else {}
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(*self.address, timeout=SECONDS)
        try:
            connection.request(method, path, data, given | dict(headers or {}))
            response = connection.getresponse()
            found = response.read()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, found
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Any:
        """The JSON that a body is answered with; it must be 200."""
        status, _, data = self.ask("POST", path, body)
        assert status == 200, data
        return json.loads(data)

    def refused(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error that a body is refused with."""
        status, headers, data = self.ask("POST", path, body)
        assert headers["content-type"] == "application/json"
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a streamed answer; the last must be [DONE]."""
        status, headers, data = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        lines = data.decode().split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    @property
    def num_open(self) -> int:
        """Requests that are at work behind the gateway."""
        return self.gateway.admission.num_open

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop it and wait for its end."""
        if self._thread.is_alive():
            for one in self._listeners:
                self.loop.call_soon_threadsafe(one.stop, True)
            self._thread.join(SECONDS)
        assert not self._thread.is_alive()


def address(service: Service, way: str) -> str:
    """A client's, over gRPC where ``way`` is "grpc"."""
    return f"grpc://{service.grpc_address}" if way == "grpc" else service.url


def post(path: str, body: dict, *extra: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}", *extra]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def is_idle(service: Service) -> bool:
    """Whether no request is open, in the gateway or in an engine, and every page is free."""
    engines = [one.llm.engine for one in service.models.list()]
    pools = [pool for engine in engines for pool in engine.scheduler.ledger.pools]
    return (
        service.num_open == 0
        and not any(engine.has_work for engine in engines)
        and all(pool.num_free == pool.num_pages for pool in pools)
    )


def num_connections(service: Service) -> int:
    return len(service.listener.connections)


def raw(service: Service, data: bytes) -> bytes:
    """What comes back for bytes, until the service hangs up or answers in full."""
    with service.connect() as connection:
        with suppress(OSError):  # it may have been refused before all was sent
            connection.sendall(data)
        found = b""
        with suppress(ConnectionResetError):  # what it did not read is thrown away
            while piece := connection.recv(65536):
                found += piece
        return found
