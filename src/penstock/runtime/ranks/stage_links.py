"""The messages between the machines of a pipeline, and the link of a rank that has no connection of its own.

The first rank of a stage has the connection of its machine to rank 0.  The other ranks of the stage are its children.
Each has a link to it, over which go the messages from and to ranks of other stages.  Every rank of a stage computes the
same rows, so only the first one sends them, and the first one of the next stage hands them to the ranks beside it.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.link_comm import PART, ROWS, LinkComm
from penstock.core.rank_layout import RankLayout

__all__ = ["MAX_FRAME_BYTES", "Frame", "Kind", "RankLink"]

MAX_FRAME_BYTES: Final = 1 << 30
_HEAD: Final = struct.Struct("<BBBQ")  # kind, source, target, epoch
_LENGTH: Final = struct.Struct("<I")


class Kind:
    """The kinds of a frame beside those of ``core.link_comm``."""

    JOIN: Final = 10
    WELCOME: Final = 11
    READY: Final = 12
    FAILED: Final = 13
    BEAT: Final = 14
    ENDED: Final = 15
    BUSY: Final = 16
    METADATA: Final = 17


@dataclass(frozen=True)
class Frame:
    """A message between the machines of a pipeline; ``data`` is JSON unless it comes from a LinkComm.

    ``epoch``: the number of the group of a message from one rank to another.
    """

    kind: int
    source: int = 0
    target: int = 0
    data: bytes = b""
    epoch: int = 0

    @classmethod
    def parse(cls, data: bytes) -> Frame:
        """Read a frame; struct.error if it is too short."""
        kind, source, target, epoch = _HEAD.unpack_from(data)
        return cls(kind, source, target, data[_HEAD.size :], epoch)

    @classmethod
    def of(cls, kind: int, **message: Any) -> Frame:
        """Return a frame with a message in JSON."""
        return cls(kind, data=json.dumps(message).encode())

    def SerializeToString(self) -> bytes:  # noqa: N802 - as a FrameStream calls it
        """Return the bytes of the frame."""
        return _HEAD.pack(self.kind, self.source, self.target, self.epoch) + self.data

    def message(self) -> dict[str, Any]:
        """Return the message in JSON; ValueError."""
        try:
            message = json.loads(self.data)
        except RecursionError:
            raise ValueError("expected fewer levels") from None
        if not isinstance(message, dict):
            raise ValueError("expected an object")
        return message


class RankLink:
    """The link of rank ``rank``, which is not the first one of its stage, to the first one.

    ``connection``: a connected socket, at whose other end is a FrameStream.  ``comm`` is the rank's connection with all
    ranks.  ``part_bytes``: the most bytes of a part of an exchange.
    """

    def __init__(self, connection: socket.socket, rank: int, layout: RankLayout, part_bytes: int) -> None:
        self._connection, self._rank = connection, rank
        self._lock = threading.Lock()
        self.comm = LinkComm(rank, layout.world, part_bytes, self._transmit, self._tell_end)
        threading.Thread(target=self._receive, name="penstock-link", daemon=True).start()

    def _transmit(self, kind: int, target: int, data: bytes) -> bool:
        return kind == ROWS or self._send(Frame(kind, self._rank, target, data))  # the first rank sends the rows

    def _tell_end(self, reason: str) -> None:
        self._send(Frame.of(Kind.ENDED, reason=reason))

    def _send(self, frame: Frame) -> bool:
        data = frame.SerializeToString()
        with self._lock:
            try:
                self._connection.sendall(_LENGTH.pack(len(data)) + data)
            except OSError:
                return False
        return True

    def _receive(self) -> None:
        with suppress(OSError, ValueError, struct.error):
            while True:
                (size,) = _LENGTH.unpack(self._connection.recv(_LENGTH.size, socket.MSG_WAITALL))
                frame = Frame.parse(self._connection.recv(size, socket.MSG_WAITALL))
                if frame.kind in (ROWS, PART):
                    self.comm.deliver(frame.kind, frame.source, frame.data)
                elif frame.kind == Kind.ENDED:
                    self.comm.end(str(frame.message().get("reason")))
        self.comm.end("the first rank of the stage has ended")
