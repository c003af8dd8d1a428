"""HTTP/1.1: uvicorn's protocol, whose parser has no limits, with the limits of the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.api_errors import CODES
from penstock.serving.call import SINK, Headers
from penstock.serving.http.transport import Transport

__all__ = ["MAX_REFUSED", "TOO_MANY_CONNECTIONS", "BoundedProtocol"]

MAX_REFUSED: Final = 64
"""The most connections above ``num_connections`` that are kept open while they read why they were refused."""
_REFUSED_S: Final = 1.0
"""The time that they have for it."""

_SEND_BYTES: Final = 1 << 17
_RECEIVE_BYTES: Final = 1 << 16
_PHRASES: Final = {
    400: "Bad Request",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
}
_CHUNKED: Final = [b"chunked"]


class _RefusedError(Exception):
    """Raised in a callback of the parser to stop it; ``_refusal`` holds the reason."""


class _Sink:
    """The ResponseSink of a request; it keeps the state of uvicorn's cycle, which ends the request."""

    __slots__ = ("_cycle", "on_gone")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.on_gone: Callable[[], None] | None = None

    @property
    def is_gone(self) -> bool:
        return self._cycle.disconnected

    @property
    def is_free(self) -> bool:
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    async def drained(self) -> None:
        await self._cycle.flow.drain()

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        head = self._head(status, headers)
        self._write(head if self._cycle.scope["method"] == "HEAD" else head + body)
        self._complete()

    def begin(self, status: int, headers: Headers, data: bytes) -> None:
        if not self._is_old:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self._write(self._head(status, headers) + self._piece(data))

    def write(self, data: bytes) -> None:
        self._write(self._piece(data))

    def end(self, data: bytes = b"") -> None:
        self._write((self._piece(data) if data else b"") + (b"" if self._is_old else b"0\r\n\r\n"))
        self._complete()

    @property
    def _is_old(self) -> bool:
        """True for a client of HTTP/1.0, which knows no chunks: its response ends with the connection."""
        return self._cycle.scope["http_version"] == "1.0"

    def _piece(self, data: bytes) -> bytes:
        return data if self._is_old else _chunk(data)

    def break_off(self) -> None:
        self.on_gone = None
        self._cycle.disconnected = True
        self._cycle.transport.abort()

    def lost(self) -> None:
        """Note that the client has disconnected; uvicorn does so only for the last of several requests."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        if self.on_gone is not None:
            self.on_gone()

    def _head(self, status: int, headers: Headers) -> bytes:
        cycle = self._cycle
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers = [*headers, (b"connection", b"close")]
        pieces, lines = [STATUS_LINE[status]], 2
        for pairs in (cycle.default_headers, headers):
            for name, value in pairs:
                pieces += (name, b": ", value, b"\r\n")
            lines += len(pairs)
        pieces.append(b"\r\n")
        head = b"".join(pieces)
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            raise ValueError("a header contains a line break")
        return head

    def _write(self, data: bytes) -> None:
        cycle = self._cycle
        if not cycle.disconnected:
            cycle.response_started, cycle.waiting_for_100_continue = True, False
            cycle.transport.write(data)

    def _complete(self) -> None:
        cycle = self._cycle
        if cycle.disconnected:
            return
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _refusal(status: int, message: str) -> bytes:
    """Return an error response that is sent without the application; the connection is closed after it."""
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
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


TOO_MANY_CONNECTIONS: Final = _refusal(503, "Too many open connections. Retry later.")


class BoundedProtocol(HttpToolsProtocol):
    """One connection.  The application is a Gateway, whose limits apply from the first byte.

    ``connected`` is called when the connection is made, from when on it counts as open.
    """

    def __init__(self, config: Any, *arguments: Any, connected: Callable[[], None], **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._connected = connected
        self._limits = config.app.settings.limits
        self._arrivals = config.app.arrivals
        self._timer: asyncio.TimerHandle | None = None
        self._sinks: deque[_Sink] = deque()  # of the received, unanswered requests, in their order
        self._num_bytes = 0
        self._num_unparsed = 0
        self._refusal = (400, "Malformed HTTP request.")
        self._is_in_body = False
        self._is_upgrade = False
        self._held: tuple[int, int, str] | None = None
        """A refusal that waits for responses to earlier requests: how many requests it follows, status, message."""

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, or refuse it if ``num_connections`` are open."""
        self._connected()
        limits = self._limits
        is_full = len(self.connections) >= limits.num_connections
        linger_s = min(limits.body_s, _REFUSED_S) if is_full else limits.body_s
        self._way = Transport(transport, lambda: self._is_in_body, linger_s, limits.write_s)
        super().connection_made(self._way)  # type: ignore[arg-type]
        if hasattr(transport, "max_size"):  # asyncio would read 256 KiB, thousands of requests or chunks, in one turn
            transport.max_size = _RECEIVE_BYTES
        own = transport.get_extra_info("socket")
        if own is not None:  # a small buffer: the system would hold megabytes for a client that reads nothing
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            if own.family != socket.AF_UNIX:  # otherwise a small chunk waits up to 40 ms for an acknowledgement
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_full:
            self._is_in_body = True  # the client may still send its request
            self.transport.write(TOO_MANY_CONNECTIONS)
            self.transport.close()
        else:
            self._arrivals.opened(self)
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after a closed connection."""
        self._arrivals.on_received(self)
        self._stop_timer()
        self._way.ended()
        super().connection_lost(exc)
        while self._sinks:
            self._sinks.popleft().lost()

    def data_received(self, data: bytes) -> None:
        """Parse received data; the first bytes of a request start its timeout."""
        if self.transport.is_closing() or self._held is not None:
            return
        self._arrivals.on_received(self)
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            if self._is_in_body:  # the rest of a request that is already answered: discard it
                self._timer = self.loop.call_later(self._limits.body_s, self._way.end)
            else:
                self._expect_headers()
        self._num_unparsed += len(data)
        self._parse(data)
        # The parser buffers an incomplete header without a limit.
        is_head = not self._is_in_body and self._held is None and not self.transport.is_closing()
        if is_head and self._num_unparsed > self._limits.header_bytes:
            self._refuse(431, "The headers are too large.")

    def _parse(self, data: bytes) -> None:
        """Parse received data like uvicorn, but continue after an ``Upgrade`` header.

        The parser stops after the headers of a request to upgrade and would parse its body as the next request.  A
        server may ignore the header (RFC 9110 section 7.8), so a new parser reads the same headers without it, and then
        the rest.
        """
        self._unset_keepalive_if_required()
        pieces: list[bytes | memoryview] = [data]
        try:
            while pieces:
                piece = pieces.pop()
                try:
                    self.parser.feed_data(piece)
                except HttpParserUpgrade as stop:
                    pieces += (memoryview(piece)[stop.args[0] :], self._head_without_upgrade())
                    self.parser = HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except HttpParserError:
            self.logger.warning("Request refused: %s", self._refusal[1])
            self.send_400_response(self._refusal[1])

    def _head_without_upgrade(self) -> bytes:
        """Return the request line and headers that were parsed last, as bytes, without ``Upgrade``."""
        parts = [self.parser.get_method(), b" ", self.url, b" HTTP/", self.parser.get_http_version().encode(), b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                parts += (name, b": ", value, b"\r\n")
        return b"".join((*parts, b"\r\n"))

    def on_message_begin(self) -> None:
        """Handle the beginning of a request."""
        super().on_message_begin()
        self._num_bytes = 0
        self._is_upgrade = False

    def on_url(self, url: bytes) -> None:
        """Handle a part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header.  A trailer after a chunked body is ignored, because it must not count as a header."""
        self._count(len(name) + len(value) + 4)
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop(501, "Unsupported method: CONNECT. This server is not a proxy.")
            self._is_upgrade = True  # ``_parse`` reads the headers again
            return
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and codings != _CHUNKED:
            self._stop(501, "Unsupported Transfer-Encoding. Expected chunked.")
        if codings and self.parser.get_http_version() == "1.0":  # faulty framing (RFC 9112 section 6.1)
            self._stop(400, "Transfer-Encoding requires HTTP/1.1.")
        self._stop_timer()
        self._is_in_body = True
        # Else ``Connection: close`` among the trailers makes the parser drop what follows.
        self.parser.set_dangerous_leniencies(lenient_keep_alive=self.parser.should_keep_alive())
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # its task starts in the next turn of the loop
            sink = _Sink(self.cycle)
            self._sinks.append(sink)
            self.cycle.scope[SINK] = sink  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        """Handle the end of a request; if it is already answered, the connection becomes idle."""
        if self._is_upgrade:
            return
        self._is_in_body = False
        self._num_unparsed = 0
        super().on_message_complete()
        if self._timer is not None:
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Prepare for the next request."""
        if self._sinks:
            self._sinks.popleft()
        if self._held is not None:
            self._held = self._held[0] - 1, *self._held[1:]
            if not self._held[0]:
                self._write_refusal(*self._held[1:])
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse the request; called for errors of the parser and of the callbacks above."""
        self._refuse(*self._refusal)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        limits = self._limits
        if self._num_bytes > limits.header_bytes or len(self.headers) >= limits.num_headers:
            self._stop(431, "The headers are too many or too large.")

    def _stop(self, status: int, message: str) -> None:
        """Stop the parser from inside a callback and refuse the request."""
        self._refusal = status, message
        raise _RefusedError

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
        """Send an error after the responses to earlier requests, without the application, and close the connection."""
        self._stop_timer()
        # The refused request is among the unanswered ones if the application has it already.
        is_own = self._is_in_body and self.cycle is not None and not self.cycle.response_complete
        num_before = len(self._sinks) - is_own
        if num_before > 0 and not self.transport.is_closing():
            self._held = num_before, status, message
        else:
            self._write_refusal(status, message)

    def _write_refusal(self, status: int, message: str) -> None:
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(_refusal(status, message))
        self._is_in_body = status in (431, 501)  # the client may still send the rest of the request
        self.transport.close()
