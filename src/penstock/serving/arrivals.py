"""Requests that are about to come, as far as a door can tell: so that those which come together begin together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["FRESH_S", "MAX_S", "Arrivals"]

FRESH_S: Final = 0.005
"""A connection that was opened a shorter time ago and has sent nothing is likely to send a request."""
MAX_S: Final = 0.01
"""Nobody is kept waiting for longer."""
_LOOK_S: Final = 0.0003
_NUM_ROUNDS: Final = 3
"""Of the event loop, from the bytes of a request to its place in a worker's stream."""


class Arrivals:
    """Connections that are fresh and silent, and who waits until there are none.

    Without it the first of many requests to a resting worker has a step of its own, which takes as long as one of all
    of them, and the others wait for its end.
    """

    def __init__(self) -> None:
        self._fresh: dict[object, float] = {}

    def opened(self, connection: object) -> None:
        """A client has connected."""
        self._fresh[connection] = asyncio.get_running_loop().time() + FRESH_S

    def spoke(self, connection: object) -> None:
        """It has sent something, or is gone."""
        self._fresh.pop(connection, None)

    @property
    def num_expected(self) -> int:
        """Connections that are likely to send a request now."""
        now = asyncio.get_running_loop().time()
        for connection, until in [*self._fresh.items()]:
            if until > now:  # and so are those behind it
                break
            del self._fresh[connection]
        return len(self._fresh)

    def settle(self, callback: Callable[[], None]) -> None:
        """Call it once nothing more is expected and what is here already has gone its way, MAX_S from now at last."""
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
