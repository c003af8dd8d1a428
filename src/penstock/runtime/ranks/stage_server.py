"""The server that stages of other machines join, and the port that several pipelines of a service share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.config import TOKEN_RULE, check_flag, check_integer, check_number, is_token
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.processes.listen import open_port

__all__ = ["StageServer", "listen_for_stages", "reserved_port"]

_BACKLOG: Final = 64


@dataclass(frozen=True)
class StageServer:
    """The server where the stages of other machines join.

    ``certificate`` and ``key`` are files in PEM.  Each stage proves itself with ``token``.  Port 0 takes a free one,
    which ``on_listen`` is told.  ``on_join`` gets the address of each stage that joins, HOST:PORT, and how many have
    joined.  ``join_s``: how long to wait for all stages, in seconds.  ``shared``: pipelines of
    several processes of this user wait at the port, each until it has its stages.  Raises InvalidArgumentError.
    """

    host: str
    port: int
    certificate: Path
    key: Path
    token: str
    join_s: float = 600.0
    on_listen: Callable[[int], None] | None = None
    on_join: Callable[[str, int], None] | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        """Refuse a wrong value, by name."""
        if not isinstance(self.host, str) or not self.host:
            raise InvalidArgumentError(f"host: expected a name or an address, got {self.host!r:.100}", param="host")
        check_integer("port", self.port, 0, 65_535)
        for name in ("certificate", "key"):
            if not isinstance(path := getattr(self, name), str | os.PathLike):
                raise InvalidArgumentError(f"{name}: expected the path of a file, got {path!r:.100}", param=name)
        if not is_token(self.token):
            raise InvalidArgumentError(f"token: expected {TOKEN_RULE}", param="token")
        check_number("join_s", self.join_s, 1e6)
        check_flag("shared", self.shared)


def listen_for_stages(server: StageServer) -> socket.socket:
    """Return a socket that listens at the address of ``server``; FileAccessError."""
    return _open_port(server, is_listening=True)


@contextmanager
def reserved_port(server: StageServer | None) -> Iterator[StageServer | None]:
    """Keep a port for the pipelines of this service during the block; yield the server with its number.

    The socket that keeps it accepts no connection: the kernel gives these to the pipelines that wait for stages.
    Raises FileAccessError if another program has the port.
    """
    if server is None:
        yield None
        return
    server = replace(server, shared=True)
    with _open_port(server, is_listening=False) as keeper:
        yield replace(server, port=int(keeper.getsockname()[1]))


def _open_port(server: StageServer, *, is_listening: bool) -> socket.socket:
    try:
        backlog = _BACKLOG if is_listening else None
        listener = open_port(server.host, server.port, backlog, is_shared=server.shared)
    except OSError as error:
        param = "stage_host" if isinstance(error, socket.gaierror) else "stage_port"
        address = f"[{server.host}]" if ":" in server.host else server.host
        text = f"{param}: failed to listen for stages at {address}:{server.port}: {error.strerror or error}"
        raise FileAccessError(text, param=param) from error
    listener.setblocking(False)
    return listener
