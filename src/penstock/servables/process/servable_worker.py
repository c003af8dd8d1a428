"""A servable worker as the primary sees it: it is started, sent one batch at a time, watched and stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final

from penstock.errors import InvalidFileError, PenstockError, UnavailableError
from penstock.logs import tell
from penstock.processes.frames import FrameStream
from penstock.processes.parent import kill_by_env_tag
from penstock.processes.supervision import Death, has_crashed, signal_name
from penstock.runtime.machine import OomKills
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.progress import PROGRESS_BYTES, ProcessProgress
from penstock.servables.process.worker_main import MAX_FRAME_BYTES

__all__ = ["ServableWorker", "start_servable_worker"]

_COMMAND: Final = (sys.executable, "-P", "-m", "penstock.servables.process.worker_main")
_ENVIRONMENT_MARK: Final = "_PENSTOCK_STAGE"
"""The environment variable that identifies everything that a process started, when the process ends."""
_FOREIGN: Final = "it sent something other than the result of its batch"
_STOP_S: Final = 2.0
_LAST_RESULT_S: Final = 1.0


class ServableWorker:
    """A running servable worker.

    ``manifest``: that of the servable in JSON, once ``wait_ready`` returned; empty for a process that runs a model.
    ``on_result`` is called with the result of the last batch, ``on_end`` as soon as the process is known to have ended.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        stream: FrameStream[pb.FromStage],
        progress: ProcessProgress,
        environment_mark: str,
    ) -> None:
        self.pid, self.label, self.is_joined = process.pid, f"process {process.pid}", False
        self._environment_mark = environment_mark
        self.manifest = ""
        self.is_hung = False
        self.on_result: Callable[[pb.Result], None] = lambda result: None
        self.on_end: Callable[[], None] = lambda: None
        self._process, self._stream, self._progress = process, stream, progress
        self._is_gone = self._was_ended_here = False
        self._descendants_killed: asyncio.Future[int] | None = None
        self._num_sent = 0
        self._awaited = 0  # the number of the batch that it runs; 0: none

    async def wait_ready(self, start: pb.Start) -> None:
        """Send what to load, and wait until it is loaded.

        Raises InvalidFileError with the message of the process, or UnavailableError if the process was killed.
        """
        self._stream.send(pb.ToStage(start=start))
        try:
            first = await self._stream.read()
        except Exception as error:
            raise InvalidFileError(f"{start.file or start.folder}: {_FOREIGN} ({error})") from error
        if first is None:
            await self._wait_exit()
            raise self._load_error(start)
        if first.HasField("failed"):
            if first.failed.trace:
                tell(
                    "script_failed", first.failed.text, logging.WARNING, servable=start.servable, version=start.version,
                    trace=first.failed.trace,
                )  # fmt: skip
            raise InvalidFileError(first.failed.text)
        if not first.HasField("ready"):
            raise InvalidFileError(f"{start.file or start.folder}: {_FOREIGN}")
        self.manifest = first.ready.manifest
        self._stream.listen(self._on_message)

    def _load_error(self, start: pb.Start) -> PenstockError:
        """Return the error for a process that ended before it had loaded anything."""
        status = self._process.returncode
        if not start.model and self.has_begun and status is not None and status >= 0:  # by os._exit, for example
            return InvalidFileError(f"{start.file}: the script ended its process with status {status} while loading")
        return UnavailableError(f"{start.folder}: the process ended while loading: {self._exit_reason()}")

    def send_batch(self, message: pb.ToStage) -> bool:
        """Send a batch; the result of the previous one must have arrived.  False if the process is gone."""
        if not self._progress.reset():  # the process waits for a batch, so nothing else writes the page now
            return False
        self._num_sent += 1
        self._awaited = message.batch.number = self._num_sent
        return self._stream.send(message)

    @property
    def has_begun(self) -> bool:
        """Return True if the process has started to read the batch that it was sent last."""
        return self._progress.read()[0]

    def position(self) -> tuple[int, int]:
        """Return the stage of the unit that runs, or ran when the process died, and the instance of the batch.

        The instance is -1 for all instances.  A stage number that the unit does not have means: no stage was called.
        """
        return self._progress.read()[1]

    def _on_message(self, message: pb.FromStage) -> None:
        """Take a result.  Raises ValueError, which closes the stream, if it is not that of the current batch."""
        number = message.result.number
        if not number or number != self._awaited:
            raise ValueError(f"expected the result of batch {self._awaited}, got that of batch {number}")
        self._awaited = 0
        self.on_result(message.result)

    async def wait_ended(self) -> Death:
        """Wait until the process has ended for any reason, and return how."""
        exited = asyncio.ensure_future(self._process.wait())
        stream_ended = asyncio.ensure_future(self._stream.ended.wait())
        try:
            await asyncio.wait((exited, stream_ended), return_when=asyncio.FIRST_COMPLETED)
            self.on_end()
            if not stream_ended.done():  # the last result may arrive, unless a child process holds the stream open
                await asyncio.wait((stream_ended,), timeout=_LAST_RESULT_S)
        finally:
            exited.cancel()
            stream_ended.cancel()
        await self._wait_exit()
        if self.is_hung:
            return Death("hang", "it took longer than timeout_s")
        if self._stream.error is not None:
            text = f"process {self.pid}: {_FOREIGN} ({self._stream.error})"
            tell("stage_stream_broken", text, logging.WARNING, pid=self.pid)
            return Death("stream", _FOREIGN)
        status = self._process.returncode
        if self._was_ended_here or has_crashed(status):
            return Death("signal" if status is not None and status < 0 else "exit", self._exit_reason())
        if _oom_kills().look():  # its batch may be too large, and would be so again
            return Death("signal", f"{self._exit_reason()}, as the kernel had no memory left")
        return Death("signal", self._exit_reason(), was_killed=True)

    async def _wait_exit(self) -> None:
        """End the process after its stream has ended; it may exit by itself first."""
        if not self.is_hung and self._stream.error is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), _LAST_RESULT_S)
        await self._kill_and_wait()

    def kill(self) -> None:
        """Kill the process group at once."""
        if not self._is_gone:
            self._was_ended_here |= self._process.returncode is None
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _kill_and_wait(self) -> None:
        self.kill()
        await self._process.wait()
        self._is_gone = True  # another process may get this pid from now on
        self._stream.close()
        self._progress.close()
        if self._descendants_killed is None:  # descendants may have started other sessions
            self._descendants_killed = asyncio.ensure_future(asyncio.to_thread(kill_by_env_tag, self._environment_mark))
        await asyncio.shield(self._descendants_killed)

    async def stop(self) -> None:
        """Close the stream so that the process exits, and kill it if it does not."""
        self._stream.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), _STOP_S)
        except asyncio.CancelledError:  # the caller does not wait any longer
            self.kill()
            raise
        await self._kill_and_wait()

    def _exit_reason(self) -> str:
        status = self._process.returncode
        if status is not None and status < 0:
            return f"it was ended by {signal_name(-status)}"
        return f"it exited with status {status}"


