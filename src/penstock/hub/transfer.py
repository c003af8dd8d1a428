"""Requests to a hub, and to the servers that it redirects to, with limits on their time, rate and size.

Each request runs in its own thread, so that a server cannot block the caller: not with a name that does not resolve,
and not with headers that arrive one byte per second.  Requests go through the session of ``huggingface_hub``, with its
proxies and certificates.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import SplitResult, urljoin, urlsplit

from penstock.config import show
from penstock.errors import InvalidFileError, UnavailableError
from penstock.hub.names import ModelName
from penstock.hub.remote_model import RemoteFile
from penstock.hub.transfer_errors import endpoint, network_error, refusal
from penstock.version import __version__

__all__ = ["Pace", "Sink", "Transfer", "is_redirect", "open_transfer", "receive"]

_HEAD_S: Final = 30.0
"""Limit in seconds on the time from a request to the end of the response's headers."""
_SILENCE_S: Final = 20.0
"""Seconds without a byte after which a connection is closed; ``HF_HUB_DOWNLOAD_TIMEOUT`` may be longer."""
_WINDOW_S: Final = 20.0
_MIN_RATE: Final = 1000
"""Bytes per second that must arrive on average over each ``_WINDOW_S`` seconds of waiting."""
_ATTEMPTS: Final = 3
"""Number of consecutive attempts with less than ``_PROGRESS_BYTES`` each after which a download stops."""
_PROGRESS_BYTES: Final = 64 << 10
_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 10.0
"""The longest pause that a hub may ask for between two attempts."""
_MAX_REDIRECTS: Final = 10
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PIECE_BYTES: Final = 1 << 20
_WAITING_PIECES: Final = 16
_MAX_OVERHEAD_BYTES: Final = 64 << 10
"""Bytes by which a compressed response may exceed twice what it contains."""
_ENCODINGS: Final = ("gzip", "x-gzip", "deflate")


class Sink(Protocol):
    """The receiver of a file."""

    def write(self, data: bytes) -> None:
        """Append bytes."""

    def tell(self) -> int:
        """Return the number of bytes that are here."""

    def restart(self) -> None:
        """Drop every byte."""


@dataclass(frozen=True)
class _Head:
    status: int
    headers: Mapping[str, str]


class _Exchange(threading.Thread):
    """One request without redirects: ``items`` gets its head, the pieces of its body, and None or an error."""

    def __init__(self, method: str, url: str, headers: Mapping[str, str], silence_s: float) -> None:
        super().__init__(name="penstock-hub-request", daemon=True)
        self._method, self._url, self._headers, self._silence_s = method, url, headers, silence_s
        self._is_abandoned = threading.Event()
        self.items: queue.Queue[_Head | bytes | BaseException | None] = queue.Queue(_WAITING_PIECES)

    def run(self) -> None:
        """Send the request."""
        from huggingface_hub.utils import get_session

        try:
            stream = get_session().stream(
                self._method, self._url, headers=self._headers, timeout=self._silence_s, follow_redirects=False
            )
            with stream as response:
                self._put(_Head(response.status_code, response.headers))
                for piece in response.iter_raw():
                    if not self._put(piece):
                        return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: _Head | bytes | BaseException | None) -> bool:
        """Add an item; False if the caller no longer waits for it."""
        while not self._is_abandoned.is_set():
            try:
                self.items.put(item, timeout=0.2)
                return True
            except queue.Full:
                pass
        return False

    def abandon(self) -> None:
        """Let the thread end at its next byte or timeout."""
        self._is_abandoned.set()


class Pace:
    """The time that the caller waited for a response, its deadline, and its lowest rate.

    The deadline holds for all attempts together, the rate for each of them.
    """

    def __init__(self, name: ModelName, max_s: float | None = None) -> None:
        self._name, self._max_s = name, max_s
        self._total_s = self._window_s = 0.0
        self._window_bytes = 0

    def remaining_s(self) -> float:
        """Return the seconds after which ``add`` must be called if nothing arrives."""
        left = _WINDOW_S - self._window_s
        return max(0.0, left if self._max_s is None else min(left, self._max_s - self._total_s))

    def add(self, seconds: float, num_bytes: int) -> None:
        """Count bytes and the time that the caller waited for them; UnavailableError if they come too slowly."""
        self.spend(seconds)
        self._window_s += seconds
        self._window_bytes += num_bytes
        if self._window_s >= _WINDOW_S:
            if self._window_bytes < _MIN_RATE * self._window_s:
                raise _slow(
                    self._name,
                    f"expected at least {_MIN_RATE} bytes per second, got {self._window_bytes} bytes in "
                    f"{self._window_s:.0f} s",
                )
            self.start_attempt()

    def spend(self, seconds: float) -> None:
        """Count time in which no bytes were expected, for the deadline only; UnavailableError when it has passed."""
        self._total_s += seconds
        if self._max_s is not None and self._total_s >= self._max_s:
            raise _slow(self._name, f"the response took more than {self._max_s:g} s")

    def start_attempt(self) -> None:
        """Measure the rate from here on."""
        self._window_s, self._window_bytes = 0.0, 0


