"""Accept connections of machines that have not proved yet that they belong to the group, with limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

__all__ = ["MAX_STRANGERS", "StrangerServer"]

MAX_STRANGERS: Final = 64
"""Limit on connections that are not authenticated.  A further one takes the place of the oldest."""
_PAUSE_S: Final = 0.2


class StrangerServer:
    """Accepts connections until ``close``, and calls ``admit`` with each; it counts as a stranger until that returns.

    When the process is out of file descriptors, connections wait in the system's queue for ``pause_s``.
    """

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[socket.socket], Awaitable[None]],
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._listener, self._admit, self._pause_s = listener, admit, pause_s
        self._strangers: dict[asyncio.Task[None], None] = {}
        listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept())
        self._accepting.add_done_callback(lambda _: listener.close())

    def close(self) -> None:
        """Stop listening, and end the connections of strangers."""
        for task in (self._accepting, *self._strangers):
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
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._strangers.pop(task, None)
            if task.cancelled():  # possibly before it started
                connection.close()

        task = asyncio.ensure_future(self._serve(connection))
        self._strangers[task] = None
        task.add_done_callback(ended)

    async def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            await self._admit(connection)
