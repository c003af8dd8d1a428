"""The listener: uvicorn with bounds of our own on headers, time and connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.errors import FileAccessError
from penstock.serving.refusals import CODES

if TYPE_CHECKING:
    from penstock.serving.door import Door
    from penstock.serving.settings import DoorLimits, DoorSettings

__all__ = ["Listener"]


class _TooLargeError(Exception):
    """More headers, or more of them, than may be."""


def _protocol(limits: DoorLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol, whose parser knows no bounds, with those of a service."""

    class Bounded(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _num_bytes = 0
        _in_headers = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.num_connections:
                self._refuse(503, "as many connections are open as may be")
                return
            self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _expect_headers(self) -> None:
            self._in_headers, self._num_bytes = True, 0
            self._stop_timer()
            self._timer = self.loop.call_later(limits.header_s, self._late)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._in_headers:
                if self._timer is None:
                    self._expect_headers()
                self._num_bytes += len(data)
                if self._num_bytes > limits.header_bytes + len(data):
                    self._refuse(431, "the headers are too large")
                    return
            try:
                super().data_received(data)
            except _TooLargeError:
                self._refuse(431, "the headers are too many or too large")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0
            self._in_headers = True

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)
            super().on_header(name, value)

        def _count(self, num_bytes: int) -> None:
            self._header_bytes += num_bytes
            if self._header_bytes > limits.header_bytes or len(self.headers) >= limits.num_headers:
                self._is_too_large = True
                raise _TooLargeError

        def on_headers_complete(self) -> None:
            self._in_headers, self._num_bytes = False, 0
            self._stop_timer()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_headers = True

        _header_bytes = 0
        _is_too_large = False

        def send_400_response(self, msg: str) -> None:
            if self._is_too_large:
                self._refuse(431, "the headers are too many or too large")
            else:
                self._refuse(400, "this is no HTTP/1.1 request")

        def _refuse(self, status: int, message: str) -> None:
            """Answer outside of the application, and hang up."""
            kind, phrase = (
                CODES[status].type,
                {400: "Bad Request", 431: "Headers Too Large", 503: "Unavailable"}[status],
            )
            error = {"error": {"message": message, "type": kind, "param": None, "code": None}}
            body = json.dumps(error).encode()
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            extra = "retry-after: 1\r\n" if status == 503 else ""
            self.transport.write(f"{head}{extra}connection: close\r\n\r\n".encode() + body)
            self.transport.close()
            self._stop_timer()

    return Bounded


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """The door on a socket.  ``open`` binds it, ``serve`` answers until ``stop`` is called."""

    def __init__(self, app: Door, settings: DoorSettings) -> None:
        self._settings = settings
        self._socket: socket.socket | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_protocol(settings.limits),
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                proxy_headers=False,
                timeout_keep_alive=int(settings.limits.keep_alive_s),
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
            )
        )

    def open(self) -> str:
        """Bind the address; returns the URL.  FileAccessError when the system refuses it."""
        settings = self._settings
        try:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            self._socket = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
        except OSError as error:
            raise FileAccessError(f"{settings.host}:{settings.port}: {error.strerror or error}") from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "http" if settings.tls_certificate is None else "https"
        return f"{scheme}://{host}:{self._socket.getsockname()[1]}"

    async def serve(self) -> None:
        """Answer requests; returns once ``stop`` was called and what ran has ended."""
        if self._socket is None:
            self.open()
        if self._socket is not None:
            with self._socket:
                await self._server.serve(sockets=[self._socket])

    def stop(self, at_once: bool = False) -> None:
        """Take no more connections; requests that run may end unless ``at_once``."""
        self._server.should_exit = True
        if at_once:
            self._server.force_exit = True
