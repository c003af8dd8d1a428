"""Exports and commands in processes that are forked from one which has the imports, instead of importing for each.

Outside of commands an export is a new interpreter, whose imports take more processor time than the export of a
small model.  In the tests' own processes, the child is a copy of a process that has them already: with PyTorch for a
network of the test's own, and without it for the others, as for users.  It runs
the same ``penstock.graph.export_child`` with the same arguments, environment, pipes and session.  Exports of commands
that tests start are new interpreters as for users, and so are those of tests with the fixture ``cold_exports``.

A command (``run_command``) is forked likewise, and runs ``main`` to the end of its interpreter.  All children of a
process with imports have its hash seed: tests of what depends on that start new interpreters.

Run as a script, ``zygote.py SOCKET PID KIND`` serves one process of tests and ends with it.
"""

from __future__ import annotations

import gc
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import pytest

from penstock import env
from penstock.cli.main import main
from penstock.runtime import export_process
from penstock.symbolic.choice import use_own_modules

NEW_INTERPRETER = export_process.new_interpreter

_AT_IMPORT: Final = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "PENSTOCK_CPU",
    "PENSTOCK_LIBRARY",
    "PENSTOCK_OPS",
)
"""Environment variables that imports may read."""
_FIRST: Final = dict(os.environ)


class Forked:
    """An ``ExportProcess``, or a command, that a third process started.  It ends with this process."""

    def __init__(self, path: Path, arguments: list[str], environment: dict[str, str], folder: Path) -> None:
        pipes = [os.pipe() for _ in range(3)]
        theirs, ours = [pipes[0][0], pipes[1][1], pipes[2][1]], [pipes[0][1], pipes[1][0], pipes[2][0]]
        self._status: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(path))
        socket.send_fds(self._connection, [json.dumps([arguments, environment, str(folder)]).encode()], theirs)
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

    def communicate(self, text: str) -> tuple[str, str]:
        """Send the standard input, and return what comes back on the other streams until they end.

        The child is killed when this is interrupted, as by the time limit of a test.
        """
        streams = self.stdout, self.stderr
        for stream in streams:
            stream.reconfigure(errors="strict")  # type: ignore[attr-defined]
        try:
            with ThreadPoolExecutor(2) as readers:
                texts = [readers.submit(stream.read) for stream in streams]
                try:
                    with suppress(BrokenPipeError), self.stdin:
                        self.stdin.write(text)
                    found = texts[0].result(), texts[1].result()
                except BaseException:
                    self._connection.close()
                    raise
        finally:
            for stream in streams:
                stream.close()
        return found


def serve(path: str, pid: int, kind: str) -> None:
    """Fork for each connection, until the process ``pid`` is gone; ``kind`` is "own", "torch" or "command"."""
    parent = os.pidfd_open(pid)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(16)
    if os.fork():  # of whose children tests see none
        os._exit(0)
    os.setsid()
    _import_for(kind)
    gc.collect()
    gc.freeze()  # children do not copy what their garbage collection would look at
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while parent not in select.select([listener, parent], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(parent)
            _wait_for_child(connection, kind)
        connection.close()
    shutil.rmtree(Path(path).parent, ignore_errors=True)  # of tests that were killed


def _import_for(kind: str) -> None:
    if kind == "command":
        import penstock.cli.models.inspect
        import penstock.cli.run.batch
        import penstock.cli.run.chat
        import penstock.cli.run.run
        import penstock.graph.inspect
        import penstock.llm.llm
        import penstock.offline.text_tasks
        import penstock.runtime.native

        assert "huggingface_hub" not in sys.modules, "it reads HF_HOME and others, which commands are given, at import"
        return
    if kind == "torch":
        import torch.export._trace  # noqa: F401

        import penstock.graph.capture
    else:
        use_own_modules()
    import penstock.graph.export_child
    import penstock.graph.tracer
    import penstock.models.meta
    import penstock.models.sources  # noqa: F401


def _wait_for_child(connection: socket.socket, kind: str) -> None:
    """Fork the child; tell its number, and how it ended.  It is killed if nobody waits any longer."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    pid = os.fork()
    if pid == 0:
        connection.close()
        arguments = _become_child(*json.loads(request), descriptors)
        if kind == "command":
            sys.argv = ["penstock", *arguments]
            raise SystemExit(main())  # past `serve`, to the end of the interpreter
        _export(arguments)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os._exit(1)
    connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _become_child(arguments: list[str], environment: dict[str, str], folder: str, descriptors: list[int]) -> list[str]:
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 16)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return arguments


def _export(arguments: list[str]) -> None:
    from penstock.graph import export_child

    status = 1
    try:
        sys.argv = ["export_child.py", *arguments]
        status = export_child.main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


_STARTED: Final[dict[str, Path]] = {}
"""Sockets of the processes with the imports, by their kinds."""


def has_first_imports(environment: dict[str, str]) -> bool:
    """Return True if imports find the same in ``environment`` as when this process began."""
    return all(environment.get(name) == _FIRST.get(name) for name in _AT_IMPORT)


def _start(kind: str, arguments: Sequence[str], environment: dict[str, str], folder: Path | None = None) -> Forked:
    """Fork; the first time of a kind starts the process with the imports, whose environment is no test's own."""
    if kind not in _STARTED:
        path = Path(tempfile.mkdtemp(prefix="ps-"), "zygote")
        words = [sys.executable, __file__, str(path), str(os.getpid()), kind]
        first = _FIRST | {name: environment[name] for name in ("PYTHONPATH", "PYTHONUTF8") if name in environment}
        subprocess.run(words, env=first, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        _STARTED[kind] = path
    return Forked(_STARTED[kind], list(arguments), environment, folder or Path.cwd())


def run_command(
    words: Sequence[str], text: str, environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run ``penstock WORDS`` in a folder with ``text`` as its standard input."""
    command = _start("command", words, environment, folder)
    stdout, stderr = command.communicate(text)
    return subprocess.CompletedProcess(list(words), command.wait(), stdout, stderr)


@pytest.fixture(scope="session", autouse=True)
def warm_exports() -> Iterator[None]:
    """Let exports of this process be forked."""

    def start(arguments: Sequence[str]) -> Forked | export_process.ExportProcess:
        environment = env.child_environment()
        if not has_first_imports(environment):
            return NEW_INTERPRETER(arguments)
        return _start("torch" if "--network" in arguments else "own", arguments, environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_process, "new_interpreter", start)
        yield
    for path in _STARTED.values():
        shutil.rmtree(path.parent, ignore_errors=True)


@pytest.fixture
def cold_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports of this process be new interpreters."""
    monkeypatch.setattr(export_process, "new_interpreter", NEW_INTERPRETER)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
