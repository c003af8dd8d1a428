"""The ``tokenizers`` library in a separate process, with limits on memory and time.

A ``tokenizer.json`` is untrusted, and the library that runs it limits neither the memory nor the time of a text.  So it
runs in a child process: when it exceeds a limit, the child dies, the call raises TokenizerError, and the next call
starts another child.  Tokenizers that the core can compile need no such process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from penstock.checkpoint.tokenizer_frames import (
    MAX_TEXT_BYTES,
    FrameOperation,
    FrameStatus,
    TextWindow,
    WindowRequest,
    pack_lists,
    receive,
    reply_head,
    request_head,
    unpack_lists,
    unpack_windows,
)
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, TokenizerError, UnsupportedError

__all__ = ["TokenizerProcess"]

_COMMAND: Final = (sys.executable, "-P", "-m", "penstock.checkpoint.tokenizer_child")
OPEN_SECONDS: Final = 10.0
"""Limit on the CPU time for reading a file."""
CALL_SECONDS: Final = 3.0
STEP_SECONDS: Final = 1.0
"""Limits on the CPU time of a call, to which its input adds.  STEP_SECONDS is for token ids, whose text the engine's
step waits for."""
_BYTES_PER_SECOND: Final = 200_000
_WALL_FACTOR, _WALL_SECONDS = 4.0, 10.0
"""Limit on the wall time of a call, which is longer because the child may have to wait for a core."""
MAX_DEATHS: Final = 3
PAUSE_SECONDS: Final = 10.0
"""Seconds for which calls are refused after ``MAX_DEATHS`` deaths in a row; each restart reads the file again."""
_MAX_REPLY_BYTES: Final = 2 * MAX_TEXT_BYTES
_MAX_KEPT_CHARS, _MAX_KEPT_TEXTS = 256, 1 << 18
_INPUTS: Final = {
    FrameOperation.OPEN: "to open the file",
    FrameOperation.ENCODE: "for this text",
    FrameOperation.DECODE: "for these token ids",
    FrameOperation.TOKEN_BYTES: "for this token id",
    FrameOperation.TOKEN_ID: "for this token",
    FrameOperation.VOCABULARY: "for the vocabulary",
    FrameOperation.WINDOWS: "for this text",
    FrameOperation.JOIN_TOKENS: "for these tokens",
}

_LONG_CALLS: Final = (FrameOperation.ENCODE, FrameOperation.VOCABULARY, FrameOperation.WINDOWS)


@dataclass(frozen=True)
class _Info:
    is_byte_level: bool
    longest_token: int
    specials: frozenset[int]
    has_subword_prefix: bool


class _Child:
    """A running child and its channel."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        home = str(Path(__file__).parents[2])
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths if home in paths else [*paths, home]),
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
        }
        with other:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                _COMMAND,
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self.channel, self.pid = own, os.getpid()

    def end(self) -> int:
        """Kill the child and return its exit status.  A forked copy of the parent leaves it running."""
        self.channel.close()
        if self.pid != os.getpid():
            self.process.returncode = 0  # not this process's child
            return 0
        with suppress(ProcessLookupError):
            self.process.kill()
        return self.process.wait()


