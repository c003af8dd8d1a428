"""Accept connections of machines that have not proved yet that they belong to the group, with limits."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.config import show
from penstock.logs import tell

__all__ = ["MAX_PENDING", "PendingServer"]

MAX_PENDING: Final = 64
"""Limit on connections that are not authenticated.  A further one takes the place of the oldest."""
_PAUSE_S: Final = 0.2


class PendingServer:
    """Accepts connections until ``close``, and calls ``admit`` with each; it is pending until that returns.

    When the process is out of file descriptors, connections wait in the system's queue for ``pause_s``.
    """

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[socket.socket], Awaitable[None]],
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._listener, self._admit, self._pause_s = listener, admit, pause_s
        self._pending: dict[asyncio.Task[None], None] = {}
        self._has_told = False
        listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())
        self._accepting.add_done_callback(lambda _: listener.close())

    def close(self) -> None:
        """Stop listening, and end the pending connections."""
        for task in (self._accepting, *self._pending):
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(self._pause_s)
                continue
            connection.setblocking(False)
            if len(self._pending) >= MAX_PENDING:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                oldest.cancel()
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._pending.pop(task, None)
            if task.cancelled():  # possibly before it started
                connection.close()

        task = asyncio.ensure_future(self._serve(connection))
        self._pending[task] = None
        task.add_done_callback(ended)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._admit(connection)
        except OSError:
            connection.close()
        except Exception as error:
            connection.close()
            if not self._has_told:  # once, so that nobody outside can fill the log
                self._has_told = True
                message = f"a connection failed before it joined: {type(error).__name__}: {show(str(error))}"
                tell("connection_failed", message, logging.WARNING)
