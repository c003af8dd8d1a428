"""Confine this process for good before it reads what a stranger wrote: no network, no programs, no other files.

A seccomp filter (Linux) has a list of the system calls that the process needs and refuses all others; descriptors that
are open already stay usable.  Landlock, where the kernel has it, refuses the same once more, by what a call does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Callable
from typing import Final

from penstock.errors import UnsupportedError
from penstock.processes.allowed_calls import ALLOWED, CONDITIONAL
from penstock.processes.landlock import restrict

__all__ = ["confine", "limit_resources"]

_NO_NEW_PRIVS = 38
_FILTER_MODE, _ALL_THREADS = 1, 1
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN: Final = {"x86_64": 0, "aarch64": 1}
_TERMINAL_QUERIES: Final = (0x5401, 0x5413, 0x802C542A)
"""TCGETS, TIOCGWINSZ and TCGETS2: isatty asks with one of them."""
_CLOSE_ON_EXEC: Final = (0x5451, 0x5450)
_DESCRIPTOR_FLAGS: Final = (0, 1, 2, 3, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL and F_DUPFD_CLOEXEC.  F_SETOWN would send signals to other processes."""
_FIRST_POISON: Final = 100
"""MADV_HWPOISON: from here on, madvise takes memory from the whole machine."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_X32: Final = 0x40000000
_NEW_CALLS: Final = 424
"""Calls from here on are those of Linux 5.1 and later, with the same numbers on all machines.  A library that uses one
falls back to an older call when it is told that the kernel has none."""

_REFUSE: Final = _ERROR | errno.EPERM


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _argument(index: int) -> bytes:
    """Load the lower half of an argument; both machines are little-endian."""
    return _instruction(_LOAD, _ARGUMENTS_AT + 8 * index)


def _allowed_if_one_of(index: int, values: tuple[int, ...]) -> list[bytes]:
    program = [_argument(index)]
    for value in values:
        program += [_instruction(_EQUAL, value, 0, 1), _instruction(_RETURN, _ALLOW)]
    return [*program, _instruction(_RETURN, _REFUSE)]


def _advice() -> list[bytes]:
    return [
        _argument(2),
        _instruction(_AT_LEAST, _FIRST_POISON, 0, 1),
        _instruction(_RETURN, _REFUSE),
        _instruction(_RETURN, _ALLOW),
    ]


_CONDITIONS: Final[dict[str, Callable[[], list[bytes]]]] = {
    "ioctl": lambda: _allowed_if_one_of(1, _TERMINAL_QUERIES + _CLOSE_ON_EXEC),
    "fcntl": lambda: _allowed_if_one_of(1, _DESCRIPTOR_FLAGS),
    "tgkill": lambda: _allowed_if_one_of(0, (os.getpid(),)),  # abort signals its own thread
    "madvise": _advice,
}


def _filter(machine: str) -> bytes:
    """Return the filter as a program of classic BPF: each block of a call ends with a return."""
    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL),
    ]
    blocks = {name: (numbers, [_instruction(_RETURN, _ALLOW)]) for name, numbers in ALLOWED.items()}
    blocks |= {name: (numbers, _CONDITIONS[name]()) for name, numbers in CONDITIONAL.items()}
    for numbers, block in blocks.values():
        number = numbers[_COLUMN[machine]]
        if number is not None:
            program += [_instruction(_EQUAL, number, 0, len(block)), *block]
    program += [
        _instruction(_AT_LEAST, _NEW_CALLS, 0, 1),
        _instruction(_RETURN, _ERROR | errno.ENOSYS),
        _instruction(_RETURN, _REFUSE),
    ]
    return b"".join(program)


def confine() -> None:
    """Allow the threads of this process to compute, and to read and write files that are open already.

    It opens no file after that, so it must have imported what it needs.  Other system calls fail with EPERM, and those
    of Linux 5.1 and later with ENOSYS.  Raises UnsupportedError where the kernel or the machine does not allow it.
    """
    machine = platform.machine()
    if machine not in _ARCH:
        raise UnsupportedError(f"A process cannot be confined on {machine}; expected one of {', '.join(_ARCH)}.")
    program = _filter(machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    descriptor = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    number, mode, flags = (ctypes.c_long(value) for value in (_SECCOMP[machine], _FILTER_MODE, _ALL_THREADS))
    if libc.prctl(_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        raise UnsupportedError(f"A process cannot be confined here: {os.strerror(ctypes.get_errno())}")
    restrict()
    if libc.syscall(number, mode, flags, ctypes.c_char_p(descriptor)):
        raise UnsupportedError(f"A process cannot be confined here: {os.strerror(ctypes.get_errno())}")


def limit_resources(*, memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Lower the limits of this process: address space, time on the processor, and the size of a file it writes."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))
