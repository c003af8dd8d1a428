"""The ranks of a program on this machine: started, watched, and ended together."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO, Final

from penstock.errors import FileAccessError
from penstock.launch.orphan_reaper import OrphanReaper
from penstock.launch.shared_files import SharedFiles
from penstock.processes.parent import die_with_parent, kill_by_env_tag
from penstock.processes.supervision import signal_name

__all__ = ["GRACE_S", "LocalGroup", "describe_end"]

GRACE_S: Final = 2.0
"""A rank has this time to end by itself after SIGTERM."""
_CHUNK: Final = 1 << 16
_LOOK_S: Final = 5.0
_DRAIN_S: Final = 1.0
_MARK: Final = "PENSTOCK_LAUNCH_MARK"


class LocalGroup:
    """Processes of one program, each in a session of its own.

    ``mark`` is a text that no other group has; the processes, and those that they start, are known by it.
    ``stdout`` and ``stderr`` get the output of all ranks, line by line; with ``is_prefixed``, each line begins with the
    rank in brackets.  With ``log_dir`` each rank's output is also written to ``worker_RANK.log`` there.
    """

    def __init__(
        self, mark: str, stdout: BinaryIO, stderr: BinaryIO, *, is_prefixed: bool = True, log_dir: Path | None = None
    ) -> None:
        self._mark = mark
        self._outputs = (stdout, stderr)
        self._is_prefixed = is_prefixed
        self._log_dir = log_dir
        self._logs: dict[int, BinaryIO] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._files = SharedFiles(f"{_MARK}={mark}")
        self._reaper: OrphanReaper | None = None

    def start(self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> None:
        """Start one process per rank with its environment.  FileAccessError if the command cannot be run."""
        self._open_logs(environments)
        try:
            self._reaper = OrphanReaper(f"{_MARK}={self._mark}")
            for rank, environment in environments.items():
                self._processes[rank] = self._spawn(command, environment)
        except OSError as error:
            raise FileAccessError(f"{command[0]}: cannot be run: {error.strerror}") from None
        for rank, process in self._processes.items():
            for stream, output in zip((process.stdout, process.stderr), self._outputs, strict=True):
                if stream is not None:
                    self._readers.append(asyncio.ensure_future(self._copy(stream, output, rank)))

    def _open_logs(self, ranks: Iterable[int]) -> None:
        """Create the log files; FileAccessError if one cannot be written."""
        if self._log_dir is None:
            return
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for rank in ranks:
                self._logs[rank] = (self._log_dir / f"worker_{rank}.log").open("wb")
        except OSError as error:
            raise FileAccessError(f"--log-dir: {self._log_dir}: {error.strerror}", param="log_dir") from None

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent()
            if os.getppid() != parent:  # it ended before the kernel knew that this process should end with it
                os._exit(1)

        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, _MARK: self._mark},
            start_new_session=True,
            preexec_fn=prepare,
        )

    async def wait(self) -> tuple[int, int] | None:
        """Wait until all ranks have ended with status 0, or one has not; return that rank and its status, or None.

        A status is that of subprocess: negative for a signal.
        """
        loop = asyncio.get_running_loop()
        ends: asyncio.Queue[int] = asyncio.Queue()
        descriptors: dict[int, int] = {}
        for rank, process in self._processes.items():
            descriptors[rank] = os.pidfd_open(process.pid)
            loop.add_reader(descriptors[rank], self._ended, rank, descriptors, ends)
        looking = asyncio.ensure_future(self._look())
        try:
            for _ in range(len(descriptors)):
                rank = await ends.get()
                status = self._processes[rank].wait()
                if status:
                    return rank, status
            return None
        finally:
            looking.cancel()
            for descriptor in descriptors.values():
                loop.remove_reader(descriptor)
                os.close(descriptor)

    @staticmethod
    def _ended(rank: int, descriptors: Mapping[int, int], ends: asyncio.Queue[int]) -> None:
        asyncio.get_running_loop().remove_reader(descriptors[rank])
        ends.put_nowait(rank)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self._files.look)

    async def end(self, number: int = signal.SIGTERM, grace_s: float = GRACE_S) -> None:
        """End all processes of the group, and what they started: with a signal, then with SIGKILL."""
        self._files.look()
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = asyncio.get_running_loop().time() + grace_s
        while any(process.poll() is None for process in running) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what the rank left in its session
            process.wait()
        kill_by_env_tag(f"{_MARK}={self._mark}")
        self._files.remove()
        if self._reaper is not None:
            self._reaper.close()
        _, pending = await asyncio.wait(self._readers, timeout=_DRAIN_S) if self._readers else ((), ())
        for reader in pending:  # a process of another user may hold the pipe
            reader.cancel()
        for log in self._logs.values():
            log.close()

    async def _copy(self, stream: IO[bytes], output: BinaryIO, rank: int) -> None:
        """Copy whole lines of a rank; a last line without an end gets one."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
        prefix = b"[%d] " % rank if self._is_prefixed else b""
        partial_line = b""
        try:
            while data := await reader.read(_CHUNK):
                *lines, partial_line = (partial_line + data).split(b"\n")
                if len(partial_line) > _CHUNK:
                    lines, partial_line = [*lines, partial_line], b""
                self._write(output, rank, prefix, lines)
            if partial_line:
                self._write(output, rank, prefix, [partial_line])
        finally:
            transport.close()

    def _write(self, output: BinaryIO, rank: int, prefix: bytes, lines: Sequence[bytes]) -> None:
        _write(output, b"".join(b"%b%b\n" % (prefix, line) for line in lines))
        if rank in self._logs:
            _write(self._logs[rank], b"".join(b"%b\n" % line for line in lines))


def _write(output: BinaryIO, data: bytes) -> None:
    """Write and flush; a closed pipe must not keep the ranks from being watched."""
    with suppress(OSError, ValueError):
        output.write(data)
        output.flush()


def describe_end(status: int) -> str:
    """Say how a process ended: its status is that of subprocess."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal_name(-status)}"
