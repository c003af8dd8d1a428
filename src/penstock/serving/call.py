"""One HTTP request on its way through the service, and the two kinds of answers: whole, and a stream of events."""

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

encoded: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # a value as JSON
quoted: Final = json.encoder.encode_basestring_ascii  # a text as JSON, in C
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
    """Of a request: 24 random digits of base 16, which the system is asked for by the hundred."""
    if not _ids:
        found = os.urandom(_ID_BYTES * 100).hex()
        _ids.extend(found[at : at + 2 * _ID_BYTES] for at in range(0, len(found), 2 * _ID_BYTES))
    return _ids.pop()


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = field(default_factory=list)


def json_reply(value: Any) -> Reply:
    """200 with a value as JSON."""
    return Reply(200, encoded(value).encode())


@dataclass
class Call:
    """A request that was let in: its checked ``body``, what the path holds, and where answers go.

    ``origin`` is that of a page of another host that may call.  ``facts`` go into the log line.  ``is_gone`` says that
    the client went away.  ``trace`` is there when spans are made of requests, ``body_now`` where the server has it.
    ``data`` is the body of an operation that reads it itself, ``headers`` are all of them by name; ``methods`` are the
    servables, where there are any.  ``client`` is whose request it is (``Admission.client_of``).
    """

    request_id: str
    path_values: Mapping[str, str]
    body: dict[str, Any]
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

    def model(self) -> Backend:
        """The model that the body names; the only one where it names none."""
        if self.models.is_draining:
            raise RefusalError(503, "the service is stopping", code="draining")
        name = self.body.get("model")
        if name is None:
            known = self.models.list()
            # One that loads for the first time may come to nothing: it changes nobody's requests before it is there.
            served = [one for one in known if known_card(one) is not None] or known
            if len(served) != 1:
                raise RefusalError(
                    400,
                    "model is missing: /v1/models lists the names",
                    param="model",
                    code="missing_required_parameter",
                )
            backend = served[0]
        else:
            backend = self.models.get(name)
        self.facts["model"] = backend.name
        if "user" in self.body:
            self.facts["user"] = self.body["user"]
        return backend

    def is_ready(self) -> bool:
        """Whether a model or a servable takes requests."""
        if self.models.is_draining:
            return False
        methods = self.methods.list() if self.methods is not None else ()
        return any(one.is_ready for one in self.models.list()) or any(one.is_ready for one in methods)

    def fixed(self) -> Headers:
        """Headers of every answer."""
        if not self.origin:
            return FIXED_HEADERS
        return [*FIXED_HEADERS, (b"access-control-allow-origin", self.origin.encode()), (b"vary", b"Origin")]

    async def reply(self, reply: Reply) -> None:
        """Send a whole answer."""
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
        """Send a piece; a reader who takes nothing of it for ``write_s`` is given up as gone."""
        sending = self.send(message)
        try:
            waits_for = sending.send(None)  # nearly always done at once: no clock is set for that
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
    """What is left of a coroutine that was begun by hand and ``waits_for`` something; its result."""
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
    """A request's answer past ASGI: ``DIRECT_BODY`` of a scope, where the server has it."""

    on_gone: Callable[[], None] | None
    """Called when the client goes away before the end of the answer."""

    @property
    def is_gone(self) -> bool:
        """Whether it has gone away already."""

    def whole(self, status: int, headers: Headers, body: bytes) -> bool:
        """Write a whole answer; False, and nothing is written, where that would have to wait or nobody reads it."""

    def together(self) -> AbstractContextManager[None]:
        """What is sent inside goes out in one piece."""

    def break_off(self) -> None:
        """End the connection in the middle of the answer; what was not read is dropped."""

    @property
    def is_free(self) -> bool:
        """Whether a piece can be written now, without waiting for the reader."""

    def write(self, piece: bytes) -> None:
        """Write a piece, in order with those that were sent."""


class Events:
    """A stream of server-sent events.  It begins with the first, so that what fails before is a plain refusal."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._body = call.body_now

    def write_now(self, make: Callable[[], bytes]) -> bool:
        """Send the events that ``make`` gives, without waiting; False, and it is not called, when the answer has not
        begun, its reader is behind, or the server knows nothing else than ASGI."""
        body = self._body
        if body is None or not self._call.has_begun or not body.is_free:
            return False
        events = make()
        if events:
            body.write(events)
        return True

    async def write(self, events: bytes) -> None:
        """Send events, complete with ``data: `` and the empty line; nothing is sent for none."""
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
        """Send the last events and end the answer."""
        await self.write(last)
        await self._call.write({"type": "http.response.body", "body": b""})
