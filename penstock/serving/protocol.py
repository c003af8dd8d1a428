"""uvicorn's HTTP/1.1, whose parser knows no bounds, with those of a service."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.serving.call import DIRECT_BODY, Headers
from penstock.serving.refusals import CODES
from penstock.serving.transport import Transport

__all__ = ["BoundedProtocol"]

_SEND_BYTES: Final = 1 << 17
_PHRASES: Final = {400: "Bad Request", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class _TooLargeError(Exception):
    """More headers, or larger ones, than may be."""


class _Together:
    """Stands for a connection's transport while a whole answer is written, which then goes out in one piece."""

    __slots__ = ("_cycle", "_pieces", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport: Any = cycle.transport
        self._pieces: list[bytes] = []

    def __enter__(self) -> None:
        self._cycle.transport = self  # type: ignore[assignment]

    def __exit__(self, *_error: object) -> None:
        self._cycle.transport = self._transport
        self._flush()

    def _flush(self) -> None:
        if self._pieces:
            self._transport.write(b"".join(self._pieces))
            self._pieces.clear()

    def write(self, data: bytes) -> None:
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._pieces.clear()
        self._transport.abort()


class _DirectBody:
    """The rest of an answer that has begun in chunks, without a message, a coroutine and a look at each for a piece."""

    __slots__ = ("_cycle", "on_gone")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.on_gone: Callable[[], None] | None = None

    @property
    def is_gone(self) -> bool:
        return self._cycle.disconnected

    def together(self) -> _Together:
        return _Together(self._cycle)

    def break_off(self) -> None:
        self.on_gone = None
        self._cycle.disconnected = True
        self._cycle.transport.abort()

    @property
    def is_free(self) -> bool:
        cycle = self._cycle
        return (
            cycle.response_started
            and bool(cycle.chunked_encoding)
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
            and cycle.scope["method"] != "HEAD"
        )

    def whole(self, status: int, headers: Headers, body: bytes) -> bool:
        cycle = self._cycle
        if cycle.response_started or cycle.flow.write_paused or cycle.disconnected:
            return False
        found, lines = [STATUS_LINE[status]], 2
        for named in (cycle.default_headers, headers):
            for name, value in named:
                found += (name, b": ", value, b"\r\n")
            lines += len(named)
        if not cycle.keep_alive:
            found.append(b"connection: close\r\n")
            lines += 1
        found.append(b"\r\n")
        head = b"".join(found)
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            raise ValueError("a header holds the end of a line")
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.write(head if cycle.scope["method"] == "HEAD" else head + body)
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    def write(self, piece: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class BoundedProtocol(HttpToolsProtocol):
    """One connection.  The application is a Door, whose limits hold from the first byte on."""

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._limits = config.app.settings.limits
        self._arrivals = config.app.arrivals
        self._timer: asyncio.TimerHandle | None = None
        self._direct: deque[_DirectBody] = deque()  # of the requests that came and are not answered: in their order
        self._num_bytes = 0
        self._num_unparsed = 0
        self._is_too_large = False
        self._is_in_body = False

    def connection_made(self, transport: Any) -> None:
        """Take a connection, unless there are as many as may be."""
        limits = self._limits
        self._way = Transport(transport, lambda: self._is_in_body, limits.body_s, limits.write_s)
        super().connection_made(self._way)  # type: ignore[arg-type]
        own = transport.get_extra_info("socket")
        if own is not None:  # else the system takes megabytes for a reader who takes nothing
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            if own.family != socket.AF_UNIX:  # else a small piece waits 40 ms for an acknowledgement
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self._limits.num_connections:
            self._refuse(503, "as many connections are open as may be")
        else:
            self._arrivals.opened(self)
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._arrivals.spoke(self)
        self._stop_timer()
        self._way.ended()
        super().connection_lost(exc)
        while self._direct:
            on_gone = self._direct.popleft().on_gone
            if on_gone is not None:
                on_gone()

    def data_received(self, data: bytes) -> None:
        """Parse what came; the first bytes of a request start its clock."""
        if self.transport.is_closing():
            return
        self._arrivals.spoke(self)
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            if self._is_in_body:  # of a request that was answered before all of it was here: nobody reads it
                self._timer = self.loop.call_later(self._limits.body_s, self._way.end)
            else:
                self._expect_headers()
        self._num_unparsed += len(data)
        super().data_received(data)
        # The parser keeps half a header to itself, however long it grows.
        if (
            self._timer is not None
            and not self._is_in_body
            and self._num_unparsed > self._limits.header_bytes
            and not self.transport.is_closing()
        ):
            self._refuse(431, "the headers are too large")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._num_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The application takes over."""
        self._stop_timer()
        self._is_in_body = True
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # its task begins with the loop's next round
            direct = _DirectBody(self.cycle)
            self._direct.append(direct)
            self.cycle.scope[DIRECT_BODY] = direct  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        """All of a request is here; where its answer is, too, the connection rests as behind any other answer."""
        self._is_in_body = False
        super().on_message_complete()
        if self._timer is not None:
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """The next request may come."""
        if self._direct:
            self._direct.popleft()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser gave up; what our own callbacks raise ends here, too."""
        if self._is_too_large:
            self._refuse(431, "the headers are too many or too large")
        else:
            self._refuse(400, "this is no HTTP/1.1 request")

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        limits = self._limits
        if self._num_bytes > limits.header_bytes or len(self.headers) >= limits.num_headers:
            self._is_too_large = True
            raise _TooLargeError

    def _expect_headers(self) -> None:
        self._num_unparsed = 0
        self._timer = self.loop.call_later(self._limits.header_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer outside of the application, and hang up."""
        error = {"message": message, "type": CODES[status].type, "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        lines = [
            f"HTTP/1.1 {status} {_PHRASES[status]}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        if CODES[status].is_retriable:
            lines.append("retry-after: 1")
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self._is_in_body = status == 431  # the rest of the headers is on its way
        self.transport.close()
        self._stop_timer()
