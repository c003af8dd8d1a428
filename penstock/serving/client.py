"""``penstock.Client`` and ``penstock.AsyncClient``: a service over HTTP, with streams and tries again."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from penstock.errors import ServiceError
from penstock.serving.client_wire import Address, Events, Parsed, Question, Retries

__all__ = ["AsyncClient", "Client"]

_CHUNK: Final = 1 << 16
DEFAULT_URL: Final = "http://127.0.0.1:8000"
Answer = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]


class Client:
    """A service, asked from any number of threads.

    Answers are the service's JSON (docs/serving.md), fields of requests its fields.  ``timeout_s`` is for the next
    bytes of an answer, not for all of it.  A refusal that may pass (408, 429, 503) and a connection that breaks
    before anything was given to you are tried again ``retries`` times, later each time; a stream that has begun never
    is, nor what took too long.  All else raises ServiceError.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str | None = None, timeout_s: float = 600.0, retries: int = 2
    ) -> None:
        self._address = Address(url, api_key, timeout_s, retries)
        self._kept: deque[socket.socket] = deque()

    def models(self) -> list[Answer]:
        """What is served."""
        found: list[Answer] = self._ask(Question.get("/v1/models"))["data"]
        return found

    def model(self, name: str) -> Answer:
        """One model."""
        return self._ask(Question.get("/v1/models/", name))

    def status(self) -> Answer:
        """Models, workers, counts and latencies of the moment."""
        return self._ask(Question.get("/status"))

    def complete(self, prompt: str | Sequence[Any], **fields: Any) -> Answer:
        """Continue a prompt or several; ``choices`` hold the answers."""
        return self._ask(Question.complete(prompt, fields, False))

    def stream_complete(self, prompt: str | Sequence[Any], **fields: Any) -> Iterator[Answer]:
        """The same as it grows; leaving the loop ends the request."""
        return self._stream(Question.complete(prompt, fields, True))

    def chat(self, messages: Messages, **fields: Any) -> Answer:
        """Answer a conversation."""
        return self._ask(Question.chat(messages, fields, False))

    def stream_chat(self, messages: Messages, **fields: Any) -> Iterator[Answer]:
        """The same as it grows; leaving the loop ends the request."""
        return self._stream(Question.chat(messages, fields, True))

    def embed(self, texts: str | Sequence[Any], **fields: Any) -> list[list[float]]:
        """A vector for each text."""
        return [one["embedding"] for one in self._ask(Question.embed(texts, fields))["data"]]

    def tokenize(self, prompt: str, **fields: Any) -> list[int]:
        """A text's token ids."""
        found: list[int] = self._ask(Question.tokenize(prompt, fields))["tokens"]
        return found

    def detokenize(self, tokens: Sequence[int], **fields: Any) -> str:
        """The text of token ids."""
        return str(self._ask(Question.detokenize(tokens, fields))["prompt"])

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._kept:
            self._kept.pop().close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Question) -> Answer:
        retries = Retries(self._address)
        while True:
            try:
                connection, answer = self._begin(question)
                try:
                    while not answer.is_complete:
                        answer.feed(connection.recv(_CHUNK))
                finally:
                    self._put_back(connection, answer)
                found: Answer = answer.value()
                return found
            except (OSError, ServiceError) as error:
                time.sleep(retries.pause(error))

    def _stream(self, question: Question) -> Iterator[Answer]:
        retries = Retries(self._address)
        while True:
            try:
                connection, answer = self._begin(question)
                try:
                    events = Events(answer, retries)
                    while not events.is_over:
                        yield from events.take()
                        if not answer.is_complete:
                            answer.feed(connection.recv(_CHUNK))
                    return
                finally:
                    self._put_back(connection, answer)
            except (OSError, ServiceError) as error:
                time.sleep(retries.pause(error))

    def _begin(self, question: Question) -> tuple[socket.socket, Parsed]:
        """A connection with the answer's first bytes; one that the service closed meanwhile does not count."""
        data = self._address.request(question.method, question.path, question.body)
        while True:
            is_kept = bool(self._kept)
            try:
                connection = self._kept.pop()
            except IndexError:
                connection = self._connect()
            answer = Parsed()
            try:
                connection.sendall(data)
                answer.feed(connection.recv(_CHUNK))
            except BaseException as error:
                connection.close()
                if is_kept and isinstance(error, ConnectionError):
                    continue
                raise
            return connection, answer

    def _connect(self) -> socket.socket:
        address = self._address
        connection = socket.create_connection((address.host, address.port), address.timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.is_tls:
            return ssl.create_default_context().wrap_socket(connection, server_hostname=address.host)
        return connection

    def _put_back(self, connection: socket.socket, answer: Parsed) -> None:
        if answer.may_be_kept:
            self._kept.append(connection)
        else:
            connection.close()


_Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AsyncClient:
    """Client for asyncio, in one event loop; cancelling a caller ends its request."""

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str | None = None, timeout_s: float = 600.0, retries: int = 2
    ) -> None:
        self._address = Address(url, api_key, timeout_s, retries)
        self._kept: deque[_Pair] = deque()

    async def models(self) -> list[Answer]:
        """What is served."""
        found: list[Answer] = (await self._ask(Question.get("/v1/models")))["data"]
        return found

    async def model(self, name: str) -> Any:
        """One model."""
        return await self._ask(Question.get("/v1/models/", name))

    async def status(self) -> Any:
        """Models, workers, counts and latencies of the moment."""
        return await self._ask(Question.get("/status"))

    async def complete(self, prompt: str | Sequence[Any], **fields: Any) -> Any:
        """Continue a prompt or several; ``choices`` hold the answers."""
        return await self._ask(Question.complete(prompt, fields, False))

    def stream_complete(self, prompt: str | Sequence[Any], **fields: Any) -> AsyncIterator[Answer]:
        """The same as it grows; closing the iterator ends the request."""
        return self._stream(Question.complete(prompt, fields, True))

    async def chat(self, messages: Messages, **fields: Any) -> Any:
        """Answer a conversation."""
        return await self._ask(Question.chat(messages, fields, False))

    def stream_chat(self, messages: Messages, **fields: Any) -> AsyncIterator[Answer]:
        """The same as it grows; closing the iterator ends the request."""
        return self._stream(Question.chat(messages, fields, True))

    async def embed(self, texts: str | Sequence[Any], **fields: Any) -> list[list[float]]:
        """A vector for each text."""
        return [one["embedding"] for one in (await self._ask(Question.embed(texts, fields)))["data"]]

    async def tokenize(self, prompt: str, **fields: Any) -> list[int]:
        """A text's token ids."""
        found: list[int] = (await self._ask(Question.tokenize(prompt, fields)))["tokens"]
        return found

    async def detokenize(self, tokens: Sequence[int], **fields: Any) -> str:
        """The text of token ids."""
        return str((await self._ask(Question.detokenize(tokens, fields)))["prompt"])

    async def close(self) -> None:
        """Close the connections that are kept."""
        while self._kept:
            await _hang_up(self._kept.pop()[1])

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, question: Question) -> Any:
        retries = Retries(self._address)
        while True:
            try:
                pair, answer = await self._begin(question)
                try:
                    while not answer.is_complete:
                        answer.feed(await self._read(pair))
                finally:
                    await self._put_back(pair, answer)
                return answer.value()
            except (OSError, ServiceError) as error:
                await asyncio.sleep(retries.pause(error))

    async def _stream(self, question: Question) -> AsyncIterator[Answer]:
        retries = Retries(self._address)
        while True:
            try:
                pair, answer = await self._begin(question)
                try:
                    events = Events(answer, retries)
                    while not events.is_over:
                        for event in events.take():
                            yield event
                        if not answer.is_complete:
                            answer.feed(await self._read(pair))
                    return
                finally:
                    await self._put_back(pair, answer)
            except (OSError, ServiceError) as error:
                await asyncio.sleep(retries.pause(error))

    async def _begin(self, question: Question) -> tuple[_Pair, Parsed]:
        """A connection with the answer's first bytes; one that the service closed meanwhile does not count."""
        address = self._address
        data = address.request(question.method, question.path, question.body)
        while True:
            is_kept = bool(self._kept)
            pair = self._kept.pop() if is_kept else await self._connect()
            answer = Parsed()
            try:
                pair[1].write(data)
                await pair[1].drain()
                answer.feed(await self._read(pair))
            except BaseException as error:
                await _hang_up(pair[1])
                if is_kept and isinstance(error, ConnectionError):
                    continue
                raise
            return pair, answer

    async def _connect(self) -> _Pair:
        address = self._address
        context = ssl.create_default_context() if address.is_tls else None
        async with asyncio.timeout(address.timeout_s):
            return await asyncio.open_connection(address.host, address.port, ssl=context)

    async def _read(self, pair: _Pair) -> bytes:
        async with asyncio.timeout(self._address.timeout_s):
            return await pair[0].read(_CHUNK)

    async def _put_back(self, pair: _Pair, answer: Parsed) -> None:
        if answer.may_be_kept:
            self._kept.append(pair)
        else:
            await _hang_up(pair[1])


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
