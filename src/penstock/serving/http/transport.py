"""A connection's transport that comes to its end, whatever the client still sends or does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Transport"]

_MIN_BYTES: Final = 1 << 16
"""Who takes less of an answer in ``write_s`` is not waited for."""


class Transport:
    """Stands for asyncio's, whose ``close`` alone ends nothing where a client reads nothing, and breaks an answer off
    where it is still sending: then the system resets the connection, and the client never reads what it was refused
    with.  So what ``is_sending`` still brings is thrown away for up to ``body_s``, and what is not read in time is
    dropped.  ``ended`` must be called with the connection's end.
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
        """Nothing to a client that has gone: asyncio would log each piece until it has told the protocol so.  Of a
        connection that is about to end, nothing is left to say.
        """
        if not self._lingers and not self._inner.is_closing():
            self._inner.write(data)

    def is_closing(self) -> bool:
        """Whether nothing that comes matters any more."""
        return self._lingers or self._is_ending or bool(self._inner.is_closing())

    def close(self) -> None:
        """End the connection once what was written has left; a client that is still sending may read it first."""
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
        """End it whatever comes, once what was written has left."""
        if self._is_ending:
            return
        self.ended()
        self._inner.close()
        self._watch()

    def abort(self) -> None:
        """End it now; what has not left is dropped."""
        self.ended()
        self._inner.abort()

    def ended(self) -> None:
        """It is gone: nothing is left to be watched."""
        self._is_ending, self._is_sending = True, bool  # False; what was asked holds this
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
