"""HTTP requests, responses and server-sent events of a client, without I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

from penstock.errors import InvalidArgumentError, ServiceError

__all__ = ["EventDecoder", "HttpRequest", "HttpResponse", "json_body", "path_segment"]

MAX_RESPONSE_BYTES: Final = (1 << 31) - 1

_T = TypeVar("_T")


@dataclass(frozen=True)
class HttpRequest(Generic[_T]):
    """A request, and how to read its response.

    ``path`` starts behind the prefix of the service's URL.  ``headers`` describe ``body`` and are sent only with one.
    ``read`` turns the complete HttpResponse of a call, or each event of a stream, into the caller's value.
    """

    method: str
    path: str
    read: Callable[[Any], _T]
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)


class HttpResponse:
    """A response whose body arrives in chunks.  ``headers`` finds names in lower case."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Add a chunk of the body.  Raises ConnectionError for a body above MAX_RESPONSE_BYTES."""
        self._num_bytes += len(chunk)
        if self._num_bytes > MAX_RESPONSE_BYTES:
            raise ConnectionError(f"the response exceeds {MAX_RESPONSE_BYTES} bytes")
        self._chunks.append(chunk)

    def take(self) -> bytes:
        """Return the part of the body received since the last call."""
        data = b"".join(self._chunks)
        self._chunks.clear()
        return data

    @property
    def is_event_stream(self) -> bool:
        """True if the body is a stream of server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        """Return the body as a JSON value.  Raises ServiceError for an error response."""
        data = self.take()
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if self.status == 200 and value is not None:
            return value
        raise self.error(value, data)

    def refusal(self) -> ServiceError:
        """Return the error of a response that does not have the expected form."""
        data = self.take()
        try:
            return self.error(json.loads(data), data)
        except ValueError:
            return self.error(None, data)

    def error(self, value: Any, data: bytes = b"") -> ServiceError:
        """Return the error that a JSON body describes, in OpenAI's form or in the Open Inference Protocol's."""
        details = value.get("error") if isinstance(value, dict) else None
        if isinstance(details, str):  # the Open Inference Protocol has the message here and the rest beside it
            details = {**value, "message": details}
        details = details if isinstance(details, dict) else {}
        message = details.get("message") or f"status {self.status}: {data[:200]!r}"
        return ServiceError(
            str(message), self.status, code=details.get("code"), param=details.get("param"),
            request_id=self.headers.get("x-request-id", ""),
            retry_after_s=seconds_of(self.headers.get("retry-after", "")),
        )  # fmt: skip


def seconds_of(retry_after: str) -> float:
    """Return the seconds of a ``Retry-After`` value; 0 for a date, and for anything that is not a short number."""
    return float(retry_after) if retry_after.isdigit() and len(retry_after) < 7 else 0.0


class EventDecoder:
    """Split the body of a response into server-sent events, each of which is a JSON object."""

    def __init__(self, response: HttpResponse) -> None:
        self._response = response
        self._rest = b""
        self._is_complete = False

    def decode(self) -> Iterator[dict[str, Any]]:
        """Yield the events that have arrived completely.

        Raises ServiceError for an event that reports an error, and ConnectionError for a malformed one.
        """
        if not self._response.is_event_stream:
            return
        *events, self._rest = (self._rest + self._response.take()).split(b"\n\n")
        for event in events:
            text = event.removeprefix(b"data: ")
            if text == b"[DONE]":
                self._is_complete = True
                continue
            try:
                value = json.loads(text)
            except ValueError:
                raise ConnectionError(f"malformed event: {event[:100]!r}") from None
            if "error" in value:
                raise self._response.error(value)
            # generate_stream has no [DONE]: the event with finish_reason is the last of its answer.
            self._is_complete |= bool(value.get("finish_reason"))
            yield value

    def finish(self) -> None:
        """Check the end of the body: ServiceError for a refusal, ConnectionError for a stream that stopped early."""
        if not self._response.is_event_stream:
            raise self._response.refusal()
        if not self._is_complete:
            raise ConnectionError("the stream ended before its last event")


def json_body(fields: Mapping[str, Any]) -> bytes:
    """Encode a request body.  Raises InvalidArgumentError for values that JSON cannot hold."""
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the request cannot be encoded as JSON: {error}") from None


def path_segment(name: str) -> str:
    """Quote a name as one segment of a path; "." and ".." stay names instead of moving up."""
    return quote(name, safe="") if name.strip(".") or not name else name.replace(".", "%2E")
