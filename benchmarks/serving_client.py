"""A cheap client for services with OpenAI's completions: requests are sent when they are due, not when others end.

While answers arrive, the client only stores each read with its time, and parses the bytes afterwards, so that it uses
as little of the machine as possible.  Connections are kept: a request uses an idle one or opens another.  No
dependencies.
"""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

LAST_CHUNK = b"\r\n0\r\n\r\n"
PAUSE_S = 0.001
HEAD_END = b"\r\n\r\n"

Reads = Sequence[tuple[float, bytes]]
"""What came, and when (seconds of time.perf_counter)."""


@dataclass(frozen=True)
class Server:
    """A server.  ``url`` includes "/v1", as for OpenAI's clients; with an empty ``key`` none is sent."""

    url: str
    key: str = ""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise SystemExit(f"the URL must be http://HOST:PORT/v1, not {self.url!r}")
        return parts.hostname, parts.port or 80

    def message(self, path: str, body: dict[str, Any]) -> bytes:
        """Return a complete POST request."""
        data = json.dumps(body).encode()
        host, port = self.address
        head = f"POST {urlsplit(self.url).path.rstrip('/')}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
        head += "Content-Type: application/json\r\n" + (f"Authorization: Bearer {self.key}\r\n" if self.key else "")
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class Answer:
    """The answer to one request.  Times are of time.perf_counter; 0 in ``ended_s`` if it was lost."""

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    lost: str = ""
    reads: list[tuple[float, bytes]] = field(default_factory=list)


class Connection(asyncio.BufferedProtocol):
    """A connection, which carries one request at a time."""

    _room = memoryview(bytearray(1 << 16))  # all share it: what came is copied before anything else is read

    def __init__(self, rests: list[Connection]) -> None:
        self._rests = rests
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._left = -1  # bytes of a body whose length was told
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    async def ask(self, message: bytes, answer: Answer) -> None:
        """Send a request; return when its answer has ended or was lost."""
        self._answer, self._done = answer, asyncio.get_running_loop().create_future()
        self._left, self._tail = -1, b""
        answer.sent_s = time.perf_counter()
        self._transport.write(message)  # type: ignore[union-attr]
        try:
            await self._done
        finally:
            if not answer.ended_s:
                self.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        now, answer, data = time.perf_counter(), self._answer, bytes(self._room[:nbytes])
        if answer is None:
            return self.close()  # nothing was asked
        answer.reads.append((now, data))
        if self._left < 0 and not self._tail:
            self._begin(answer)
        elif self._left >= 0:
            self._left -= len(data)
        else:
            self._tail = (self._tail + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        if self._left == 0 or self._tail == LAST_CHUNK:
            answer.ended_s = now
            self._rest()
        return None

    def _begin(self, answer: Answer) -> None:
        """Read the headers: find the length of the body, or that it comes in chunks."""
        head, end, body = b"".join(data for _, data in answer.reads).partition(HEAD_END)
        if not end:
            return
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if length:
            self._left = int(length[1]) - len(body)
        else:
            self._tail = (end + body)[-len(LAST_CHUNK) :]

    def _rest(self) -> None:
        self._answer = None
        self._rests.append(self)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._rests:
            self._rests.remove(self)
        if self._answer is not None:
            self._answer.lost = self._answer.lost or "connection lost"
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Pausing(selectors.DefaultSelector):
    """Looks at connections once a millisecond at most: a client that shares the machine with what it measures wakes
    less often, and its times may be a millisecond late.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        time.sleep(PAUSE_S)
        return super().select(timeout)


def pausing_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop with that selector, for asyncio.Runner."""
    return asyncio.SelectorEventLoop(Pausing())


async def play(
    server: Server,
    messages: Sequence[bytes],
    due: Sequence[float],
    patience_s: float = 600.0,
    kept: list[Connection] | None = None,
) -> tuple[float, list[Answer]]:
    """Send each request when it is due (seconds from the start); return the start, and the answers in the same order.

    An answer that has not ended ``patience_s`` after it was due is given up: its connection is closed.  With ``kept``,
    connections come from there and stay there, for a next call in the same event loop; else all are closed.
    """
    rests = [] if kept is None else kept
    loop, (host, port) = asyncio.get_running_loop(), server.address
    start = time.perf_counter()
    answers = [Answer(start + one) for one in due]

    async def one(message: bytes, answer: Answer) -> None:
        await asyncio.sleep(max(0.0, answer.due_s - time.perf_counter()))
        try:
            async with asyncio.timeout(patience_s):
                if rests:
                    connection = rests.pop()
                else:
                    _, connection = await loop.create_connection(lambda: Connection(rests), host, port)
                await connection.ask(message, answer)
        except TimeoutError:
            answer.lost = "given up"
        except OSError:
            answer.lost = "not connected"

    await asyncio.gather(*(one(message, answer) for message, answer in zip(messages, answers, strict=True)))
    if kept is None:
        hang_up(rests)
    return start, answers


def hang_up(connections: list[Connection]) -> None:
    """Close the connections."""
    for connection in [*connections]:
        connection.close()


def body_of(reads: Reads) -> tuple[int, Iterator[tuple[float, bytes]]]:
    """Return the status and the body with its times, without chunk framing.  ValueError if it is not HTTP."""
    text = b""
    for number, (at_s, data) in enumerate(reads):
        text += data
        head, end, body = text.partition(HEAD_END)
        if end:
            rest = [(at_s, body), *reads[number + 1 :]] if body else [*reads[number + 1 :]]
            is_chunked = re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head) is not None
            return int(head.split(b" ", 2)[1]), _unchunked(rest) if is_chunked else iter(rest)
    raise ValueError("the answer has no headers")


def _unchunked(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Return the bytes of the chunks, each with the time at which it was complete."""
    held = b""
    for at_s, data in reads:
        held += data
        found = b""
        while (end := held.find(b"\r\n")) >= 0:
            size = int(held[:end].split(b";")[0], 16)
            if len(held) < end + size + 4:
                break
            found += held[end + 2 : end + 2 + size]
            held = held[end + size + 4 :]
        if found:
            yield at_s, found


def events_of(body: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Return the data of server-sent events, each with the time at which its line was complete."""
    held = b""
    for at_s, data in body:
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at_s, line[5:].strip()
