"""Client of a service's admin socket: list, load, update and unload models, and drain workers."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from penstock.client.address import Address
from penstock.client.calls import Answer, HttpCall
from penstock.client.exchange import Exchange
from penstock.client.http_messages import HttpRequest, HttpResponse, json_body, path_segment
from penstock.errors import FileAccessError, ServiceError

__all__ = ["AdminClient"]

_ADDRESS: Final = Address("http://localhost", timeout_s=1e6, retries=0)
"""The timeout is long because a load takes as long as it takes."""


class AdminClient:
    """Client of ``penstock serve --admin-socket PATH``; results are its JSON objects (docs/guides/serving.md).

    With ``address``, of a service's public listener and with an admin key, only ``profile`` is there.

    Raises ServiceError for a refusal, FileAccessError if no service listens at the socket.  An interrupted load or
    update is cancelled by the service.
    """

    def __init__(self, path: Path | None, address: Address = _ADDRESS) -> None:
        self._path, self._address = path, address

    def status(self) -> Answer:
        """Return all models and their workers."""
        return self._send("GET", "/admin/models")

    def load(self, path: str, name: str = "") -> Answer:
        """Load a bundle or checkpoint folder at an absolute path, and return its model when that is ready."""
        return self._send("POST", "/admin/models/load", {"path": path} | ({"name": name} if name else {}))

    def update(self, name: str, path: str) -> Answer:
        """Switch a model to other weights, and return it when the workers with the old ones have ended."""
        return self._send("POST", f"/admin/models/{path_segment(name)}/update", {"path": path})

    def unload(self, name: str) -> Answer:
        """Drain a model and free its memory."""
        return self._send("POST", f"/admin/models/{path_segment(name)}/unload")

    def drain_worker(self, name: str, worker: str, *, replace: bool = False) -> Answer:
        """End one worker of a model; other workers go on with its requests.  ``replace``: start another one first."""
        fields = {"worker": worker, "replace": replace}
        return self._send("POST", f"/admin/models/{path_segment(name)}/drain", fields)

    def profile(
        self, name: str, *, steps: int = 200, seconds: float | None = None, limits: bool = False, worker: str = ""
    ) -> Answer:
        """Record steps of a model while it answers requests, and return the report.

        ``seconds``: limit on the time to record, at most 60 by default.  ``limits``: measure the machine's limits as
        well.  ``worker``: "" is the one with most open requests.
        """
        fields: dict[str, Any] = {"steps": steps, "limits": limits, "worker": worker}
        if seconds is not None:
            fields["seconds"] = seconds
        return self._send("POST", f"/admin/models/{path_segment(name)}/profile", fields)

    def _send(self, method: str, route: str, fields: Mapping[str, Any] | None = None) -> Answer:
        from penstock.client.http_transport import HttpTransport

        if self._path is not None:
            _check_socket(self._path)
        body = None if fields is None else json_body(fields)
        call = HttpCall(HttpRequest(method, route, HttpResponse.json, body))
        with closing(HttpTransport(self._address, self._path)) as transport:
            try:
                answer: Answer = transport.send(Exchange(call, self._address))
            except OSError as error:
                raise ServiceError(
                    f"{self._path or self._address.url}: the connection to the service broke: {error}", 0
                ) from error
        return answer


def _check_socket(path: Path) -> None:
    """Raise FileAccessError unless a service listens.  After a failed connect, httpx leaves the socket open."""
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            reason = error.strerror or str(error)
            raise FileAccessError(f"{path}: no service answers at this socket: {reason}") from error
