"""``penstock.Client``: the client of a service, for threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.client import calls
from penstock.client.address import Address
from penstock.client.calls import DEFAULT_URL, Answer, ClientCall, Messages
from penstock.client.inference_stream import InferenceStream
from penstock.client.oip_calls import InferCall
from penstock.client.servables import Servables
from penstock.errors import ServiceError

if TYPE_CHECKING:
    from penstock.client.grpc_transport import GrpcTransport
    from penstock.client.http_transport import HttpTransport
    from penstock.client.tensors import InferResult

__all__ = ["Client"]

_NUM_THREADS: Final = 64

_T = TypeVar("_T")


class Client:
    """A client of one service, for any number of threads.

    ``url`` begins with ``http://``, ``https://``, ``grpc://`` or ``grpcs://``.  All of these serve inference;
    the other routes are available over HTTP only.  Results are the service's JSON objects, and keyword arguments are
    the fields of its requests (docs/guides/serving.md).

    ``timeout_s`` limits the wait for the next bytes, in seconds, not the whole response.  The client retries up to
    ``retries`` times, with growing pauses, if the service refuses with 408, 429 or 503 or the connection breaks.  It
    never retries after a timeout, nor a stream that has yielded an event.  Other failures raise ServiceError.

    ``tls_ca`` is a PEM file of authorities to trust instead of the system's.  ``binary=False`` sends and requests
    tensors as JSON over HTTP.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str | None = None, timeout_s: float = 600.0, retries: int = 2,
        tls_ca: str | Path | None = None, binary: bool = True,
    ) -> None:  # fmt: skip
        self._address = Address(url, api_key, timeout_s, retries, tls_ca)
        self._is_binary = binary
        self._lock = threading.Lock()
        self._opened: HttpTransport | GrpcTransport | None = None
        self.servables = Servables(self._call)
        """Describe, load and unload servables."""

    def models(self) -> list[Answer]:
        """Return the models that are served."""
        return self._call(calls.list_models())

    def model(self, name: str) -> Answer:
        """Return the description of one model."""
        return self._call(calls.describe_model(name))

    def status(self) -> Answer:
        """Return the current models, workers, counts and latencies."""
        return self._call(calls.service_status())

    def complete(self, prompt: str | Sequence[Any], **fields: Any) -> Answer:
        """Continue one prompt or several; the results are in ``choices``."""
        return self._call(calls.complete(prompt, fields))

    def stream_complete(self, prompt: str | Sequence[Any], **fields: Any) -> Iterator[Answer]:
        """Continue prompts and yield each event of the stream; leaving the loop ends the request."""
        return self._transport.stream(calls.stream_complete(prompt, fields))

    def chat(self, messages: Messages, **fields: Any) -> Answer:
        """Return the next message of a conversation."""
        return self._call(calls.chat(messages, fields))

    def stream_chat(self, messages: Messages, **fields: Any) -> Iterator[Answer]:
        """Yield each event of the next message of a conversation; leaving the loop ends the request."""
        return self._transport.stream(calls.stream_chat(messages, fields))

    def embed(self, texts: str | Sequence[Any], **fields: Any) -> list[list[float]]:
        """Return a vector for each text."""
        return self._call(calls.embed(texts, fields))

    def tokenize(self, prompt: str, **fields: Any) -> list[int]:
        """Return the token ids of a text."""
        return self._call(calls.tokenize(prompt, fields))

    def detokenize(self, tokens: Sequence[int], **fields: Any) -> str:
        """Return the text of token ids."""
        return self._call(calls.detokenize(tokens, fields))

    def infer(self, servable: str, inputs: Mapping[str, Any], **options: Any) -> InferResult:
        """Send arrays (or lists) by name to a servable or a language model, and return its outputs as arrays by name.

        The first dimension of every array is the batch.  Options:

        - ``method``: a method of the servable; the default one without it
        - ``version``: a number or a label; the newest ready version without it
        - ``outputs``: the names of the outputs to return; all without it
        - ``parameters``: ``priority``, ``per_instance_errors``; for a language model the fields of SamplingParams
        - ``timeout_s``: seconds for the whole call, retries included.  The service receives this limit too.
        """
        return self._call(self._inference("infer", servable, inputs, options))

    def infer_async(self, servable: str, inputs: Mapping[str, Any], **options: Any) -> Future[InferResult]:
        """Call infer in the background.  Up to 64 calls run at a time, and further ones wait."""
        return self._threads.submit(self._call, self._inference("infer_async", servable, inputs, options))

    def infer_many(
        self, servable: str, inputs: Iterable[Mapping[str, Any]], *, in_flight: int = 32, **options: Any
    ) -> Iterator[InferResult | ServiceError]:
        """Yield one result for each of ``inputs``, in their order, with ``in_flight`` requests at a time (at most 64).

        A request that fails yields its ServiceError in its place, and the others continue.
        """
        pending: deque[Future[InferResult]] = deque()
        try:
            for arrays in inputs:
                call = self._inference("infer_many", servable, arrays, options)
                pending.append(self._threads.submit(self._call, call))
                if len(pending) >= in_flight:
                    yield _result_or_error(pending.popleft())
            while pending:
                yield _result_or_error(pending.popleft())
        finally:
            for future in pending:
                future.cancel()

    def stream_infer(self, servable: str, inputs: Mapping[str, Any], **options: Any) -> Iterator[InferResult]:
        """Yield the parts of a language model's answer as they arrive; leaving the loop ends the request.

        HTTP takes one prompt, gRPC takes several.  Over gRPC a servable's result is one part.
        """
        return self._transport.stream(InferenceStream(self._inference("stream_infer", servable, inputs, options)))

    def close(self) -> None:
        """Wait for the background calls, then close the connections; open streams end with an error."""
        if (threads := self.__dict__.pop("_threads", None)) is not None:
            threads.shutdown()
        with self._lock:
            transport, self._opened = self._opened, None
        if transport is not None:
            transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_THREADS, "penstock-client")

    @property
    def _transport(self) -> HttpTransport | GrpcTransport:
        with self._lock:
            if self._opened is None:
                if self._address.is_grpc:
                    from penstock.client.grpc_transport import GrpcTransport

                    self._opened = GrpcTransport(self._address)
                else:
                    from penstock.client.http_transport import HttpTransport

                    self._opened = HttpTransport(self._address)
            return self._opened

    def _inference(
        self, caller: str, servable: str, inputs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> InferCall:
        return InferCall.from_arguments(f"Client.{caller}", servable, inputs, options, binary=self._is_binary)

    def _call(self, call: ClientCall[_T]) -> _T:
        return self._transport.call(call)


def _result_or_error(future: Future[InferResult]) -> InferResult | ServiceError:
    try:
        return future.result()
    except ServiceError as error:
        return error