@cache
def _oom_kills() -> OomKills:
    """Return the counter that all servable workers of this process share."""
    return OomKills()


async def start_servable_worker(start: pb.Start, load_s: float) -> ServableWorker:
    """Start a process and wait up to ``load_s`` seconds until it has loaded what ``start`` names.

    Raises as ``ServableWorker.wait_ready`` does, and UnavailableError; the process is stopped then.
    """
    _oom_kills()  # counts from now on
    try:
        process = await _spawn()
    except OSError as error:  # no file descriptor, process or memory is left
        raise UnavailableError(f"failed to start a process: {error}") from error
    try:
        async with asyncio.timeout(load_s):
            await process.wait_ready(start)
    except BaseException as error:
        process.kill()
        await process.stop()
        if isinstance(error, TimeoutError):
            raise UnavailableError(f"{start.folder}: not loaded within {load_s:g} s") from None
        raise
    return process


async def _spawn() -> ServableWorker:
    """Spawn a process that inherits one end of a socket pair; nothing else can connect, so no secret is needed."""
    token = secrets.token_hex(16)
    progress_fd = os.memfd_create("penstock-progress", os.MFD_CLOEXEC)
    parent_end, child_end = socket.socketpair()
    try:
        os.ftruncate(progress_fd, PROGRESS_BYTES)
        progress = ProcessProgress(progress_fd)
        arguments: Any = (*_COMMAND, str(child_end.fileno()), str(progress_fd))
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # output of the operator's code goes to standard error
            pass_fds=(child_end.fileno(), progress_fd),
            env={**os.environ, _ENVIRONMENT_MARK: token},
            start_new_session=True,  # the terminal's signals reach only the primary; the group can be killed as a whole
        )
    except BaseException:
        parent_end.close()
        raise
    finally:
        child_end.close()
        os.close(progress_fd)
    stream = FrameStream(parent_end, pb.FromStage.FromString, MAX_FRAME_BYTES)
    return ServableWorker(process, stream, progress, f"{_ENVIRONMENT_MARK}={token}")
