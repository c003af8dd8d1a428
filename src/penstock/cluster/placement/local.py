"""Workers as child processes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.cluster.placement.placement import Placement, Resources

    def _fits(placement: LocalPlacement) -> Placement:
        return placement


__all__ = ["COMMAND", "LocalPlacement", "LocalProcess"]

COMMAND: Final = (sys.executable, "-P", "-m", "penstock.serving.workers.worker")
"""-P keeps Python from importing a package named penstock in the folder where the service was started."""


class LocalProcess:
    """A child process.  Its standard input stays open until ``release``; a worker ends when it closes."""

    node = ""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def has_ended(self) -> bool:
        """True once its end is known."""
        return self._process.returncode is not None

    async def wait(self) -> int | None:
        """Wait for the end and return the exit status."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill the process."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def release(self) -> None:
        """Close its standard input."""
        if self._process.stdin is not None:
            self._process.stdin.close()


class LocalPlacement:
    """Starts workers with ``command``.  The worker itself checks its memory plan, so resources are not reserved."""

    is_local = True

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._processes: list[LocalProcess] = []

    async def open(self) -> None:
        """Do nothing: this machine is there."""

    async def start(self, config: str, resources: Resources) -> LocalProcess:
        """Start a fresh interpreter; a fork would break threads and event loops."""
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        if process.stdin is not None:  # the line fits into the pipe, so there is nothing to wait for
            process.stdin.write(config.encode() + b"\n")
        group = LocalProcess(process)
        self._processes = [*(running for running in self._processes if not running.has_ended), group]
        return group

    async def close(self) -> None:
        """End the processes that are left."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            await process.wait()
            process.release()
        self._processes.clear()
