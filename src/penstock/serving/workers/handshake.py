"""The handshake of a worker: it sends Join, and the primary answers with Welcome, or with Stop and the reason."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.errors import InternalError, InvalidArgumentError, UnavailableError
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.messages import error_from, error_to

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.processes.frames import FrameStream

__all__ = ["ALPN", "GRPC_ALPN", "GRPC_PROTOCOL", "JOIN_S", "PROTOCOL", "join", "receive_join", "refuse", "welcome"]
__all__ += ["PAGE_SECRET", "STAGE_ALPN", "protocol_error"]

PROTOCOL: Final = 7
"""Version of the messages between a primary and its workers."""
GRPC_PROTOCOL: Final = 1
"""The version in which workers of other machines used gRPC."""
ALPN: Final = "penstock-worker"
"""The name of the messages between machines in TLS."""
STAGE_ALPN: Final = "penstock-stages"
"""The name of the messages to machines that run servable workers."""
GRPC_ALPN: Final = "h2"
PAGE_SECRET: Final = os.urandom(16)
"""The secret of page keys that this primary gives to its workers, so that their keys are equal to its own."""
JOIN_S: Final = 10.0
"""Limit on the time from the connection to Join, and from Join to its answer."""


def protocol_error(primary: int, worker: int, model: str = "") -> InvalidArgumentError:
    """Return the error for a worker whose protocol version is not that of the primary."""
    name = f"the worker of model {model!r:.140}" if model else "the worker"
    return InvalidArgumentError(
        f"the primary uses worker protocol {primary}, {name} uses protocol {worker}. Install the same version of "
        "Penstock on both machines"
    )


async def join(stream: FrameStream[pb.ToWorker], request: pb.Join) -> pb.Welcome:
    """Send ``request``, wait for the welcome and return it.

    Raises the error with which the primary refuses the worker, and UnavailableError if the primary ends the connection
    or does not answer within ``JOIN_S``.
    """
    request.protocol = PROTOCOL
    stream.send(pb.FromWorker(join=request))
    try:
        async with asyncio.timeout(JOIN_S):
            answer = await stream.read()
    except TimeoutError as error:
        raise UnavailableError(f"the primary did not answer within {JOIN_S:g} s") from error
    if answer is None:
        raise UnavailableError("the primary closed the connection")
    if answer.HasField("stop"):
        raise error_from(answer.stop.reason)
    if not answer.HasField("welcome"):
        raise InternalError(f"the primary answered Join with {answer.WhichOneof('kind')}")
    if answer.welcome.protocol != PROTOCOL:
        raise protocol_error(answer.welcome.protocol, PROTOCOL)
    return answer.welcome


async def receive_join(stream: FrameStream[pb.FromWorker]) -> pb.Join:
    """Wait for a worker's first message.  If it is another one, or none, the Join is empty."""
    first = await stream.read()
    return pb.Join() if first is None else first.join


def welcome(stream: FrameStream[pb.FromWorker]) -> None:
    """Tell a worker that it has joined."""
    stream.send(pb.ToWorker(welcome=pb.Welcome(protocol=PROTOCOL, page_secret=PAGE_SECRET)))


async def refuse(stream: FrameStream[pb.FromWorker], error: PenstockError, *, is_known: bool = True) -> None:
    """Tell a worker why it may not join.

    A worker that ``is_known`` gets ``JOIN_S`` to read that and to end the connection: if it is sending, closing the
    connection first could destroy the reason on its way.
    """
    stream.send(pb.ToWorker(stop=pb.Stop(reason=error_to(error))))
    if is_known:
        stream.listen(_ignore)
        with suppress(TimeoutError):
            await asyncio.wait_for(stream.ended.wait(), JOIN_S)
    stream.close()


def _ignore(message: pb.FromWorker) -> None:
    """Drop what a refused worker sends."""
