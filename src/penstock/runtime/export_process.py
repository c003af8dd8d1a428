"""The process that exports a model: a new interpreter, or a copy of this process, which has most imports already.

A copy starts in milliseconds, where a new interpreter takes a quarter of a second.  Only a process that allows it is
copied: its threads must hold no lock that the copy would wait for.  That is the ``penstock`` command before it opens a
model, whose one other thread sleeps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import IO, NoReturn, Protocol

__all__ = ["ExportProcess", "allow_copies", "new_interpreter", "start_export"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_known_threads: list[threading.Thread] = []
_allowed: list[bool] = []


class ExportProcess(Protocol):
    """A running export: the part of ``subprocess.Popen[str]`` that is used of it."""

    pid: int
    stdin: IO[str] | None
    stdout: IO[str] | None
    stderr: IO[str] | None

    def poll(self) -> int | None:
        """Return the exit status, or minus the number of the signal that killed it; None while it runs."""

    def wait(self) -> int:
        """Wait for the end; return the exit status as ``poll`` does."""


def allow_copies() -> None:
    """Let exports run in copies of this process, as long as it has only the threads that it has now."""
    _allowed.append(True)
    _known_threads[:] = threading.enumerate()


def _may_copy() -> bool:
    is_known = all(thread in _known_threads for thread in threading.enumerate())
    return bool(_allowed) and sys.platform == "linux" and is_known and "torch" not in sys.modules


def start_export(arguments: Sequence[str], *, is_own_code: bool) -> ExportProcess:
    """Start an export in a session of its own: Ctrl-C reaches only this process, which then kills the child's group.

    ``arguments`` are those of ``penstock.graph.export_child``.  ``is_own_code``: no network script is imported.
    """
    return _Copy(arguments) if is_own_code and _may_copy() else new_interpreter(arguments)


def new_interpreter(arguments: Sequence[str]) -> ExportProcess:
    """Start an export in a new interpreter, as ``start_export`` does."""
    import subprocess  # imported here: a command that finds its bundle starts no process

    from penstock import env

    return subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.graph.export_child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=env.child_environment(),
        start_new_session=True,
    )


class _Copy:
    """A copy of this process that exports a model."""

    def __init__(self, arguments: Sequence[str]) -> None:
        import penstock.checkpoint.folder  # noqa: F401 - both processes read the checkpoint

        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before this process began
            stream.flush()  # what waits in them is not for the copy to write
        pipes = [os.pipe() for _ in range(3)]
        ends = [pipes[0][0], pipes[1][1], pipes[2][1]]
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the copy must not run this process's handlers
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # for NumPy's threads, which NumPy ends at a fork
                self.pid = os.fork()
            if self.pid == 0:
                _export(arguments, ends, signals)
        except OSError:
            for pipe in pipes:
                for end in pipe:
                    os.close(end)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        for end in ends:
            os.close(end)
        self.stdin: IO[str] | None = os.fdopen(pipes[0][1], "w", encoding="utf-8")
        self.stdout: IO[str] | None = os.fdopen(pipes[1][0], encoding="utf-8", errors="replace")
        self.stderr: IO[str] | None = os.fdopen(pipes[2][0], encoding="utf-8", errors="replace")
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the status as ``ExportProcess.poll``."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Return the status as ``ExportProcess.wait``."""
        status = None
        while status is None:
            status = self._reap(0)
        return status

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # SIGCHLD is ignored: the kernel keeps no status, and the report says the rest
                pid, status = self.pid, 0
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def _export(arguments: Sequence[str], streams: Sequence[int], signals: Iterable[int]) -> NoReturn:
    """Become an export process with these standard streams and no other descriptors, where ``signals`` are blocked.

    The parent's ends of the pipes are among the others: a copy that holds one would not see that its parent died.
    """
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        from penstock.graph.export_child import main

        status = main(arguments)
    except BaseException:  # never back into the code that this process is a copy of
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)
