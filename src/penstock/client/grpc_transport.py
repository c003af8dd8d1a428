"""Calls over gRPC, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from penstock.client.address import Address
from penstock.client.calls import ClientCall, Rpc
from penstock.client.http_messages import MAX_RESPONSE_BYTES, seconds_of
from penstock.client.retries import Retries
from penstock.errors import InvalidArgumentError, ServiceError

__all__ = ["AsyncGrpcTransport", "GrpcTransport"]

_SERVICE: Final = "/inference.GRPCInferenceService"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.enable_retries", 0),  # class Retries does them, and honours retry-after
    ("grpc.use_local_subchannel_pool", 1),
)
_STATUSES: Final = {
    "INVALID_ARGUMENT": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "NOT_FOUND": 404, "UNIMPLEMENTED": 405,
    "RESOURCE_EXHAUSTED": 413, "CANCELLED": 499, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
"""The HTTP status of a gRPC code.  RESOURCE_EXHAUSTED is 429 if the service sends retry-after with it."""

_T = TypeVar("_T")


class GrpcTransport:
    """gRPC for any number of threads."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._metadata = _metadata(address)
        self._lock = threading.Lock()
        self._channel: Any = None

    def call(self, call: ClientCall[_T]) -> _T:
        """Send a request, with retries, and return the value of its reply.  Raises ServiceError."""
        retries, rpc = Retries(self._address, call.timeout_s, call.is_sent_once), call.rpc()
        while True:
            try:
                return self._send(rpc, retries.read_timeout_s())
            except (OSError, ServiceError) as error:
                time.sleep(retries.pause_s(error))

    def _send(self, rpc: Rpc[_T], timeout_s: float) -> _T:
        method = self._opened().unary_unary(f"{_SERVICE}/{rpc.method}", _serialize, rpc.reply.FromString)
        with _translated_errors(self._address):
            reply = method(rpc.message, timeout=timeout_s, metadata=self._metadata)
        return rpc.read(reply)

    def stream(self, call: ClientCall[_T]) -> Iterator[_T]:
        """Send a request and return the items of its response; closing the iterator ends the request."""
        return self._items(call.rpc(), call.timeout_s)

    def _items(self, rpc: Rpc[_T], timeout_s: float | None) -> Iterator[_T]:
        method = self._opened().stream_stream(f"{_SERVICE}/{rpc.method}", _serialize, rpc.reply.FromString)
        with _translated_errors(self._address):
            replies = method(iter([rpc.message]), timeout=timeout_s, metadata=self._metadata)
            try:
                for reply in replies:
                    _check_reply(reply)
                    yield rpc.read(reply.infer_response)
                    if _is_final(reply):
                        return
            finally:
                replies.cancel()

    def _opened(self) -> Any:
        with self._lock:
            if self._channel is None:
                self._channel = _open_channel(grpc, self._address)
            return self._channel

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class AsyncGrpcTransport:
    """gRPC for one event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._metadata = _metadata(address)
        self._channel: Any = None

    async def call(self, call: ClientCall[_T]) -> _T:
        """Send a request, with retries, and return the value of its reply.  Raises ServiceError."""
        retries, rpc = Retries(self._address, call.timeout_s, call.is_sent_once), call.rpc()
        while True:
            try:
                return await self._send(rpc, retries.read_timeout_s())
            except (OSError, ServiceError) as error:
                await asyncio.sleep(retries.pause_s(error))

    async def _send(self, rpc: Rpc[_T], timeout_s: float) -> _T:
        method = self._opened().unary_unary(f"{_SERVICE}/{rpc.method}", _serialize, rpc.reply.FromString)
        with _translated_errors(self._address):
            reply = await method(rpc.message, timeout=timeout_s, metadata=self._metadata)
        return rpc.read(reply)

    def stream(self, call: ClientCall[_T]) -> AsyncIterator[_T]:
        """Send a request and return the items of its response; closing the iterator ends the request."""
        return self._items(call.rpc(), call.timeout_s)

    async def _items(self, rpc: Rpc[_T], timeout_s: float | None) -> AsyncIterator[_T]:
        method = self._opened().stream_stream(f"{_SERVICE}/{rpc.method}", _serialize, rpc.reply.FromString)
        with _translated_errors(self._address):
            replies = method(timeout=timeout_s, metadata=self._metadata)
            try:
                await replies.write(rpc.message)
                await replies.done_writing()
                async for reply in replies:
                    _check_reply(reply)
                    yield rpc.read(reply.infer_response)
                    if _is_final(reply):
                        return
            finally:
                replies.cancel()

    def _opened(self) -> Any:
        if self._channel is None:
            self._channel = _open_channel(grpc.aio, self._address)
        return self._channel

    async def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _open_channel(api: Any, address: Address) -> Any:
    """Open a channel of ``api``, which is grpc or grpc.aio."""
    if address.is_tls:
        return api.secure_channel(address.authority, _credentials(address), _OPTIONS)
    return api.insecure_channel(address.authority, _OPTIONS)


def _credentials(address: Address) -> Any:
    """Return the credentials of a TLS channel, which trusts ``tls_ca``, or the system's authorities without it."""
    file = address.tls_ca or ssl.get_default_verify_paths().cafile
    try:
        return grpc.ssl_channel_credentials(Path(file).read_bytes() if file is not None else None)
    except OSError as error:
        raise InvalidArgumentError(f"tls_ca: cannot read {file}: {error.strerror or error}", param="tls_ca") from None


def _metadata(address: Address) -> tuple[tuple[str, str], ...]:
    return () if address.api_key is None else (("authorization", f"Bearer {address.api_key}"),)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


@contextmanager
def _translated_errors(address: Address) -> Iterator[None]:
    """Raise gRPC's errors as ServiceError."""
    try:
        yield
    except grpc.RpcError as error:
        raise _service_error(error, address) from None


def _service_error(error: Any, address: Address) -> ServiceError:
    """Return the ServiceError for a failed RPC; its status is 0 if the service was not reached."""
    trailers = {str(key): value for key, value in error.trailing_metadata() or ()}
    code, message = error.code().name, error.details() or ""
    retry_after = str(trailers.get("retry-after", ""))
    status = _status(code, retry_after)
    if status == 504 and trailers.get("error-code") == "body_too_slow":
        status = 408
    elif status == 503 and "x-request-id" not in trailers:
        status, message = 0, f"{address.url}: {message}"
    return ServiceError(
        message or code, status, code=trailers.get("error-code"), param=trailers.get("error-param"),
        request_id=str(trailers.get("x-request-id", "")), retry_after_s=seconds_of(retry_after),
    )  # fmt: skip


def _status(code: str, retry_after: str) -> int:
    status = _STATUSES.get(code, 500)
    return 429 if status == 413 and retry_after else status


def _check_reply(reply: Any) -> None:
    """Raise ServiceError for an item of a stream that reports an error."""
    if reply.error_message:
        details = {name: value.string_param for name, value in reply.infer_response.parameters.items()}
        raise ServiceError(
            reply.error_message, _status(details.get("code", ""), details.get("retry-after", "")),
            code=details.get("error-code") or None, param=details.get("error-param") or None,
            request_id=details.get("x-request-id", ""),
        )  # fmt: skip


def _is_final(reply: Any) -> bool:
    """Return True for the last item of a stream."""
    return bool(reply.infer_response.parameters["triton_final_response"].bool_param)
