"""One HTTP request, and the two kinds of responses: a whole body, and a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import os
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from penstock.api_errors import RefusalError
from penstock.llm.backend import known_card

if TYPE_CHECKING:
    from penstock.llm.backend import Backend, Models
    from penstock.serving.metrics import Metrics
    from penstock.serving.request_trace import RequestTrace
    from penstock.serving.settings import GatewaySettings
    from penstock.tensors import Methods

__all__ = [
    "DIRECT_BODY",
    "DONE",
    "Body",
    "Call",
    "Events",
    "Headers",
    "Message",
    "Receive",
    "Reply",
    "Scope",
    "Send",
    "json_reply",
    "quoted",
    "rest_of",
]

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]

encoded: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # encodes a value as JSON
quoted: Final = json.encoder.encode_basestring_ascii  # encodes a string as JSON, in C
DONE: Final = b"data: [DONE]\n\n"
DIRECT_BODY: Final = "penstock.body"
FIXED_HEADERS: Final[Headers] = [
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


_ID_BYTES: Final = 12
_ids: list[str] = []


def new_id() -> str:
    """Return a new request id: 24 random hexadecimal digits.  Random bytes are read for 100 ids at a time."""
    if not _ids:
        digits = os.urandom(_ID_BYTES * 100).hex()
        _ids.extend(digits[at : at + 2 * _ID_BYTES] for at in range(0, len(digits), 2 * _ID_BYTES))
    return _ids.pop()


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
    """An admitted request: its ``body`` as the struct of its operation, the variable parts of its path, and ``send``.

    ``origin``: the allowed Origin of a page of another host, or "".  ``facts``: fields for the log line.  ``is_gone``:
    the client has disconnected.  ``trace``: set if tracing is on.  ``body_now``: the direct way to write the response,
    if the server offers it.  ``data``: the raw body, for operations that parse it themselves.  ``headers``: all request
    headers by name.  ``methods``: the servables, if there are any.  ``client``: the client that the request is
    accounted to (``Admission.client_of``).
    """

    request_id: str
    path_values: Mapping[str, str]
    body: Any
    models: Models
    settings: GatewaySettings
    metrics: Metrics
    send: Send
    arrived: float = field(default_factory=time.perf_counter)
    facts: dict[str, Any] = field(default_factory=dict)
    has_begun: bool = False
    is_gone: bool = False
    origin: str = ""
    trace: RequestTrace | None = None
    body_now: Body | None = None
    data: bytes = b""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    methods: Methods | None = None
    client: str = ""

    @property
    def timeout_s(self) -> float:
        """The time limit of the request in seconds: the body's, but at most ``request_s``."""
        most = self.settings.limits.request_s
        return min(getattr(self.body, "timeout_s", None) or most, most)

    def model(self, name: str | None) -> Backend:
        """Return the model of a name, or the only model if there is no name."""
        if self.models.is_draining:
            raise RefusalError(503, "The service is stopping.", code="draining")
        if name is None:
            known = self.models.list()
            # A model in its first load does not count: the load may fail.
            served = [one for one in known if known_card(one) is not None] or known
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
        return any(one.is_ready for one in self.models.list()) or any(one.is_ready for one in methods)

    def fixed(self) -> Headers:
        """Return the headers that each response has."""
        if not self.origin:
            return FIXED_HEADERS
        return [*FIXED_HEADERS, (b"access-control-allow-origin", self.origin.encode()), (b"vary", b"Origin")]

    async def reply(self, reply: Reply) -> None:
        """Send a whole response."""
        headers = [
            (b"content-type", reply.content_type),
            (b"content-length", b"%d" % len(reply.body)),
            (b"x-request-id", self.request_id.encode()),
            *self.fixed(),
            *reply.headers,
        ]
        self.has_begun = True
        body = self.body_now
        if body is not None and body.whole(reply.status, headers, reply.body):
            return
        with nullcontext() if body is None else body.together():
            await self.write({"type": "http.response.start", "status": reply.status, "headers": headers})
            await self.write({"type": "http.response.body", "body": reply.body})

    async def write(self, message: Message) -> None:
        """Send a message; a client that reads nothing of it for ``write_s`` is treated as disconnected."""
        sending = self.send(message)
        try:
            waits_for = sending.send(None)  # this nearly always completes, so that no timeout has to be set up
        except StopIteration:
            return
        try:
            async with asyncio.timeout(self.settings.limits.write_s):
                await rest_of(sending, waits_for)
        except TimeoutError:
            self.is_gone = True
            self.facts["gone"] = "slow reader"
            if self.body_now is not None:
                self.body_now.break_off()
            raise asyncio.CancelledError from None


@types.coroutine
def rest_of(begun: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Await the rest of a coroutine that was started with ``send(None)`` and yielded ``waits_for``."""
    while True:
        try:
            answer = yield waits_for
        except BaseException as error:
            act = partial(begun.throw, error)
        else:
            act = partial(begun.send, answer)
        try:
            waits_for = act()
        except StopIteration as done:
            result: T = done.value
            return result


class Body(Protocol):
    """Writes a response without ASGI: ``DIRECT_BODY`` of a scope, if the server offers it."""

    on_gone: Callable[[], None] | None
    """Called when the client disconnects before the end of the response."""

    @property
    def is_gone(self) -> bool:
        """True if the client has disconnected."""

    def whole(self, status: int, headers: Headers, body: bytes) -> bool:
        """Write a whole response; return False, with nothing written, if that would block or the client is gone."""

    def together(self) -> AbstractContextManager[None]:
        """Combine all writes inside the context into one."""

    def break_off(self) -> None:
        """Close the connection in the middle of the response; unread data is dropped."""

    @property
    def is_free(self) -> bool:
        """True if a chunk can be written now without waiting for the client."""

    def write(self, piece: bytes) -> None:
        """Write a chunk behind those that were written before."""


class Events:
    """A stream of server-sent events.  The response begins with the first event, so an earlier error has a status."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._body = call.body_now

    def write_now(self, make: Callable[[], bytes]) -> bool:
        """Send the events that ``make`` returns, without waiting.

        Returns False, without calling ``make``, if the response has not begun, the client is slow to read, or the
        server offers only ASGI.
        """
        body = self._body
        if body is None or not self._call.has_begun or not body.is_free:
            return False
        events = make()
        if events:
            body.write(events)
        return True

    async def write(self, events: bytes) -> None:
        """Send encoded events, each with ``data: `` and the empty line; empty bytes send nothing."""
        if not events:
            return
        call = self._call
        if not call.has_begun:
            call.has_begun = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"x-request-id", call.request_id.encode()),
                (b"x-accel-buffering", b"no"),
                *call.fixed(),
            ]
            await call.write({"type": "http.response.start", "status": 200, "headers": headers})
        await call.write({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, last: bytes = DONE) -> None:
        """Send the last events and end the response."""
        await self.write(last)
        await self._call.write({"type": "http.response.body", "body": b""})
