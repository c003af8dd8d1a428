"""A listener of the admin socket over models, and requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.serving.http.admin import make_admin
from penstock.serving.http.app import make_app
from penstock.serving.http.listener import Listener
from penstock.serving.model_changes import Changes


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=600)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def call(path: Path, method: str, route: str, body: object = None) -> tuple[int, dict]:
    """Status and JSON of one request."""
    connection = Connection(path)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, route, data, {"Content-Type": "application/json"} if data else {})
        answer = connection.getresponse()
        return answer.status, json.load(answer)
    finally:
        connection.close()


@asynccontextmanager
async def admin(models, path: Path):
    """A listener over models; gives what asks it, and its changes."""
    changes = Changes(models)
    gateway = make_admin(changes, models, make_app(models).admission.metrics)
    listener = Listener(gateway, gateway.settings, path)
    assert listener.open() == f"unix:{path}"
    running = asyncio.ensure_future(listener.serve())

    async def asked(*arguments) -> tuple[int, dict]:
        return await asyncio.to_thread(call, path, *arguments)

    try:
        yield asked, changes
    finally:
        await changes.close()
        listener.stop(at_once=True)
        await running
        assert not path.exists()
