"""Expected requests: requests that arrive together are held back for a moment, so that they start together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["FRESH_S", "MAX_S", "Arrivals"]

FRESH_S: Final = 0.005
"""A silent connection that was opened more recently than this is likely to send a request."""
MAX_S: Final = 0.01
"""The longest time that a request is held back."""
_LOOK_S: Final = 0.0003
_NUM_ROUNDS: Final = 3
"""Turns of the event loop between receiving the bytes of a request and writing it to a worker's stream."""


class Arrivals:
    """Tracks new, silent connections, and calls back when there are none.

    Otherwise the first of many requests to an idle worker would run in a step of its own, which takes as long as a step
    of all of them, and the others would wait for its end.
    """

    def __init__(self) -> None:
        self._fresh: dict[object, float] = {}

    def opened(self, connection: object) -> None:
        """Note that a client has connected."""
        self._fresh[connection] = asyncio.get_running_loop().time() + FRESH_S

    def spoke(self, connection: object) -> None:
        """Note that a connection has sent something or was closed."""
        self._fresh.pop(connection, None)

    @property
    def num_expected(self) -> int:
        """The number of connections that are likely to send a request soon."""
        now = asyncio.get_running_loop().time()
        for connection, until in [*self._fresh.items()]:
            if until > now:  # later entries expire later
                break
            del self._fresh[connection]
        return len(self._fresh)

    def settle(self, callback: Callable[[], None]) -> None:
        """Call back when no request is expected and all received ones were passed on, or at the latest after MAX_S."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self._look, callback, loop.time() + MAX_S, 1)

    def _look(self, callback: Callable[[], None], until: float, rounds: int) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= until:
            callback()
        elif self.num_expected:
            loop.call_later(_LOOK_S, self._look, callback, until, 0)
        elif rounds >= _NUM_ROUNDS:
            callback()
        else:
            loop.call_soon(self._look, callback, until, rounds + 1)
