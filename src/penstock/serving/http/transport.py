"""A connection's transport that always closes in time, even if the client keeps sending or does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Transport"]

_MIN_BYTES: Final = 1 << 16
"""A client that reads less than this within ``write_s`` is cut off."""


class Transport:
    """Wraps asyncio's transport to close connections properly.

    asyncio's ``close`` never completes if the client does not read.  If the client is still sending, the system resets
    the connection, and the client loses the error response.  So while ``is_sending`` returns True, received data is
    discarded for up to ``body_s``; then data that the client does not read in time is dropped.  ``ended`` must be
    called when the connection is lost.
    """

    def __init__(self, inner: asyncio.Transport, is_sending: Callable[[], bool], body_s: float, write_s: float) -> None:
        self._inner: Any = inner
        self._is_sending, self._body_s, self._write_s = is_sending, body_s, write_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._lingers = self._is_ending = False
        self._num_unsent = 0
        self.get_extra_info = inner.get_extra_info
        self.pause_reading, self.resume_reading = inner.pause_reading, inner.resume_reading

    def write(self, data: bytes) -> None:
        """Write data, unless the connection is closing.

        asyncio would log each write to a closed connection until it has notified the protocol.
        """
        if not self._lingers and not self._inner.is_closing():
            self._inner.write(data)

    def is_closing(self) -> bool:
        """Return True if further received data is ignored."""
        return self._lingers or self._is_ending or bool(self._inner.is_closing())

    def close(self) -> None:
        """Close after written data was sent; a client that is still sending gets time to read it."""
        if self._lingers or self._is_ending or not self._is_sending():
            self.end()
            return
        self._lingers = True
        self._inner.resume_reading()
        if self._inner.can_write_eof():
            try:
                self._inner.write_eof()
            except OSError:  # the client has closed the connection, and asyncio does not know it yet
                self.end()
                return
        self._timer = self._loop.call_later(self._body_s, self.end)

    def end(self) -> None:
        """Close after written data was sent, even if the client is still sending."""
        if self._is_ending:
            return
        self.ended()
        self._inner.close()
        self._watch()

    def abort(self) -> None:
        """Close now; data that was not sent is dropped."""
        self.ended()
        self._inner.abort()

    def ended(self) -> None:
        """Stop the timers of a lost connection."""
        self._is_ending, self._is_sending = True, bool  # bool() is False; the old callback would keep this object alive
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        self._num_unsent = self._inner.get_write_buffer_size()
        self._timer = self._loop.call_later(self._write_s, self._look)

    def _look(self) -> None:
        if self._inner.get_write_buffer_size() > self._num_unsent - _MIN_BYTES:
            self._inner.abort()
        else:
            self._watch()
