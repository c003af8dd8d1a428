"""The messages between a process that has text and the process that runs its tokenizer.

A request is an operation, its flags, a limit of CPU seconds and a payload; a reply is a status and a payload.
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
    "Operation",
    "Status",
    "pack_lists",
    "receive",
    "reply_head",
    "request_head",
    "unpack_lists",
]

MAX_TEXT_BYTES: Final = 64 << 20
"""Limit on the text that one call decodes."""


class Operation(IntEnum):
    """What the child is asked to do.  The payload of each is in brackets."""

    OPEN = 0  # [the file]: the first request
    ENCODE = 1  # [UTF-8]
    DECODE = 2  # [lists of ids]
    TOKEN_BYTES = 3  # [one list of one id]
    TOKEN_ID = 4  # [UTF-8]


class Status(IntEnum):
    """How a request ended.  Payloads other than that of OK are messages."""

    OK = 0
    INVALID_FILE = 1
    UNSUPPORTED = 2
    NO_MEMORY = 3


request_head: Final = struct.Struct("<BBdQ")
"""Operation, flag, CPU seconds, bytes of the payload."""
reply_head: Final = struct.Struct("<BQ")
"""Status, bytes of the payload."""


def receive(channel: socket.socket, size: int) -> bytes | None:
    """Exactly ``size`` bytes; None when the other end closed the channel first."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = channel.recv_into(view[done:])
        if count == 0:
            return None
        done += count
    return bytes(data)


def pack_lists(lists: Sequence[Sequence[int]]) -> bytes:
    """Lists of ids as 32-bit integers: how many lists, their lengths, their ids.  OverflowError beyond 32 bits."""
    out = array("I", [len(lists), *map(len, lists)])
    for ids in lists:
        out.extend(ids if isinstance(ids, array) else array("I", ids))
    return out.tobytes()


def unpack_lists(data: bytes) -> list[array[int]]:
    """What ``pack_lists`` wrote."""
    values = array("I")
    values.frombytes(data)
    count, found = values[0], []
    begin = 1 + count
    for length in values[1 : 1 + count]:
        found.append(values[begin : begin + length])
        begin += length
    return found
