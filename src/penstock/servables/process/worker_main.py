"""A servable worker: imports a servable.py or opens a model, and runs its batches one at a time for the primary.

The process inherits one end of a socket pair as a file descriptor, which no other process has.  The operator's code
runs only here.  Its standard output is redirected to standard error.
"""

from __future__ import annotations

import builtins
import io
import linecache
import os
import signal
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from penstock.errors import InvalidArgumentError, PenstockError
from penstock.processes.parent import die_with_parent
from penstock.servables.api.declare import collect_declarations, run_stages_of
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.failures import format_trace, to_unicode
from penstock.servables.process.progress import ProcessProgress

__all__ = ["MAX_FRAME_BYTES", "main"]

_LENGTH: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 1 << 30
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class BatchRunner(Protocol):
    """The interface of an object that runs batches in this process."""

    def run(self, batch: pb.Batch, note: Callable[[int, int], None]) -> pb.Result:
        """Return the outputs of a batch, or its failures.  ``note(stage, instance)`` records the progress."""


class _StageRunner:
    """The Python stages of a servable.py."""

    def __init__(self, start: pb.Start) -> None:
        from penstock.servables.api.manifest import manifest_to_json
        from penstock.servables.api.manifest_builder import build_manifest

        with collect_declarations(Path(start.folder), start.version) as declared:
            run_stages_of(declared)
            _run_script(start.file, start.source)
            manifest, self._programs = build_manifest(declared)
        self.manifest = manifest_to_json(manifest)
        self.memory_limit_bytes = (manifest.settings.memory_limit_mib or 0) << 20

    def run(self, batch: pb.Batch, note: Callable[[int, int], None]) -> pb.Result:
        from penstock.servables.process.unit_program import run_batch

        return run_batch(self._programs[batch.unit], batch, note)


def _run_script(file: str, source: bytes) -> None:
    """Run the text that the primary read as the module ``servable``, whatever the file contains by now."""
    module = types.ModuleType("servable")
    module.__file__ = file
    sys.modules["servable"] = module
    sys.path.append(str(Path(file).parent))  # modules beside the file come after all installed ones
    text = source.decode()
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code = builtins.compile(source, file, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - the operator's own file; running it is the purpose of this process


def _describe(error: BaseException, file: str) -> str:
    """Return the message of an error with the line of servable.py that raised it."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}:{error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{file}:{lines[-1]}: " if lines else f"{file}: "
    if isinstance(error, SystemExit):
        return f"{where}it ended its process while loading, by {error!r}"
    return where + (str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}")


class _Stream:
    """Frames over a blocking socket.  ``begin`` is called when a frame arrives, before it is read.

    Only the process that made the stream may use it.  A stage that forks may return in the child, too; using the stream
    there ends the child.
    """

    def __init__(self, own: socket.socket, begin: Callable[[], None]) -> None:
        self._socket, self._begin = own, begin
        self._file = own.makefile("rb", 1 << 16)
        self._pid = os.getpid()

    def close_in_child(self) -> None:
        """Close the socket in a forked child, so that nothing in the child writes to it."""
        os.close(self._socket.detach())

    def _end_child(self) -> None:
        """End the process if it is a forked child, even one that was forked without Python's knowledge."""
        if os.getpid() != self._pid:
            text = "penstock: a stage forked and returned in the child process; the child was ended\n"
            with suppress(OSError):
                os.write(2, text.encode())
            os._exit(1)

    def read(self) -> pb.ToStage | None:
        """Return the next message; None if the primary is gone or closed the stream."""
        self._end_child()
        head = self._file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        self._begin()
        (size,) = _LENGTH.unpack(head)
        data = self._file.read(size)
        return pb.ToStage.FromString(data) if len(data) == size else None

    def send(self, message: pb.FromStage) -> None:
        """Send a message; block while the socket's buffer is full."""
        self._end_child()
        data = message.SerializeToString()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)


class _MemoryLimit:
    """Compares the resident memory of this process with a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC) if limit_bytes else -1

    def used_if_exceeded(self) -> int:
        """Return the bytes in use if they exceed the limit; otherwise 0."""
        if self._file < 0:
            return 0
        used = int(os.pread(self._file, 128, 0).split()[1]) * _PAGE
        return used if used > self._limit else 0


def _load(start: pb.Start) -> tuple[BatchRunner, str, int]:
    """Return what runs batches, its manifest in JSON and its memory limit in bytes."""
    if start.model:
        from penstock.servables.process.model_file import LoadedModel

        return LoadedModel(start), "", start.memory_limit_bytes
    stages = _StageRunner(start)
    return stages, stages.manifest, stages.memory_limit_bytes


def _run_on(cores: Sequence[int]) -> None:
    """Run this process, and the threads that it starts, on these cores only; with none given, on any."""
    if not cores:
        return
    allowed = os.sched_getaffinity(0)
    if not allowed.issuperset(cores):
        raise InvalidArgumentError(
            f"instances: expected cores that the service may use ({', '.join(map(str, sorted(allowed)))}), "
            f"got {', '.join(map(str, cores))}",
            param="instances",
        )
    os.sched_setaffinity(0, cores)


def _serve(stream: _Stream, note: Callable[[int, int], None]) -> int:
    """Load, then run batches until the primary closes the stream; return the exit status."""
    first = stream.read()
    if first is None:
        return 1
    start = first.start
    try:
        _run_on(start.cores)
        runner, manifest, limit_bytes = _load(start)
    except BaseException as error:  # includes SystemExit: the message names the line instead of a dead process
        text = _describe(error, start.file) if not start.model else str(error)
        trace = "" if isinstance(error, PenstockError) else format_trace(error, start.file, __file__)
        stream.send(pb.FromStage(failed=pb.Failed(text=to_unicode(text, 2000), trace=trace)))
        return 1
    memory = _MemoryLimit(limit_bytes)
    stream.send(pb.FromStage(ready=pb.Ready(manifest=manifest)))
    while (message := stream.read()) is not None:
        began = time.perf_counter_ns()
        result = runner.run(message.batch, note)
        result.took_ns = time.perf_counter_ns() - began
        result.excess_bytes = memory.used_if_exceeded()
        if result.ByteSize() > MAX_FRAME_BYTES:
            result = pb.Result()
            result.failures.add(
                part=-1, instance=-1, kind="result", text=f"its outputs exceed {MAX_FRAME_BYTES >> 20} MiB"
            )
        result.number = message.batch.number
        stream.send(pb.FromStage(result=result))
    return 0


def main(arguments: list[str]) -> int:
    """Run the process.  The primary passes two file descriptors: of the socket and of the progress page."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    with suppress(OSError):  # if memory runs out the kernel should kill this process rather than the service
        Path("/proc/self/oom_score_adj").write_text("500")
    if isinstance(sys.stdout, io.TextIOWrapper):  # print output at once, even if the process dies afterwards
        sys.stdout.reconfigure(line_buffering=True)
    socket_fd, progress_fd = int(arguments[0]), int(arguments[1])
    os.set_inheritable(socket_fd, False)
    progress = ProcessProgress(progress_fd)
    os.close(progress_fd)
    with socket.socket(fileno=socket_fd) as own:
        own.setblocking(True)
        stream = _Stream(own, progress.begin)
        os.register_at_fork(after_in_child=stream.close_in_child)
        os.register_at_fork(after_in_child=progress.detach)
        return _serve(stream, progress.note)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
