"""Messages over a socket, each behind its length: how a primary and the workers of its own machine talk.

The messages are those of gRPC's streams (``wire.proto``).  Here a message is one ``send`` in whichever thread has it,
and one wake-up of the event loop that reads it; gRPC's threads and loops took three of each (docs/log.md).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from penstock.errors import InternalError

__all__ = ["FIRST_BYTES", "FrameStream"]

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 18
FIRST_BYTES: Final = 1 << 16
"""Of messages from somebody who has not said yet who it is."""


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802 - protobuf's


Incoming = TypeVar("Incoming")


class FrameStream(Generic[Incoming]):
    """One end of a stream over ``own``, a connected socket that this closes; ``parse`` makes messages of bytes.

    Messages wait for ``read``, or go to ``listen``'s listener as they come.  A longer message than ``max_bytes``, one
    that ``parse`` or the listener refuses, and a socket that fails end the stream: ``error`` says why, None for an end
    that the other side chose.  Use it in the event loop in which it was made, but for ``send``.
    """

    def __init__(self, own: socket.socket, parse: Callable[[bytes], Incoming], max_bytes: int) -> None:
        own.setblocking(False)
        self.max_bytes = max_bytes
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        self.on_room: Callable[[], None] = lambda: None
        """Called when all that was sent has left, after a time when it had not."""
        self._socket, self._parse = own, parse
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # over what is written, and the socket's end
        self._unsent = bytearray()
        self._closed = False
        self._held = bytearray()
        self._unread: deque[Incoming] = deque()
        self._listener: Callable[[Incoming], None] | None = None
        self._came = asyncio.Event()
        self._loop.add_reader(own, self._read)

    def send(self, *messages: _Message) -> bool:
        """Send messages, from any thread and without waiting: what the socket does not take is kept and follows.  Of a
        stream that has ended nothing is sent: False."""
        found = [message.SerializeToString() for message in messages]
        data = b"".join(_LENGTH.pack(len(one)) + one for one in found)
        with self._lock:
            if self._closed:
                return False
            if self._unsent:
                self._unsent += data
                return True
            try:
                num_sent = self._socket.send(data)
            except (BlockingIOError, InterruptedError):
                num_sent = 0
            except OSError:  # the reader finds the same
                return False
            if num_sent < len(data):
                self._unsent += data[num_sent:]
                with suppress(RuntimeError):  # the event loop is closed
                    self._loop.call_soon_threadsafe(self._await_room)
            return True

    @property
    def has_room(self) -> bool:
        """Whether all that was sent has left: what is sent now is not kept behind it."""
        return not self._unsent

    async def read(self) -> Incoming | None:
        """The next message; None when there is none any more.  Raises what the stream ended with."""
        while not self._unread and not self.ended.is_set():
            self._came.clear()
            await self._came.wait()
        if self._unread:
            return self._unread.popleft()
        if self.error is not None:
            raise self.error
        return None

    def listen(self, listener: Callable[[Incoming], None]) -> None:
        """Hand over what came and what comes, instead of keeping it for ``read``."""
        self._listener = listener
        while self._unread and not self._closed:
            self._give(self._unread.popleft())

    def close(self) -> None:
        """End the stream; what the socket has not taken is dropped.  Calling it again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._unsent.clear()
        self.ended.set()
        self._came.set()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        held, start = self._held, 0
        held += data
        while len(held) - start >= _LENGTH.size and not self._closed:
            (size,) = _LENGTH.unpack_from(held, start)
            if size > self.max_bytes:
                self._fail(InternalError(f"a message of {size} bytes came, where {self.max_bytes} may"))
                return
            first = start + _LENGTH.size
            if len(held) - first < size:
                break
            start = first + size
            try:
                message = self._parse(bytes(held[first:start]))
            except Exception as error:
                self._fail(error)
                return
            self._give(message)
        del held[:start]

    def _give(self, message: Incoming) -> None:
        if self._listener is None:
            self._unread.append(message)
            self._came.set()
            return
        try:
            self._listener(message)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.close()

    def _await_room(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        with self._lock:
            try:
                num_sent = self._socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                num_sent = len(self._unsent)
            del self._unsent[:num_sent]
            if self._unsent:
                return
            self._loop.remove_writer(self._socket)
        self.on_room()
