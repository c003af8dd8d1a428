"""One HTTP request, and the two kinds of responses: a whole body, and a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.api_errors import RefusalError
from penstock.errors import NotFoundError
from penstock.llm.backend import known_card

if TYPE_CHECKING:
    from penstock.llm.backend import Backend, Models
    from penstock.serving.metrics import Metrics
    from penstock.serving.request_trace import RequestTrace
    from penstock.serving.settings import GatewaySettings
    from penstock.tensors import Methods

__all__ = [
    "DONE",
    "SINK",
    "Call",
    "Events",
    "Headers",
    "Message",
    "Receive",
    "Reply",
    "ResponseSink",
    "Scope",
    "Send",
    "json_reply",
    "new_id",
    "quoted",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]

encoded: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # encodes a value as JSON
quoted: Final = json.encoder.encode_basestring_ascii  # encodes a string as JSON, in C
DONE: Final = b"data: [DONE]\n\n"
SINK: Final = "penstock.sink"
"""The key of the ResponseSink in the scope of a request."""
FIXED_HEADERS: Final[Headers] = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_CORS_HEADERS: Final[Headers] = [
    (b"access-control-expose-headers", b"x-request-id, retry-after"),
    (b"vary", b"Origin"),
]


def new_id() -> str:
    """Return a new request id: 24 random hexadecimal digits."""
    return os.urandom(12).hex()


@dataclass(frozen=True)
class Reply:
    """A whole response."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = field(default_factory=list)


def json_reply(value: Any) -> Reply:
    """Return a response with status 200 and a value as JSON."""
    return Reply(200, encoded(value).encode())


@dataclass
class Call:
    """An admitted request: its ``body`` as the struct of its operation, and the variable parts of its path.

    ``origin``: the allowed Origin of a page of another host, or "".  ``facts``: fields for the log line.  ``is_gone``:
    the client has disconnected.  ``trace``: set if tracing is on.  ``sink``: where an HTTP response is written.
    ``data``: the raw body, for operations that parse it themselves.  ``headers``: all request
    headers by name.  ``methods``: the servables, if there are any.  ``client``: the client that the request is
    accounted to (``ApiKeys.client_of``).  ``address``: the client's.  ``is_known``: whether the client has a valid key;
    None until someone asks ``Admission.is_known``.  ``is_counted``: it counts as an open request.  ``remaining_s``:
    returns the seconds until the client's own deadline.
    """

    request_id: str
    path_values: Mapping[str, str]
    body: Any
    models: Models
    settings: GatewaySettings
    metrics: Metrics
    sink: ResponseSink | None = None
    arrived: float = field(default_factory=time.perf_counter)
    facts: dict[str, Any] = field(default_factory=dict)
    has_begun: bool = False
    is_gone: bool = False
    origin: str = ""
    trace: RequestTrace | None = None
    data: bytes = b""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    methods: Methods | None = None
    client: str = ""
    address: str = ""
    is_known: bool | None = None
    is_counted: bool = False
    remaining_s: Callable[[], float] = lambda: math.inf

    def model(self, name: str | None) -> Backend:
        """Return the model of a name, or the only model if there is no name."""
        if self.models.is_draining:
            raise RefusalError(503, "The service is stopping.", code="draining")
        if name is None:
            models = self.models.list()
            # A model in its first load does not count: the load may fail.
            served = [model for model in models if known_card(model) is not None] or models
            if not served:
                raise NotFoundError("This service has no language models.")
            if len(served) != 1:
                raise RefusalError(
                    400,
                    "model: missing, and several models are served. /v1/models lists their names.",
                    param="model",
                    code="missing_required_parameter",
                )
            backend = served[0]
        else:
            backend = self.models.get(name)
        self.facts["model"] = backend.name
        user = getattr(self.body, "user", None)
        if user is not None:
            self.facts["user"] = user
        return backend

    def is_ready(self) -> bool:
        """Return True if a model or a servable accepts requests."""
        if self.models.is_draining:
            return False
        methods = self.methods.list() if self.methods is not None else ()
        return any(model.is_ready for model in self.models.list()) or any(model.is_ready for model in methods)

    def fixed(self) -> Headers:
        """Return the headers that each response has."""
        if not self.origin:
            return FIXED_HEADERS
        return [*FIXED_HEADERS, (b"access-control-allow-origin", self.origin.encode()), *_CORS_HEADERS]

    async def reply(self, reply: Reply) -> None:
        """Send a whole response."""
        length = b"%d" % len(reply.body)
        of_body = [(b"content-type", reply.content_type), (b"content-length", length)]
        headers = [
            *(of_body if reply.status != 204 else ()),  # which has no body (RFC 9110 section 8.6)
            (b"x-request-id", self.request_id.encode()),
            *self.fixed(),
            *reply.headers,
        ]
        sink = await self.ready_sink()
        sink.whole(reply.status, headers, reply.body)
        self.has_begun = True

    async def ready_sink(self) -> ResponseSink:
        """Return the sink once a write need not be kept in memory.

        A client that reads nothing for ``write_s`` is treated as disconnected.
        """
        sink = self.sink
        if sink is None:
            raise RuntimeError("This request has no HTTP response.")
        if sink.is_free or sink.is_gone:
            return sink
        try:
            async with asyncio.timeout(self.settings.limits.write_s):
                await sink.drained()
        except TimeoutError:
            self.is_gone = True
            self.facts["gone"] = "slow reader"
            sink.break_off()
            raise asyncio.CancelledError from None
        return sink


