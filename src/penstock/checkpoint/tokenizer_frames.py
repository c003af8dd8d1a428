"""The messages between a process and the child process that runs its tokenizer.

A request is an operation, a flag, a limit of CPU seconds and a payload; a reply is a status and a payload.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

__all__ = [
    "MAX_TEXT_BYTES",
    "FrameOperation",
    "FrameStatus",
    "pack_lists",
    "receive",
    "reply_head",
    "request_head",
    "unpack_lists",
]

MAX_TEXT_BYTES: Final = 64 << 20
"""Limit on the text that one call decodes."""


class FrameOperation(IntEnum):
    """The operation of a request.  The comments give the payload."""

    OPEN = 0  # [the file]: the first request
    ENCODE = 1  # [UTF-8]
    DECODE = 2  # [lists of ids]
    TOKEN_BYTES = 3  # [one list of one id]
    TOKEN_ID = 4  # [UTF-8]
    VOCABULARY = 5  # []: the bytes of every token


class FrameStatus(IntEnum):
    """The status of a reply.  For a status other than OK the payload is an error message."""

    OK = 0
    INVALID_FILE = 1
    UNSUPPORTED = 2
    NO_MEMORY = 3


request_head: Final = struct.Struct("<BBdQ")
"""Operation, flag, CPU seconds, size of the payload in bytes."""
reply_head: Final = struct.Struct("<BQ")
"""Status, size of the payload in bytes."""


def receive(channel: socket.socket, size: int) -> bytes | None:
    """Receive exactly ``size`` bytes; return None when the other end closes the channel first."""
    data = bytearray(size)
    view, num_received = memoryview(data), 0
    while num_received < size:
        count = channel.recv_into(view[num_received:])
        if count == 0:
            return None
        num_received += count
    return bytes(data)


def pack_lists(lists: Sequence[Sequence[int]]) -> bytes:
    """Encode lists of ids as 32-bit integers: the number of lists, their lengths, their ids.

    Raises OverflowError for an id beyond 32 bits.
    """
    out = array("I", [len(lists), *map(len, lists)])
    for ids in lists:
        out.extend(ids if isinstance(ids, array) else array("I", ids))
    return out.tobytes()


def unpack_lists(data: bytes) -> list[array[int]]:
    """Return the lists that ``pack_lists`` encoded."""
    values = array("I")
    values.frombytes(data)
    count, lists = values[0], []
    begin = 1 + count
    for length in values[1 : 1 + count]:
        lists.append(values[begin : begin + length])
        begin += length
    return lists
