"""``penstock.AsyncClient``: the client of a service, for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.client import calls
from penstock.client.address import Address
from penstock.client.calls import DEFAULT_URL, Answer, ClientCall, Messages
from penstock.client.inference_stream import InferenceStream
from penstock.client.oip_calls import InferCall
from penstock.client.servables import AsyncServables
from penstock.errors import ServiceError

if TYPE_CHECKING:
    from penstock.client.grpc_transport import AsyncGrpcTransport
    from penstock.client.http_transport import AsyncHttpTransport
    from penstock.client.tensors import InferResult

__all__ = ["AsyncClient"]

_T = TypeVar("_T")


class AsyncClient:
    """The methods of penstock.Client as coroutines of one event loop; options and results are the same.

    Cancelling a task, or closing the iterator of a stream, ends its request.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str | None = None, timeout_s: float = 600.0, retries: int = 2,
        tls_ca: str | Path | None = None, binary: bool = True,
    ) -> None:  # fmt: skip
        self._address = Address(url, api_key, timeout_s, retries, tls_ca)
        self._is_binary = binary
        self._opened: AsyncHttpTransport | AsyncGrpcTransport | None = None
        self.servables = AsyncServables(self._call)
        """Describe, load and unload servables."""

    async def models(self) -> list[Answer]:
        """Return the models that are served."""
        return await self._call(calls.list_models())

    async def model(self, name: str) -> Answer:
        """Return the description of one model."""
        return await self._call(calls.describe_model(name))

    async def status(self) -> Answer:
        """Return the current models, workers, counts and latencies."""
        return await self._call(calls.service_status())

    async def complete(self, prompt: str | Sequence[Any], **fields: Any) -> Answer:
        """Continue one prompt or several; the results are in ``choices``."""
        return await self._call(calls.complete(prompt, fields))

    def stream_complete(self, prompt: str | Sequence[Any], **fields: Any) -> AsyncIterator[Answer]:
        """Continue prompts and yield each event of the stream; closing the iterator ends the request."""
        return self._transport.stream(calls.stream_complete(prompt, fields))

    async def chat(self, messages: Messages, **fields: Any) -> Answer:
        """Return the next message of a conversation."""
        return await self._call(calls.chat(messages, fields))

    def stream_chat(self, messages: Messages, **fields: Any) -> AsyncIterator[Answer]:
        """Yield each event of the next message of a conversation; closing the iterator ends the request."""
        return self._transport.stream(calls.stream_chat(messages, fields))

    async def embed(self, texts: str | Sequence[Any], **fields: Any) -> list[list[float]]:
        """Return a vector for each text."""
        return await self._call(calls.embed(texts, fields))

    async def tokenize(self, prompt: str, **fields: Any) -> list[int]:
        """Return the token ids of a text."""
        return await self._call(calls.tokenize(prompt, fields))

    async def detokenize(self, tokens: Sequence[int], **fields: Any) -> str:
        """Return the text of token ids."""
        return await self._call(calls.detokenize(tokens, fields))

    async def infer(self, servable: str, inputs: Mapping[str, Any], **options: Any) -> InferResult:
        """See Client.infer."""
        return await self._call(self._inference("infer", servable, inputs, options))

    def infer_async(self, servable: str, inputs: Mapping[str, Any], **options: Any) -> asyncio.Task[InferResult]:
        """Start infer as a task."""
        return asyncio.ensure_future(self._call(self._inference("infer_async", servable, inputs, options)))

    async def infer_many(
        self, servable: str, inputs: Iterable[Mapping[str, Any]], *, in_flight: int = 32, **options: Any
    ) -> AsyncIterator[InferResult | ServiceError]:
        """Yield one result for each of ``inputs``, in their order, with ``in_flight`` requests at a time.

        A request that fails yields its ServiceError in its place, and the others continue.
        """
        pending: deque[asyncio.Task[InferResult]] = deque()
        try:
            for arrays in inputs:
                call = self._inference("infer_many", servable, arrays, options)
                pending.append(asyncio.ensure_future(self._call(call)))
                if len(pending) >= in_flight:
                    yield await _result_or_error(pending.popleft())
            while pending:
                yield await _result_or_error(pending.popleft())
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def stream_infer(self, servable: str, inputs: Mapping[str, Any], **options: Any) -> AsyncIterator[InferResult]:
        """See Client.stream_infer; closing the iterator ends the request."""
        return self._transport.stream(InferenceStream(self._inference("stream_infer", servable, inputs, options)))

    async def close(self) -> None:
        """Close the connections; open streams end with an error."""
        transport, self._opened = self._opened, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _transport(self) -> AsyncHttpTransport | AsyncGrpcTransport:
        if self._opened is None:
            if self._address.is_grpc:
                from penstock.client.grpc_transport import AsyncGrpcTransport

                self._opened = AsyncGrpcTransport(self._address)
            else:
                from penstock.client.http_transport import AsyncHttpTransport

                self._opened = AsyncHttpTransport(self._address)
        return self._opened

    def _inference(
        self, caller: str, servable: str, inputs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> InferCall:
        return InferCall.from_arguments(f"AsyncClient.{caller}", servable, inputs, options, binary=self._is_binary)

    async def _call(self, call: ClientCall[_T]) -> _T:
        return await self._transport.call(call)


async def _result_or_error(task: asyncio.Task[InferResult]) -> InferResult | ServiceError:
    try:
        return await task
    except ServiceError as error:
        return error
