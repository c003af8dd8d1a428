"""A worker's process on this machine: started with a configuration on standard input, watched, and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import UnavailableError
from penstock.processes.supervision import Death

if TYPE_CHECKING:
    from penstock.serving.proto import wire_pb2 as pb
    from penstock.serving.workers.worker_config import WorkerConfig
    from penstock.serving.workers.worker_connection import WorkerConnection

__all__ = ["COMMAND", "WorkerProcess", "not_started", "start_process", "unwritten_bytes"]

_STOP_S: Final = 5.0


COMMAND: Final = (sys.executable, "-P", "-m", "penstock.serving.workers.worker")
"""-P: never a package of that name that happens to lie in the folder where the service was started."""


async def start_process(config: WorkerConfig, command: Sequence[str] = COMMAND) -> asyncio.subprocess.Process:
    """A fresh interpreter, never a fork of this one: threads and event loops do not survive that."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    if process.stdin is not None:  # a line that the pipe holds: nothing to wait for
        process.stdin.write(config.to_json().encode() + b"\n")
    return process


def unwritten_bytes(pid: int, plan: pb.Plan) -> int:
    """Of the memory that a process planned, what the kernel does not count as its own: mapped weights, pages of keys
    and values that nobody wrote yet, and what is still to be loaded."""
    own = 0
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                own = int(line.split()[1]) * 1024
    return max(plan.weight_bytes, plan.total_bytes - own)


class WorkerProcess:
    """A process and its link.  ``hang_s``: how long its engine's loop may stand."""

    def __init__(self, process: asyncio.subprocess.Process, link: WorkerConnection, hang_s: float) -> None:
        self.link = link
        self._process = process
        self._watch = asyncio.ensure_future(link.watch(hang_s))

    async def ended(self) -> Death:
        """Until the process is over; how that came."""
        exited = asyncio.ensure_future(self._process.wait())
        gone = asyncio.ensure_future(self.link.gone.wait())
        try:
            await asyncio.wait((exited, gone), return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():  # the stream ended, or it hangs: nothing good comes of it any more
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(exited), 0.0 if self.link.is_hung else _STOP_S)
            self._kill()
            await exited
        finally:
            gone.cancel()
            exited.cancel()
        status = self._process.returncode
        if self.link.is_hung:
            death = Death("hang", "its engine's loop stood still")
        else:
            death = Death("signal" if status is not None and status < 0 else "exit", _how(status))
        self._end(death.why)
        return death

    async def stop(self) -> None:
        """Tell it to end, and end it when it does not."""
        self.link.status = "draining"
        self.link.stop()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self._kill()
            await self._process.wait()
        finally:
            self._kill()
        self._end("the worker was stopped")

    def _end(self, why: str) -> None:
        self._watch.cancel()
        self.link.fail(f"the worker is gone: {why}")
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


def _how(status: int | None) -> str:
    if status is None:
        return "it left without a word"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with status {status}"


def not_started(status: int | None) -> UnavailableError:
    """For a process that ended before its model was loaded."""
    return UnavailableError(f"the worker ended while its model was loading: {_how(status)}")
