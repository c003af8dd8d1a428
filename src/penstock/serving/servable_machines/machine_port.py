"""The primary's side of machines that join to run servable workers, on the port for workers of other machines."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.errors import InvalidArgumentError, PenstockError, UnavailableError
from penstock.logs import tell
from penstock.processes.frames import FIRST_BYTES, FrameStream
from penstock.processes.silence import SILENT_S
from penstock.processes.tls import keep_alive
from penstock.servables.process import worker_messages_pb2 as pb

if TYPE_CHECKING:
    from penstock.processes.tls import TlsSession

__all__ = ["PROTOCOL", "ServeMachine", "refuse_machine", "serve_servable_machine"]

PROTOCOL: Final = 2
"""Version of the messages between a primary and such a machine."""
_JOIN_S: Final = 10.0
ServeMachine: TypeAlias = Callable[[FrameStream[pb.FromMachine], str], Awaitable[None]]
"""Serves a machine with its stream and its address.  Raises PenstockError with the reason if it may not join."""


async def refuse_machine(stream: FrameStream[pb.FromMachine], address: str) -> None:
    """Refuse a machine because the service has no servables."""
    raise InvalidArgumentError("this service has no servables")


async def serve_servable_machine(
    connection: socket.socket, tls: TlsSession, token: str, address: str, serve: ServeMachine
) -> None:
    """Let a machine that knows ``token`` join, and serve it until its connection ends.

    The machine gets the reason of a refusal.  Raises the errors of the connection.
    """
    stream = FrameStream(connection, pb.FromMachine.FromString, FIRST_BYTES, tls)
    try:
        async with asyncio.timeout(_JOIN_S):
            first = await stream.read()
        join = pb.Join() if first is None else first.join
        if not hmac.compare_digest(_digest(token), _digest(join.token)):
            stream.send(_refusal("unknown worker token"))
            return
        keep_alive(connection, int(SILENT_S))
        try:
            if join.protocol != PROTOCOL:
                raise InvalidArgumentError(
                    f"the service uses protocol {PROTOCOL} for servables, this machine uses protocol {join.protocol}. "
                    "Install the same version of Penstock on both machines"
                )
            stream.send(pb.ToMachine(welcome=pb.Welcome(protocol=PROTOCOL)))
            await serve(stream, address)
        except PenstockError as error:
            tell("machine_refused", f"Refused a machine at {address}: {error}.", logging.WARNING, address=address)
            stream.send(_refusal(str(error), may_retry=isinstance(error, UnavailableError)))
            stream.listen(lambda message: None)
            with suppress(TimeoutError):  # closing at once could destroy the reason on its way
                await asyncio.wait_for(stream.ended.wait(), _JOIN_S)
    finally:
        stream.close()


def _refusal(text: str, *, may_retry: bool = False) -> pb.ToMachine:
    return pb.ToMachine(refusal=pb.Refusal(text=text[:2000], may_retry=may_retry))


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
