"""A stage process: imports a servable.py, or opens a model, and runs batches of it for the primary, one at a time.

It is started with one end of a pair of sockets, which nobody else has, as a descriptor that its last argument names.
The operator's code runs here and nowhere else.  What it prints goes to standard error, as its standard output is that.
"""

from __future__ import annotations

import builtins
import io
import linecache
import mmap
import os
import signal
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from penstock.errors import PenstockError
from penstock.processes.parent import die_with_parent
from penstock.servables.api.declare import declaring, run_stages_of
from penstock.servables.process import stages_pb2 as pb
from penstock.servables.process.failures import plain, trace_of

__all__ = ["BEGUN", "MARK_BYTES", "MAX_FRAME_BYTES", "PLACE", "main"]

_LENGTH: Final = struct.Struct("<I")
MARK_BYTES: Final = mmap.PAGESIZE
"""Of the memory in which a process notes what it is at, from its beginning on ``BEGUN`` and ``PLACE``."""
BEGUN: Final = struct.Struct("<I")
"""Whether it has begun to read what it was given last: 1, or 0 as the primary left it."""
PLACE: Final = struct.Struct("<II")
"""Which stage of its unit it is at, and which instance of the batch, counted from 1; 0 is all of them."""
MAX_FRAME_BYTES: Final = 1 << 30
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Runner(Protocol):
    """What runs batches here."""

    def run(self, batch: pb.Batch, mark: Callable[[int, int], None]) -> pb.Result:
        """A batch's outputs, or why not."""


class _Stages:
    """The Python stages of a servable.py."""

    def __init__(self, start: pb.Start) -> None:
        from penstock.servables.api.plan import write_plan
        from penstock.servables.api.plan_builder import make_plan

        with declaring(Path(start.folder), start.version) as declared:
            run_stages_of(declared)
            _run_file(start.file, start.source)
            plan, self._programs = make_plan(declared)
        self.plan = write_plan(plan)
        self.memory_limit_bytes = (plan.settings.memory_limit_mib or 0) << 20

    def run(self, batch: pb.Batch, mark: Callable[[int, int], None]) -> pb.Result:
        from penstock.servables.process.programs import run_batch

        return run_batch(self._programs[batch.unit], batch, mark)


def _run_file(file: str, source: bytes) -> None:
    """Run the text that the primary read, whatever the file holds by now, as the module ``servable``."""
    module = types.ModuleType("servable")
    module.__file__ = file
    sys.modules["servable"] = module
    sys.path.append(str(Path(file).parent))  # modules that lie beside it; behind all that is installed
    text = source.decode()
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code = builtins.compile(source, file, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - the operator's own file, which is what this process is for


def _told(error: BaseException, file: str) -> str:
    """An error with the line of servable.py that it came from."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}:{error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{file}:{lines[-1]}: " if lines else f"{file}: "
    if isinstance(error, SystemExit):
        return f"{where}it ended its process while it was loaded, by {error!r}"
    return where + (str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}")


class _Stream:
    """Frames over a socket that blocks.  ``begin`` is called with each that comes, before anything is done with it.

    Only the process that made it reads and writes: a stage that forks may return in the child, too, which ends here.
    """

    def __init__(self, own: socket.socket, begin: Callable[[], None]) -> None:
        self._socket, self._begin = own, begin
        self._file = own.makefile("rb", 1 << 16)
        self._pid = os.getpid()

    def close_in_child(self) -> None:
        """Close the socket in a child that was forked, so that nothing there writes on it."""
        os.close(self._socket.detach())

    def _end_child(self) -> None:
        """End the process if it is a child, also one that was forked past Python."""
        if os.getpid() != self._pid:
            told = "penstock: a stage forked and returned in the child, too: the child was ended\n"
            with suppress(OSError):
                os.write(2, told.encode())
            os._exit(1)

    def read(self) -> pb.ToStage | None:
        """The next message; None when the primary has gone or wants no more."""
        self._end_child()
        head = self._file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        self._begin()
        (size,) = _LENGTH.unpack(head)
        data = self._file.read(size)
        return pb.ToStage.FromString(data) if len(data) == size else None

    def send(self, message: pb.FromStage) -> None:
        """Send, waiting for room."""
        self._end_child()
        data = message.SerializeToString()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)


class _Mark:
    """What the process is at, in memory that the primary reads."""

    def __init__(self, shared_fd: int) -> None:
        self._memory: mmap.mmap | bytearray = mmap.mmap(shared_fd, MARK_BYTES)

    def leave_in_child(self) -> None:
        """Let a child that was forked write elsewhere."""
        self._memory = bytearray(MARK_BYTES)

    def begin(self) -> None:
        """The process has begun to read what it was given."""
        BEGUN.pack_into(self._memory, 0, 1)

    def note(self, stage: int, instance: int) -> None:
        """The process is at this stage of its unit and this instance of the batch; -1: all of them."""
        PLACE.pack_into(self._memory, BEGUN.size, stage, instance + 1)


class _Memory:
    """Resident memory above a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC) if limit_bytes else -1

    def excess(self) -> int:
        """Bytes in use, when they are above the limit; else 0."""
        if self._file < 0:
            return 0
        used = int(os.pread(self._file, 128, 0).split()[1]) * _PAGE
        return used if used > self._limit else 0


