"""A rank's connection over any messages between processes: a ``ps_comm`` whose functions are Python's.

The owner sends and receives the messages.  A message has a source and a target, and messages between two ranks keep
their order.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from penstock.core.library import ENDED, CommStruct, library, sized
from penstock.errors import PenstockError, UnavailableError

__all__ = ["PART", "ROWS", "LinkComm"]

ROWS: Final = 1
"""The kind of a message from ``send`` to ``recv``."""
PART: Final = 2
"""The kind of a rank's part of an exchange, after its tag."""
_TAG: Final = struct.Struct("<Q")
_ABORTED: Final = 7  # PS_ABORTED
_ALIGNMENT: Final = 64


class LinkComm:
    """The connection of rank ``rank`` of ``world``.

    ``part_bytes``: the most bytes of a part of an exchange.  ``transmit`` sends (kind, target, data) and returns False
    if the connection has ended.  The owner calls ``deliver`` with each message that arrives.  ``on_abort`` is called
    with the reason when this rank ends the group.  ``timeout_s``: how long a rank waits for another within a step.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        part_bytes: int,
        transmit: Callable[[int, int, bytes], bool],
        on_abort: Callable[[str], None],
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self.rank, self.world, self.part_bytes = rank, world, part_bytes
        self._transmit, self._on_abort, self._timeout_s = transmit, on_abort, timeout_s
        self._buffer = ctypes.create_string_buffer(part_bytes + _ALIGNMENT)
        self._part = -(-ctypes.addressof(self._buffer) // _ALIGNMENT) * _ALIGNMENT
        self._received: dict[tuple[int, int], deque[bytes]] = {}
        self._arrived = threading.Condition()
        self._reason: str | None = None
        self._parts: list[bytes] = []  # of the last exchange; the core reads them until the next one
        functions: dict[str, Callable[..., Any]] = {
            "part": lambda _: self._part,
            "all_gather": self._guarded(self._all_gather),
            "broadcast": self._guarded(self._broadcast),
            "send": self._guarded(self._send),
            "recv": self._guarded(self._recv),
            "barrier": self._guarded(lambda tag: self._exchange(tag, [0] * world)),
            "abort": lambda _, reason: self.abort((reason or b"").decode("utf-8", "replace")),
            "await": self._guarded(self._await),
        }
        types: dict[str, Any] = {field[0]: field[1] for field in CommStruct._fields_}
        self._functions = {name: types[name](function) for name, function in functions.items()}  # ctypes frees others
        self._struct = sized(CommStruct, rank=rank, world=world, part_bytes=part_bytes, **self._functions)

    @property
    def address(self) -> int:
        """The address of the struct, for the C API."""
        return ctypes.addressof(self._struct)

    @property
    def reason(self) -> str | None:
        """The reason why the group was ended; None before that."""
        return self._reason

    def deliver(self, kind: int, source: int, data: bytes) -> None:
        """Take a message that has arrived, from any thread."""
        with self._arrived:
            self._received.setdefault((kind, source), deque()).append(data)
            self._arrived.notify_all()

    def abort(self, reason: str) -> None:
        """End every wait of this rank, now and later, and tell the owner.  Any thread may call this."""
        if self.end(reason):
            self._on_abort(reason)

    def end(self, reason: str) -> bool:
        """End every wait of this rank; the first reason stays.  Returns False if it had ended."""
        with self._arrived:
            if self._reason is not None:
                return False
            self._reason = reason
            self._arrived.notify_all()
            return True

    def close(self) -> None:
        """Forget what has arrived."""
        self._received.clear()

    def _guarded(self, function: Callable[..., None]) -> Callable[..., int]:
        def call(_: int | None, *arguments: Any) -> int:
            try:
                function(*arguments)
            except PenstockError as error:
                return int(library().ps_fail(_ABORTED, str(error).encode()))
            except Exception as error:
                self.abort(f"rank {self.rank}: {type(error).__name__}: {error}")
                return int(library().ps_fail(_ABORTED, str(error).encode()))
            return 0

        return call

    def _check(self) -> None:
        if self._reason is not None:
            raise UnavailableError(ENDED + self._reason)

    def _wait(self, kind: int, source: int, *, forever: bool = False) -> deque[bytes]:
        """Wait until a message has arrived; return the messages of that kind and source."""
        with self._arrived:
            messages = self._received.setdefault((kind, source), deque())
            has_come = self._arrived.wait_for(
                lambda: messages or self._reason is not None, None if forever else self._timeout_s
            )
            self._check()
        if not has_come:
            self.abort(f"rank {self.rank} waited {1000 * self._timeout_s:.0f} ms for rank {source}")
            self._check()
        return messages

    def _post(self, kind: int, target: int, data: bytes) -> None:
        self._check()
        if not self._transmit(kind, target, data):
            self.abort(f"rank {self.rank} lost its connection with rank {target}")
            self._check()

    def _send(self, target: int, data: int, num_bytes: int) -> None:
        self._check()
        if num_bytes:
            self._post(ROWS, target, ctypes.string_at(data, num_bytes))

    def _recv(self, source: int, data: int, num_bytes: int) -> None:
        self._check()
        if not num_bytes:
            return
        message = self._wait(ROWS, source).popleft()
        if len(message) != num_bytes:
            self.abort(f"rank {self.rank} expected {num_bytes} bytes from rank {source}, got {len(message)}")
            self._check()
        ctypes.memmove(data, message, num_bytes)

    def _await(self, source: int) -> None:
        self._wait(ROWS, source, forever=True)

    def _all_gather(self, tag: int, sizes: Any, parts: Any) -> None:
        self._exchange(tag, sizes[: self.world])
        for rank, part in enumerate(self._parts):
            parts[rank] = ctypes.cast(ctypes.c_char_p(part), ctypes.c_void_p)

    def _broadcast(self, tag: int, root: int, num_bytes: int, forever: int, data: Any) -> None:
        self._exchange(tag, [num_bytes * (rank == root) for rank in range(self.world)], forever=bool(forever))
        data[0] = ctypes.cast(ctypes.c_char_p(self._parts[root]), ctypes.c_void_p)

    def _exchange(self, tag: int, sizes: list[int], *, forever: bool = False) -> None:
        own = ctypes.string_at(self._part, sizes[self.rank])
        for rank in range(self.world):
            if rank != self.rank:
                self._post(PART, rank, _TAG.pack(tag) + own)
        self._parts = [own] * self.world
        for rank, size in enumerate(sizes):
            if rank == self.rank:
                continue
            message = self._wait(PART, rank, forever=forever).popleft()
            if message[: _TAG.size] != _TAG.pack(tag) or len(message) != _TAG.size + size:
                self.abort(
                    f"ranks {self.rank} and {rank} do not run the same step: rank {self.rank} is in the exchange with "
                    f"tag {tag:016x} and expects {size} bytes, rank {rank} sent {_tag_and_size(message)}"
                )
                self._check()
            self._parts[rank] = message[_TAG.size :]


def _tag_and_size(message: bytes) -> str:
    if len(message) < _TAG.size:
        return f"{len(message)} bytes without a tag"
    return f"tag {_TAG.unpack_from(message)[0]:016x} with {len(message) - _TAG.size} bytes"
