"""A confined process computes with the files that it has, and reaches nothing else."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.env import child_environment
from penstock.processes import confine
from penstock.processes.allowed_calls import ALLOWED, CONDITIONAL

ATTEMPTS = """
import ctypes, fcntl, json, os, platform, resource, signal, socket, subprocess, sys, threading
from penstock.processes.confine import confine
os.chdir(sys.argv[1])
open("kept", "w").close()
os.mkfifo("pipe"), os.symlink("kept", "link")
out, go, seen = os.open("out", os.O_RDWR | os.O_CREAT), threading.Event(), {}
kept = os.open("kept", os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return 0
def raw(x86, arm, *arguments):
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    if libc.syscall(ctypes.c_long(x86 if platform.machine() == "x86_64" else arm), *words) < 0:
        raise OSError(ctypes.get_errno(), "")
def other():
    go.wait()
    seen["a thread that ran before"] = attempt(socket.socket)
parent, host = os.getppid(), socket.gethostname()
priority, cores = os.getpriority(os.PRIO_PROCESS, parent), os.sched_getaffinity(parent)
early = threading.Thread(target=other); early.start()
confine()
go.set(); early.join()
attribute = (ctypes.c_uint64 * 8)()
calls = {
    "socket": (socket.socket,), "socketpair": (socket.socketpair,), "run": (subprocess.run, ["true"]),
    "fork": (os.fork,), "execv": (os.execv, "/bin/true", ["true"]), "create": (open, "new", "w"),
    "append": (open, "kept", "a"), "unlink": (os.unlink, "kept"), "rename": (os.rename, "kept", "b"),
    "mkdir": (os.mkdir, "c"), "symlink": (os.symlink, "kept", "d"), "link": (os.link, "kept", "e"),
    "chmod": (os.chmod, "kept", 0), "truncate": (os.truncate, "kept", 0), "kill": (os.kill, parent, 0),
    "tgkill": (raw, 234, 131, parent, parent, 0), "mkfifo": (os.mkfifo, "f"), "utime": (os.utime, "kept"),
    "prlimit": (resource.prlimit, parent, resource.RLIMIT_CORE, (0, 0)),
    "setrlimit": (raw, 160, 164, 4, 0), "own prlimit": (raw, 302, 261, 0, 4, ctypes.addressof(attribute), 0),
    "setxattr": (os.setxattr, "kept", "user.a", b"1"),
    "setxattrat": (raw, 463, 463, -100, b"kept", 0, b"user.a", ctypes.addressof(attribute), 16),
    "removexattrat": (raw, 466, 466, -100, b"kept", 0, b"user.a"),
    "FS_IOC_SETFLAGS": (fcntl.ioctl, kept, 0x40086602, bytes(8)),
    "F_SETOWN": (fcntl.fcntl, kept, fcntl.F_SETOWN, parent), "F_SETFL": (fcntl.fcntl, kept, fcntl.F_SETFL, 0),
    "setpriority": (os.setpriority, os.PRIO_PROCESS, parent, priority),
    "sched_setaffinity": (os.sched_setaffinity, parent, cores),
    "sched_setscheduler": (os.sched_setscheduler, parent, os.SCHED_OTHER, os.sched_param(0)),
    "sethostname": (socket.sethostname, host), "reboot": (raw, 169, 142, 0, 0, 0, 0),
    "init_module": (raw, 175, 105, 0, 0, 0), "finit_module": (raw, 313, 273, -1, 0, 0),
    "swapoff": (raw, 168, 225, b"none"), "acct": (raw, 163, 89, b"none"), "fsconfig": (raw, 431, 431, -1, 0, 0, 0, 0),
    "file_setattr": (raw, 469, 469, -100, b"kept", ctypes.addressof(attribute), 24, 0),
    "clone3": (raw, 435, 435, 0, 0), "openat2": (raw, 437, 437, -100, b"kept", 0, 0),
    "io_uring_setup": (raw, 425, 425, 1, 0), "pidfd_open": (os.pidfd_open, parent),
    "ptrace": (raw, 101, 117, 16, parent), "open": (open, "kept"), "list": (os.listdir, "."),
    "read a link": (os.readlink, "link"), "own limits": (resource.getrlimit, resource.RLIMIT_CORE),
}
seen |= {name: attempt(*call) for name, call in calls.items()}
assert os.pwrite(out, b"x", 0) == 1
print(json.dumps(seen))
"""
LANDLOCK = """
import os, socket, sys
from penstock.processes.landlock import restrict
os.chdir(sys.argv[1])
open("kept", "w").close()
out = open("out", "w")
listener = socket.create_server(("127.0.0.1", 0))
if not restrict(may_read=True):
    print("none")
    sys.exit()
text = open("kept").read()
restrict()
for call in (lambda: open("kept", "a"), lambda: open("kept"), lambda: os.listdir("."), lambda: os.unlink("kept"),
             lambda: os.mkdir("c"), lambda: os.mkfifo("f"), lambda: os.symlink("kept", "d"),
             lambda: os.execv("/bin/true", ["true"])):
    try:
        call()
    except PermissionError:
        continue
    print("not refused")
print(text + "restricted", file=out)
"""
GAPS = (
    "setxattrat removexattrat FS_IOC_SETFLAGS F_SETOWN F_SETFL setpriority sched_setaffinity sched_setscheduler "
    "sethostname reboot init_module finit_module swapoff acct fsconfig file_setattr setrlimit"
)


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The error of each attempt of a confined process, 0 where it succeeded."""
    folder = tmp_path_factory.mktemp("confined")
    done = run(ATTEMPTS, folder)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["kept", "link", "out", "pipe"]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_a_confined_process_reaches_nothing(attempts: dict[str, int]) -> None:
    allowed = {name: number for name, number in attempts.items() if number not in (errno.EPERM, errno.ENOSYS)}
    assert allowed == {}


@pytest.mark.parametrize("gap", GAPS.split())
def test_calls_that_change_the_machine_are_refused(gap: str, attempts: dict[str, int]) -> None:
    assert attempts[gap] in (errno.EPERM, errno.ENOSYS)


def test_landlock_refuses_by_itself(tmp_path: Path) -> None:
    done = run(LANDLOCK, tmp_path)
    assert done.returncode == 0, done.stderr
    if done.stdout == "none\n":
        pytest.skip("this kernel has no Landlock")
    assert done.stdout == ""
    assert (tmp_path / "out").read_text() == "restricted\n"


MACHINES = ("x86_64", "aarch64")


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int | str:
    """Run the filter as the kernel does: "allow", "kill", or the error number."""
    if architecture is None:
        architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("<HBBI", confine._filter(machine)))
    place = accumulator = value = 0
    while True:
        code, if_true, if_false, value = program[place]
        place += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            break
        else:
            is_true = {0x15: accumulator == value, 0x35: accumulator >= value}[code]
            place += if_true if is_true else if_false
    named: dict[int, int | str] = {0x7FFF0000: "allow", 0x80000000: "kill"}
    return named.get(value, value & 0xFFFF)