def _slow(name: ModelName, reason: str) -> UnavailableError:
    return UnavailableError(f"{name}: {endpoint()}: {reason}. Try again later.", code="hub_too_slow")


class Transfer:
    """A response: ``status``, ``headers`` in lower case, ``url``, and its body in ``pieces``."""

    def __init__(self, name: ModelName, url: str, head: _Head, exchange: _Exchange) -> None:
        self.url, self.status = url, head.status
        self.headers = {key.lower(): value for key, value in head.headers.items()}
        self._name, self._exchange = name, exchange

    def pieces(self, pace: Pace) -> Iterator[bytes]:
        """Return the body piece by piece, decompressed; ``pace`` counts the time of waiting for it.

        A piece has at most 1 MiB.
        """
        raw = self._raw(pace)
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding in _ENCODINGS:
            return _decompressed(raw, self._name)
        if encoding not in ("identity", ""):
            raise InvalidFileError(
                f"{self._name}: {endpoint()}: Content-Encoding: expected none or gzip, got {show(encoding)}",
                param="Content-Encoding",
                code="invalid_header",
            )
        return raw

    def _raw(self, pace: Pace) -> Iterator[bytes]:
        while True:
            start = time.monotonic()
            try:
                item = self._exchange.items.get(timeout=pace.remaining_s())
            except queue.Empty:
                item = b""
            pace.add(time.monotonic() - start, len(item) if isinstance(item, bytes) else 0)
            if item is None:
                return
            if isinstance(item, BaseException):
                raise network_error(self._name, item) from None
            if isinstance(item, bytes) and item:
                yield item


def _decompressed(pieces: Iterator[bytes], name: ModelName) -> Iterator[bytes]:
    """Decompress a body of gzip or deflate; each piece has at most 1 MiB.

    Data after the end of the compressed stream is not read.  A stream that is much longer than its content is refused,
    because empty blocks can go on forever.
    """
    state = zlib.decompressobj(zlib.MAX_WBITS | 32)
    num_raw = num_bytes = 0
    try:
        for piece in pieces:
            while piece and not state.eof:
                data = state.decompress(piece, _PIECE_BYTES)
                num_raw += len(piece) - len(state.unconsumed_tail)
                num_bytes += len(data)
                if num_raw > 2 * num_bytes + _MAX_OVERHEAD_BYTES:
                    raise InvalidFileError(
                        f"{name}: {endpoint()}: expected a compressed response, got {num_raw} bytes that expand to "
                        f"{num_bytes}. Check HF_ENDPOINT.",
                        code="invalid_response",
                    )
                yield data
                piece = state.unconsumed_tail
            if state.eof:
                return
    except zlib.error:
        raise InvalidFileError(
            f"{name}: {endpoint()}: the compressed response is damaged. Try again.", code="invalid_response"
        ) from None
    raise UnavailableError(f"{name}: {endpoint()}: the connection closed before the response was complete. Try again.")


