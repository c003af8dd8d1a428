"""A stage process as the primary has it: started, given batches one at a time, watched and ended."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from penstock.errors import InvalidFileError, PenstockError, UnavailableError
from penstock.logs import tell
from penstock.processes.frames import FrameStream
from penstock.processes.parent import kill_marked
from penstock.processes.supervision import Death
from penstock.servables.process import stages_pb2 as pb
from penstock.servables.process.stage_worker import BEGUN, MARK_BYTES, MAX_FRAME_BYTES, PLACE

__all__ = ["StageProcess", "launch"]

_COMMAND: Final = (sys.executable, "-P", "-m", "penstock.servables.process.stage_worker")
_ENVIRONMENT_MARK: Final = "_PENSTOCK_STAGE"
"""The environment variable by which all that a process started is found when it ends."""
_NOWHERE: Final = (0xFFFFFFFF, 0)
"""The place in a batch that no stage has been called with."""
_FOREIGN: Final = "it sent something that is not the result of its batch"
_STOP_S: Final = 2.0
_LAST_WORDS_S: Final = 1.0


class StageProcess:
    """``on_result`` is called with what comes back of the batch that was given last, ``on_end`` as soon as ``ended``
    knows that nothing more is run; ``plan`` is what it told.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        stream: FrameStream[pb.FromStage],
        mark: mmap.mmap,
        environment_mark: str,
    ) -> None:
        self.pid = process.pid
        self._environment_mark = environment_mark
        self.plan = ""
        self.is_hung = False
        self.on_result: Callable[[pb.Result], None] = lambda result: None
        self.on_end: Callable[[], None] = lambda: None
        self._process, self._stream, self._mark = process, stream, mark
        self._has_begun, self._place = False, _NOWHERE
        self._is_gone = False
        self._rest: asyncio.Future[int] | None = None
        self._num_given = 0
        self._awaited = 0  # the number of the batch that it has; 0: none

    async def ready(self, start: pb.Start) -> None:
        """Until it has loaded what it is to run; InvalidFileError with what it says was wrong, UnavailableError."""
        self._stream.send(pb.ToStage(start=start))
        try:
            first = await self._stream.read()
        except Exception as error:
            raise InvalidFileError(f"{start.file or start.folder}: {_FOREIGN} ({error})") from error
        if first is None:
            await self._exited()
            raise self._lost(start)
        if first.HasField("failed"):
            if first.failed.trace:
                tell(
                    "script_failed", first.failed.text, logging.WARNING, servable=start.servable, version=start.version,
                    trace=first.failed.trace,
                )  # fmt: skip
            raise InvalidFileError(first.failed.text)
        if not first.HasField("ready"):
            raise InvalidFileError(f"{start.file or start.folder}: {_FOREIGN}")
        self.plan = first.ready.plan
        self._stream.listen(self._hear)

    def _lost(self, start: pb.Start) -> PenstockError:
        """What is to be said of a process that was gone before it had loaded anything."""
        status = self._process.returncode
        if not start.model and self._has_begun and status is not None and status >= 0:  # by os._exit and the like
            return InvalidFileError(f"{start.file}: it ended its process while it was loaded, with status {status}")
        return UnavailableError(f"{start.folder}: its process ended while it was loaded: {self._how()}")

    def give(self, batch: pb.ToStage) -> bool:
        """Run a batch, the one before having come back; False when it cannot get it any more."""
        if self._mark.closed:
            return False
        BEGUN.pack_into(self._mark, 0, 0)  # it waits for the batch, so that nobody else writes here
        PLACE.pack_into(self._mark, BEGUN.size, *_NOWHERE)
        self._num_given += 1
        self._awaited = batch.batch.number = self._num_given
        return self._stream.send(batch)

    def _read_mark(self) -> None:
        if not self._mark.closed:
            (begun,) = BEGUN.unpack_from(self._mark)
            self._has_begun, self._place = bool(begun), PLACE.unpack_from(self._mark, BEGUN.size)

    @property
    def has_begun(self) -> bool:
        """Whether it has read anything of the batch that it was given last."""
        self._read_mark()
        return self._has_begun

    def at(self) -> tuple[int, int]:
        """Which stage of its unit it is at, or was when it died, and which instance of the batch; -1: all of them.  A
        stage that there is not: none yet.
        """
        self._read_mark()
        stage, instance = self._place
        return stage, instance - 1

    def _hear(self, message: pb.FromStage) -> None:
        """Take a result; ValueError, which ends the stream, for one that does not belong to the batch that it has."""
        number = message.result.number
        if not number or number != self._awaited:
            raise ValueError(f"expected a result of batch {self._awaited}, found one of batch {number}")
        self._awaited = 0
        self.on_result(message.result)

    async def ended(self) -> Death:
        """Until it is over, however that came."""
        exited = asyncio.ensure_future(self._process.wait())
        gone = asyncio.ensure_future(self._stream.ended.wait())
        try:
            await asyncio.wait((exited, gone), return_when=asyncio.FIRST_COMPLETED)
            self.on_end()
            if not gone.done():  # its last result is on its way, unless what it started holds the stream open
                await asyncio.wait((gone,), timeout=_LAST_WORDS_S)
        finally:
            exited.cancel()
            gone.cancel()
        await self._exited()
        if self.is_hung:
            return Death("hang", "it took longer than timeout_s")
        if self._stream.error is not None:
            text = f"process {self.pid}: {_FOREIGN} ({self._stream.error})"
            tell("stage_stream_broken", text, logging.WARNING, pid=self.pid)
            return Death("stream", _FOREIGN)
        status = self._process.returncode
        return Death("signal" if status is not None and status < 0 else "exit", self._how())

    async def _exited(self) -> None:
        """Its stream has ended: nothing good comes of it any more."""
        if not self.is_hung and self._stream.error is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), _LAST_WORDS_S)
        await self._kill()

    def kill(self) -> None:
        """End it at once, with all that it started."""
        if not self._is_gone:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _kill(self) -> None:
        self.kill()
        await self._process.wait()
        self._is_gone = True  # the number may be another one's from now on
        self._stream.close()
        self._read_mark()
        self._mark.close()  # a mapping holds a descriptor
        if self._rest is None:  # what it started may be in sessions of its own
            self._rest = asyncio.ensure_future(asyncio.to_thread(kill_marked, self._environment_mark))
        await asyncio.shield(self._rest)

    async def stop(self) -> None:
        """Let it end in good order, and end it when it does not."""
        self._stream.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), _STOP_S)
        except asyncio.CancelledError:  # nobody waits for it any more
            self.kill()
            raise
        await self._kill()

    def _how(self) -> str:
        status = self._process.returncode
        if status is not None and status < 0:
            return f"it was ended by {signal.Signals(-status).name}"
        return f"it ended with status {status}"


