"""The descriptions of routes: handler, request body, responses, and required key; and the lookup of a route."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Protocol

import msgspec

from penstock.serving.call import Call, Reply

__all__ = ["GRPC", "JSON", "Endpoint", "Handler", "Media", "Operation", "Routes"]

Handler = Callable[[Call], Awaitable[Reply | None]]
NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}"
"""The pattern of a name in a path: no separator, no leading dot."""
MAX_NEAREST_CHARS: Final = 100
"""The longest path for which a similar route is suggested; the search takes quadratic time."""
GRPC: Final = "gRPC"
"""The ``method`` of gRPC's endpoints and of their log lines."""
_CHAT: Final = "POST /v1/chat/completions"
_OTHER_APIS: Final = {
    "/v1/responses": ("OpenAI's Responses API", _CHAT),
    "/v1/assistants": ("OpenAI's Assistants API", _CHAT),
    "/v1/threads": ("OpenAI's Assistants API", _CHAT),
    "/v1/conversations": ("OpenAI's Conversations API", _CHAT),
    "/v1/realtime": ("OpenAI's Realtime API", f"{_CHAT} with stream"),
    "/v1/batches": ("OpenAI's Batch API", "the command `penstock batch`"),
    "/v1/files": ("OpenAI's Files API", "the command `penstock batch`"),
    "/v1/audio": ("OpenAI's audio API", ""),
    "/v1/images": ("OpenAI's images API", ""),
    "/v1/moderations": ("OpenAI's moderation API", ""),
    "/v1/vector_stores": ("OpenAI's vector stores", "POST /v1/embeddings"),
    "/v1/fine_tuning": ("OpenAI's fine-tuning API", ""),
    "/v1/messages": ("Anthropic's Messages API", _CHAT),
    "/api/chat": ("Ollama's API", _CHAT),
    "/api/generate": ("Ollama's API", "POST /v1/completions"),
    "/api/embed": ("Ollama's API", "POST /v1/embeddings"),
    "/api/embeddings": ("Ollama's API", "POST /v1/embeddings"),
    "/api/tags": ("Ollama's API", "GET /v1/models"),
    "/generate": ("TGI's API", "POST /v1/completions"),
    "/generate_stream": ("TGI's API", "POST /v1/completions with stream"),
    "/completion": ("llama.cpp's API", "POST /v1/completions"),
    "/redoc": ("ReDoc", "GET /docs"),
}
"""Routes of other services by prefix: what has them, and what to use instead."""
COMMON_REFUSALS: Final = (400, 401, 403, 431)


class Endpoint(Protocol):
    """A route of HTTP or a method of gRPC, as the policy sees it."""

    @property
    def method(self) -> str:
        """The method of HTTP, or ``GRPC``."""

    @property
    def path(self) -> str:
        """The path in metrics and traces."""

    @property
    def name(self) -> str:
        """The name that traces know the operation by; gRPC's methods have the names of the same HTTP operations."""

    @property
    def is_open(self) -> bool:
        """True if it needs no key."""

    @property
    def is_admin(self) -> bool:
        """True if it needs an admin key."""

    @property
    def is_work(self) -> bool:
        """True if its requests run in an engine or a servable, and so can wait in a queue and time out."""

    @property
    def is_counted(self) -> bool:
        """True if its requests count as open requests."""

    @property
    def is_probe(self) -> bool:
        """True if its successful requests are frequent and change nothing, so that they are logged as DEBUG."""


@dataclass(frozen=True)
class Media:
    """The accepted formats of a request body.

    ``types``: accepted values of Content-Type; "" accepts a missing header.  ``encodings``: accepted compressions.
    ``is_optional``: an empty body counts as an empty object.  ``is_raw``: the handler parses ``Call.data`` itself, and
    the body's type describes its JSON part.  ``headers``: JSON schemas of further headers that describe the body.
    """

    types: tuple[str, ...] = ("application/json",)
    encodings: tuple[str, ...] = ()
    is_optional: bool = False
    is_raw: bool = False
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


JSON: Final = Media()


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    ``handler`` returns a Reply, or None after it has sent the response itself.  ``answer``: the type of a JSON
    response, or a tuple of other content types.  ``body``: the struct of the request's body.  ``events``: the struct of
    an event, if the response may be a stream.  ``refusals``: error statuses beside those that all routes share.
    ``is_open``: needs no key.  ``is_admin``: needs an admin key.  ``media``: the accepted formats of the body.
    ``binary``: the response may have bytes after its JSON.
    """

    method: str
    path: str
    name: str
    summary: str
    handler: Handler
    answer: Any
    body: type[msgspec.Struct] | None = None
    events: type[msgspec.Struct] | None = None
    refusals: tuple[int, ...] = ()
    is_open: bool = False
    is_admin: bool = False
    media: Media = JSON
    binary: bool = False

    @property
    def is_work(self) -> bool:
        """True if the request runs in an engine or a servable, and so can wait in a queue and time out."""
        return 504 in self.refusals

    @property
    def is_counted(self) -> bool:
        """True unless anyone may call it."""
        return not self.is_open

    @property
    def is_probe(self) -> bool:
        """True for GET."""
        return self.method == "GET"

    @property
    def is_oip(self) -> bool:
        """True for a route of the Open Inference Protocol, whose errors have another format."""
        return is_oip(self.path)

    @property
    def statuses(self) -> tuple[int, ...]:
        """Return the error statuses of the route."""
        with_body = (408, 413, 415) if self.body is not None else ()
        return tuple(sorted({*COMMON_REFUSALS, *with_body, *self.refusals, 500}))


def is_oip(path: str) -> bool:
    """Return True for a path under ``/v2``, the prefix of the Open Inference Protocol."""
    return path == "/v2" or path.startswith("/v2/")


class Routes:
    """Finds the operation of a method and path; only operations of the table can be reached."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)
        self._plain: dict[str, dict[str, Operation]] = {}
        self._named: list[tuple[re.Pattern[str], dict[str, Operation]]] = []
        for operation in operations:
            methods = self._plain.setdefault(operation.path, {})
            methods[operation.method] = operation
        for path, methods in self._plain.items():
            if "{" in path:
                pattern = re.sub(r"\\{(\w+)\\}", rf"(?P<\1>{NAME})", re.escape(path))
                self._named.append((re.compile(pattern), methods))

    def find(self, path: str) -> tuple[dict[str, Operation], dict[str, str]]:
        """Return the operations of a path by method, and its variable parts; both are empty for an unknown path."""
        methods = self._plain.get(path)
        if methods is not None and "{" not in path:
            return methods, {}
        for pattern, methods in self._named:
            path_match = pattern.fullmatch(path)
            if path_match is not None:
                return methods, path_match.groupdict()
        return {}, {}

    def hint(self, path: str) -> str:
        """Return a sentence for the caller of an unknown path; empty if nothing is similar."""
        for prefix, (name, instead) in _OTHER_APIS.items():
            if path == prefix or path.startswith(prefix + "/"):
                return f"{name} is not available here." + (f" Use {instead}." if instead else "")
        near = self.nearest(path)
        return f"Did you mean {near}?" if near else ""

    def nearest(self, path: str) -> str:
        """Return the route that is most similar to an unknown path; empty if none is similar."""
        if len(path) > MAX_NEAREST_CHARS:
            return ""
        tail = path.rstrip("/")
        ends = [route for route in self._plain if tail and route.endswith(tail)]
        return (ends or get_close_matches(path, self._plain, 1) or [""])[0]
