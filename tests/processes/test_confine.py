"""A confined process computes and reads, and reaches nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.env import child_environment

ATTEMPTS = """
import os, resource, signal, socket, subprocess, sys, threading
from penstock.processes.confine import confine
os.chdir(sys.argv[1])
open("kept", "w").close()
out, go, seen = os.open("out", os.O_RDWR | os.O_CREAT), threading.Event(), []
def other(): go.wait(); seen.append(attempt(socket.socket))
def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return 0
early = threading.Thread(target=other); early.start()
confine()
go.set(); early.join()
calls = [
    (socket.socket,), (socket.socketpair,), (subprocess.run, ["true"]), (os.fork,), (os.execv, "/bin/true", ["true"]),
    (open, "new", "w"), (open, "kept", "a"), (os.unlink, "kept"), (os.rename, "kept", "b"), (os.mkdir, "c"),
    (os.symlink, "kept", "d"), (os.link, "kept", "e"), (os.chmod, "kept", 0), (os.truncate, "kept", 0),
    (os.kill, os.getppid(), 0), (os.mkfifo, "f"), (signal.pthread_kill, threading.get_ident(), 0),
    (resource.prlimit, os.getppid(), resource.RLIMIT_CORE, (0, 0)),
]
assert [attempt(*call) for call in calls] == [1] * len(calls), [(attempt(*call), call) for call in calls]
assert seen == [1], "a thread that ran before is confined too"
late = threading.Thread(target=lambda: seen.append(open("kept").read())); late.start(); late.join()
assert seen == [1, ""] and os.pwrite(out, b"x", 0) == 1
print("confined")
"""


def test_a_confined_process_reaches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ATTEMPTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    assert done.stdout == "confined\n", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "out"]