async def launch(start: pb.Start, load_s: float) -> StageProcess:
    """A process that has loaded its part; raises as ``ready`` does, and leaves nothing then."""
    try:
        process = await _started()
    except OSError as error:  # no descriptor, no process, no memory
        raise UnavailableError(f"a process cannot be started: {error}") from error
    try:
        async with asyncio.timeout(load_s):
            await process.ready(start)
    except BaseException as error:
        process.kill()
        await process.stop()
        if isinstance(error, TimeoutError):
            raise UnavailableError(f"{start.folder}: not loaded within {load_s:g} s") from None
        raise
    return process


async def _started() -> StageProcess:
    """The process gets its end of a pair of sockets: nobody else can have it, so there is no secret to prove."""
    token = secrets.token_hex(16)
    mark_fd = os.memfd_create("penstock-mark", os.MFD_CLOEXEC)
    own, its = socket.socketpair()
    try:
        os.ftruncate(mark_fd, MARK_BYTES)
        mark = mmap.mmap(mark_fd, MARK_BYTES)
        arguments: Any = (*_COMMAND, str(its.fileno()), str(mark_fd))
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # what the operator's code prints is no protocol's
            pass_fds=(its.fileno(), mark_fd),
            env={**os.environ, _ENVIRONMENT_MARK: token},
            start_new_session=True,  # signals of a terminal are the primary's; and all that it starts ends with it
        )
    except BaseException:
        own.close()
        raise
    finally:
        its.close()
        os.close(mark_fd)
    stream = FrameStream(own, pb.FromStage.FromString, MAX_FRAME_BYTES)
    return StageProcess(process, stream, mark, f"{_ENVIRONMENT_MARK}={token}")
