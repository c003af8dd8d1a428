"""The gRPC gateway of the service: it checks each RPC before a method handles it.

The order of checks is: the metadata's size, Origin, the key, the number of open requests, the admin key, the room in
the queues, the message's arrival time, size and fields.  All methods go through ``GrpcGateway``, including unknown
ones.  The decisions that are not specific to gRPC are those of ``penstock.serving.admission``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import DecodeError

from penstock.api_errors import MAX_MESSAGE_CHARS, RefusalError, grpc_code
from penstock.serving.admission import Admission, check_single
from penstock.serving.call import Call
from penstock.serving.grpc.compression import encoding_of, unpacked
from penstock.serving.grpc.message_bounds import BadMessageError, check_fields
from penstock.serving.grpc.send_budget import SendBudget
from penstock.serving.json_bounds import LARGE_BODY, decode
from penstock.serving.operations import GRPC

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KEY_HINT", "GoneError", "GrpcCall", "GrpcGateway", "GrpcMethod", "Outcome", "trailers_of"]

_OPEN_MESSAGE: Final = 1 << 10
_MAX_KEYLESS: Final = 16
"""The most messages that are read at a time from clients without a key: each may be large until it was received."""
KEY_HINT: Final = "Send the metadata `authorization: Bearer KEY`."


class GoneError(Exception):
    """Raised when the client has disconnected or does not read."""


@dataclass(frozen=True)
class GrpcMethod:
    """One method: its path, the type of its request, and its handler.

    ``run`` returns the response message.  ``is_stream``: ``run`` reads messages and writes responses itself.
    ``is_many``: ``run`` only writes responses itself.  ``is_open``: needs no key.  ``is_work``: counts as an open
    request.  ``is_admin``: needs an admin key.
    """

    path: str
    request: Any
    run: Callable[[GrpcCall], Awaitable[Any]]
    is_stream: bool = False
    is_many: bool = False
    is_open: bool = False
    is_work: bool = False
    is_admin: bool = False

    @property
    def method(self) -> str:
        """``GRPC``."""
        return GRPC

    @property
    def name(self) -> str:
        """The equal HTTP operation if the method runs a model; "" for other methods, which have no spans."""
        return "infer" if self.is_work else ""

    @property
    def is_counted(self) -> bool:
        """True if a call counts as an open request, as those that run a model do; a watched stream does not."""
        return self.is_work

    @property
    def is_probe(self) -> bool:
        """True for a method that neither runs a model nor changes the loaded models."""
        return not (self.is_work or self.is_admin)


@dataclass
class Outcome:
    """The end of a request: a status of the table of errors, 200, or 499 for a client that disconnected."""

    status: int = 499
    refusal: RefusalError | None = None


@dataclass
class GrpcCall:
    """An RPC, or a request of a stream.  ``request`` is what code that is independent of gRPC sees of it."""

    gateway: GrpcGateway
    method: GrpcMethod
    context: Any
    request: Call
    message: Any = None

    @property
    def is_known(self) -> bool:
        """True if the client has a valid key, or none is needed."""
        return self.gateway.admission.is_known(self.request)

    async def next(self) -> bytes | None:
        """Read the next message; None after the last message and when the service stops."""
        reading = asyncio.ensure_future(self.read())
        stopping = asyncio.ensure_future(self.gateway.stopping.wait())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            stopping.cancel()

    async def read(self) -> bytes | None:
        """Read the client's next message; None after the last.  Raises GoneError if the RPC is over."""
        try:
            data = await self.context.read()
        except grpc.aio.BaseError as error:
            raise GoneError(str(error)) from error
        return None if data is grpc.aio.EOF else bytes(data)

    async def write(self, message: Any) -> None:
        """Send a message.  Raises GoneError if the RPC is over, or if the client reads nothing for ``write_s``."""
        try:
            async with asyncio.timeout(self.gateway.limits.write_s):
                await self.context.write(message.SerializeToString())
        except TimeoutError:
            raise self._slow_reader() from None
        except grpc.aio.BaseError as error:
            raise GoneError(str(error)) from error

    async def whole(self, message: Any) -> bytes:
        """Return the bytes of the only response, which gRPC sends when the method returns.

        Raises GoneError if the send budget has no room for ``write_s``.
        """
        data: bytes = message.SerializeToString()
        try:
            await self.gateway.send_budget.add(len(data), self.gateway.limits.write_s)
        except TimeoutError:
            raise self._slow_reader() from None
        return data

    def _slow_reader(self) -> GoneError:
        self.request.facts["gone"] = "slow reader"
        return GoneError("slow reader")

    async def parsed(self, data: bytes) -> Any:
        """Parse a message of the method's type, compressed or not.  Raises RefusalError for invalid bytes."""
        most = _OPEN_MESSAGE if self.method.is_open else self.gateway.limits.body_bytes
        num_bytes = LARGE_BODY if encoding_of(data) else len(data)

        def parse() -> Any:
            try:
                message = unpacked(data, most)
                check_fields(message, self.method.request.DESCRIPTOR)
                return self.method.request.FromString(message)
            except (BadMessageError, DecodeError) as error:
                text = f"Invalid {self.method.request.DESCRIPTOR.name} message: {error}"
                raise RefusalError(400, text, code="invalid_message") from None

        return await decode(num_bytes, parse)


