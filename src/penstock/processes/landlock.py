"""Landlock (Linux 5.13 and later): the kernel refuses files, TCP and signals, whichever call asks for them.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

__all__ = ["restrict"]

_NO_NEW_PRIVS: Final = 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_ASK_VERSION: Final = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_NUM_FILE_RIGHTS: Final = (0, 13, 14, 15, 15, 16)
"""The number of rights to files that version 0, 1, ... knows; later ones know at least as many."""
_TCP: Final = 0b11
"""bind and connect, from version 4 on."""
_SCOPES: Final = 0b11
"""Abstract sockets and signals stay within the process, from version 6 on."""


def restrict(*, may_read: bool = False) -> bool:
    """Give up all that Landlock can refuse, for this thread and those that it starts.

    Descriptors that are open stay usable.  ``may_read``: files can still be opened for reading, for a process that
    imports modules later.  The process gains no privileges from now on (PR_SET_NO_NEW_PRIVS).  Returns False where the
    kernel has no Landlock or it is off.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))):
        return False
    version = libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    if version < 1:
        return False
    num_rights = _NUM_FILE_RIGHTS[min(version, len(_NUM_FILE_RIGHTS) - 1)]
    words = [(1 << num_rights) - 1 & ~(_READ_FILE | _READ_DIR if may_read else 0)]
    if version >= 4:
        words.append(_TCP)
    if version >= 6:
        words.append(_SCOPES)
    attributes = struct.pack(f"={len(words)}Q", *words)
    rules = libc.syscall(
        ctypes.c_long(_CREATE_RULESET),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
        ctypes.c_uint32(0),
    )
    if rules < 0:
        return False
    try:
        return bool(libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(rules), ctypes.c_uint32(0)) == 0)
    finally:
        os.close(rules)
