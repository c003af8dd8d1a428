"""When and in which sizes the system makes memory: else when it is first written, in huge pages where asked for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import cache
from typing import Any, Final

from penstock.errors import FileAccessError

__all__ = ["can_map_segments", "make_memory", "map_over", "use_small_pages"]

_NO_HUGE_PAGES: Final = 15
"""MADV_NOHUGEPAGE."""
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux 5.14."""
_MAP_FIXED: Final = 16
_HUGE_PAGES: Final = 14
"""MADV_HUGEPAGE."""
_SEGMENT_ALIGNMENT: Final = 4096


@cache
def _madvise() -> Any:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return call


def make_memory(address: int, num_bytes: int) -> bool:
    """Have the system make the pages of a private mapping that hold these bytes, as the first write to each would, and
    leave what is in them.  The interpreter lock is released, and others may write meanwhile.

    False where the system has no such call or no memory; the first write then makes them all the same.
    """
    if sys.platform != "linux":
        return False
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    while _madvise()(start, stop - start, _POPULATE_WRITE) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True


def use_small_pages(address: int, num_bytes: int) -> None:
    """Have the whole pages within these bytes of a mapping made one by one, never as part of a huge one.  Advice: a
    system that knows no huge pages does so anyway.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and stop > start:
        _madvise()(start, stop - start, _NO_HUGE_PAGES)


def can_map_segments() -> bool:
    """Whether segments of bundles, which begin at multiples of 4096 bytes, begin at pages of this system: there are
    systems with pages of 16 and of 64 KiB."""
    return _SEGMENT_ALIGNMENT % mmap.PAGESIZE == 0


def map_over(address: int, num_bytes: int, file: int, offset: int) -> None:
    """Puts pages of a file, read-only and shared, in the place of whole pages of another mapping.

    The caller has seen that the bytes are equal, so that who reads them meanwhile sees no difference.  FileAccessError
    when the system refuses, and the old pages stay.
    """
    call = _mmap()
    if call(address, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, offset) != address:
        raise FileAccessError(f"sharing weights: {os.strerror(ctypes.get_errno())}")
    if sys.platform == "linux":
        _madvise()(address, num_bytes, _HUGE_PAGES)  # as the core advises for what it maps


@cache
def _mmap() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    call.restype = ctypes.c_void_p
    return call
