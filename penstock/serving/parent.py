"""What ties a process to the one that started it."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress
from typing import Final

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    """The kernel kills this process when the primary's dies; one that died before is seen on what it holds open."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
