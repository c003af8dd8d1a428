"""Bounds on JSON bodies that are small yet slow to parse, checked before parsing.

The parser holds the interpreter lock for a whole body: 8 MiB of distinct keys blocked the event loop for 0.8 s, short
strings or escapes for 0.15 s.  Counting works in slices, between which other threads can run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from penstock.errors import InvalidFileError

__all__ = ["LARGE_BODY", "MAX_ESCAPES", "MAX_KEYS", "MAX_NESTS", "MAX_STRINGS", "MAX_VALUES", "check_counts", "decode"]

T = TypeVar("T")
LARGE_BODY: Final = 1 << 16
"""Bodies of at least this many bytes are decoded in a thread.  A smaller body cannot exceed a bound."""
MAX_VALUES: Final = 1 << 20
MAX_NESTS: Final = 1 << 16
"""Lists and objects."""
MAX_KEYS: Final = 1 << 15
"""Limit on the total number of members of all objects; a conversation of 4,096 messages has 8,192."""
MAX_STRINGS: Final = 1 << 17
"""Keys included."""
MAX_ESCAPES: Final = 1 << 19
"""Backslash sequences in strings."""
_SLICE: Final = 1 << 16
_THREAD: Final = ThreadPoolExecutor(1, "penstock-decode")


async def decode(num_bytes: int, call: Callable[[], T]) -> T:
    """Return the result of ``call``, which decodes a body of ``num_bytes``; a large body is decoded in a thread.

    There is only one such thread, so at most one parser competes with the event loop.
    """
    if num_bytes < LARGE_BODY:
        return call()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, call)


def check_counts(data: bytes, file: str) -> None:
    """Raise InvalidFileError if JSON exceeds a bound; ``file`` is its name in the message.

    Characters inside strings do not count.  Text that is not JSON may pass, because the parser will refuse it.
    """
    if len(data) < LARGE_BODY:
        return
    at = quotes = 0
    counts = {"values": 1, "lists and objects": 0, "keys": 0, "strings": 0, "escapes": 0}
    while at < len(data):
        piece = data[at : at + _SLICE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the slice ends inside an escape: extend it
            piece = data[at : at + _SLICE + 1]
        at += len(piece)
        without_pairs = piece.replace(b"\\\\", b"")
        parts = without_pairs.replace(b'\\"', b"").split(b'"')  # each remaining quote begins or ends a string
        between = b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        counts["values"] += between.count(b",")
        counts["lists and objects"] += between.count(b"[") + between.count(b"{")
        counts["keys"] += between.count(b":")
        counts["strings"] = quotes // 2
        counts["escapes"] += (len(piece) - len(without_pairs)) // 2 + without_pairs.count(b"\\")
        for name, most in _BOUNDS:
            if counts[name] > most:
                raise InvalidFileError(f"{file}: expected at most {most} {name}, got more")


_BOUNDS: Final = (
    ("values", MAX_VALUES),
    ("lists and objects", MAX_NESTS),
    ("keys", MAX_KEYS),
    ("strings", MAX_STRINGS),
    ("escapes", MAX_ESCAPES),
)
