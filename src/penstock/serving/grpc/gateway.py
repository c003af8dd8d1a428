"""The gRPC gateway of the service: it checks each RPC before a method handles it, like ``penstock.serving.gateway``.

The order of checks is: the metadata's size, Origin, the key, the method, the number of open requests, the message's
arrival time, size and fields.  All methods go through ``GrpcGateway``, including unknown ones.  Keys, limits, counts
and metrics are shared with the HTTP gateway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import DecodeError

from penstock.api_errors import MAX_MESSAGE_CHARS, RefusalError, grpc_code, refusal_of
from penstock.errors import UnavailableError
from penstock.serving.call import Call, new_id
from penstock.serving.gateway import LOG, REQUEST_ID
from penstock.serving.grpc.compression import encoding_of, unpacked
from penstock.serving.grpc.message_bounds import BadMessageError, check_fields
from penstock.serving.grpc.send_budget import SendBudget
from penstock.serving.json_bounds import LARGE_BODY, decode
from penstock.serving.operations import Operation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.serving.gateway import Gateway

__all__ = ["GoneError", "GrpcCall", "GrpcGateway", "Method", "Outcome", "trailers_of"]

_OPEN_MESSAGE: Final = 1 << 10
_MAX_KEYLESS: Final = 16
"""The most messages that are read at a time from clients without a key: each may be large until it was received."""
_NO_DEADLINE_S: Final = 1e9
NO_KEY: Final = "API key required. Send the metadata `authorization: Bearer KEY`."


class GoneError(Exception):
    """Raised when the client has disconnected or does not read."""


@dataclass(frozen=True)
class Method:
    """One method: its full name, the type of its request, and its handler.

    ``run`` returns the response message.  ``is_stream``: ``run`` reads messages and writes responses itself.
    ``is_many``: ``run`` only writes responses itself.  ``is_open``: needs no key.  ``is_work``: counts as an open
    request.  ``is_admin``: needs an admin key.
    """

    name: str
    request: Any
    run: Callable[[GrpcCall], Awaitable[Any]]
    is_stream: bool = False
    is_many: bool = False
    is_open: bool = False
    is_work: bool = False
    is_admin: bool = False


@dataclass
class Outcome:
    """The end of a request: a status of the table of errors, 200, or 499 for a client that disconnected."""

    status: int = 499
    refusal: RefusalError | None = None

    def refuse(self, error: BaseException, call: GrpcCall) -> None:
        """Record that the request ended with an error."""
        self.refusal = refusal_of(error, call.request_id)
        self.status = self.refusal.status
        call.facts["error"] = str(error)[:1000]

    @property
    def code(self) -> str:
        """The name of the gRPC status code."""
        return grpc_code(self.status)


@dataclass
class GrpcCall:
    """An RPC.  ``is_known``: it has a valid key, or none is needed.  ``facts``: fields for the log line."""

    gateway: GrpcGateway
    method: Method
    context: Any
    request_id: str
    headers: Mapping[bytes, bytes]
    is_known: bool
    message: Any = None
    arrived: float = field(default_factory=time.perf_counter)
    facts: dict[str, Any] = field(default_factory=dict)
    asked: Call | None = None

    @property
    def remaining_s(self) -> float:
        """Seconds until the client's deadline; a very large number if it has none."""
        found = self.context.time_remaining()
        return _NO_DEADLINE_S if found is None else float(found)

    @property
    def client(self) -> str:
        """The client that the request is accounted to."""
        address = _host_of(self.context.peer())
        return self.gateway.http.admission.client_of(self.headers.get(b"authorization"), address)

    def request(self, body: dict[str, Any]) -> Call:
        """Return the RPC as a Call, for code that is independent of gRPC."""
        http = self.gateway.http
        call = Call(self.request_id, {}, body, http.models, http.settings, http.metrics, _no_send)
        call.arrived, call.facts, call.methods = self.arrived, self.facts, http.methods
        call.client = self.client
        if http.traces is not None:
            call.trace = http.traces.begin(self.headers)
        self.asked = call
        return call

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
            await self.gateway.untaken.add(len(data), self.gateway.limits.write_s)
        except TimeoutError:
            raise self._slow_reader() from None
        return data

    def _slow_reader(self) -> GoneError:
        self.facts["gone"] = "slow reader"
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
                raise RefusalError(400, f"Invalid {self.method.request.DESCRIPTOR.name} message: {error}") from None

        return await decode(num_bytes, parse)