def _open(start: pb.Start) -> tuple[Runner, str, int]:
    """What runs, its plan and its memory limit."""
    if start.model:
        from penstock.servables.process.onnx_model import OnnxModel

        return OnnxModel(start), "", start.memory_limit_bytes
    stages = _Stages(start)
    return stages, stages.plan, stages.memory_limit_bytes


def serve(stream: _Stream, note: Callable[[int, int], None]) -> int:
    """Load, then run batches until the primary ends the stream; the exit status."""
    first = stream.read()
    if first is None:
        return 1
    start = first.start
    try:
        runner, plan, limit_bytes = _open(start)
    except BaseException as error:  # SystemExit, too: the file is told by its line, and not as a process that died
        text = _told(error, start.file) if not start.model else str(error)
        trace = "" if isinstance(error, PenstockError) else trace_of(error, start.file, __file__)
        stream.send(pb.FromStage(failed=pb.Failed(text=plain(text, 2000), trace=trace)))
        return 1
    memory = _Memory(limit_bytes)
    stream.send(pb.FromStage(ready=pb.Ready(plan=plan)))
    while (message := stream.read()) is not None:
        began = time.perf_counter_ns()
        result = runner.run(message.batch, note)
        result.took_ns = time.perf_counter_ns() - began
        result.excess_bytes = memory.excess()
        if result.ByteSize() > MAX_FRAME_BYTES:
            result = pb.Result()
            result.failures.add(part=-1, instance=-1, kind="result", text="its outputs are too large")
        result.number = message.batch.number
        stream.send(pb.FromStage(result=result))
    return 0


def main(arguments: list[str]) -> int:
    """Run the process that the primary started with ``[descriptor of the socket, descriptor of the mark]``."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    with suppress(OSError):  # when memory is short the kernel should end this process, not the service
        Path("/proc/self/oom_score_adj").write_text("500")
    if isinstance(sys.stdout, io.TextIOWrapper):  # what is printed is seen at once, also when it ends badly
        sys.stdout.reconfigure(line_buffering=True)
    own_fd, mark_fd = int(arguments[0]), int(arguments[1])
    os.set_inheritable(own_fd, False)
    mark = _Mark(mark_fd)
    os.close(mark_fd)
    with socket.socket(fileno=own_fd) as own:
        own.setblocking(True)
        stream = _Stream(own, mark.begin)
        os.register_at_fork(after_in_child=stream.close_in_child)
        os.register_at_fork(after_in_child=mark.leave_in_child)
        return serve(stream, mark.note)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
