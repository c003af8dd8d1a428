"""Calls of a client over gRPC: a channel, refusals as ServiceError, answers that come in pieces."""

from __future__ import annotations

import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from penstock.client.http import MAX_ANSWER_BYTES, Address, Retries
from penstock.client.inference import Inference, Rpc, read_response
from penstock.client.tensors import InferResult
from penstock.errors import InvalidArgumentError, ServiceError

__all__ = ["AsyncChannel", "Channel"]

_SERVICE: Final = "/inference.GRPCInferenceService"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.enable_retries", 0),  # the client's own, which wait as long as they are told
    ("grpc.use_local_subchannel_pool", 1),
)
_STATUSES: Final = {
    "INVALID_ARGUMENT": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "NOT_FOUND": 404, "UNIMPLEMENTED": 405,
    "RESOURCE_EXHAUSTED": 413, "CANCELLED": 499, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
"""HTTP's status for a code; RESOURCE_EXHAUSTED is 429 where the service says when to come again."""


def _credentials(address: Address) -> Any:
    """Those of a channel with TLS, which trusts ``tls_ca`` or the authorities that the system does."""
    file = address.tls_ca or ssl.get_default_verify_paths().cafile
    try:
        return grpc.ssl_channel_credentials(Path(file).read_bytes() if file is not None else None)
    except OSError as error:
        raise InvalidArgumentError(f"tls_ca {file}: {error.strerror or error}") from None


def _target(address: Address) -> str:
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"


def _metadata(address: Address) -> tuple[tuple[str, str], ...]:
    return () if address.api_key is None else (("authorization", f"Bearer {address.api_key}"),)


def _raw(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _refused(error: Any, address: Address) -> ServiceError:
    """An RPC that failed; status 0 when the service was not reached."""
    trailers = {str(key): value for key, value in error.trailing_metadata() or ()}
    code, told = error.code().name, error.details() or ""
    status = _STATUSES.get(code, 500)
    retry_after = str(trailers.get("retry-after", ""))
    if status == 413 and retry_after:
        status = 429
    elif status == 504 and trailers.get("error-code") == "body_too_slow":
        status = 408
    elif status == 503 and "x-request-id" not in trailers:
        status, told = 0, f"{address.url}: {told}"
    return ServiceError(
        told or code, status, code=trailers.get("error-code"), param=trailers.get("error-param"),
        request_id=str(trailers.get("x-request-id", "")),
        retry_after_s=float(retry_after) if retry_after.isdigit() and len(retry_after) < 7 else 0.0,
    )  # fmt: skip


@contextmanager
def _told(address: Address) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _refused(error, address) from None


def _of_piece(piece: Any) -> tuple[InferResult, bool]:
    """A piece of an answer, and whether it is the last; ServiceError for a refusal."""
    response = piece.infer_response
    if piece.error_message:
        given = {name: one.string_param for name, one in response.parameters.items()}
        status = _STATUSES.get(given.get("code", ""), 500)
        if status == 413 and given.get("retry-after"):
            status = 429
        raise ServiceError(
            piece.error_message, status, code=given.get("error-code") or None, param=given.get("error-param") or None,
            request_id=given.get("x-request-id", ""),
        )  # fmt: skip
    return read_response(response), response.parameters["triton_final_response"].bool_param


class Channel:
    """gRPC for any number of threads."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._channel: Any = None

    def ask(self, rpc: Rpc, retries: Retries) -> Any:
        """The reply, read; ServiceError."""
        call = self._opened().unary_unary(f"{_SERVICE}/{rpc.method}", _raw, rpc.reply.FromString)
        with _told(self._address):
            reply = call(rpc.message, timeout=retries.patience_s(), metadata=_metadata(self._address))
        return rpc.read(reply)

    def stream(self, inference: Inference) -> Iterator[InferResult]:
        """An answer's pieces as they come; leaving the loop ends the request."""
        from penstock.serving.proto import oip_pb2 as pb

        call = self._opened().stream_stream(
            f"{_SERVICE}/ModelStreamInfer", _raw, pb.ModelStreamInferResponse.FromString
        )
        with _told(self._address):
            pieces = call(iter([inference.message()]), timeout=inference.timeout_s, metadata=_metadata(self._address))
            try:
                for piece in pieces:
                    result, is_last = _of_piece(piece)
                    yield result
                    if is_last:
                        return
            finally:
                pieces.cancel()

    def _opened(self) -> Any:
        with self._lock:
            if self._channel is None:
                address = self._address
                if address.is_tls:
                    self._channel = grpc.secure_channel(_target(address), _credentials(address), _OPTIONS)
                else:
                    self._channel = grpc.insecure_channel(_target(address), _OPTIONS)
            return self._channel

    def close(self) -> None:
        """Close the connection; what is asked later opens another."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


class AsyncChannel:
    """gRPC for one event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._channel: Any = None

    async def ask(self, rpc: Rpc, retries: Retries) -> Any:
        """The reply, read; ServiceError."""
        call = self._opened().unary_unary(f"{_SERVICE}/{rpc.method}", _raw, rpc.reply.FromString)
        with _told(self._address):
            reply = await call(rpc.message, timeout=retries.patience_s(), metadata=_metadata(self._address))
        return rpc.read(reply)

    async def stream(self, inference: Inference) -> AsyncIterator[InferResult]:
        """An answer's pieces as they come; closing the iterator ends the request."""
        from penstock.serving.proto import oip_pb2 as pb

        call = self._opened().stream_stream(
            f"{_SERVICE}/ModelStreamInfer", _raw, pb.ModelStreamInferResponse.FromString
        )
        with _told(self._address):
            pieces = call(timeout=inference.timeout_s, metadata=_metadata(self._address))
            try:
                await pieces.write(inference.message())
                await pieces.done_writing()
                async for piece in pieces:
                    result, is_last = _of_piece(piece)
                    yield result
                    if is_last:
                        return
            finally:
                pieces.cancel()

    def _opened(self) -> Any:
        if self._channel is None:
            address = self._address
            if address.is_tls:
                self._channel = grpc.aio.secure_channel(_target(address), _credentials(address), _OPTIONS)
            else:
                self._channel = grpc.aio.insecure_channel(_target(address), _OPTIONS)
        return self._channel

    async def close(self) -> None:
        """Close the connection; what is asked later opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
