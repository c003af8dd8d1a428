"""Asks a service's admin socket: models listed, loaded, updated and unloaded."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import FileAccessError, ServiceError

__all__ = ["AdminClient"]

Answer = dict[str, Any]


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket, without a limit of time: a load takes as long as it takes."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.connect(str(self._path))
        except OSError as error:
            self.sock.close()
            why = error.strerror or str(error)
            raise FileAccessError(f"{self._path}: no service answers at this socket: {why}") from error


class AdminClient:
    """The admin socket of ``penstock serve --admin-socket PATH``; answers are its JSON (docs/serving.md).

    Raises ServiceError with what it refuses, FileAccessError when nobody listens.  Leaving a load or an update ends it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def status(self) -> Answer:
        """All models and their workers."""
        return self._ask("GET", "/admin/models")

    def load(self, path: str, name: str = "") -> Answer:
        """Load a bundle or a checkpoint's folder at an absolute path; returns when it is ready."""
        return self._ask("POST", "/admin/models/load", {"path": path} | ({"name": name} if name else {}))

    def update(self, name: str, path: str) -> Answer:
        """Switch a model to other weights; returns when the old ones have ended."""
        return self._ask("POST", f"/admin/models/{quote(name, safe='')}/update", {"path": path})

    def unload(self, name: str) -> Answer:
        """Drain a model and give its memory back."""
        return self._ask("POST", f"/admin/models/{quote(name, safe='')}/unload")

    def _ask(self, method: str, route: str, body: Answer | None = None) -> Answer:
        data = None if body is None else json.dumps(body)
        with closing(_Connection(self._path)) as connection:
            try:
                connection.request(method, route, data, {"Content-Type": "application/json"} if data else {})
                reply = connection.getresponse()
                found = json.loads(reply.read())
            except (http.client.HTTPException, ConnectionError, ValueError) as error:
                raise ServiceError(f"{self._path}: the service went away: {error}", 0) from error
        if reply.status == 200 and isinstance(found, dict):
            return found
        refusal = found.get("error", {}) if isinstance(found, dict) else {}
        raise ServiceError(
            str(refusal.get("message", f"the service answered with status {reply.status}")),
            reply.status,
            code=refusal.get("code"),
            param=refusal.get("param"),
            request_id=reply.headers.get("X-Request-Id", ""),
        )
