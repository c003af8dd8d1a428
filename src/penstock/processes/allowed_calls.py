"""The system calls that a confined process may make: the numbers of x86-64 and AArch64, None where there is none.

These are what reading an open file into tensors is seen to need, and what the C library and Python use in their place
on other kernels and versions.  None of them opens a file, starts a thread or reaches another process.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ALLOWED", "CONDITIONAL", "CallNumbers"]

CallNumbers = tuple[int | None, int | None]
"""The numbers of a call on x86-64 and AArch64."""

_OPEN_FILES: Final[dict[str, CallNumbers]] = {
    "read": (0, 63), "pread64": (17, 67), "lseek": (8, 62), "fstat": (5, 80), "newfstatat": (262, 79),
    "statx": (332, 291), "write": (1, 64), "pwrite64": (18, 68), "writev": (20, 66), "close": (3, 57),
}  # fmt: skip
_MEMORY: Final[dict[str, CallNumbers]] = {
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "brk": (12, 214),
}  # fmt: skip
_LOCKS_AND_END: Final[dict[str, CallNumbers]] = {
    "futex": (202, 98), "sched_yield": (24, 124), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
_SIGNALS_OF_ITS_OWN: Final[dict[str, CallNumbers]] = {
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
}  # fmt: skip
_TIME_AND_IDENTITY: Final[dict[str, CallNumbers]] = {
    "clock_gettime": (228, 113), "gettimeofday": (96, 169), "time": (201, None), "getpid": (39, 172),
    "gettid": (186, 178), "getrandom": (318, 278),
}  # fmt: skip

ALLOWED: Final = _OPEN_FILES | _MEMORY | _LOCKS_AND_END | _SIGNALS_OF_ITS_OWN | _TIME_AND_IDENTITY
"""Calls that are allowed with any arguments."""
CONDITIONAL: Final[dict[str, CallNumbers]] = {
    "ioctl": (16, 29), "fcntl": (72, 25), "tgkill": (234, 131), "madvise": (28, 233),
}  # fmt: skip
"""Calls whose arguments decide (``confine.py``)."""