def _request_headers() -> dict[str, str]:
    """Return the headers of a request, with the user's token.  Files are requested without compression.

    The function of ``huggingface_hub`` for these headers may send a request itself, without these limits.
    """
    from huggingface_hub import constants, get_token

    headers = {"User-Agent": f"penstock/{__version__}", "Accept-Encoding": "identity"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return headers if token is None else {**headers, "Authorization": f"Bearer {token}"}


@contextmanager
def open_transfer(method: str, url: str, name: ModelName, *, start: int = 0, follow: bool = True) -> Iterator[Transfer]:
    """Send a request and follow its redirects; only the hub receives the user's token.

    ``start``: ask for the bytes from there on.  ``follow`` False: return a redirect to another server as it is.
    UnavailableError if the connection fails or is too slow.
    """
    from huggingface_hub import constants

    headers = _request_headers()
    if start:
        headers["Range"] = f"bytes={start}-"
    silence_s = max(_SILENCE_S, float(constants.HF_HUB_DOWNLOAD_TIMEOUT))
    for _ in range(_MAX_REDIRECTS):
        is_hub = _is_hub(url)
        sent = headers if is_hub else {key: value for key, value in headers.items() if key.lower() != "authorization"}
        exchange = _Exchange(method, url, sent, silence_s)
        exchange.start()
        try:
            transfer = Transfer(name, url, _head_of(exchange, name), exchange)
            if not is_redirect(transfer):
                yield transfer
                return
            url = _redirected(name, url, transfer.headers["location"])
            if not follow and is_hub and not _is_hub(url):
                yield transfer
                return
        finally:
            exchange.abandon()
    raise InvalidFileError(
        f"{name}: {endpoint()}: expected at most {_MAX_REDIRECTS} redirects, got more. Check HF_ENDPOINT.",
        param="Location",
        code="invalid_header",
    )


def is_redirect(transfer: Transfer) -> bool:
    """Return True for a response that only names another address."""
    return transfer.status in _REDIRECTS and "location" in transfer.headers


def _head_of(exchange: _Exchange, name: ModelName) -> _Head:
    try:
        item = exchange.items.get(timeout=_HEAD_S)
    except queue.Empty:
        raise _slow(name, f"expected a response within {_HEAD_S:g} s, got none") from None
    if isinstance(item, BaseException):
        raise network_error(name, item) from None
    if not isinstance(item, _Head):
        raise UnavailableError(f"{name}: {endpoint()}: expected a response, got none. Try again later.")
    return item


def _redirected(name: ModelName, url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
        parts = urlsplit(target)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and _port(parts) > 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InvalidFileError(
            f"{name}: {endpoint()}: Location: expected an HTTP or HTTPS URL, got {show(location)}",
            param="Location",
            code="invalid_header",
        )
    return target


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _is_hub(url: str) -> bool:
    """Return True for an address of the hub's own server, or of the same one with TLS."""
    hub, parts = urlsplit(endpoint()), urlsplit(url)
    if (hub.hostname or "").lower() != (parts.hostname or "").lower():
        return False
    same = (hub.scheme, _port(hub)) == (parts.scheme, _port(parts))
    return same or (hub.scheme, _port(hub), parts.scheme, _port(parts)) == ("http", 80, "https", 443)


def receive(name: ModelName, file: RemoteFile, url: str, sink: Sink, max_s: float | None = None) -> None:
    """Receive the rest of a file; go on after a broken connection as long as bytes arrive.

    ``max_s``: the seconds that all attempts may take together.  Raises UnavailableError when the connection fails,
    what ``refusal`` has when the hub refuses, and InvalidFileError for a body of another length.
    """
    pace = Pace(name, max_s)
    failures, with_range, most = 0, True, sink.tell()
    while sink.tell() < file.num_bytes:
        if sink.tell() and not with_range:
            sink.restart()
        try:
            with_range = _receive_part(name, file, url, sink, pace)
            if with_range:
                break
        except UnavailableError as error:
            failures = 0 if sink.tell() - most >= _PROGRESS_BYTES else failures + 1
            most = max(most, sink.tell())  # what is received again is no progress
            if failures >= _ATTEMPTS or error.code == "hub_too_slow" or error.retry_after_s > _MAX_PAUSE_S:
                raise
            pause_s = max(_PAUSE_S, error.retry_after_s)
            pace.spend(pause_s)
            time.sleep(pause_s)
    if sink.tell() != file.num_bytes:
        raise InvalidFileError(
            f"{name}: {file.name}: expected the {file.num_bytes} bytes of the hub's listing, got {sink.tell()}",
            code="wrong_length",
        )


def _receive_part(name: ModelName, file: RemoteFile, url: str, sink: Sink, pace: Pace) -> bool:
    """Append the rest of a file; False if the hub answered with another part of it."""
    start, began = sink.tell(), time.monotonic()
    pace.start_attempt()
    with ExitStack() as stack:
        try:
            transfer = stack.enter_context(open_transfer("GET", url, name, start=start))
        except UnavailableError:  # an attempt that fails takes time, too
            pace.spend(time.monotonic() - began)
            raise
        pace.spend(time.monotonic() - began)
        if start and transfer.status in (206, 416):
            begin = transfer.headers.get("content-range", "").removeprefix("bytes ").partition("-")[0].strip()
            if transfer.status == 416 or begin != str(start) or "content-encoding" in transfer.headers:
                return False
        elif transfer.status != 200:
            raise refusal(name, transfer.status, transfer.headers)
        elif start:
            sink.restart()  # the hub ignored the range
        for piece in transfer.pieces(pace):
            if sink.tell() + len(piece) > file.num_bytes:
                raise InvalidFileError(
                    f"{name}: {file.name}: expected the {file.num_bytes} bytes of the hub's listing, got more",
                    code="wrong_length",
                )
            sink.write(piece)
    return True
