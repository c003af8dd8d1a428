"""What both clients of a service share: bytes of requests, answers parsed as they come, what is worth another try."""

from __future__ import annotations

import json
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httptools

from penstock.errors import InvalidArgumentError, ServiceError, UnsupportedError

__all__ = ["Address", "Events", "Parsed", "Question", "Retries", "json_of"]

RETRIABLE: Final = (0, 408, 429, 503)
MAX_PAUSE_S: Final = 30.0
MAX_ANSWER_BYTES: Final = (1 << 31) - 1


@dataclass(frozen=True)
class Address:
    """Where a service is, and how long and how often it is asked."""

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0
    retries: int = 2
    tls_ca: str | Path | None = None
    host: str = field(init=False)
    port: int = field(init=False)
    is_tls: bool = field(init=False)
    is_grpc: bool = field(init=False)
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        """InvalidArgumentError for what cannot be asked."""
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        is_http, is_grpc = parts.scheme in ("http", "https"), parts.scheme in ("grpc", "grpcs")
        if not (is_http or is_grpc) or not parts.hostname or port == -1 or parts.query or parts.username:
            raise InvalidArgumentError(f"url must be like http://host:port or grpc://host:port, not {self.url!r:.200}")
        if is_grpc and (port is None or parts.path.strip("/")):
            raise InvalidArgumentError(f"url must be like grpc://host:port, without a path, not {self.url!r:.200}")
        if self.api_key is not None and re.fullmatch(r"[!-~]+", self.api_key) is None:
            raise InvalidArgumentError("api_key must be printable characters of ASCII without spaces")
        if not 0 < self.timeout_s <= 1e6:
            raise InvalidArgumentError(f"timeout_s must be above 0 and up to 1e6, not {self.timeout_s!r}")
        if isinstance(self.retries, bool) or not 0 <= self.retries <= 100:
            raise InvalidArgumentError(f"retries must be a whole number from 0 to 100, not {self.retries!r}")
        is_tls = parts.scheme in ("https", "grpcs")
        if self.tls_ca is not None and not is_tls:
            raise InvalidArgumentError(f"tls_ca goes with https:// and grpcs://, not with {self.url!r:.200}")
        values = {
            "host": parts.hostname, "port": port or (443 if is_tls else 80), "is_tls": is_tls, "is_grpc": is_grpc,
            "prefix": parts.path.rstrip("/").removesuffix("/v1"),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """How to know the service, whose certificate ``tls_ca`` or an authority of the system vouches for."""
        if not self.is_tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgumentError(f"tls_ca {self.tls_ca}: {error.strerror or error}") from None

    def request(self, question: Question) -> bytes:
        """The bytes of one request on a kept connection."""
        if self.is_grpc:
            told = f"{question.method} {question.path} is a route of HTTP: the client needs its http:// address"
            raise UnsupportedError(f"{told}, not {self.url}")
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{question.method} {self.prefix}{question.path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines.append("Accept-Encoding: identity")
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if question.data is not None:
            lines += [f"{name}: {value}" for name, value in question.headers]
            lines.append(f"Content-Length: {len(question.data)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (question.data or b"")


class Parsed:
    """An answer as its bytes come."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.status = 0
        self.is_complete = False
        self._keeps = False
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the parser."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Of the parser."""
        self.status = self._parser.get_status_code()
        self._keeps = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Of the parser."""
        self._parts.append(data)
        self._num_bytes += len(data)

    def on_message_complete(self) -> None:
        """Of the parser."""
        self.is_complete = True

    def feed(self, data: bytes) -> None:
        """Take bytes of the connection; none is its end.  ConnectionError when the answer breaks off."""
        if not data:
            raise ConnectionError("the connection ended before the answer did")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"what came is no HTTP: {error}") from None
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise ConnectionError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")

    def take(self) -> bytes:
        """The body since the last call."""
        found = b"".join(self._parts)
        self._parts.clear()
        return found

    @property
    def is_stream(self) -> bool:
        """Whether events come."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def may_be_kept(self) -> bool:
        """Whether the connection serves another request."""
        return self.is_complete and self._keeps

    def value(self) -> Any:
        """The body as JSON; ServiceError for a refusal."""
        data = self.take()
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if self.status == 200 and found is not None:
            return found
        raise self.error(found, data)

    def refusal(self) -> ServiceError:
        """The answer to who asked for a stream and got none."""
        data = self.take()
        try:
            return self.error(json.loads(data), data)
        except ValueError:
            return self.error(None, data)

    def error(self, found: Any, data: bytes = b"") -> ServiceError:
        """The refusal that a body tells of."""
        told = found.get("error") if isinstance(found, dict) else None
        if isinstance(told, str):  # the Open Inference Protocol's form
            told = {**found, "message": told}
        told = told if isinstance(told, dict) else {}
        message = told.get("message") or f"status {self.status}: {data[:200]!r}"
        return ServiceError(
            str(message), self.status, code=told.get("code"), param=told.get("param"),
            request_id=self.headers.get("x-request-id", ""), retry_after_s=_seconds(self.headers.get("retry-after")),
        )  # fmt: skip


def _seconds(text: str | None) -> float:
    return float(text) if text is not None and text.isdigit() and len(text) < 7 else 0.0


class Retries:
    """When to try again: only what is worth it, later each time, at random so that clients do not come together.

    ``has_begun``: somebody was given a part of the answer, so that nothing is tried again.  ``timeout_s``: for all
    tries together.
    """

    def __init__(self, address: Address, timeout_s: float | None = None, is_asked_once: bool = False) -> None:
        self.has_begun = False
        self._address = address
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._left = 0 if is_asked_once else address.retries
        self._pause_s = 0.5

    def pause(self, error: OSError | ServiceError) -> float:
        """Seconds to wait before another try; raises the error, as a ServiceError, when there is none.

        What took too long is not tried again: the service may be at work on it.
        """
        failed = self._lost(error) if isinstance(error, OSError) else error
        if self.has_begun or self._left == 0 or failed.status not in RETRIABLE or isinstance(error, TimeoutError):
            raise failed from None
        self._left -= 1
        pause_s = max(failed.retry_after_s, self._pause_s) * (1 + random.random() / 2)  # noqa: S311 - no secret
        self._pause_s *= 2
        pause_s = min(pause_s, MAX_PAUSE_S)
        if self._end is not None and time.monotonic() + pause_s >= self._end:
            raise failed from None
        return pause_s

    def patience_s(self) -> float:
        """How long to wait for the next bytes."""
        left_s = self._address.timeout_s
        if self._end is not None:
            left_s = min(left_s, max(self._end - time.monotonic(), 0.001))
        return left_s

    def _lost(self, error: OSError) -> ServiceError:
        """A connection that did not come about, or broke off, as the error of a client: status 0."""
        told, status = error.strerror or str(error) or type(error).__name__, 0
        if isinstance(error, TimeoutError):
            told = f"nothing came for {self._address.timeout_s:g} s"
            if self._end is not None and time.monotonic() >= self._end:
                told, status = "no answer in the time it was given", 504
        return ServiceError(f"{self._address.url}: {told}", status)


class Events:
    """Server-sent events of an answer as JSON values.  Once the first is taken, ``retries.has_begun``."""

    def __init__(self, answer: Parsed, retries: Retries) -> None:
        self._answer, self._retries = answer, retries
        self._rest = b""
        self._is_done = False
        self.is_over = False

    def take(self) -> Iterator[dict[str, Any]]:
        """The events that have come whole.

        ServiceError for an answer that is none of events, and for an event that says what went wrong; ConnectionError
        for a stream that ends before its last event.
        """
        answer = self._answer
        if not answer.is_stream:
            if answer.is_complete:
                raise answer.refusal()
            return
        *events, self._rest = (self._rest + answer.take()).split(b"\n\n")
        for event in events:
            text = event.removeprefix(b"data: ")
            if text == b"[DONE]":
                self._is_done = True
                continue
            try:
                value = json.loads(text)
            except ValueError:
                raise ConnectionError(f"what came is no event: {event[:100]!r}") from None
            if "error" in value:
                raise answer.error(value)
            self._retries.has_begun = True
            self._is_done |= bool(value.get("finish_reason"))  # of generate_stream, whose end is told so
            yield value
        if answer.is_complete:
            if not self._is_done:
                raise ConnectionError("the stream ended before its last event")
            self.is_over = True


@dataclass(frozen=True)
class Question:
    """One request over HTTP: what is asked, of which route, and how its answer is read once it is whole."""

    method: str
    path: str
    data: bytes | None = None
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    read: Callable[[Parsed], Any] = Parsed.value

    @classmethod
    def get(cls, path: str, name: str = "") -> Question:
        """Of a route without a body; ``name`` is the variable part of its path."""
        return cls("GET", path + quote(name, safe=""))

    @classmethod
    def complete(cls, prompt: str | Sequence[Any], fields: Mapping[str, Any], stream: bool) -> Question:
        """Of ``/v1/completions``."""
        return cls._post("/v1/completions", {"prompt": prompt}, fields, stream)

    @classmethod
    def chat(cls, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], stream: bool) -> Question:
        """Of ``/v1/chat/completions``."""
        return cls._post("/v1/chat/completions", {"messages": messages}, fields, stream)

    @classmethod
    def embed(cls, texts: str | Sequence[Any], fields: Mapping[str, Any]) -> Question:
        """Of ``/v1/embeddings``."""
        return cls._post("/v1/embeddings", {"input": texts}, fields, False)

    @classmethod
    def tokenize(cls, prompt: str, fields: Mapping[str, Any]) -> Question:
        """Of ``/tokenize``."""
        return cls._post("/tokenize", {"prompt": prompt}, fields, False)

    @classmethod
    def detokenize(cls, tokens: Sequence[int], fields: Mapping[str, Any]) -> Question:
        """Of ``/detokenize``."""
        return cls._post("/detokenize", {"tokens": tokens}, fields, False)

    @classmethod
    def _post(cls, path: str, own: dict[str, Any], fields: Mapping[str, Any], stream: bool) -> Question:
        if "stream" in fields:
            raise InvalidArgumentError("stream is no field here: the methods whose names begin with stream_ do that")
        return cls("POST", path, json_of({**own, **fields, **({"stream": True} if stream else {})}))


def json_of(body: Mapping[str, Any]) -> bytes:
    """A body; InvalidArgumentError for what JSON does not have."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the body is no JSON: {error}") from None
