"""Control when the kernel allocates the pages of a mapping, their size, and the file behind them."""

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
    """Allocate the pages of a private mapping that hold these bytes now, instead of at the first write to each.

    Their contents do not change.  The call releases the interpreter lock, and other threads may write to the pages
    meanwhile.  Returns False when the kernel has no such call or no memory; the first write then allocates the pages.
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
    """Advise the kernel not to use huge pages for the whole pages within these bytes of a mapping."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and stop > start:
        _madvise()(start, stop - start, _NO_HUGE_PAGES)


def can_map_segments() -> bool:
    """Return True if every segment of a bundle begins at a page boundary of this system.

    Segments begin at multiples of 4096 bytes; some systems have pages of 16 or 64 KiB.
    """
    return _SEGMENT_ALIGNMENT % mmap.PAGESIZE == 0


def map_over(address: int, num_bytes: int, file: int, offset: int) -> None:
    """Replace whole pages of a mapping by pages of a file, mapped read-only and shared.

    The caller must have checked that the bytes are equal, because other threads may read them meanwhile.  Raises
    FileAccessError when the kernel refuses; the old pages then stay.
    """
    call = _mmap()
    if call(address, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, offset) != address:
        raise FileAccessError(f"Failed to map shared weights: {os.strerror(ctypes.get_errno())}")
    if sys.platform == "linux":
        _madvise()(address, num_bytes, _HUGE_PAGES)  # the core gives the same advice for the weights that it maps


@cache
def _mmap() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    call.restype = ctypes.c_void_p
    return call
