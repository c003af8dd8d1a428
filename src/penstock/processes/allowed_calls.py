"""The system calls that a confined process may make: the numbers of x86-64 and AArch64, None where there is none.

These are what reading a file into tensors is seen to need, and what the C libraries, Python and PyTorch use in their
place on other kernels and versions.  None of them changes a file by its name or reaches another process.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ALLOWED", "CONDITIONAL", "CallNumbers"]

CallNumbers = tuple[int | None, int | None]
"""The numbers of a call on x86-64 and AArch64."""

_READ: Final[dict[str, CallNumbers]] = {
    "read": (0, 63), "lseek": (8, 62), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291),
    "close": (3, 57), "pread64": (17, 67), "readv": (19, 65), "preadv": (295, 69), "preadv2": (327, 286),
    "stat": (4, None), "lstat": (6, None), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61),
    "getcwd": (79, 17), "statfs": (137, 43), "fstatfs": (138, 44), "fadvise64": (221, 223),
    "dup": (32, 23), "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
}  # fmt: skip
_WRITE_TO_OPEN_FILES: Final[dict[str, CallNumbers]] = {"write": (1, 64), "pwrite64": (18, 68), "writev": (20, 66)}
_MEMORY: Final[dict[str, CallNumbers]] = {
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "brk": (12, 214), "mincore": (27, 232), "get_mempolicy": (239, 236),
}  # fmt: skip
_THREADS: Final[dict[str, CallNumbers]] = {
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "getpriority": (140, 141), "getcpu": (309, 168), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
_SIGNALS_OF_ITS_OWN: Final[dict[str, CallNumbers]] = {
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
}  # fmt: skip
_TIME_AND_IDENTITY: Final[dict[str, CallNumbers]] = {
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "getrlimit": (97, 163), "gettid": (186, 178), "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179),
    "getrandom": (318, 278), "arch_prctl": (158, None),
}  # fmt: skip

ALLOWED: Final = _READ | _WRITE_TO_OPEN_FILES | _MEMORY | _THREADS | _SIGNALS_OF_ITS_OWN | _TIME_AND_IDENTITY
"""Calls that are allowed with any arguments."""
CONDITIONAL: Final[dict[str, CallNumbers]] = {
    "open": (2, None), "openat": (257, 56), "clone": (56, 220), "ioctl": (16, 29), "fcntl": (72, 25),
    "prctl": (157, 167), "prlimit64": (302, 261), "tgkill": (234, 131), "madvise": (28, 233),
}  # fmt: skip
"""Calls whose arguments decide (``confine.py``)."""
