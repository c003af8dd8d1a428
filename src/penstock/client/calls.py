"""The calls of a client: each builds its request and reads the response, without I/O.

Client and AsyncClient make the same calls; a transport for HTTP or gRPC carries them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from penstock.client.http_messages import HttpRequest, HttpResponse, json_body, path_segment
from penstock.errors import InvalidArgumentError, UnsupportedError

__all__ = ["DEFAULT_URL", "ClientCall", "HttpCall", "Rpc"]

DEFAULT_URL: Final = "http://127.0.0.1:8000"

Answer = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Rpc(Generic[_T]):
    """A request over gRPC: the method, its message, the type of the reply, and how to read that."""

    method: str
    message: Any
    reply: Any
    read: Callable[[Any], _T]


class ClientCall(ABC, Generic[_T]):
    """A call whose value, or each item of whose stream, is a ``T``.

    ``timeout_s`` limits the whole call; None leaves the limit to the client.  ``is_sent_once`` forbids retries.
    """

    timeout_s: float | None = None
    is_sent_once = False

    @abstractmethod
    def http_request(self) -> HttpRequest[_T]:
        """Return the request over HTTP."""

    @abstractmethod
    def rpc(self) -> Rpc[_T]:
        """Return the request over gRPC."""


class HttpCall(ClientCall[_T]):
    """A call of a route that only HTTP has."""

    def __init__(self, request: HttpRequest[_T]) -> None:
        self._request = request

    def http_request(self) -> HttpRequest[_T]:
        """Return the request over HTTP."""
        return self._request

    def rpc(self) -> Rpc[_T]:
        """Raise UnsupportedError: the service has no such method over gRPC."""
        route = f"{self._request.method} {self._request.path}"
        raise UnsupportedError(f"{route} is not available over gRPC. Use the service's http:// address.", param="url")


def list_models() -> ClientCall[list[Answer]]:
    """``GET /v1/models``."""
    return _get("/v1/models", lambda response: response.json()["data"])


def describe_model(name: str) -> ClientCall[Answer]:
    """``GET /v1/models/{name}``."""
    return _get(f"/v1/models/{path_segment(name)}", HttpResponse.json)


def service_status() -> ClientCall[Answer]:
    """``GET /status``."""
    return _get("/status", HttpResponse.json)


def complete(prompt: str | Sequence[Any], fields: Mapping[str, Any]) -> ClientCall[Answer]:
    """``POST /v1/completions``."""
    return _post("/v1/completions", {"prompt": prompt}, fields, HttpResponse.json)


def stream_complete(prompt: str | Sequence[Any], fields: Mapping[str, Any]) -> ClientCall[Answer]:
    """``POST /v1/completions`` as a stream."""
    return _stream("/v1/completions", {"prompt": prompt}, fields)


def chat(messages: Messages, fields: Mapping[str, Any]) -> ClientCall[Answer]:
    """``POST /v1/chat/completions``."""
    return _post("/v1/chat/completions", {"messages": messages}, fields, HttpResponse.json)


def stream_chat(messages: Messages, fields: Mapping[str, Any]) -> ClientCall[Answer]:
    """``POST /v1/chat/completions`` as a stream."""
    return _stream("/v1/chat/completions", {"messages": messages}, fields)


def embed(texts: str | Sequence[Any], fields: Mapping[str, Any]) -> ClientCall[list[list[float]]]:
    """``POST /v1/embeddings``."""
    return _post("/v1/embeddings", {"input": texts}, fields, _embeddings)


def tokenize(prompt: str, fields: Mapping[str, Any]) -> ClientCall[list[int]]:
    """``POST /tokenize``."""
    return _post("/tokenize", {"prompt": prompt}, fields, lambda response: response.json()["tokens"])


def detokenize(tokens: Sequence[int], fields: Mapping[str, Any]) -> ClientCall[str]:
    """``POST /detokenize``."""
    return _post("/detokenize", {"tokens": tokens}, fields, lambda response: str(response.json()["prompt"]))


def _embeddings(response: HttpResponse) -> list[list[float]]:
    return [item["embedding"] for item in response.json()["data"]]


def _get(path: str, read: Callable[[HttpResponse], _T]) -> ClientCall[_T]:
    return HttpCall(HttpRequest("GET", path, read))


def _post(
    path: str, own: Mapping[str, Any], fields: Mapping[str, Any], read: Callable[[HttpResponse], _T]
) -> ClientCall[_T]:
    if "stream" in fields:
        raise InvalidArgumentError(
            "stream: not a field of this method. Use the method whose name begins with stream_.", param="stream"
        )
    return HttpCall(HttpRequest("POST", path, read, json_body({**own, **fields})))


def _stream(path: str, own: Mapping[str, Any], fields: Mapping[str, Any]) -> ClientCall[Answer]:
    if "stream" in fields:
        raise InvalidArgumentError("stream: not a field of this method, which always streams.", param="stream")
    return HttpCall(HttpRequest("POST", path, _whole_event, json_body({**own, **fields, "stream": True})))


def _whole_event(event: Answer) -> Answer:
    return event
