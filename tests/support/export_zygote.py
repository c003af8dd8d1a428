"""Exports in processes that are forked from one which has the imports, instead of importing for each.

Outside of commands an export is a new interpreter, whose imports take more processor time than the export of a
small model.  In the tests' own processes, the child is a copy of a process that has them already: with PyTorch for a
network of the test's own, and without it for the others, as for users.  It runs
the same ``penstock.graph.export_child`` with the same arguments, environment, pipes and session.  Commands that tests
start do as they do for users, and so do tests with the fixture ``cold_exports``.

Run as a script, ``export_zygote.py SOCKET PID KIND`` serves one process of tests and ends with it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from penstock import env
from penstock.runtime import export_process
from penstock.symbolic.choice import use_own_modules

NEW_INTERPRETER = export_process.new_interpreter


class Forked:
    """An ``ExportProcess`` that a third process started."""

    def __init__(self, path: Path, arguments: list[str], environment: dict[str, str]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        theirs, ours = [pipes[0][0], pipes[1][1], pipes[2][1]], [pipes[0][1], pipes[1][0], pipes[2][0]]
        self._status: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(path))
        socket.send_fds(self._connection, [json.dumps([arguments, environment, os.getcwd()]).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin: IO[str] = os.fdopen(ours[0], "w", encoding="utf-8")
        self.stdout: IO[str] = os.fdopen(ours[1], encoding="utf-8", errors="replace")
        self.stderr: IO[str] = os.fdopen(ours[2], encoding="utf-8", errors="replace")
        self.pid = int(self._connection.recv(64))

    def poll(self) -> int | None:
        """Return the status, negative for a signal, or None while the child runs."""
        if self._status is None and select.select([self._connection], [], [], 0)[0]:
            return self.wait()
        return self._status

    def wait(self) -> int:
        """Wait for the end and return the status."""
        if self._status is None:
            self._status = int(self._connection.recv(64))
            self._connection.close()
        return self._status


def serve(path: str, pid: int, kind: str) -> None:
    """Fork for each connection, until the process ``pid`` is gone; ``kind`` is "own" or "torch"."""
    parent = os.pidfd_open(pid)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(16)
    if os.fork():  # of whose children tests see none
        os._exit(0)
    os.setsid()
    if kind == "torch":
        import torch.export._trace  # noqa: F401

        import penstock.graph.capture
    else:
        use_own_modules()
    import penstock.graph.export_child
    import penstock.graph.tracer
    import penstock.models.meta
    import penstock.models.sources  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while parent not in select.select([listener, parent], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            _wait_for_child(connection)
        connection.close()
    shutil.rmtree(Path(path).parent, ignore_errors=True)  # of tests that were killed


def _wait_for_child(connection: socket.socket) -> None:
    """Fork the child; tell its number, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _export(*json.loads(request), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.send(str(pid).encode())
    connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _export(arguments: list[str], environment: dict[str, str], folder: str, descriptors: list[int]) -> None:
    from penstock.graph import export_child

    status = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 16)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = ["export_child.py", *arguments]
        status = export_child.main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


@pytest.fixture(scope="session", autouse=True)
def warm_exports() -> Iterator[None]:
    """Let exports of this process be forked; the first one starts the process with the imports."""
    started: dict[str, Path] = {}

    def start(arguments: Sequence[str]) -> Forked:
        kind = "torch" if "--network" in arguments else "own"
        environment = env.child_environment()
        if kind not in started:
            path = Path(tempfile.mkdtemp(prefix="ps-"), "zygote")
            words = [sys.executable, __file__, str(path), str(os.getpid()), kind]
            subprocess.run(words, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            started[kind] = path
        return Forked(started[kind], list(arguments), environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_process, "new_interpreter", start)
        yield
    for path in started.values():
        shutil.rmtree(path.parent, ignore_errors=True)


@pytest.fixture
def cold_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports of this process be new interpreters."""
    monkeypatch.setattr(export_process, "new_interpreter", NEW_INTERPRETER)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
