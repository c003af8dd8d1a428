"""The user at the other end of a TCP connection within this machine, as /proc/net/tcp and tcp6 have it."""

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
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The beginning of an IPv4 address as one of IPv6."""


def user_of_peer(connection: socket.socket) -> int | None:
    """Return the id of the user that has the other end of a connection, or None if this machine does not know it."""
    try:
        peer, own = _entries(connection.getpeername()), _entries(connection.getsockname())
    except OSError:
        return None
    for table, *ends in zip(("tcp", "tcp6"), peer, own, strict=True):
        with suppress(OSError), Path("/proc/net", table).open(encoding="ascii") as lines:
            for line in lines:
                words = line.split()
                if words[1:4] == [*ends, _ESTABLISHED]:
                    return int(words[7])
    return None


def _entries(address: tuple[Any, ...]) -> tuple[str, str]:
    """Return an address as the tables of IPv4 and of IPv6 have it: words of 32 bits in the byte order of the machine.

    A socket for both families is in the table of IPv6, with its IPv4 addresses as ::ffff:a.b.c.d, and the other end
    may be in the other table.  An address without a form in IPv4 is "" there.
    """
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    old = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else ip
    new = ip.packed if old is None else _MAPPED + old.packed
    return "" if old is None else _entry(old.packed, address[1]), _entry(new, address[1])


def _entry(packed: bytes, port: int) -> str:
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
