"""The admission policy of the service, which HTTP and gRPC share.

A gateway describes a request by its headers (or metadata), the address of its client, and its endpoint.  The policy
gives the request an id, checks its origin, its key, the number of open requests and the room in the queues, limits its
time, and counts and logs its end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.api_errors import RefusalError, grpc_code, refusal_of
from penstock.errors import DeadlineError, QueueFullError, UnavailableError
from penstock.logs import LOG
from penstock.serving.call import Call, ResponseSink, new_id
from penstock.serving.keys import ApiKeys
from penstock.serving.metrics import Metrics
from penstock.serving.operations import GRPC, Endpoint

if TYPE_CHECKING:
    from penstock.llm.backend import Models
    from penstock.serving.settings import GatewaySettings
    from penstock.serving.traces import Traces
    from penstock.tensors import Methods

__all__ = ["Admission", "check_single", "deadline_s", "within"]

T = TypeVar("T")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_GRACE_S: Final = 5.0
"""The engine ends a request at its deadline; this much later the gateway does."""


class Admission:
    """Decides which requests are served, and records each of them.

    ``keys``: the API keys; without them, all clients are admitted.  ``metrics``: the metrics of another gateway of the
    service, to share them.  ``traces``: exports spans of requests.  ``methods``: the servables.
    """

    def __init__(
        self,
        models: Models,
        settings: GatewaySettings,
        keys: ApiKeys | None = None,
        metrics: Metrics | None = None,
        traces: Traces | None = None,
        methods: Methods | None = None,
    ) -> None:
        self.models, self.settings, self.methods = models, settings, methods
        self.keys = keys or ApiKeys()
        self.metrics = metrics or Metrics(models)
        self.num_open = 0
        self._traces = traces
        self._origins = frozenset(settings.origins)

    def begin(
        self,
        headers: Mapping[bytes, bytes],
        address: str,
        sink: ResponseSink | None = None,
        *,
        request_id: str = "",
        remaining_s: Callable[[], float] = lambda: math.inf,
    ) -> Call:
        """Return a new request, which ``end`` must close.

        ``address`` is the client's, or "" for a unix socket.  ``request_id``: the id of a part of another request;
        by default the valid ``x-request-id`` of the headers, or a new id.  ``remaining_s`` returns the seconds until
        the client's own deadline.
        """
        if not request_id:
            header = headers.get(b"x-request-id", b"")
            request_id = header.decode() if _REQUEST_ID.fullmatch(header) else new_id()
        call = Call(request_id, {}, {}, self.models, self.settings, self.metrics, sink)
        call.headers, call.methods, call.remaining_s = headers, self.methods, remaining_s
        call.address, call.client = address, self.keys.client_of(headers.get(b"authorization"), address)
        if self._traces is not None:
            call.trace = self._traces.begin(headers)
        return call

    def check_origin(self, call: Call, host: str = "") -> None:
        """Refuse requests of web pages of other hosts, except those of allowed origins; note such an origin.

        ``host`` is the server's name and port that the client asked for, if the transport tells it.
        """
        origin = call.headers.get(b"origin")
        if origin is None:
            return
        text = origin.decode("latin-1").lower()
        if text in self._origins:
            call.origin = text
        elif not host or text.partition("://")[2] != host:
            message = "Origin not allowed. The server's --allowed-origin option adds origins."
            raise RefusalError(403, message, code="origin_not_allowed")

    def is_known(self, call: Call) -> bool:
        """Return True if the client has a valid key, or none is needed."""
        if call.is_known is None:
            call.is_known = self.keys.admits(call.headers.get(b"authorization"))
        return call.is_known

    def check_key(self, call: Call, hint: str = "Send `Authorization: Bearer KEY`.") -> None:
        """Raise a 401 error unless the client has a valid key, or none is needed; ``hint`` says how to send one."""
        if not self.is_known(call):
            raise RefusalError(401, f"API key required. {hint}", code="invalid_api_key")

    def admit(self, call: Call, endpoint: Endpoint) -> None:
        """Count an open request; raise an error if there are too many, without an admin key, or without room."""
        if endpoint.is_counted:
            self.count(call)
        if endpoint.is_admin:
            self.keys.check_admin(call.headers.get(b"authorization"))
        if endpoint.is_work and not endpoint.is_admin:
            self._check_room(call.client)

    def count(self, call: Call) -> None:
        """Count an open request until ``end``; raise a 429 error if there are too many."""
        most = self.settings.limits.num_open
        if self.num_open >= most:
            raise RefusalError(429, f"Too many open requests (limit {most}). Retry later.", code="too_many_requests")
        self.num_open += 1
        call.is_counted = True

    def _check_room(self, client: str) -> None:
        """Raise QueueFullError if every model's queue is full for a client, before the body is read.

        With servables, or with room at any model, the check happens later, when the body has named the model.
        """
        models = self.models.list()
        if not models or self.models.is_draining or any(model.has_room_for(client) for model in models):
            return
        if self.methods is None or not self.methods.list():
            raise QueueFullError("The request queue of every model is full. Retry later.")

    def refusal(self, call: Call, error: BaseException) -> RefusalError:
        """Return the response for a request that failed, and note the error for its log line."""
        refusal = refusal_of(error, call.request_id)
        call.facts["error"] = str(error)[:1000]
        if refusal.status == 500 and refusal is not error:  # the failure of a stage is logged where it happens
            LOG.error("request %s failed", call.request_id, exc_info=error)
        return refusal

    def internal_cancellation(self, call: Call, error: asyncio.CancelledError) -> UnavailableError | None:
        """Return the error of a request that waited for something that was cancelled, and log it.

        Returns None if the request's own task was cancelled: then no client waits for the response.
        """
        task = asyncio.current_task()
        if task is None or task.cancelling():
            return None
        LOG.error("request %s was cancelled internally", call.request_id, exc_info=error)
        return UnavailableError("The request was cancelled internally. Send it again.")

    def end(self, call: Call, endpoint: Endpoint | None, method: str, path: str, status: int) -> None:
        """Close a request: count it, end its trace and write its log line.

        ``endpoint`` is None if there is none for ``method`` and ``path``.  ``status``: of the table of errors, below
        400, or 499 for a client that disconnected.
        """
        if call.is_counted:
            self.num_open -= 1
            call.is_counted = False
        seconds = time.perf_counter() - call.arrived
        route = "none" if endpoint is None else endpoint.path
        line = {"request_id": call.request_id, "method": method, "path": path[:200], "status": status}
        if method == GRPC:
            line["code"] = grpc_code(status)
            self.metrics.grpc(route, grpc_code(status), seconds)
        else:
            self.metrics.http(method, route, status, seconds)
        if self._traces is not None and call.trace is not None and endpoint is not None:
            self._traces.end(call, call.trace, endpoint, status)
        level = logging.DEBUG if status == 200 and endpoint is not None and endpoint.is_probe else logging.INFO
        if LOG.isEnabledFor(level):
            line |= {"seconds": round(seconds, 6), "client": call.address, **call.facts}
            LOG.log(level, "%s %s", call.request_id, line.get("code", status), extra={"facts": line})


def check_single(
    pairs: Collection[tuple[bytes, bytes]], headers: Mapping[bytes, bytes], names: Sequence[bytes], kind: str
) -> None:
    """Raise a 400 error if a header that must be unique appears more than once.

    ``headers`` is the mapping made from ``pairs``; ``kind`` says what the transport calls a header.
    """
    if len(headers) == len(pairs):
        return
    all_names = [name for name, _ in pairs]
    for name in names:
        if all_names.count(name) > 1:
            raise RefusalError(400, f"The {kind} {name.decode()} appears more than once.", code="invalid_header")


def deadline_s(call: Call, timeout_s: float | None = None) -> float:
    """Return the seconds that a response may take: the least of ``request_s``, ``timeout_s`` (which the request asks
    for), and the rest of the client's own deadline.  Raises DeadlineError if that is over.
    """
    seconds = min(call.settings.limits.request_s, call.remaining_s())
    if timeout_s is not None:
        seconds = min(timeout_s, seconds)
    if seconds <= 0:
        raise DeadlineError("the deadline had passed when the request arrived")
    return seconds


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Await ``work``.  Raises DeadlineError a moment after ``seconds``, if the engine has not ended it by then."""
    try:
        async with asyncio.timeout(seconds + _GRACE_S):
            return await work
    except DeadlineError:  # the engine's error, which is also a TimeoutError
        raise
    except TimeoutError:
        message = f"timeout: no complete response within {seconds:g} s"
        raise DeadlineError(message, param="timeout") from None
