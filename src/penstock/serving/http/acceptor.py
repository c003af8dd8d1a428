"""Accept connections, with limits, and with a pause when the process is out of file descriptors.

asyncio's own server logs a failed ``accept`` once for each place of its backlog, and retries as often at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from penstock.logs import tell

__all__ = ["Acceptor"]

_MAX_ACCEPTS: Final = 256
"""The most connections that are accepted in one turn of the event loop."""
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 1.0
_LOG_S: Final = 1.0


class Acceptor:
    """Accepts connections of a listening socket until ``close``; it replaces asyncio's server in uvicorn's list.

    ``make`` returns the protocol of a new connection; the protocol calls the function passed to ``make`` when the
    connection is made.  ``tls`` is the context of TLS handshakes, ``handshake_s`` their timeout.  If ``is_full``
    returns True for the number of connections without a protocol, a new connection gets ``refusal`` and is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
        is_full: Callable[[int], bool],
        refusal: bytes,
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        self._listener, self._make, self._is_full, self._refusal = listener, make, is_full, refusal
        self._tls, self._handshake_s = tls, handshake_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._num_opening = 0  # those whose protocol has no connection yet
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._logged = -_LOG_S
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting connections and cancel running handshakes."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                own, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause(error)
                return
            self._pause_s = _FIRST_PAUSE_S
            own.setblocking(False)
            if self._is_full(self._num_opening):
                self._refuse(own)
            else:
                self._begin(own)

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a while; connections wait in the system's queue."""
        self._loop.remove_reader(self._listener.fileno())
        self._timer = self._loop.call_later(self._pause_s, self._resume)
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        now = time.monotonic()
        if now - self._logged >= _LOG_S:
            self._logged = now
            reason = error.strerror or str(error)
            tell("accept_failed", f"Failed to accept a connection: {reason}. Retrying.", logging.WARNING)

    def _begin(self, own: socket.socket) -> None:
        is_counted = True

        def connected() -> None:
            nonlocal is_counted
            self._num_opening -= is_counted
            is_counted = False

        def ended(task: asyncio.Task[None]) -> None:
            self._opening.discard(task)
            connected()  # in case the handshake failed
            if task.cancelled():  # possibly before it started
                own.close()

        self._num_opening += 1
        task = self._loop.create_task(self._open(own, connected))
        self._opening.add(task)
        task.add_done_callback(ended)

    def _refuse(self, own: socket.socket) -> None:
        with own, suppress(OSError):
            if self._tls is None:  # before a TLS handshake no response can be sent
                own.send(self._refusal)
            own.shutdown(socket.SHUT_WR)

    async def _open(self, own: socket.socket, connected: Callable[[], None]) -> None:
        timeout = None if self._tls is None else self._handshake_s
        with suppress(OSError):  # a handshake that failed or timed out has closed the socket
            await self._loop.connect_accepted_socket(
                partial(self._make, connected), own, ssl=self._tls, ssl_handshake_timeout=timeout
            )
