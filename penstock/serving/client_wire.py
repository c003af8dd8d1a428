"""What both clients of a service share: bytes of requests, answers parsed as they come, what is worth another try."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httptools

from penstock.errors import InvalidArgumentError, ServiceError

__all__ = ["Address", "Events", "Parsed", "Question", "Retries"]

RETRIABLE: Final = (0, 408, 429, 503)
MAX_PAUSE_S: Final = 30.0
MAX_ANSWER_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Address:
    """Where a service is, and how long and how often it is asked."""

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0
    retries: int = 2
    host: str = field(init=False)
    port: int = field(init=False)
    is_tls: bool = field(init=False)
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        """InvalidArgumentError for what cannot be asked."""
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.username:
            raise InvalidArgumentError(f"url must be like http://host:port, not {self.url!r:.200}")
        if self.api_key is not None and re.fullmatch(r"[!-~]+", self.api_key) is None:
            raise InvalidArgumentError("api_key must be printable characters of ASCII without spaces")
        if not 0 < self.timeout_s <= 1e6:
            raise InvalidArgumentError(f"timeout_s must be above 0 and up to 1e6, not {self.timeout_s!r}")
        if isinstance(self.retries, bool) or not 0 <= self.retries <= 100:
            raise InvalidArgumentError(f"retries must be a whole number from 0 to 100, not {self.retries!r}")
        is_tls = parts.scheme == "https"
        values = {
            "host": parts.hostname, "port": port or (443 if is_tls else 80), "is_tls": is_tls,
            "prefix": parts.path.rstrip("/").removesuffix("/v1"),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        """The bytes of one request on a kept connection."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept-Encoding: identity"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        data = b""
        if body is not None:
            try:
                data = json.dumps(body, allow_nan=False).encode()
            except (TypeError, ValueError) as error:
                raise InvalidArgumentError(f"the body is no JSON: {error}") from None
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


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

    ``has_begun``: somebody was given a part of the answer, so that nothing is tried again.
    """

    def __init__(self, address: Address) -> None:
        self.has_begun = False
        self._address = address
        self._left = address.retries
        self._pause_s = 0.5

    def pause(self, error: OSError | ServiceError) -> float:
        """Seconds to wait before another try; raises the error, as a ServiceError, when there is none.

        What took too long is not tried again: the service may be at work on it.
        """
        failed = _lost(self._address, error) if isinstance(error, OSError) else error
        if self.has_begun or self._left == 0 or failed.status not in RETRIABLE or isinstance(error, TimeoutError):
            raise failed from None
        self._left -= 1
        pause_s = max(failed.retry_after_s, self._pause_s) * (1 + random.random() / 2)  # noqa: S311 - no secret
        self._pause_s *= 2
        return min(pause_s, MAX_PAUSE_S)


def _lost(address: Address, error: OSError) -> ServiceError:
    """A connection that did not come about, or broke off, as the error of a client: status 0."""
    told = error.strerror or str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        told = f"nothing came for {address.timeout_s:g} s"
    return ServiceError(f"{address.url}: {told}", 0)


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
            yield value
        if answer.is_complete:
            if not self._is_done:
                raise ConnectionError("the stream ended before its last event")
            self.is_over = True


@dataclass(frozen=True)
class Question:
    """One request: what is asked and of which route."""

    method: str
    path: str
    body: dict[str, Any] | None = None

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
        return cls("POST", path, {**own, **fields, **({"stream": True} if stream else {})})