class GrpcGateway(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Runs the methods of the RPCs that ``admission`` lets in."""

    def __init__(self, admission: Admission, methods: Sequence[GrpcMethod]) -> None:
        self.admission, self.limits = admission, admission.settings.limits
        self.stopping = asyncio.Event()
        """Set when idle streams should end."""
        self.num_asked = 0
        """The number of RPCs that gRPC has passed to this gateway."""
        self.send_budget = SendBudget()
        self._methods = {method.path: method for method in methods}
        self._streamed = {path: self._handler(method) for path, method in self._methods.items()}
        whole = {path: method for path, method in self._methods.items() if not (method.is_stream or method.is_many)}
        self._whole = {path: self._handler(method, is_whole=True) for path, method in whole.items()}
        self._num_keyless = 0

    def service(self, details: Any) -> Any:
        """Return gRPC's handler for a method; unknown methods have one, too, which refuses them.

        A single response goes out together with its status, unless slow clients have used up the send budget.  Then it
        is written first, with a timeout of its own.
        """
        self.num_asked += 1
        whole = self._whole.get(details.method)
        if whole is not None and self.send_budget.has_room:
            return whole
        return self._streamed.get(details.method) or self._handler(_unknown(details.method))

    def _handler(self, method: GrpcMethod, is_whole: bool = False) -> Any:
        if is_whole:

            async def answer(_requests: Any, context: Any) -> bytes:
                return await self._serve(method, context, is_whole=True)

            return grpc.stream_unary_rpc_method_handler(answer)

        async def write(_requests: Any, context: Any) -> None:
            await self._serve(method, context)

        return grpc.stream_stream_rpc_method_handler(write)

    async def _serve(self, method: GrpcMethod, context: Any, is_whole: bool = False) -> bytes:
        """Handle an RPC; return the bytes of the response that gRPC still has to send if ``is_whole``."""
        metadata = [(_bytes(key), _bytes(value)) for key, value in context.invocation_metadata() or ()]
        call = self.begin(method, context, dict(metadata))
        outcome, response = Outcome(), b""
        try:
            with self.counted(outcome, call):
                self._let_in(call, metadata)
                if not method.is_stream:
                    call.message = await call.parsed(await self._read(call))
                reply = await method.run(call)
                if is_whole:
                    response = await call.whole(reply)
                elif reply is not None:
                    await call.write(reply)
        except asyncio.CancelledError:
            if call.request.facts.get("gone") == "slow reader":  # gRPC would keep an RPC without a status
                with suppress(TimeoutError, grpc.aio.BaseError):
                    async with asyncio.timeout(1):
                        await context.abort(grpc.StatusCode.ABORTED, "The client did not read the response in time.")
            raise
        context.set_trailing_metadata(trailers_of(call.request.request_id, outcome.refusal))
        if outcome.refusal is not None:  # not ``abort``: its exception would hold the request until a collection
            context.set_code(getattr(grpc.StatusCode, grpc_code(outcome.status)))
            context.set_details(str(outcome.refusal)[:MAX_MESSAGE_CHARS])
        return response

    def begin(self, method: GrpcMethod, context: Any, headers: Mapping[bytes, bytes], request_id: str = "") -> GrpcCall:
        """Return a new RPC, or with ``request_id`` a new request of a stream; ``counted`` must close it."""

        def remaining_s() -> float:
            seconds = context.time_remaining()
            return math.inf if seconds is None else float(seconds)

        address = _host_of(context.peer())
        request = self.admission.begin(headers, address, request_id=request_id, remaining_s=remaining_s)
        return GrpcCall(self, method, context, request)

    @contextmanager
    def counted(self, outcome: Outcome, call: GrpcCall) -> Iterator[None]:
        """Record how the block ends: in ``outcome``, the metrics and the log."""
        try:
            yield
            outcome.status = 200
        except GoneError:
            raise asyncio.CancelledError from None
        except asyncio.CancelledError as error:
            cancellation = self.admission.internal_cancellation(call.request, error)
            if cancellation is not None:
                self._refuse(outcome, call, cancellation)
            else:
                if call.request.remaining_s() <= 0:
                    outcome.status = 504
                raise
        except Exception as error:
            self._refuse(outcome, call, error)
        finally:
            path = call.method.path
            self.admission.end(call.request, call.method if path in self._methods else None, GRPC, path, outcome.status)

    def _refuse(self, outcome: Outcome, call: GrpcCall, error: Exception) -> None:
        outcome.refusal = refusal = self.admission.refusal(call.request, error)
        outcome.status = refusal.status
        refusal.__traceback__ = refusal.__context__ = None  # else error, frames and outcome would be a reference cycle

    def _let_in(self, call: GrpcCall, metadata: Sequence[tuple[bytes, bytes]]) -> None:
        """Make all checks that do not need the message."""
        request, admission = call.request, self.admission
        if len(metadata) > self.limits.num_headers:
            text = f"The metadata has more than {self.limits.num_headers} entries."
            raise RefusalError(431, text, code="too_many_headers")
        check_single(metadata, request.headers, (b"authorization", b"origin"), "metadata key")
        admission.check_origin(request)
        if not call.method.is_open:
            admission.check_key(request, KEY_HINT)
        admission.admit(request, call.method)

    @contextmanager
    def _keyless(self) -> Iterator[None]:
        if self._num_keyless >= _MAX_KEYLESS:
            raise RefusalError(429, "Too many requests without a key. Retry later.", code="too_many_requests")
        self._num_keyless += 1
        try:
            yield
        finally:
            self._num_keyless -= 1

    async def _read(self, call: GrpcCall) -> bytes:
        """Read the only message of a method."""
        try:
            with nullcontext() if call.is_known else self._keyless():
                async with asyncio.timeout(self.limits.body_s):
                    data = await call.read()
        except TimeoutError:
            message = f"The message did not arrive within {self.limits.body_s:g} s."
            raise RefusalError(408, message, code="body_too_slow") from None
        if call.method.is_open and len(data or b"") > _OPEN_MESSAGE:  # anyone may send it
            raise RefusalError(413, f"The message has more than {_OPEN_MESSAGE} bytes.", code="body_too_large")
        if data is None:
            raise RefusalError(400, "The request message is missing.", code="missing_required_parameter")
        return data


def trailers_of(request_id: str, refusal: RefusalError | None) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata: the request's id, and for an error what HTTP has in its headers and body."""
    trailers = [("x-request-id", request_id)]
    if refusal is not None:
        trailers += [(name.decode(), value.decode()) for name, value in refusal.headers if name == b"retry-after"]
        for name, text in (("error-code", refusal.code), ("error-param", refusal.param)):
            if text:
                trailers.append((name, ascii(text)[1:-1]))
    return tuple(trailers)


def _unknown(path: str) -> GrpcMethod:
    async def refuse(call: GrpcCall) -> None:
        raise RefusalError(405, "Unknown method. Server reflection lists all methods.", code="unknown_method")

    return GrpcMethod(path, None, refuse, is_stream=True)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "replace")


def _host_of(peer: str) -> str:
    """Return the address in "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000"."""
    return peer.partition(":")[2].rpartition(":")[0].replace("%5B", "").replace("%5D", "")
