"""The process in which the ``tokenizers`` library runs: ``python -m penstock.checkpoint.tokenizer_child``.

Its standard input is a socket to the parent.  The memory of the process and the CPU time of each request are limited;
at either limit the kernel kills the process, and the parent reports an error and starts another.  Landlock, where the
kernel has it, refuses to write files, to run programs, TCP and signals to other processes.  The library prints
panics with backtraces to standard error, which the parent discards: each request ends with one reply.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.tokenizer_frames import (
    MAX_TEXT_BYTES,
    FrameOperation,
    FrameStatus,
    WindowRequest,
    pack_lists,
    pack_windows,
    receive,
    reply_head,
    request_head,
    unpack_lists,
)
from penstock.errors import InvalidFileError, PenstockError, UnsupportedError
from penstock.processes.landlock import restrict

if TYPE_CHECKING:
    from penstock.checkpoint.tokenizer_file import LibraryTokenizer

__all__ = ["MAX_MEMORY_BYTES", "main", "max_ids"]

MAX_MEMORY_BYTES: Final = 2 << 30
"""Limit on the address space of the process."""
_IDS_PER_BYTE, _FREE_IDS = 4, 1 << 16
_REPEATS: Final = 4
"""The number of windows that a token may be in, as a share of the limit on the ids of a text."""


def max_ids(num_bytes: int) -> int:
    """Return the limit on the ids of a text, so that a hostile file cannot fill the parent's memory."""
    return _IDS_PER_BYTE * num_bytes + _FREE_IDS


def _lower_limits() -> None:
    for kind, limit in ((resource.RLIMIT_AS, MAX_MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process even inside the library


def _open(data: bytes) -> tuple[LibraryTokenizer, bytes]:
    from penstock.checkpoint.tokenizer_file import LibraryTokenizer

    tokenizer = LibraryTokenizer(data)
    info = {
        "is_byte_level": tokenizer.is_byte_level,
        "longest_token": tokenizer.longest_token(),
        "specials": sorted(tokenizer.specials),
        "has_subword_prefix": tokenizer.has_subword_prefix,
    }
    return tokenizer, json.dumps(info).encode()


def _encode(tokenizer: LibraryTokenizer, payload: bytes, flag: bool) -> bytes:
    ids = tokenizer.encode(payload.decode(), add_special_tokens=flag)
    if len(ids) > max_ids(len(payload)):
        raise InvalidFileError(f"tokenizer.json: the tokenizer made {len(ids)} tokens from {len(payload)} bytes")
    return pack_lists([ids])


def _decode(tokenizer: LibraryTokenizer, payload: bytes, flag: bool) -> bytes:
    texts, num_bytes = [], 0
    for ids in unpack_lists(payload):
        texts.append(tokenizer.decode(ids, skip_special_tokens=flag).encode())
        num_bytes += len(texts[-1])
        if num_bytes > MAX_TEXT_BYTES:
            raise InvalidFileError(
                f"tokenizer.json: the tokenizer made more than {MAX_TEXT_BYTES} bytes from {len(ids)} tokens"
            )
    return struct.pack(f"<{len(texts)}Q", *map(len, texts)) + b"".join(texts)


def _vocabulary(tokenizer: LibraryTokenizer) -> bytes:
    tokens = [tokenizer.token(token) for token in range(tokenizer.num_tokens())]
    return struct.pack(f"<Q{len(tokens)}I", len(tokens), *map(len, tokens)) + b"".join(tokens)


def _windows(tokenizer: LibraryTokenizer, payload: bytes) -> bytes:
    windows = tokenizer.windows(WindowRequest(**json.loads(payload)))
    num_ids = sum(len(window.ids) for window in windows)
    if num_ids > _REPEATS * max_ids(len(payload)):
        raise InvalidFileError(f"tokenizer.json: the tokenizer made {num_ids} tokens from {len(payload)} bytes")
    return pack_windows(windows)


def _answer(tokenizer: LibraryTokenizer, operation: int, flag: bool, payload: bytes) -> bytes:
    if operation == FrameOperation.ENCODE:
        return _encode(tokenizer, payload, flag)
    if operation == FrameOperation.DECODE:
        return _decode(tokenizer, payload, flag)
    if operation == FrameOperation.TOKEN_BYTES:
        return tokenizer.token(unpack_lists(payload)[0][0])
    if operation == FrameOperation.VOCABULARY:
        return _vocabulary(tokenizer)
    if operation == FrameOperation.WINDOWS:
        return _windows(tokenizer, payload)
    if operation == FrameOperation.JOIN_TOKENS:
        return json.dumps(tokenizer.join_tokens(json.loads(payload))).encode()
    token = tokenizer.token_id(payload.decode())
    return b"" if token is None else struct.pack("<I", token)


def _serve(channel: socket.socket) -> None:
    """Answer requests until the parent closes the channel."""
    tokenizer: LibraryTokenizer | None = None
    while (head := receive(channel, request_head.size)) is not None:
        operation, flag, seconds, size = request_head.unpack(head)
        payload = receive(channel, size)
        if payload is None:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        status = FrameStatus.OK
        try:
            if tokenizer is None or operation == FrameOperation.OPEN:
                tokenizer, reply = _open(payload)
            else:
                reply = _answer(tokenizer, operation, bool(flag), payload)
        except UnsupportedError as error:
            status, reply = FrameStatus.UNSUPPORTED, str(error).encode()
        except PenstockError as error:
            status, reply = FrameStatus.INVALID_FILE, str(error).encode()
        except MemoryError:
            status, reply = FrameStatus.NO_MEMORY, b""
        except Exception as error:
            status, reply = FrameStatus.INVALID_FILE, f"tokenizer.json: {type(error).__name__}: {error}"[:200].encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(reply_head.pack(status, len(reply)) + reply)


def main() -> int:
    """Serve the parent at the other end of standard input; return the exit status."""
    _lower_limits()
    restrict(may_read=True)
    channel = socket.socket(fileno=sys.stdin.fileno())
    try:
        _serve(channel)
    except (BrokenPipeError, ConnectionResetError):  # the parent exited
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