async def _no_send(message: Any) -> None:
    raise RuntimeError("an RPC cannot send HTTP messages")


class GrpcGateway(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Admits RPCs and runs their methods.  ``http`` is the gateway whose keys, limits, counts and metrics it shares."""

    def __init__(self, http: Gateway, methods: Sequence[Method]) -> None:
        self.http, self.limits = http, http.settings.limits
        self.stopping = asyncio.Event()
        """Set when idle streams should end."""
        self.num_asked = 0
        """The number of RPCs that gRPC has passed to this gateway."""
        self.untaken = SendBudget()
        self._methods = {f"/{one.name}": one for one in methods}
        self._streamed = {path: self._handler(one) for path, one in self._methods.items()}
        whole = {path: one for path, one in self._methods.items() if not (one.is_stream or one.is_many)}
        self._whole = {path: self._handler(one, is_whole=True) for path, one in whole.items()}
        self._num_keyless = 0

    def service(self, details: Any) -> Any:
        """Return gRPC's handler for a method; unknown methods have one, too, which refuses them.

        A single response goes out together with its status, unless slow clients have used up the send budget.  Then it
        is written first, with a timeout of its own.
        """
        self.num_asked += 1
        whole = self._whole.get(details.method)
        if whole is not None and self.untaken.has_room:
            return whole
        return self._streamed.get(details.method) or self._handler(_unknown(details.method))

    def _handler(self, method: Method, is_whole: bool = False) -> Any:
        if is_whole:

            async def answer(_requests: Any, context: Any) -> bytes:
                return await self._serve(method, context, is_whole=True)

            return grpc.stream_unary_rpc_method_handler(answer)

        async def write(_requests: Any, context: Any) -> None:
            await self._serve(method, context)

        return grpc.stream_stream_rpc_method_handler(write)

    async def _serve(self, method: Method, context: Any, is_whole: bool = False) -> bytes:
        """Handle an RPC; return the bytes of the response that gRPC still has to send if ``is_whole``."""
        metadata = [(_bytes(key), _bytes(value)) for key, value in context.invocation_metadata() or ()]
        headers = dict(metadata)
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if given and REQUEST_ID.fullmatch(given) else new_id()
        call = GrpcCall(self, method, context, request_id, headers, self._knows(headers))
        outcome, found = Outcome(), b""
        try:
            with self.counted(outcome, call):
                self._let_in(call, metadata)
                if method.is_work:  # requests of a stream are checked later, because their errors need their ids
                    self.http.check_room(call.client)
                with self.opened() if method.is_work else nullcontext():
                    if not method.is_stream:
                        call.message = await call.parsed(await self._read(call))
                    reply = await method.run(call)
                    if is_whole:
                        found = await call.whole(reply)
                    elif reply is not None:
                        await call.write(reply)
        except asyncio.CancelledError:
            if call.facts.get("gone") == "slow reader":  # gRPC would keep an RPC without a status
                with suppress(TimeoutError, grpc.aio.BaseError):
                    async with asyncio.timeout(1):
                        await context.abort(grpc.StatusCode.ABORTED, "The client did not read the response in time.")
            raise
        context.set_trailing_metadata(trailers_of(request_id, outcome.refusal))
        if outcome.refusal is not None:  # not ``abort``: its exception would hold the request until a collection
            context.set_code(getattr(grpc.StatusCode, outcome.code))
            context.set_details(str(outcome.refusal)[:MAX_MESSAGE_CHARS])
        return found

    @contextmanager
    def counted(self, outcome: Outcome, call: GrpcCall) -> Iterator[None]:
        """Record how the block ends: in ``outcome``, the metrics and the log."""
        try:
            yield
            outcome.status = 200
        except GoneError:
            raise asyncio.CancelledError from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # an inner task was cancelled: the client is still waiting
                outcome.refuse(UnavailableError("The request was cancelled internally. Send it again."), call)
                LOG.error("request %s was cancelled internally", call.request_id, exc_info=error)
            else:
                if call.remaining_s <= 0:
                    outcome.status = 504
                raise
        except Exception as error:
            outcome.refuse(error, call)
            if outcome.status == 500 and outcome.refusal is not error:  # stage failures are logged elsewhere
                LOG.error("request %s failed", call.request_id, exc_info=error)
            if outcome.refusal is not None:  # break the reference cycle of the error, its frames and the outcome
                outcome.refusal.__traceback__ = outcome.refusal.__context__ = None
        finally:
            self._note(call, outcome)

    def _knows(self, headers: Mapping[bytes, bytes]) -> bool:
        return self.http.admission.lets_in(headers.get(b"authorization"))

    def _let_in(self, call: GrpcCall, metadata: Sequence[tuple[bytes, bytes]]) -> None:
        """Make all checks that do not need the message."""
        if len(metadata) > self.limits.num_headers:
            raise RefusalError(431, f"The metadata has more than {self.limits.num_headers} entries.")
        if len(call.headers) != len(metadata):
            names = [name for name, _ in metadata]
            for single in (b"authorization", b"origin"):
                if names.count(single) > 1:
                    raise RefusalError(
                        400, f"The metadata key {single.decode()} appears more than once.", code="invalid_header"
                    )
        origin = call.headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in self.http.origins:
            message = "Origin not allowed. The server's --allowed-origin option adds origins."
            raise RefusalError(403, message, code="origin_not_allowed")
        if not call.is_known and not call.method.is_open:
            raise RefusalError(401, NO_KEY, code="invalid_api_key")
        if call.method.is_admin:
            self.http.admission.check_admin(call.headers.get(b"authorization"))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Count an open request for the duration of the block; raise a 429 error if too many are open."""
        if self.http.num_open >= self.limits.num_open:
            message = f"Too many open requests (limit {self.limits.num_open}). Retry later."
            raise RefusalError(429, message, code="too_many_requests")
        self.http.num_open += 1
        try:
            yield
        finally:
            self.http.num_open -= 1

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

    def _note(self, call: GrpcCall, outcome: Outcome) -> None:
        """Count an RPC, or a request of a stream, and write its log line."""
        seconds = time.perf_counter() - call.arrived
        path = f"/{call.method.name}"
        self.http.metrics.grpc(path if path in self._methods else "none", outcome.code, seconds)
        if self.http.traces is not None and call.method.is_work:
            asked = call.asked or call.request({})
            if asked.trace is not None:
                self.http.traces.end(asked, asked.trace, _operation(path), outcome.status)
        level = logging.INFO if call.method.is_work or outcome.status >= 400 else logging.DEBUG
        if LOG.isEnabledFor(level):
            line = {
                "request_id": call.request_id,
                "method": "gRPC",
                "path": path[:200],
                "status": outcome.status,
                "code": outcome.code,
                "seconds": round(seconds, 6),
                "client": _host_of(call.context.peer()),
                **call.facts,
            }
            LOG.log(level, "%s %s", call.request_id, outcome.code, extra={"facts": line})


def trailers_of(request_id: str, refusal: RefusalError | None) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata: the request's id, and for an error what HTTP has in its headers and body."""
    found = [("x-request-id", request_id)]
    if refusal is not None:
        found += [(name.decode(), value.decode()) for name, value in refusal.headers if name == b"retry-after"]
        for name, text in (("error-code", refusal.code), ("error-param", refusal.param)):
            if text:
                found.append((name, ascii(text)[1:-1]))
    return tuple(found)


def _operation(path: str) -> Operation:
    """Return a method as an Operation, for traces."""

    async def unreachable(call: Call) -> None:
        raise RuntimeError("a gRPC method is not an HTTP route")

    return Operation("gRPC", path, "infer", "", unreachable, ())


def _unknown(path: str) -> Method:
    async def refuse(call: GrpcCall) -> None:
        raise RefusalError(405, "Unknown method. Server reflection lists all methods.", code="unknown_method")

    return Method(path.removeprefix("/"), None, refuse, is_stream=True)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "replace")


def _host_of(peer: str) -> str:
    """Return the address in "ipv4:127.0.0.1:5000" or "ipv6:%5B::1%5D:5000"."""
    return peer.partition(":")[2].rpartition(":")[0].replace("%5B", "").replace("%5D", "")
