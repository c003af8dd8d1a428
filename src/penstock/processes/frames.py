"""Messages over a socket, each after its length, plain or encrypted.

The primary talks to its workers this way (``wire.proto``), and a service to the processes of servables
(``worker_messages.proto``).  A message costs one ``send`` in the thread that has it and one wake-up of the event loop
that reads it.  gRPC's threads and event loops took three of each (docs/history/log.md).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from penstock.errors import InternalError

if TYPE_CHECKING:
    from penstock.processes.tls import TlsSession

__all__ = ["FIRST_BYTES", "FrameStream"]

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 18
FIRST_BYTES: Final = 1 << 16
"""Limit on the size of a message from a peer that has not been authenticated."""


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802 - protobuf's


Incoming = TypeVar("Incoming")


class FrameStream(Generic[Incoming]):
    """One end of a stream of messages over ``connection``, a connected socket that the stream closes.

    ``parse`` makes a message from bytes.  ``tls``, after its handshake, encrypts the stream.  Messages wait for
    ``read`` or go to the listener as they arrive.  The stream ends when a message is longer than ``max_bytes``, when
    ``parse`` or the listener raises, and when the socket fails.  ``error`` has the exception that ended it.  It is None
    if the peer ended the stream or the socket failed.

    Use it in the event loop in which it was made.  Only ``send`` may be called from any thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        parse: Callable[[bytes], Incoming],
        max_bytes: int,
        tls: TlsSession | None = None,
    ) -> None:
        connection.setblocking(False)
        self.max_bytes = max_bytes
        self.heard = time.monotonic()
        """The time of the last data, also of a part of a message: a long one takes its time on a slow network."""
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        self.on_room: Callable[[], None] = lambda: None
        """Called when all buffered data has been sent."""
        self._socket, self._parse, self._tls = connection, parse, tls
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards _unsent, _tls and the end of the socket
        self._unsent = bytearray()
        self._closed = False
        self._received = bytearray()
        self._unread: deque[Incoming] = deque()
        self._listener: Callable[[Incoming], None] | None = None
        self._merge: Callable[[Incoming, Incoming], bool] | None = None
        self._has_unread = asyncio.Event()
        self._loop.add_reader(connection, self._read)
        if tls is not None:  # the end of the handshake may have brought the first message
            self._loop.call_soon(self._receive, b"")

    def send(self, *messages: _Message) -> bool:
        """Send messages from any thread without waiting; False if the stream has ended.

        Data that the socket does not accept is buffered and sent later.
        """
        payloads = [message.SerializeToString() for message in messages]
        data = b"".join(_LENGTH.pack(len(payload)) + payload for payload in payloads)
        with self._lock:
            if self._closed:
                return False
            try:
                return self._transmit(data if self._tls is None else self._tls.encrypt(data))
            except OSError:  # the reader gets the same error
                return False

    def _transmit(self, data: bytes) -> bool:
        """Send or buffer bytes, with the lock held; OSError."""
        if self._unsent:
            self._unsent += data
            return True
        try:
            num_sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            num_sent = 0
        if num_sent < len(data):
            self._unsent += data[num_sent:]
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._await_room)
        return True

    @property
    def has_room(self) -> bool:
        """True if nothing is buffered."""
        return not self._unsent

    async def read(self) -> Incoming | None:
        """Return the next message, or None at the end of the stream.  Raises ``error`` if that ended it."""
        while not self._unread and not self.ended.is_set():
            self._has_unread.clear()
            await self._has_unread.wait()
        if self._unread:
            return self._unread.popleft()
        if self.error is not None:
            raise self.error
        return None

    def listen(
        self, listener: Callable[[Incoming], None], merge: Callable[[Incoming, Incoming], bool] | None = None
    ) -> None:
        """Call ``listener`` with each message, including unread ones, instead of keeping them for ``read``.

        Several messages arrive together if this process is slower than its peer.  ``merge(first, second)`` may then add
        a message to the one before it; it returns False if they must stay apart.
        """
        self._listener, self._merge = listener, merge
        while self._unread and not self._closed:
            self._deliver(self._unread.popleft())

    def close(self) -> None:
        """End the stream and drop buffered data.  Further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._unsent.clear()
        self.ended.set()
        self._has_unread.set()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self.heard = time.monotonic()
            self._receive(data)
        else:
            self.close()

    def _receive(self, data: bytes) -> None:
        if self._closed:
            return
        if self._tls is None:
            self._parse_frames(data)
            return
        try:
            with self._lock:
                data = self._tls.decrypt(data)
                if replies := self._tls.replies():
                    self._transmit(replies)
        except OSError:
            self.close()
            return
        self._parse_frames(data)
        if self._tls.has_ended:
            self.close()

    def _parse_frames(self, data: bytes) -> None:
        self._received += data
        before: Incoming | None = None  # not delivered yet: the next one may be added to it
        failure: Exception | None = None
        try:
            for message in self._whole_messages():
                if before is not None:
                    if self._merge is not None and self._merge(before, message):
                        continue
                    self._deliver(before)
                before = message
                if self._merge is None:
                    self._deliver(message)
                    before = None
        except Exception as error:
            failure = error
        if before is not None and not self._closed:
            self._deliver(before)
        if failure is not None:
            self._fail(failure)

    def _whole_messages(self) -> Iterator[Incoming]:
        """Take the whole messages out of the received data.  Raises InternalError, and what ``parse`` raises."""
        received, start = self._received, 0
        try:
            while len(received) - start >= _LENGTH.size and not self._closed:
                (size,) = _LENGTH.unpack_from(received, start)
                if size > self.max_bytes:
                    raise InternalError(f"received a message of {size} bytes; the maximum is {self.max_bytes}")
                first = start + _LENGTH.size
                if len(received) - first < size:
                    return
                start = first + size
                yield self._parse(bytes(received[first:start]))
        finally:
            del received[:start]

    def _deliver(self, message: Incoming) -> None:
        if self._listener is None:
            self._unread.append(message)
            self._has_unread.set()
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
