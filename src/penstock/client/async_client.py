"""``penstock.AsyncClient``: as ``penstock.Client``, for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.client.client import CHUNK, DEFAULT_URL, Answer, Inputs, Messages
from penstock.client.generate import Generated
from penstock.client.http import Address, Events, Parsed, Question, Retries
from penstock.client.inference import Inference, OipCall
from penstock.client.servables import AsyncServables
from penstock.errors import ServiceError

if TYPE_CHECKING:
    from penstock.client.grpc import AsyncChannel
    from penstock.client.tensors import InferResult

__all__ = ["AsyncClient"]

_Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AsyncClient:
    """Client for asyncio, in one event loop; cancelling a caller ends its request."""

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str | None = None, timeout_s: float = 600.0, retries: int = 2,
        tls_ca: str | Path | None = None, binary: bool = True,
    ) -> None:  # fmt: skip
        self._address = Address(url, api_key, timeout_s, retries, tls_ca)
        self._is_binary = binary
        self.servables = AsyncServables(self._call)
        """What is known of them, and changing them."""
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

    async def infer(self, servable: str, inputs: Inputs, **options: Any) -> InferResult:
        """As Client.infer; cancelling the caller cancels the request."""
        found: InferResult = await self._call(self._inference("infer", servable, inputs, options))
        return found

    def infer_async(self, servable: str, inputs: Inputs, **options: Any) -> asyncio.Task[InferResult]:
        """The same as a task."""
        return asyncio.ensure_future(self._call(self._inference("infer_async", servable, inputs, options)))

    async def infer_many(
        self, servable: str, inputs: Iterable[Inputs], *, in_flight: int = 32, **options: Any
    ) -> AsyncIterator[InferResult | ServiceError]:
        """As Client.infer_many, any number at a time."""
        waiting: deque[asyncio.Task[InferResult]] = deque()
        try:
            for one in inputs:
                call = self._inference("infer_many", servable, one, options)
                waiting.append(asyncio.ensure_future(self._call(call)))
                if len(waiting) >= in_flight:
                    yield await _or_error_of(waiting.popleft())
            while waiting:
                yield await _or_error_of(waiting.popleft())
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def stream_infer(self, servable: str, inputs: Inputs, **options: Any) -> AsyncIterator[InferResult]:
        """As Client.stream_infer; closing the iterator ends the request."""
        call = self._inference("stream_infer", servable, inputs, options)
        return self._channel.stream(call) if self._address.is_grpc else self._pieces(Generated(call))

    async def close(self) -> None:
        """Close the connections that are kept."""
        if (channel := self.__dict__.pop("_channel", None)) is not None:
            await channel.close()
        while self._kept:
            await _hang_up(self._kept.pop()[1])

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @cached_property
    def _channel(self) -> AsyncChannel:
        from penstock.client.grpc import AsyncChannel

        return AsyncChannel(self._address)

    def _inference(self, caller: str, servable: str, inputs: Inputs, options: Mapping[str, Any]) -> Inference:
        return Inference.asked(f"AsyncClient.{caller}", servable, inputs, options, binary=self._is_binary)

    async def _call(self, call: OipCall) -> Any:
        if not self._address.is_grpc:
            return await self._ask(call.question(), Retries(self._address, call.timeout_s, call.is_asked_once))
        retries, rpc = Retries(self._address, call.timeout_s, call.is_asked_once), call.rpc()
        while True:
            try:
                return await self._channel.ask(rpc, retries)
            except (OSError, ServiceError) as error:
                await asyncio.sleep(retries.pause(error))

    async def _ask(self, question: Question, retries: Retries | None = None) -> Any:
        retries = retries or Retries(self._address)
        while True:
            try:
                pair, answer = await self._begin(question, retries)
                try:
                    while not answer.is_complete:
                        answer.feed(await self._read(pair, retries))
                finally:
                    await self._put_back(pair, answer)
                return question.read(answer)
            except (OSError, ServiceError) as error:
                await asyncio.sleep(retries.pause(error))

    def _pieces(self, generated: Generated) -> AsyncIterator[InferResult]:
        question = generated.question()

        async def pieces() -> AsyncIterator[InferResult]:
            async with aclosing(self._stream(question, generated.timeout_s)) as events:
                async for event in events:
                    yield generated.piece(event)

        return pieces()

    async def _stream(self, question: Question, timeout_s: float | None = None) -> AsyncGenerator[Answer, None]:
        retries = Retries(self._address, timeout_s)
        while True:
            try:
                pair, answer = await self._begin(question, retries)
                try:
                    events = Events(answer, retries)
                    while not events.is_over:
                        for event in events.take():
                            yield event
                        if not answer.is_complete:
                            answer.feed(await self._read(pair, retries))
                    return
                finally:
                    await self._put_back(pair, answer)
            except (OSError, ServiceError) as error:
                await asyncio.sleep(retries.pause(error))

    async def _begin(self, question: Question, retries: Retries) -> tuple[_Pair, Parsed]:
        """A connection with the answer's first bytes; one that the service closed meanwhile does not count."""
        data = self._address.request(question)
        while True:
            is_kept = bool(self._kept)
            pair = self._kept.pop() if is_kept else await self._connect(retries)
            answer = Parsed()
            try:
                pair[1].write(data)
                await pair[1].drain()
                answer.feed(await self._read(pair, retries))
            except BaseException as error:
                await _hang_up(pair[1])
                if is_kept and isinstance(error, ConnectionError):
                    continue
                raise
            return pair, answer

    async def _connect(self, retries: Retries) -> _Pair:
        address = self._address
        async with asyncio.timeout(retries.patience_s()):
            return await asyncio.open_connection(address.host, address.port, ssl=address.tls)

    async def _read(self, pair: _Pair, retries: Retries) -> bytes:
        async with asyncio.timeout(retries.patience_s()):
            return await pair[0].read(CHUNK)

    async def _put_back(self, pair: _Pair, answer: Parsed) -> None:
        if answer.may_be_kept:
            self._kept.append(pair)
        else:
            await _hang_up(pair[1])


async def _or_error_of(task: asyncio.Task[InferResult]) -> InferResult | ServiceError:
    try:
        return await task
    except ServiceError as error:
        return error


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