class ResponseSink(Protocol):
    """The destination of a response: a connection of HTTP/1.1.

    Its methods write directly, which saves the messages, coroutines and tasks of ASGI: 16 % of the time and 20 % of the
    processor time of a small request (docs/history/log.md).  Only ``drained`` waits.  After the client has
    disconnected, writes do nothing.
    """

    on_gone: Callable[[], None] | None
    """Called when the client disconnects before the end of the response."""

    @property
    def is_gone(self) -> bool:
        """True if the client has disconnected."""

    @property
    def is_free(self) -> bool:
        """True if a write does not have to wait for the client."""

    async def drained(self) -> None:
        """Wait until a write does not have to wait for the client, or until the client has disconnected."""

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Write a whole response in one piece.  Raises ValueError for a header with a line break."""

    def begin(self, status: int, headers: Headers, data: bytes) -> None:
        """Write the headers of a response of unknown length, and the first piece of its body.  Raises ValueError."""

    def write(self, data: bytes) -> None:
        """Write the next piece of the body."""

    def end(self, data: bytes = b"") -> None:
        """Write the last piece of the body."""

    def break_off(self) -> None:
        """Close the connection in the middle of the response; unread data is dropped."""


class Events:
    """A stream of server-sent events.  The response begins with the first event, so an earlier error has a status."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def write_now(self, make: Callable[[], bytes]) -> bool:
        """Send the events that ``make`` returns, without waiting.

        Returns False, without calling ``make``, if the response has not begun or the client is slow to read.
        """
        call, sink = self._call, self._call.sink
        if sink is None or not call.has_begun or not sink.is_free:
            return False
        events = make()
        if events:
            sink.write(events)
        return True

    async def write(self, events: bytes) -> None:
        """Send encoded events, each with ``data: `` and the empty line; empty bytes send nothing."""
        if not events:
            return
        call = self._call
        sink = await call.ready_sink()
        if call.has_begun:
            sink.write(events)
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"x-request-id", call.request_id.encode()),
            (b"x-accel-buffering", b"no"),
            *call.fixed(),
        ]
        sink.begin(200, headers, events)
        call.has_begun = True

    async def end(self, last: bytes = DONE) -> None:
        """Send the last events and end the response, which has begun."""
        (await self._call.ready_sink()).end(last)
