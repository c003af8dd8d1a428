"""Calls over HTTP, for threads and for asyncio.  This module imports httpx; clients import it when they first need it.

The transports of httpx are used without httpx.Client: they follow no redirect, keep no cookie, and take neither a
proxy nor credentials from the environment.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from penstock.client.address import Address
from penstock.client.calls import ClientCall
from penstock.client.exchange import Exchange
from penstock.errors import InvalidArgumentError, ServiceError

__all__ = ["AsyncHttpTransport", "HttpTransport"]

_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
"""A request never waits for a connection.  Idle connections stay open until the service closes them."""

_T = TypeVar("_T")


class HttpTransport:
    """HTTP for any number of threads, over TCP or, with ``socket_path``, over a unix socket."""

    def __init__(self, address: Address, socket_path: Path | None = None) -> None:
        self._address, self._socket_path = address, socket_path
        self._lock = threading.Lock()
        self._pool: httpx.HTTPTransport | None = None

    def call(self, call: ClientCall[_T]) -> _T:
        """Send a request, with retries, and return the value of its response.  Raises ServiceError."""
        exchange = Exchange(call, self._address)
        while True:
            try:
                return self.send(exchange)
            except (OSError, ServiceError) as error:
                time.sleep(exchange.retries.pause_s(error))

    def send(self, exchange: Exchange[_T]) -> _T:
        """Send a request once and return the value of its response.  Raises OSError and ServiceError."""
        with _translated_errors():
            response = self._open(exchange)
            try:
                for chunk in response.iter_raw():
                    exchange.feed(chunk)
            finally:
                response.close()
        return exchange.value()

    def stream(self, call: ClientCall[_T]) -> Iterator[_T]:
        """Send a request and return the events of its response; closing the iterator ends the request."""
        return self._events(Exchange(call, self._address))

    def _events(self, exchange: Exchange[_T]) -> Iterator[_T]:
        while True:
            try:
                with _translated_errors():
                    response = self._open(exchange)
                    try:
                        for chunk in response.iter_raw():
                            exchange.feed(chunk)
                            yield from exchange.events()
                    finally:
                        response.close()
                exchange.finish()
                return
            except (OSError, ServiceError) as error:
                time.sleep(exchange.retries.pause_s(error))

    def _open(self, exchange: Exchange[Any]) -> httpx.Response:
        """Send a request and return the response once its headers have arrived; the caller closes it.

        A kept connection that the service has closed is replaced, and does not count as a try.
        """
        while True:
            trace = _ConnectionTrace()
            try:
                response = self._opened().handle_request(_encode(self._address, exchange, trace.on_event))
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if trace.is_new:
                    raise
                continue
            exchange.begin(response.status_code, response.headers)
            return response

    def _opened(self) -> httpx.HTTPTransport:
        with self._lock:
            if self._pool is None:
                path = None if self._socket_path is None else str(self._socket_path)
                self._pool = httpx.HTTPTransport(verify=_tls(self._address), trust_env=False, limits=_LIMITS, uds=path)
            return self._pool

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


class AsyncHttpTransport:
    """HTTP for one event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._pool: httpx.AsyncHTTPTransport | None = None

    async def call(self, call: ClientCall[_T]) -> _T:
        """Send a request, with retries, and return the value of its response.  Raises ServiceError."""
        exchange = Exchange(call, self._address)
        while True:
            try:
                with _translated_errors():
                    response = await self._open(exchange)
                    try:
                        async for chunk in response.aiter_raw():
                            exchange.feed(chunk)
                    finally:
                        await response.aclose()
                return exchange.value()
            except (OSError, ServiceError) as error:
                await asyncio.sleep(exchange.retries.pause_s(error))

    def stream(self, call: ClientCall[_T]) -> AsyncIterator[_T]:
        """Send a request and return the events of its response; closing the iterator ends the request."""
        return self._events(Exchange(call, self._address))

    async def _events(self, exchange: Exchange[_T]) -> AsyncIterator[_T]:
        while True:
            try:
                with _translated_errors():
                    response = await self._open(exchange)
                    try:
                        async for chunk in response.aiter_raw():
                            exchange.feed(chunk)
                            for event in exchange.events():
                                yield event
                    finally:
                        await response.aclose()
                exchange.finish()
                return
            except (OSError, ServiceError) as error:
                await asyncio.sleep(exchange.retries.pause_s(error))

    async def _open(self, exchange: Exchange[Any]) -> httpx.Response:
        """Send a request and return the response once its headers have arrived; the caller closes it.

        A kept connection that the service has closed is replaced, and does not count as a try.
        """
        while True:
            trace = _ConnectionTrace()
            try:
                request = _encode(self._address, exchange, trace.on_async_event)
                response = await self._opened().handle_async_request(request)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if trace.is_new:
                    raise
                continue
            exchange.begin(response.status_code, response.headers)
            return response

    def _opened(self) -> httpx.AsyncHTTPTransport:
        if self._pool is None:
            self._pool = httpx.AsyncHTTPTransport(verify=_tls(self._address), trust_env=False, limits=_LIMITS)
        return self._pool

    async def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()


def _encode(address: Address, exchange: Exchange[Any], trace: Any) -> httpx.Request:
    """Build httpx's request.  It asks for an uncompressed response, which cannot grow when it is unpacked."""
    request, url = exchange.request, address.base_url + exchange.request.path
    headers = [("Accept-Encoding", "identity")]
    if address.api_key is not None:
        headers.append(("Authorization", f"Bearer {address.api_key}"))
    if request.body is not None:
        headers += request.headers
    seconds = exchange.retries.read_timeout_s()
    extensions = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), seconds), "trace": trace}
    try:
        return httpx.Request(request.method, url, headers=headers, content=request.body, extensions=extensions)
    except httpx.InvalidURL as error:
        raise InvalidArgumentError(f"url: {url!r:.200} is invalid: {error}", param="url") from None


class _ConnectionTrace:
    """Record whether a request opened a new connection or used a kept one."""

    def __init__(self) -> None:
        self.is_new = False

    def on_event(self, name: str, _: Any) -> None:
        """httpx's trace extension."""
        if name.startswith("connection.connect"):
            self.is_new = True

    async def on_async_event(self, name: str, _: Any) -> None:
        """httpx's trace extension for asyncio."""
        self.on_event(name, _)


def _tls(address: Address) -> ssl.SSLContext:
    """Return the TLS context.  Plain HTTP gets an empty one, so that httpx does not load certificates."""
    return address.tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Raise httpx's errors as TimeoutError and ConnectionError."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except httpx.TransportError as error:
        raise ConnectionError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """Return the operating system's reason if there is one below httpx's error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or "the connection closed before the response was complete"
