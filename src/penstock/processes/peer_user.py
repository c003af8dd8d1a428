"""The user at the other end of a TCP connection within this machine, as /proc/net/tcp has it."""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["user_of_peer"]

_ESTABLISHED: Final = "01"
"""A socket that was closed has no user any more: the table then says 0."""


def user_of_peer(connection: socket.socket) -> int | None:
    """Return the id of the user that has the other end of a connection, or None if this machine does not know it."""
    try:
        peer, own = _entry(connection.getpeername()), _entry(connection.getsockname())
    except OSError:
        return None
    with suppress(OSError), Path("/proc/net", "tcp" if len(peer) == 13 else "tcp6").open(encoding="ascii") as table:
        for line in table:
            words = line.split()
            if words[1:4] == [peer, own, _ESTABLISHED]:
                return int(words[7])
    return None


def _entry(address: tuple[Any, ...]) -> str:
    """Return an address as the table has it: words of 32 bits in the byte order of the machine."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    words = struct.unpack(f"={len(ip.packed) // 4}I", ip.packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"
