"""Sockets that listen for connections of clients and of other machines."""

from __future__ import annotations

import socket
from typing import Any

__all__ = ["open_port", "peer_address"]


def open_port(host: str, port: int, backlog: int | None, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens at an address.  Raises OSError.

    ``host``: a name or an address; of the addresses of a name, one of IPv4 is preferred.  "" means all of IPv4, and
    "::" all addresses of both families.  ``port`` 0 takes a free one.  ``backlog``: how many connections may wait to be
    accepted; None: the socket is only bound.  ``is_shared``: other processes of this user may bind the port too.
    """
    addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if is_shared else socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not socket.has_dualstack_ipv6()))
        listener.bind(address)
        if backlog is not None:
            listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def peer_address(name: tuple[Any, ...]) -> str:
    """Return HOST:PORT of a peer's socket name; an IPv4 peer of a socket of both families has its own address."""
    return f"{name[0].removeprefix('::ffff:')}:{name[1]}"
