"""The gateway of the service, an ASGI application: it checks each request before a route handles it.

The order of checks is: Host and Origin, the key, the route, the body's length, type, JSON and fields.  Each response
carries the request's id; each error has OpenAI's format and a status of the table in ``penstock.api_errors``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from penstock.api_errors import RefusalError, refusal_of
from penstock.errors import DeadlineError, QueueFullError
from penstock.llm.backend import Models
from penstock.logs import LOG, note
from penstock.serving.arrivals import Arrivals
from penstock.serving.call import DIRECT_BODY, Call, Message, Receive, Reply, Scope, Send, new_id, rest_of
from penstock.serving.http.compression import inflated
from penstock.serving.json_bounds import decode
from penstock.serving.keys import Admission
from penstock.serving.metrics import Metrics
from penstock.serving.operations import Media, Operation, Routes, is_oip
from penstock.serving.request_decoding import decode_body
from penstock.serving.settings import GatewaySettings

if TYPE_CHECKING:
    from penstock.serving.traces import Traces
    from penstock.tensors import Methods

__all__ = ["LOG", "REQUEST_ID", "Gateway"]

REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_HOST: Final = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]{1,255})|\[(?P<address>[0-9A-Fa-f:.]{2,45})\])(?::[0-9]{0,5})?")
"""A Host header (RFC 9110 section 7.2) without a user, path or zone."""
_GRACE_S: Final = 5.0
_SINGLE_HEADERS: Final = (
    b"host", b"authorization", b"content-type", b"content-length", b"origin", b"content-encoding",
    b"inference-header-content-length",
)  # fmt: skip


class Gateway:
    """Admits requests, decodes their bodies and runs the handlers of their routes.

    ``admission``: the API keys; without it, all clients are admitted.  ``metrics``: the metrics of another gateway of
    the service, to share them.  ``traces``: exports spans of requests.  ``methods``: the servables.  ``arrivals``: is
    notified of connections.
    """

    def __init__(
        self,
        routes: Routes,
        models: Models,
        settings: GatewaySettings,
        admission: Admission | None = None,
        metrics: Metrics | None = None,
        traces: Traces | None = None,
        arrivals: Arrivals | None = None,
        methods: Methods | None = None,
    ) -> None:
        self.arrivals = arrivals or Arrivals()
        self.routes, self.models, self.settings = routes, models, settings
        self.metrics = metrics or Metrics(models)
        self.num_open = 0
        self.admission, self.traces, self.methods = admission or Admission(), traces, methods
        self._hosts = frozenset(name.lower() for name in settings.allowed_hosts)
        self.origins = frozenset(settings.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"Unsupported protocol: {scope['type']}. This server accepts HTTP only.")
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else new_id()
        call = Call(request_id, {}, {}, self.models, self.settings, self.metrics, send)
        call.body_now = scope.pop(DIRECT_BODY, None)  # popped, to avoid a reference cycle with the scope
        call.headers, call.methods = headers, self.methods
        call.client = self.admission.client_of(headers.get(b"authorization"), (scope.get("client") or ("",))[0])
        if self.traces is not None:
            call.trace = self.traces.begin(headers)
        operation, status = None, 499  # the status if there is no response: the client left, or the service stops
        self.num_open += 1
        try:
            try:
                operation = self._let_in(call, scope, headers)
                await self._read(operation, call, receive)
                status = await self._run(operation, call, receive)
            except Exception as error:
                status = await self._refuse(call, error, is_oip(scope["path"]))
        except asyncio.CancelledError:
            if not call.is_gone:
                raise
        finally:
            self.num_open -= 1
            self._note(call, operation, scope, status)

    def _let_in(self, call: Call, scope: Scope, headers: Mapping[bytes, bytes]) -> Operation:
        """Return the requested operation after all checks that do not need the body."""
        call.origin = self._check_host(scope, headers)
        path = scope["path"]
        methods, call.path_values = self.routes.find(path)
        operation = methods.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if call.origin and scope["method"] == "OPTIONS" and methods:
            return _preflight(path, methods)
        is_open = operation is not None and operation.is_open
        authorization = headers.get(b"authorization")
        if not is_open and not self.admission.lets_in(authorization):
            raise RefusalError(401, "API key required. Send `Authorization: Bearer KEY`.", code="invalid_api_key")
        if not methods:
            near = self.routes.nearest(path)
            hint = f" Did you mean {near}?" if near else ""
            raise RefusalError(404, f"Unknown route. /openapi.json lists all routes.{hint}", code="unknown_route")
        if operation is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            failure = RefusalError(405, f"Method not allowed. Use {allowed}.", code="method_not_allowed")
            failure.headers.append((b"allow", allowed.encode()))
            raise failure
        if self.num_open > self.settings.limits.num_open and not operation.is_open:
            most = self.settings.limits.num_open
            raise RefusalError(429, f"Too many open requests (limit {most}). Retry later.", code="too_many_requests")
        if operation.is_admin:
            self.admission.check_admin(authorization)
        if operation.is_work:
            self.check_room(call.client)
        return operation

    def check_room(self, client: str) -> None:
        """Raise QueueFullError if every model's queue is full for a client, before the body is read.

        With servables, or with room at any model, the check happens later, when the body has named the model.
        """
        models = self.models.list()
        if not models or self.models.is_draining or any(one.has_room_for(client) for one in models):
            return
        if self.methods is None or not self.methods.list():
            raise QueueFullError("The request queue of every model is full. Retry later.")

    def _check_host(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Refuse requests that web pages of other hosts send: by Host (DNS rebinding) and by Origin (cross-site calls).

        Returns the Origin if it is an allowed origin of another host, else "".
        """
        if len(headers) != len(scope["headers"]):
            names = [name for name, _ in scope["headers"]]
            for single in _SINGLE_HEADERS:
                if names.count(single) < 2:
                    continue
                raise RefusalError(400, f"The header {single.decode()} appears more than once.", code="invalid_header")
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not host:
            raise RefusalError(400, "The Host header is missing.", code="invalid_header")
        name = _name_of(host)
        if not name:
            message = "Malformed Host header. Expected a name or an address, and a port if it is not the default."
            raise RefusalError(400, message, code="invalid_header")
        if self._hosts and name not in self._hosts:
            message = "Host not allowed. The server's --allowed-host option adds names."
            raise RefusalError(403, message, code="host_not_allowed")
        origin = headers.get(b"origin")
        if origin is not None:
            text = origin.decode("latin-1").lower()
            if text in self.origins:
                return text
            if text.partition("://")[2] != host:
                message = "Origin not allowed. The server's --allowed-origin option adds origins."
                raise RefusalError(403, message, code="origin_not_allowed")
        return ""

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
        num_bytes = 0

        def take(message: Message) -> bool:
            """Add a message; return True if more messages follow."""
            nonlocal num_bytes
            if message["type"] == "http.disconnect":
                raise _GoneError
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > limits.body_bytes:
                raise too_large
            return bool(message.get("more_body", False))

        first, is_waiting, more = receive(), True, True
        try:
            waits_for = first.send(None)  # the body is nearly always complete, so that no timeout has to be set up
        except StopIteration as done:
            is_waiting, more = False, take(done.value)
        try:
            if more:
                async with asyncio.timeout(limits.body_s):
                    if is_waiting:
                        more = take(await rest_of(first, waits_for))
                    while more:
                        more = take(await receive())
        except TimeoutError:
            message = f"The body did not arrive within {limits.body_s:g} s."
            raise RefusalError(408, message, code="body_too_slow") from None
        return b"".join(parts)

    async def _run(self, operation: Operation, call: Call, receive: Receive) -> int:
        """Run the handler; it is cancelled if the client disconnects."""
        task, body = asyncio.current_task(), call.body_now

        def gone() -> None:
            call.is_gone = True
            if task is not None:
                task.cancel()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone()

        watcher = None
        if body is None:
            watcher = asyncio.create_task(watch())
        elif body.is_gone:
            raise _GoneError
        else:
            body.on_gone = gone
        seconds = call.timeout_s
        try:
            async with asyncio.timeout(seconds + _GRACE_S):
                reply = await operation.handler(call)
        except DeadlineError:  # the engine's error, which is also a TimeoutError
            raise
        except TimeoutError:
            message = f"timeout: no complete response within {seconds:g} s"
            raise RefusalError(504, message, param="timeout", code="deadline_exceeded") from None
        finally:
            if watcher is not None:
                watcher.cancel()
            if body is not None:
                body.on_gone = None
        if reply is None:
            return 200
        await call.reply(reply)
        return reply.status

    async def _refuse(self, call: Call, error: Exception, is_oip: bool) -> int:
        """Send an error: as a status, or as an event if the response has begun."""
        if isinstance(error, _GoneError):
            call.is_gone = True
            return 499
        failure = refusal_of(error, call.request_id)
        call.facts["error"] = str(error)[:1000]
        if failure.status == 500 and failure is not error:  # the failure of a stage is logged where it happens
            LOG.error("request %s failed", call.request_id, exc_info=error)
        if call.has_begun:
            await call.write(
                {"type": "http.response.body", "body": b"data: " + failure.text(is_oip) + b"\n\n", "more_body": True}
            )
            await call.write({"type": "http.response.body", "body": b""})
            return failure.status
        await call.reply(Reply(failure.status, failure.text(is_oip), headers=failure.headers))
        return failure.status

    def _note(self, call: Call, operation: Operation | None, scope: Scope, status: int) -> None:
        """Count the request and write its log line."""
        seconds = time.perf_counter() - call.arrived
        route = operation.path if operation is not None else "none"
        self.metrics.http(scope["method"], route, status, seconds)
        if self.traces is not None and call.trace is not None and operation is not None:
            self.traces.end(call, call.trace, operation, status)
        level = (
            logging.DEBUG if status == 200 and scope["method"] == "GET" else logging.INFO
        )  # health probes are frequent
        if LOG.isEnabledFor(level):
            client = scope.get("client") or ("", 0)
            line = {
                "request_id": call.request_id,
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(seconds, 6),
                "client": client[0],
                **call.facts,
            }
            note(level, call.request_id, status, line)


def _preflight(path: str, methods: Mapping[str, Operation]) -> Operation:
    """Return the operation that answers a CORS preflight: it needs no key, and lists only the methods of the route."""

    async def answer(call: Call) -> Reply:
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
            (b"access-control-max-age", b"600"),
        ]
        return Reply(204, b"", headers=headers)

    return Operation("OPTIONS", path, "preflight", "", answer, (), is_open=True)


def _encoding(headers: Mapping[bytes, bytes], media: Media) -> str:
    """Return the compression of the body, or ""; raise a 415 error for a type or an encoding that is not accepted."""
    kind, _, rest = headers.get(b"content-type", b"").partition(b";")
    is_known = kind.strip().lower().decode("latin-1") in media.types
    if not is_known or (b"charset" in rest.lower() and b"utf-8" not in rest.lower()):
        known = " or ".join(filter(None, media.types))
        message = f"Unsupported media type. Send JSON in UTF-8 with `Content-Type: {known}`."
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
    found = _HOST.fullmatch(host)
    return "" if found is None else found["name"] or found["address"]
