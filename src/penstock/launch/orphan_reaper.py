"""A process that ends what the ranks have started when the launcher is killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final, NoReturn

from penstock.launch.shared_files import SharedFiles
from penstock.processes.parent import kill_by_env_tag

__all__ = ["OrphanReaper"]

_MAX_DESCRIPTORS: Final = 1 << 20


class OrphanReaper:
    """A process that waits for the end of this one and then kills all processes with a mark in their environment.

    The kernel ends the ranks with their launcher, but not the processes that the ranks have started.  ``mark``:
    NAME=VALUE.
    """

    def __init__(self, mark: str) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _guard(read, mark)
        os.close(read)

    def close(self) -> None:
        """End the reaper; a second call does nothing."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._write)
            self._pid = 0


def _guard(read: int, mark: str) -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)  # the event loop of the launcher
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(read, 0)
        os.closerange(1, _MAX_DESCRIPTORS)  # the output and the sockets of the launcher end with it
        os.read(0, 1)  # until no process has the other end
        files = SharedFiles(mark)
        files.look()
        kill_by_env_tag(mark)
        files.remove()
    finally:
        os._exit(0)