@pytest.mark.parametrize("machine", MACHINES)
def test_only_listed_calls_are_allowed(machine: str) -> None:
    column = MACHINES.index(machine)
    allowed = {numbers[column] for numbers in ALLOWED.values()} - {None}
    conditional = {numbers[column] for numbers in CONDITIONAL.values()} - {None}
    for number in range(600):
        if number not in conditional:
            refused = errno.ENOSYS if number >= 424 else errno.EPERM
            assert verdict(machine, number) == ("allow" if number in allowed else refused), number
    assert verdict(machine, 0x40000000) == "kill"
    assert verdict(machine, 0, architecture=0x40000003) == "kill"


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_about_some_calls(machine: str) -> None:
    column = MACHINES.index(machine)
    own = os.getpid()
    table: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
        "ioctl": ([(0, 0x5401), (0, 0x5451)], [(0, 0x40086602), (0, 0x401C5820), (0, 0x5412)]),
        "fcntl": ([(0, 1), (0, 1030)], [(0, 4), (0, 8), (0, 10), (0, 1024), (0, 1033)]),
        "tgkill": ([(own, 1, 6)], [(own + 1, 1, 6), (1, 1, 9)]),
        "madvise": ([(0, 0, 4), (0, 0, 14)], [(0, 0, 100), (0, 0, 101)]),
    }
    assert table.keys() == CONDITIONAL.keys()
    for name, (allowed, refused) in table.items():
        number = CONDITIONAL[name][column]
        if number is not None:
            assert [verdict(machine, number, *arguments) for arguments in allowed] == ["allow"] * len(allowed), name
            assert [verdict(machine, number, *arguments) for arguments in refused] == [errno.EPERM] * len(refused), name


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")],
)
def test_numbers_are_the_kernels(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    found = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    }
    found |= {"newfstatat": found["fstatat"]} if "fstatat" in found else {}
    own = {name: numbers[MACHINES.index(machine)] for name, numbers in (ALLOWED | CONDITIONAL).items()}
    assert {name: number for name, number in own.items() if number is not None} == {
        name: found[name] for name, number in own.items() if number is not None and name in found
    }