class TokenizerProcess:
    """The library's tokenizer of a ``tokenizer.json``, in a child process that starts when it is needed.

    Raises InvalidFileError or UnsupportedError when the file cannot be opened, and TokenizerError when the tokenizer
    fails on a text or on ids, or exceeds its memory or time limit.  Any number of threads may use it; calls run one at
    a time.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = bytes(data)
        self._lock = threading.RLock()
        self._child: _Child | None = None
        self._finalizer: weakref.finalize[..., TokenizerProcess] | None = None
        self._info: _Info | None = None
        self._tokens: dict[int, bytes] = {}
        self._texts: dict[tuple[int, bool], str] = {}
        self._num_deaths, self._refused_until = 0, 0.0
        _TOKENIZERS.add(self)

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where no thread will release the old one."""
        self._lock = threading.RLock()

    def open(self) -> None:
        """Start the child and open the file, unless that is already done."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the child; a later call starts another."""
        with self._lock:
            self._end()

    @property
    def is_byte_level(self) -> bool:
        """True if tokens are sequences of bytes, which may end inside a UTF-8 character."""
        return self._opened().is_byte_level

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return unpack_lists(self._call(FrameOperation.ENCODE, text.encode(), add_special_tokens))[0].tolist()

    def windows(self, request: WindowRequest) -> list[TextWindow]:
        """Return the windows of a text; none if the limit leaves no room for a token of the text that is cut."""
        return unpack_windows(self._call(FrameOperation.WINDOWS, json.dumps(asdict(request)).encode(), False))

    def join_tokens(self, lists: Sequence[Sequence[str]]) -> list[str]:
        """Return the text that each list of tokens' texts stands for."""
        texts: list[str] = json.loads(self._call(FrameOperation.JOIN_TOKENS, json.dumps(lists).encode(), False))
        return texts

    @property
    def has_subword_prefix(self) -> bool:
        """True if a token inside a word begins with a mark, such as ``##``."""
        return self._opened().has_subword_prefix

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if len(ids) != 1:
            return self.decode_each([ids], skip_special_tokens=skip_special_tokens)[0]
        key = (int(ids[0]), skip_special_tokens)  # log-probabilities need the same tokens again
        if key not in self._texts:
            text = self.decode_each([ids], skip_special_tokens=skip_special_tokens)[0]
            if len(text) > _MAX_KEPT_CHARS or len(self._texts) >= _MAX_KEPT_TEXTS:
                return text
            self._texts[key] = text
        return self._texts[key]

    def decode_each(self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids, with one call to the child."""
        reply = self._call(FrameOperation.DECODE, _packed(lists), skip_special_tokens)
        lengths, begin, texts = struct.unpack_from(f"<{len(lists)}Q", reply), 8 * len(lists), []
        for length in lengths:
            texts.append(reply[begin : begin + length].decode())
            begin += length
        return texts

    def token(self, token: int) -> tuple[bytes, bool]:
        """Return the bytes that an id of a byte-level tokenizer decodes to, and whether it is special."""
        data = self._tokens.get(token)
        if data is None:
            data = self._call(FrameOperation.TOKEN_BYTES, _packed([[token]]), False)
            if len(self._tokens) < _MAX_KEPT_TEXTS:
                self._tokens[token] = data
        return data, token in self._opened().specials

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        reply = self._call(FrameOperation.TOKEN_ID, token.encode(), False)
        return struct.unpack("<I", reply)[0] if reply else None

    def longest_token(self) -> int:
        """Return the length in characters of the longest token of the vocabulary."""
        return self._opened().longest_token

    def vocabulary(self) -> tuple[list[bytes], list[int]]:
        """Return the bytes of each token of a byte-level tokenizer by its id, and the ids of special tokens."""
        info = self._opened()
        if not info.is_byte_level:
            raise UnsupportedError(
                "The tokens of this model's tokenizer are not bytes, and the core does not support its kind: answers "
                "cannot follow a grammar."
            )
        reply = self._call(FrameOperation.VOCABULARY, b"", False)
        (count,) = struct.unpack_from("<Q", reply)
        places = accumulate(struct.unpack_from(f"<{count}I", reply, 8), initial=8 + 4 * count)
        return [reply[start:end] for start, end in pairwise(places)], sorted(info.specials)

    def _opened(self) -> _Info:
        if self._info is None:
            self.open()
        if self._info is None:
            raise TokenizerError("tokenizer.json: the tokenizer was not opened")
        return self._info

    def _call(self, operation: FrameOperation, payload: bytes, flag: bool) -> bytes:
        with self._lock:
            base = CALL_SECONDS if operation in _LONG_CALLS else STEP_SECONDS
            seconds = base + len(payload) / _BYTES_PER_SECOND
            try:
                reply = self._ask(self._start(), operation, payload, flag, seconds)
            except TokenizerError:
                raise
            except (InvalidFileError, UnsupportedError) as error:  # the library's error; the child is still running
                raise TokenizerError(str(error)) from None
            self._num_deaths = 0
            return reply

    def _start(self) -> _Child:
        """Return the child; start it and open the file if necessary."""
        if self._child is not None and self._child.pid != os.getpid():  # this process is a fork
            self._end()
        if self._child is not None:
            return self._child
        left = self._refused_until - time.monotonic()
        if left > 0:
            raise TokenizerError(
                f"tokenizer.json: the tokenizer process died {MAX_DEATHS} times in a row. Retry in {left:.0f} s."
            )
        child = self._child = _Child()
        self._finalizer = weakref.finalize(self, child.end)
        try:
            info = json.loads(self._ask(child, FrameOperation.OPEN, self._data, False, OPEN_SECONDS))
        except TokenizerError:
            raise
        except PenstockError:
            self._end()
            raise
        self._info = _Info(
            info["is_byte_level"], info["longest_token"], frozenset(info["specials"]), info["has_subword_prefix"]
        )
        return child

    def _end(self) -> int:
        child, self._child = self._child, None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        return 0 if child is None else child.end()

    def _ask(self, child: _Child, operation: FrameOperation, payload: bytes, flag: bool, seconds: float) -> bytes:
        """Send one request and return its reply.  After any exception but an error reply, the child is dead."""
        child.channel.settimeout(_WALL_FACTOR * seconds + _WALL_SECONDS)
        reply: tuple[int, bytes] | None = None
        timed_out = False
        try:
            child.channel.sendall(request_head.pack(operation, flag, seconds, len(payload)) + payload)
            reply = _read_reply(child.channel)
        except TimeoutError:
            timed_out = True
        except OSError:  # the child died
            pass
        except BaseException:  # KeyboardInterrupt in the middle of a message
            self._end()
            raise
        if reply is None or reply[0] == FrameStatus.NO_MEMORY:
            raise self._died(operation, timed_out, reply is not None)
        status, data = reply
        if status == FrameStatus.OK:
            return data
        raise (UnsupportedError if status == FrameStatus.UNSUPPORTED else InvalidFileError)(data.decode())

    def _died(self, operation: FrameOperation, timed_out: bool, no_memory: bool) -> TokenizerError:
        """Count a death of the child, and return the error that says what killed it."""
        if not (timed_out or no_memory) and self._child is not None:  # otherwise it is still running
            with suppress(subprocess.TimeoutExpired):
                self._child.process.wait(1.0)
        status = self._end()
        self._num_deaths += 1
        if self._num_deaths >= MAX_DEATHS:
            self._num_deaths, self._refused_until = 0, time.monotonic() + PAUSE_SECONDS
        when = _INPUTS[operation]
        if timed_out or status == -signal.SIGPROF:
            return TokenizerError(f"tokenizer.json: the tokenizer took too long {when}")
        if no_memory or status in (-signal.SIGABRT, -signal.SIGKILL):
            return TokenizerError(f"tokenizer.json: the tokenizer needed too much memory {when}")
        return TokenizerError(f"tokenizer.json: the tokenizer process exited with status {status} {when}")


_TOKENIZERS: Final[weakref.WeakSet[TokenizerProcess]] = weakref.WeakSet()


def _renew_locks() -> None:
    for tokenizer in _TOKENIZERS:
        tokenizer.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def _packed(lists: Sequence[Sequence[int]]) -> bytes:
    try:
        return pack_lists(lists)
    except (OverflowError, TypeError) as error:
        raise InvalidArgumentError("ids: expected 32-bit integers", param="ids") from error


def _read_reply(channel: socket.socket) -> tuple[int, bytes] | None:
    """Receive the status and the payload; return None when the child died or sent an invalid reply."""
    head = receive(channel, reply_head.size)
    if head is None:
        return None
    status, size = reply_head.unpack(head)
    if size > _MAX_REPLY_BYTES:
        return None
    data = receive(channel, size)
    return None if data is None else (status, data)
