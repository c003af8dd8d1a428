"""Ends child processes together with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["die_with_parent", "kill_by_env_tag"]

_PR_SET_PDEATHSIG: Final = 1
_MAX_ROUNDS: Final = 10


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends.

    If the parent has ended before this call, that shows on the pipes and sockets that it held open.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_by_env_tag(mark: str) -> int:
    """Kill each process of this user that was started with ``mark`` (NAME=VALUE) in its environment.

    Returns the number of killed processes.  A child keeps the environment of its parent, whatever its session is and
    whichever process adopts it.
    """
    num_killed = 0
    for _ in range(_MAX_ROUNDS):  # a process may have forked meanwhile
        num_found = sum(_kill_if_marked(int(name), mark.encode()) for name in os.listdir("/proc") if name.isdigit())
        num_killed += num_found
        if not num_found:
            break
    return num_killed


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """Kill a process that has the mark; True if it had.

    The descriptor refers to the process itself: its id may be used again by another one.
    """
    if pid == os.getpid():
        return False
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False
