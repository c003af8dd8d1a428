"""Sends load over bare sockets: one constant request with a fixed number in flight, over HTTP/1.1 or gRPC over HTTP/2.

The cost of the client is the same for each system.  It parses only where an answer ends and whether it is an answer.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
STREAMS_OF_CONNECTION = 64


@dataclass(frozen=True)
class Figures:
    """The requests that ended in the measured time: rate per second, latencies in seconds, number of failures."""

    rate: float
    p50: float
    p99: float
    num_errors: int

    @classmethod
    def of(cls, times: list[float], num_errors: int, seconds: float) -> Figures:
        ordered = sorted(times) or [float("nan")]
        at = [ordered[min(int(len(ordered) * part), len(ordered) - 1)] for part in (0.5, 0.99)]
        return cls(len(times) / seconds, at[0], at[1], num_errors)

    def __str__(self) -> str:
        return (
            f"{self.rate:8.0f}/s  p50 {self.p50 * 1e3:7.2f} ms  p99 {self.p99 * 1e3:7.2f} ms  {self.num_errors} errors"
        )


@dataclass
class Tally:
    """Counts the requests that end while ``is_on``."""

    is_on: bool = False
    is_over: bool = False
    num_errors: int = 0

    def __post_init__(self) -> None:
        self.times: list[float] = []

    def ended(self, began: float, is_good: bool) -> None:
        if self.is_on:
            if is_good:
                self.times.append(time.perf_counter() - began)
            else:
                self.num_errors += 1


def _is_whole(data: bytes) -> bool:
    """Return True if an answer is complete, by its length or its last chunk."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    found = LENGTH.search(data, 0, end + 2)
    if found is not None:
        return len(data) >= end + 4 + int(found[1])
    if CHUNKED.search(data, 0, end + 2) is None:
        raise ValueError(f"the answer has no length: {data[:200]!r}")
    return data.endswith(b"\r\n0\r\n\r\n")


class HttpConnection(asyncio.Protocol):
    """Sends one request after the other on a connection that stays open."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self._tally = request, tally
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        if not _is_whole(data):
            self._rest = data
            return
        self._rest = b""
        self._tally.ended(self._began, data[9:12] == b"200")
        if not self._tally.is_over:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._tally.is_over:
            self._tally.ended(0.0, False)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _field(name: bytes, value: bytes) -> bytes:
    """Return a header without indexing, so that every request has the same bytes."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


class GrpcConnection(asyncio.Protocol):
    """Sends the same unary request on ``num_streams`` concurrent streams of one HTTP/2 connection."""

    def __init__(self, authority: str, method: str, message: bytes, num_streams: int, tally: Tally) -> None:
        names = {":method": "POST", ":scheme": "http", ":path": method, ":authority": authority}
        names |= {"content-type": "application/grpc", "te": "trailers"}
        self._headers = b"".join(_field(name.encode(), value.encode()) for name, value in names.items())
        self._body = b"\0" + len(message).to_bytes(4, "big") + message
        self._num_streams, self._tally = num_streams, tally
        self._next, self._window = 1, 65_535
        self._began: dict[int, float] = {}
        self._with_data: set[int] = set()
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        wide = (1 << 30).to_bytes(4, "big")
        transport.write(PREFACE + frame(SETTINGS, 0, 0, b"\0\x04" + wide) + frame(WINDOW, 0, 0, wide))
        self._send()

    def _send(self) -> None:
        sent = []
        while len(self._began) < self._num_streams and self._window >= len(self._body):
            stream, self._next = self._next, self._next + 2
            self._window -= len(self._body)
            self._began[stream] = time.perf_counter()
            sent += [frame(HEADERS, END_HEADERS, stream, self._headers), frame(DATA, END_STREAM, stream, self._body)]
        if sent:
            self._transport.write(b"".join(sent))

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) - at >= 9:
            size, kind, flags = int.from_bytes(data[at : at + 3], "big"), data[at + 3], data[at + 4]
            if len(data) - at < 9 + size:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, data[at + 9 : at + 9 + size])
            at += 9 + size
        self._rest = data[at:]
        if not self._tally.is_over:
            self._send()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            if len(payload) > 5:
                self._with_data.add(stream)
        elif kind == WINDOW and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == GO_AWAY:
            raise ValueError(f"the service goes away: {payload[8:200]!r}")
        if (kind in (DATA, HEADERS) and flags & END_STREAM) or kind == RESET:
            is_good = stream in self._with_data and kind == HEADERS
            self._with_data.discard(stream)
            began = self._began.pop(stream, None)
            if began is not None:
                self._tally.ended(began, is_good)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._tally.is_over:
            for began in self._began.values():
                self._tally.ended(began, False)


async def load(
    host: str, port: int, make: Callable[[int, Tally], asyncio.Protocol], in_flight: list[int], seconds: float
) -> Figures:
    """Keep a number of requests in flight on each connection; the first fifth of the time is not counted."""
    tally, loop = Tally(), asyncio.get_running_loop()
    opened = [await loop.create_connection(lambda n=number: make(n, tally), host, port) for number in in_flight]
    await asyncio.sleep(seconds / 5)
    tally.is_on, began = True, time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    tally.is_on, tally.is_over = False, True
    for transport, _ in opened:
        transport.abort()
    await asyncio.sleep(0.1)
    return Figures.of(tally.times, tally.num_errors, took)


def http_load(host: str, port: int, path: str, body: bytes, concurrency: int, seconds: float) -> Figures:
    """POST a JSON body, with one connection for each request in flight."""
    lines = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    request = f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return asyncio.run(load(host, port, lambda _, tally: HttpConnection(request, tally), [1] * concurrency, seconds))


def grpc_load(host: str, port: int, method: str, message: bytes, concurrency: int, seconds: float) -> Figures:
    """Call a method, with up to 64 requests in flight on a connection."""
    whole, rest = divmod(concurrency, STREAMS_OF_CONNECTION)
    in_flight = [STREAMS_OF_CONNECTION] * whole + ([rest] if rest else [])

    def make(number: int, tally: Tally) -> asyncio.Protocol:
        return GrpcConnection(f"{host}:{port}", method, message, number, tally)

    return asyncio.run(load(host, port, make, in_flight, seconds))
