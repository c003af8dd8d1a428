"""One call over HTTP as it proceeds, without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from penstock.client.address import Address
from penstock.client.calls import ClientCall
from penstock.client.http_messages import EventDecoder, HttpResponse
from penstock.client.retries import Retries

__all__ = ["Exchange"]

_T = TypeVar("_T")


class Exchange(Generic[_T]):
    """The request of a call, its retries, and the response that arrives.

    A transport sends ``request``, calls ``begin`` with the head of the response and ``feed`` with each chunk of its
    body.  A call then ends with ``value``; a stream reads ``events`` after each chunk and ends with ``finish``.  If
    one of these or the connection fails with OSError or ServiceError, ``retries.pause_s`` decides what follows.
    """

    def __init__(self, call: ClientCall[_T], address: Address) -> None:
        self.request = call.http_request()
        self.retries = Retries(address, call.timeout_s, call.is_sent_once)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Take the head of a response."""
        self._response = HttpResponse(status, headers)
        self._decoder = EventDecoder(self._response)

    def feed(self, chunk: bytes) -> None:
        """Take a chunk of the body.  Raises ConnectionError if it is too long, TimeoutError after the deadline."""
        self._response.feed(chunk)
        self.retries.check_deadline()

    def events(self) -> Iterator[_T]:
        """Yield the events that have arrived completely.  After the first one nothing is retried."""
        for event in self._decoder.decode():
            self.retries.has_begun = True
            yield self.request.read(event)

    def value(self) -> _T:
        """Return the value of the complete response."""
        return self.request.read(self._response)

    def finish(self) -> None:
        """Check that the stream is complete."""
        self._decoder.finish()
