"""A worker for a primary on another machine: it connects over TLS and proves itself with a token."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from penstock.config import TOKEN_RULE, is_token
from penstock.errors import (
    FileAccessError,
    InternalError,
    InvalidArgumentError,
    InvalidFileError,
    NotFoundError,
    UnavailableError,
)
from penstock.processes.reconnect import RetryLines, connection_problem
from penstock.processes.tls import client_context
from penstock.serving.keys import read_secret
from penstock.serving.workers import handshake
from penstock.serving.workers.worker import CONNECT_S, Worker, serve_over_tls
from penstock.serving.workers.worker_config import WorkerConfig

__all__ = ["LEAVE_S", "join_primary", "read_bytes", "read_token", "serve_once", "stay_joined"]

LEAVE_S: Final = 30.0
"""The time that a worker that was told to end waits for the primary to move its requests."""

_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0)
_LASTING_S: Final = 60.0
"""After a connection that lasted so long, the pauses begin again with the first one."""


def read_token(path: Path) -> str:
    """Return the token in the first line of a file.

    Raises InvalidArgumentError for a token that could be guessed, and the errors of ``read_secret``.
    """
    token = read_secret(path).decode("utf-8", "replace").strip().splitlines()
    if not token or not is_token(token[0]):
        raise InvalidArgumentError(f"{path}: expected {TOKEN_RULE}", param="path")
    return token[0]


def read_bytes(path: Path) -> bytes:
    """Return the content of a small file; FileAccessError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror}", param="path") from error


async def join_primary(config: WorkerConfig, ca: bytes | None, *, again: bool = True) -> int:
    """Serve the primary at ``config.address`` (HOST:PORT) and return the exit status.

    ``ca`` holds the trusted certificates in PEM; None trusts those of the system.  ``again``: connect again, after
    growing pauses, when the primary cannot be reached or the connection ends; without it that is an UnavailableError.
    Raises InvalidArgumentError if the primary refuses this worker, and InvalidFileError for a ``ca`` that is not PEM.
    """
    try:
        context = client_context(ca, [handshake.ALPN, handshake.GRPC_ALPN])
    except InvalidFileError as error:
        raise InvalidFileError(f"--ca-file: {error}", param="ca_file") from error

    async def serve(stopped: asyncio.Event, hurry: asyncio.Event) -> int | str:
        workers: list[Worker] = []
        serving = serve_over_tls(config, context, starts_again=again, on_join=workers.append)
        return await serve_once(
            config.address, serving, lambda: any(worker.leave() for worker in workers), stopped, hurry
        )

    return await stay_joined(config.address, serve, "worker", again=again)


async def stay_joined(
    address: str, serve: Callable[[asyncio.Event, asyncio.Event], Awaitable[int | str]], command: str, *, again: bool
) -> int:
    """Serve a primary over one connection after the other, until a signal, and return the exit status.

    ``serve`` gets what the first and the second signal set, and returns as ``serve_once`` does.  ``command``: the name
    of the command, for its lines.  ``again``: as for ``join_primary``.
    """
    stopped, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        (hurry if stopped.is_set() else stopped).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    lines = RetryLines(command, address, _PAUSES_S)
    try:
        while not stopped.is_set():
            start = loop.time()
            status = await serve(stopped, hurry)
            if loop.time() - start > _LASTING_S:
                lines.reset()
            if isinstance(status, int):
                return status
            reason = status or "the connection was closed"
            if not again:
                raise UnavailableError(f"{address}: {reason}", param="address")
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), lines.next_pause_s(reason))
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def serve_once(
    address: str,
    serve: Coroutine[Any, Any, int],
    leave: Callable[[], bool],
    stopped: asyncio.Event,
    hurry: asyncio.Event,
) -> int | str:
    """Serve over one connection.  Return the exit status, or why it ended ("" if unknown) if a retry makes sense.

    After ``stopped`` this calls ``leave``.  If that returns True, the primary has ``LEAVE_S`` to take requests back,
    or until ``hurry``.  Raises InvalidArgumentError if the primary refuses this process.
    """
    serving = asyncio.ensure_future(serve)
    stopping, hurrying = asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and leave():
            await asyncio.wait((serving, hurrying), timeout=LEAVE_S, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            return 0
        return 0 if serving.result() == 0 else ""
    except (InvalidArgumentError, NotFoundError) as error:
        raise InvalidArgumentError(f"{address} refuses this worker: {error}", param="address") from error
    except (UnavailableError, InternalError, DecodeError) as error:
        return str(error)
    except OSError as error:
        return connection_problem(error, CONNECT_S)
    finally:
        for task in (serving, stopping, hurrying):
            task.cancel()
        await asyncio.gather(serving, stopping, hurrying, return_exceptions=True)
