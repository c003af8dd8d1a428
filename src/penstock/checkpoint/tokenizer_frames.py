"""The messages between a process and the child process that runs its tokenizer.

A request is an operation, a flag, a limit of CPU seconds and a payload; a reply is a status and a payload.
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Final

__all__ = [
    "MAX_TEXT_BYTES",
    "FrameOperation",
    "FrameStatus",
    "TextWindow",
    "WindowRequest",
    "pack_lists",
    "pack_windows",
    "receive",
    "reply_head",
    "request_head",
    "unpack_lists",
    "unpack_windows",
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
    WINDOWS = 6  # [JSON of a WindowRequest]
    JOIN_TOKENS = 7  # [JSON: a list of lists of tokens' texts]


class FrameStatus(IntEnum):
    """The status of a reply.  For a status other than OK the payload is an error message."""

    OK = 0
    INVALID_FILE = 1
    UNSUPPORTED = 2
    NO_MEMORY = 3


@dataclass(frozen=True)
class WindowRequest:
    """A text, or its words, to be encoded with the places of its tokens; ``pair`` is the second text.

    ``max_len`` 0 is no limit.  ``cut`` says which text is cut to it: "longest_first", "only_first" or "only_second".
    What is cut becomes further windows, each of which begins with ``stride`` tokens of the one before, unless
    ``first_only`` drops it.
    """

    text: str | list[str]
    pair: str | None = None
    max_len: int = 0
    stride: int = 0
    cut: str = "longest_first"
    add_special_tokens: bool = True
    first_only: bool = False


@dataclass(frozen=True)
class TextWindow:
    """The tokens of a text, or of a part of it, with what is known of each.

    ``starts`` and ``ends`` are places of characters in its text (or word), ``words`` the number of its word (-1 without
    one), ``parts`` that of its text (0, or 1 for the second; -1 for a special token), ``types`` its token type.
    """

    ids: list[int]
    tokens: list[str]
    starts: list[int]
    ends: list[int]
    words: list[int]
    parts: list[int]
    types: list[int]
    special: list[int]


def pack_windows(windows: Sequence[TextWindow]) -> bytes:
    """Encode windows as JSON."""
    return json.dumps([asdict(window) for window in windows]).encode()


def unpack_windows(data: bytes) -> list[TextWindow]:
    """Return the windows that ``pack_windows`` encoded."""
    windows: list[dict[str, Any]] = json.loads(data)
    return [TextWindow(**values) for values in windows]


request_head: Final = struct.Struct("<BBdQ")
"""FrameOperation, flag, CPU seconds, size of the payload in bytes."""
reply_head: Final = struct.Struct("<BQ")
"""FrameStatus, size of the payload in bytes."""


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
