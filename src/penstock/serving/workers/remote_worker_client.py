"""A worker of another machine: dials the primary over TLS, proves itself with a token, serves until told to stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc

from penstock.errors import FileAccessError, InvalidArgumentError, NotFoundError, UnavailableError
from penstock.serving.keys import read_secret
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.messages import JOIN, MESSAGE_OPTIONS, WELCOME, bearer
from penstock.serving.workers.worker import Worker
from penstock.serving.workers.worker_config import WorkerConfig

__all__ = ["join_primary", "read_bytes", "read_token"]

MIN_TOKEN_CHARS: Final = 32
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 20_000),  # a primary whose machine is gone says nothing
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_LAST_WORDS_S: Final = 5.0
_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0)


def read_token(path: Path) -> str:
    """The token of a file's first line; InvalidArgumentError for one that can be guessed, and as ``read_secret``."""
    token = read_secret(path).decode("utf-8", "replace").strip().splitlines()
    is_plain = bool(token) and token[0].isascii() and token[0].isprintable() and " " not in token[0]
    if not is_plain or len(token[0]) < MIN_TOKEN_CHARS:
        raise InvalidArgumentError(
            f"{path}: a token has at least {MIN_TOKEN_CHARS} printable characters of ASCII without spaces; "
            "'openssl rand -hex 32' makes one"
        )
    return token[0]


def read_bytes(path: Path) -> bytes:
    """A small file; FileAccessError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror}") from error


async def join_primary(config: WorkerConfig, ca: bytes | None, *, again: bool = True) -> int:
    """Serve the primary at ``config.address``; the exit status.

    ``ca``: whose certificates are believed, in PEM (None: the system's).  ``again``: dial again, after growing pauses,
    when the primary is not there or goes away.  Raises InvalidArgumentError when it refuses this worker.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    num_tries = 0
    try:
        while not stopped.is_set():
            status = await _once(config, ca, stopped)
            if isinstance(status, int):
                return status
            because = f" ({status})" if status else ""
            if not again:
                raise UnavailableError(f"{config.address}: the primary is not there, or went away{because}")
            pause = _PAUSES_S[min(num_tries, len(_PAUSES_S) - 1)]
            num_tries += 1
            told = f"penstock worker: {config.address} is not there{because}; again in {pause:g} s"
            print(told, file=sys.stderr, flush=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), pause)
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _once(config: WorkerConfig, ca: bytes | None, stopped: asyncio.Event) -> int | str:
    """One stream: the exit status, or what is known of the reason where it is worth trying again."""
    credentials = grpc.ssl_channel_credentials(root_certificates=ca)
    channel = grpc.aio.secure_channel(config.address, credentials, options=(*MESSAGE_OPTIONS, *_KEEPALIVE))
    serving = asyncio.ensure_future(_serve(config, channel))
    stopping = asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            return 0
        return 0 if serving.result() == 0 else ""
    except (InvalidArgumentError, NotFoundError) as error:
        raise InvalidArgumentError(f"{config.address} refuses this worker: {error}") from error
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION):
            raise InvalidArgumentError(f"{config.address} refuses this worker: {error.details()}") from error
        return str(error.details() or "")
    finally:
        for task in (serving, stopping):
            task.cancel()
        await asyncio.gather(serving, stopping, return_exceptions=True)


async def _serve(config: WorkerConfig, channel: grpc.aio.Channel) -> int:
    """Join over a channel and serve until told to stop; grpc.aio.AioRpcError when the primary refuses or is gone."""
    async with channel:
        join = channel.stream_stream(
            JOIN, request_serializer=pb.FromWorker.SerializeToString, response_deserializer=pb.ToWorker.FromString
        )
        call = join(metadata=(("authorization", bearer(config.token)),))
        stream = _CallStream(call)
        try:
            return await Worker(config, stream).run()
        finally:
            await stream.close()


class _CallStream:
    """A gRPC call as a worker's stream."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._out: list[pb.FromWorker] = []
        self._has_out = asyncio.Event()
        self._writer = asyncio.ensure_future(self._write())

    def send(self, message: pb.FromWorker) -> None:
        """Send a message, from any thread and without waiting."""
        with suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._put, message)

    async def read(self) -> pb.ToWorker | None:
        """The next message; None at the stream's end.  AioRpcError when the primary refused, or is gone."""
        reader = asyncio.ensure_future(self._call.read())
        try:
            await asyncio.wait((reader, self._writer), return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():  # nothing can be sent any more: what was sent to here may say why
                await asyncio.wait((reader,), timeout=_LAST_WORDS_S)
            if reader.done() and reader.exception() is None and reader.result() is not grpc.aio.EOF:
                message: pb.ToWorker = reader.result()
                return message
        finally:
            reader.cancel()
        with suppress(TimeoutError):
            code = await asyncio.wait_for(self._call.code(), _LAST_WORDS_S)
            if code is not grpc.StatusCode.OK:  # why, in the primary's words, whichever task saw it first
                details = await self._call.details()
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        return None

    async def close(self) -> None:
        """End the call."""
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        self._call.cancel()

    def _put(self, message: pb.FromWorker) -> None:
        self._out.append(message)
        self._has_out.set()

    async def _write(self) -> None:
        if WELCOME not in (await self._call.initial_metadata() or ()):
            return  # refused: a message that meets the end of the call would hide why
        while True:
            await self._has_out.wait()
            self._has_out.clear()
            out, self._out = self._out, []
            for message in out:
                await self._call.write(message)
