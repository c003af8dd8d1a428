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
_NUM_ROUNDS: Final = 3
"""Turns of the event loop between receiving the bytes of a request and writing it to a worker's stream."""


class Arrivals:
    """Tracks new, silent connections, and calls back when there are none.

    Otherwise the first of many requests to an idle worker would run in a step of its own, which takes as long as a step
    of all of them, and the others would wait for its end: 18.0 steps instead of 16.1 for 16 streams of 16 tokens.  A
    request alone takes as long with it as without (``python benchmarks/serving_shortcuts.py MODEL.psm --shortcuts
    arrivals``; docs/history/log.md).
    """

    def __init__(self) -> None:
        self._fresh: dict[object, float] = {}
        self._waiting: list[tuple[Callable[[], None], float]] = []
        self._timer: asyncio.TimerHandle | None = None

    def opened(self, connection: object) -> None:
        """Note that a client has connected."""
        self._fresh[connection] = asyncio.get_running_loop().time() + FRESH_S

    def on_received(self, connection: object) -> None:
        """Note that a connection has sent something or was closed."""
        if self._fresh.pop(connection, None) is not None and not self._fresh:
            self._resume()

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
            self._waiting.append((callback, until))
            if self._timer is None:
                self._timer = loop.call_at(min(until, next(reversed(self._fresh.values()))), self._resume)
        elif rounds >= _NUM_ROUNDS:
            callback()
        else:
            loop.call_soon(self._look, callback, until, rounds + 1)

    def _resume(self) -> None:
        """Look again: the last silent connection has sent something, or is not expected to any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for callback, until in waiting:
            asyncio.get_running_loop().call_soon(self._look, callback, until, 0)
