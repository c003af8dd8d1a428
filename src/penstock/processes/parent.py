"""What ties a process to the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["die_with_parent", "kill_marked"]

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    """The kernel kills this process when the primary's dies; one that died before is seen on what it holds open."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_MAX_ROUNDS: Final = 10


def kill_marked(mark: str) -> int:
    """Kill each process of this user that was started with ``mark`` (NAME=VALUE) in its environment, and return how
    many there were.

    A child keeps its parent's environment whatever session it moves to, and whoever its parent is by then.
    """
    num_killed = 0
    for _ in range(_MAX_ROUNDS):  # one of them may have forked meanwhile
        found = sum(_kill_if_marked(int(one), mark.encode()) for one in os.listdir("/proc") if one.isdigit())
        num_killed += found
        if not found:
            break
    return num_killed


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """Whether it had the mark.  The descriptor holds on to the process: its number may become another one's."""
    if pid == os.getpid():
        return False
    with suppress(OSError):
        holder = os.pidfd_open(pid)
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(holder, signal.SIGKILL)
                return True
        finally:
            os.close(holder)
    return False
