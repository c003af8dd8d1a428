"""Confine this process for good before it reads what a stranger wrote: no network, no programs, no changed files.

A seccomp filter (Linux) refuses the system calls that could do so; descriptors that are open already stay usable.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from typing import Final

from penstock.errors import UnsupportedError

__all__ = ["confine", "limit_resources"]

_NO_NEW_PRIVS = 38
_FILTER_MODE, _ALL_THREADS = 1, 1
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_THREAD: Final = 0x10000
"""CLONE_THREAD: a thread, which may be started, and no process."""
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_X32: Final = 0x40000000

_REFUSED: Final = {  # by machine: sockets; programs and other processes; shared memory and queues; names and modes of
    # files; mounts, kernel modules, keys, and interfaces that would do the same in another way
    "x86_64": (
        41, 53, 42, 49, 50, 43, 288, 44, 46, 307,
        59, 322, 57, 58, 101, 310, 311, 62, 200, 129, 234, 297, 424, 438, 302,
        29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 240, 241,
        85, 87, 263, 82, 264, 316, 83, 258, 84, 86, 265, 88, 266, 90, 91, 268, 452, 92, 93, 94, 260, 76, 133, 259,
        132, 235, 261, 280, 188, 189, 190, 197, 198, 199,
        165, 166, 428, 429, 430, 432, 442, 161, 155, 272, 308, 425, 426, 427, 321, 323, 298, 250, 248, 249, 304,
    ),
    "aarch64": (
        198, 199, 203, 200, 201, 202, 242, 206, 211, 269,
        221, 281, 117, 270, 271, 129, 130, 138, 131, 240, 424, 438, 261,
        194, 195, 196, 190, 191, 193, 186, 187, 188, 189, 180, 181,
        35, 38, 276, 34, 37, 36, 52, 53, 452, 54, 55, 45, 33, 88, 5, 6, 7, 14, 15, 16,
        40, 39, 428, 429, 430, 432, 442, 51, 41, 97, 268, 425, 426, 427, 280, 282, 241, 219, 217, 218, 265,
    ),
}  # fmt: skip
_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_OPEN: Final = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
"""System calls that open a file, and which argument has the flags."""
_ABSENT: Final = (435, 437)
"""clone3 and openat2, whose flags a filter cannot see; the C library then uses the older calls."""


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _filter(machine: str) -> bytes:
    """Return the filter as a program of classic BPF: no call with a jump of more than two instructions."""
    refuse, absent = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL),
    ]
    for number in _REFUSED[machine]:
        program += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, refuse)]
    for number in _ABSENT:
        program += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, absent)]
    for number, argument in _OPEN[machine]:
        program += [
            _instruction(_EQUAL, number, 0, 4),
            _instruction(_LOAD, _ARGUMENTS_AT + 8 * argument),
            _instruction(_ANY_BIT, _WRITES, 0, 1),
            _instruction(_RETURN, refuse),
            _instruction(_RETURN, _ALLOW),
        ]
    program += [
        _instruction(_EQUAL, _CLONE[machine], 0, 3),
        _instruction(_LOAD, _ARGUMENTS_AT),
        _instruction(_ANY_BIT, _THREAD, 1, 0),
        _instruction(_RETURN, refuse),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def confine() -> None:
    """Refuse all threads of this process, now and later: sockets, programs, files to write, rename or remove.

    Raises UnsupportedError where the kernel or the machine does not allow it.
    """
    machine = platform.machine()
    if machine not in _ARCH:
        raise UnsupportedError(f"A process cannot be confined on {machine}; expected one of {', '.join(_ARCH)}.")
    program = _filter(machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    descriptor = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    number, mode, flags = (ctypes.c_long(value) for value in (_SECCOMP[machine], _FILTER_MODE, _ALL_THREADS))
    if libc.prctl(_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) or libc.syscall(
        number, mode, flags, ctypes.c_char_p(descriptor)
    ):
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
