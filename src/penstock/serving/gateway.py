"""The gateway of the service, an ASGI application: it checks each request before a route handles it.

The order of checks is: Host and Origin, the key, the route, the number of open requests, the admin key, the room in the
queues, the body's length, type, JSON and fields.  The decisions that are not specific to HTTP are those of
``penstock.serving.admission``.  Each response carries the request's id; each error has OpenAI's format and a status of
the table in ``penstock.api_errors``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Final

from penstock.api_errors import RefusalError
from penstock.serving.admission import Admission, check_single, deadline_s, within
from penstock.serving.arrivals import Arrivals
from penstock.serving.call import SINK, Call, Receive, Reply, ResponseSink, Scope, Send
from penstock.serving.http.compression import inflated
from penstock.serving.json_bounds import decode
from penstock.serving.operations import Media, Operation, Routes, is_oip
from penstock.serving.request_decoding import decode_body

__all__ = ["Gateway"]

_HOST: Final = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]{1,255})|\[(?P<address>[0-9A-Fa-f:.]{2,45})\])(?::[0-9]{0,5})?")
"""A Host header (RFC 9110 section 7.2) without a user, path or zone."""
_HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_HEALTH: Final = frozenset({"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"})
"""Health checks, whose clients may speak HTTP/1.0."""
_MAPPED: Final = "::ffff:"
"""The prefix of the address of an IPv4 client of a socket for both families."""
_SINGLE_HEADERS: Final = (
    b"host", b"authorization", b"content-type", b"content-length", b"origin", b"content-encoding",
    b"inference-header-content-length",
)  # fmt: skip


class Gateway:
    """Routes HTTP requests: ``admission`` decides which are served, handlers of ``routes`` answer their decoded bodies.

    ``arrivals``: is notified of connections.
    """

    def __init__(self, routes: Routes, admission: Admission, arrivals: Arrivals | None = None) -> None:
        self.routes, self.admission, self.settings = routes, admission, admission.settings
        self.arrivals = arrivals or Arrivals()
        self._hosts = frozenset(name.lower() for name in self.settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"Unsupported protocol: {scope['type']}. This server accepts HTTP only.")
        headers = dict(scope["headers"])
        sink = scope.pop(SINK)  # popped, to avoid a reference cycle with the scope
        address = (scope.get("client") or ("",))[0].removeprefix(_MAPPED)
        call = self.admission.begin(headers, address, sink)
        operation, status = None, 499  # the status if there is no response: the client left, or the service stops
        try:
            try:
                operation = self._let_in(call, scope)
                await self._read(operation, call, receive)
                status = await self._run(operation, call, sink)
            except asyncio.CancelledError as error:
                cancellation = None if call.is_gone else self.admission.internal_cancellation(call, error)
                if cancellation is None:
                    raise
                status = await self._refuse(call, cancellation, is_oip(scope["path"]))
            except Exception as error:
                status = await self._refuse(call, error, is_oip(scope["path"]))
        except asyncio.CancelledError:
            if not call.is_gone:  # the service ends at once: uvicorn would log a traceback of the cancellation
                sink.break_off()
        finally:
            self.admission.end(call, operation, scope["method"], scope["path"], status)

    def _let_in(self, call: Call, scope: Scope) -> Operation:
        """Return the requested operation after all checks that do not need the body."""
        path = scope["path"]
        methods, call.path_values = self.routes.find(path)
        operation = methods.get("GET" if scope["method"] == "HEAD" else scope["method"])
        is_question = scope["method"] == "OPTIONS" and bool(methods)
        self.admission.check_origin(call, self._checked_host(call, scope, path in _HEALTH or is_question))
        if is_question:
            return _preflight(methods, call.headers.get(b"access-control-request-headers", b""))
        if operation is None or not operation.is_open:
            self.admission.check_key(call)
        if not methods:
            message = f"Unknown route. {self.routes.hint(path)}".rstrip()
            raise RefusalError(404, f"{message} /docs and /openapi.json list all routes.", code="unknown_route")
        if operation is None:
            allowed = _allowed(methods)
            failure = RefusalError(405, f"Method not allowed. Use {allowed}.", code="method_not_allowed")
            failure.headers.append((b"allow", allowed.encode()))
            raise failure
        self.admission.admit(call, operation)
        return operation

    def _checked_host(self, call: Call, scope: Scope, is_health: bool) -> str:
        """Return the Host header in lower case; refuse a name that is not the server's (DNS rebinding).

        HTTP/1.0 has no Host header.  No browser sends such a request; yet only a health check may omit the name where
        names are checked.
        """
        check_single(scope["headers"], call.headers, _SINGLE_HEADERS, "header")
        host = call.headers.get(b"host", b"").decode("latin-1").lower()
        if not host and scope["http_version"] == "1.0" and (is_health or not self._hosts):
            return ""
        if not host:
            raise RefusalError(400, "The Host header is missing.", code="invalid_header")
        name = _name_of(host)
        if not name:
            message = "Malformed Host header. Expected a name or an address, and a port if it is not the default."
            raise RefusalError(400, message, code="invalid_header")
        if self._hosts and name not in self._hosts:
            message = "Host not allowed. The server's --allowed-host option adds names."
            raise RefusalError(403, message, code="host_not_allowed")
        return host

    async def _read(self, operation: Operation, call: Call, receive: Receive) -> None:
        """Read and decode the body; keep only its bytes if the operation decodes it itself."""
        body, media = operation.body, operation.media
        if body is None:
            return
        encoding = _encoding(call.headers, media)
        data = await self._collect(call.headers, receive)
        if encoding:
            data = await asyncio.to_thread(inflated, data, encoding, self.settings.limits.body_bytes)
        if media.is_raw:
            call.data = data
            return
        if media.is_optional and not data:
            data = b"{}"
        call.body = await decode(len(data), lambda: decode_body(data, body))

    async def _collect(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        limits = self.settings.limits
        too_large = RefusalError(413, f"The body has more than {limits.body_bytes} bytes.", code="body_too_large")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limits.body_bytes:
            raise too_large
        parts: list[bytes] = []
        num_bytes, more = 0, True
        try:
            async with asyncio.timeout(limits.body_s):
                while more:
                    received = await receive()
                    if received["type"] == "http.disconnect":
                        raise _GoneError
                    parts.append(received.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > limits.body_bytes:
                        raise too_large
                    more = bool(received.get("more_body", False))
        except TimeoutError:
            message = f"The body did not arrive within {limits.body_s:g} s."
            raise RefusalError(408, message, code="body_too_slow") from None
        return b"".join(parts)

    async def _run(self, operation: Operation, call: Call, sink: ResponseSink) -> int:
        """Run the handler; it is cancelled if the client disconnects."""
        task = asyncio.current_task()

        def gone() -> None:
            call.is_gone = True
            if task is not None:
                task.cancel()

        if sink.is_gone:
            raise _GoneError
        sink.on_gone = gone
        try:
            reply = await within(deadline_s(call, getattr(call.body, "timeout_s", None)), operation.handler(call))
        finally:
            sink.on_gone = None
        if reply is None:
            return 200
        await call.reply(reply)
        return reply.status

    async def _refuse(self, call: Call, error: Exception, is_oip: bool) -> int:
        """Send an error: as a status, or as an event if the response has begun."""
        if isinstance(error, _GoneError):
            call.is_gone = True
            return 499
        failure = self.admission.refusal(call, error)
        if call.has_begun:
            (await call.ready_sink()).end(b"data: " + failure.text(is_oip) + b"\n\n")
            return failure.status
        await call.reply(Reply(failure.status, failure.text(is_oip), headers=failure.headers))
        return failure.status


def _allowed(methods: Mapping[str, Operation]) -> str:
    return ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])


def _preflight(methods: Mapping[str, Operation], names: bytes) -> Operation:
    """Return the operation that answers OPTIONS: it needs no key, and lists only the methods of the route.

    With an origin it is a CORS preflight; without one, possibly the health check of a load balancer (RFC 9110, 9.3.7).
    ``names``: the headers that the page wants to send.  All of them are allowed, because the origin is.
    """
    route = next(iter(methods.values())).path  # not the path of the request: metrics have it as a label
    allowed = names if _HEADER_NAMES.fullmatch(names) else b"authorization, content-type, x-request-id"

    async def answer(call: Call) -> Reply:
        if not call.origin:
            return Reply(204, b"", headers=[(b"allow", _allowed(methods).encode())])
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-allow-headers", allowed),
            (b"access-control-max-age", b"600"),
        ]
        return Reply(204, b"", headers=headers)

    return Operation("OPTIONS", route, "preflight", "", answer, (), is_open=True)


def _encoding(headers: Mapping[bytes, bytes], media: Media) -> str:
    """Return the compression of the body, or ""; raise a 415 error for a type or an encoding that is not accepted."""
    kind, _, parameters = headers.get(b"content-type", b"").partition(b";")
    is_known = kind.strip().lower().decode("latin-1") in media.types
    if not is_known or (b"charset" in parameters.lower() and b"utf-8" not in parameters.lower()):
        content_types = " or ".join(filter(None, media.types))
        message = f"Unsupported media type. Send JSON in UTF-8 with `Content-Type: {content_types}`."
        raise RefusalError(415, message, code="unsupported_media_type")
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
    if encoding == "identity":
        return ""
    if encoding not in media.encodings:
        hint = f"Use {' or '.join(media.encodings)}." if media.encodings else "Send the body uncompressed."
        raise RefusalError(415, f"Unsupported Content-Encoding. {hint}", code="unsupported_media_type")
    return encoding


class _GoneError(Exception):
    """Raised when the client disconnects while it sends its request."""


def _name_of(host: str) -> str:
    """Return the name or address in a Host header without port and brackets; empty if the header is malformed."""
    host_match = _HOST.fullmatch(host)
    return "" if host_match is None else host_match["name"] or host_match["address"]
