"""The messages and pauses of commands that join another machine, after their connection fails."""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["RetryLines", "connection_problem"]


def connection_problem(error: OSError, timeout_s: float) -> str:
    """Return why a connection failed, in words.  ``timeout_s``: the limit on one attempt, in seconds."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if error.errno is not None and not isinstance(error, (socket.gaierror, ssl.SSLError)):
        return os.strerror(error.errno)  # that of the error of asyncio is "Connect call failed (HOST, PORT)"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return error.strerror or str(error)


class RetryLines:
    """Prints on standard error why a command has to try again; a line that would repeat the one before is left out.

    ``pauses_s``: the pauses before the next tries in seconds; the last one repeats.
    """

    def __init__(self, command: str, address: str, pauses_s: Sequence[float]) -> None:
        self._prefix: Final = f"penstock {command}: {address}: "
        self._pauses_s, self._num_tries, self._last = pauses_s, 0, ""

    def reset(self) -> None:
        """Begin again with the first pause, after a connection that succeeded."""
        self._num_tries, self._last = 0, ""

    def next_pause_s(self, reason: str) -> float:
        """Print ``reason`` and the pause, and return the pause; with an empty reason print nothing."""
        is_last = self._num_tries >= len(self._pauses_s) - 1
        pause_s = self._pauses_s[-1 if is_last else self._num_tries]
        self._num_tries += 1
        line = f"{reason}; trying again {'every' if is_last else 'in'} {pause_s:g} s"
        if reason and line != self._last:
            print(f"{self._prefix}{line}", file=sys.stderr, flush=True)
            self._last = line
        return pause_s
