"""``penstock.Client``: a service over HTTP or gRPC, with streams and tries again."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.client.generate import Generated
from penstock.client.http import Address, Events, Parsed, Question, Retries
from penstock.client.inference import Inference, OipCall
from penstock.client.servables import Servables
from penstock.errors import ServiceError

if TYPE_CHECKING:
    from penstock.client.grpc import Channel
    from penstock.client.tensors import InferResult

__all__ = ["Client"]

CHUNK: Final = 1 << 16
DEFAULT_URL: Final = "http://127.0.0.1:8000"
Answer = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
Inputs = Mapping[str, Any]
_THREADS: Final = 64


class Client:
    """A service, asked from any number of threads, at its ``http://``, ``https://``, ``grpc://`` or ``grpcs://``
    address.  Servables answer at all of these, the other routes over HTTP alone.

    Answers are the service's JSON (docs/serving.md), fields of requests its fields.  ``timeout_s`` is for the next
    bytes of an answer, not for all of it.  A refusal that may pass (408, 429, 503) and a connection that breaks
    before anything was given to you are tried again ``retries`` times, later each time; a stream that has begun never
    is, nor what took too long.  All else raises ServiceError.  ``tls_ca`` is a PEM file of authorities to trust
    instead of the system's; ``binary`` False sends and asks for tensors as JSON over HTTP.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str | None = None, timeout_s: float = 600.0, retries: int = 2,
        tls_ca: str | Path | None = None, binary: bool = True,
    ) -> None:  # fmt: skip
        self._address = Address(url, api_key, timeout_s, retries, tls_ca)
        self._is_binary = binary
        self.servables = Servables(self._call)
        """What is known of them, and changing them."""
        self._kept: deque[socket.socket] = deque()

    def models(self) -> list[Answer]:
        """What is served."""
        found: list[Answer] = self._ask(Question.get("/v1/models"))["data"]
        return found

    def model(self, name: str) -> Answer:
        """One model."""
        found: Answer = self._ask(Question.get("/v1/models/", name))
        return found

    def status(self) -> Answer:
        """Models, workers, counts and latencies of the moment."""
        found: Answer = self._ask(Question.get("/status"))
        return found

    def complete(self, prompt: str | Sequence[Any], **fields: Any) -> Answer:
        """Continue a prompt or several; ``choices`` hold the answers."""
        found: Answer = self._ask(Question.complete(prompt, fields, False))
        return found

    def stream_complete(self, prompt: str | Sequence[Any], **fields: Any) -> Iterator[Answer]:
        """The same as it grows; leaving the loop ends the request."""
        return self._stream(Question.complete(prompt, fields, True))

    def chat(self, messages: Messages, **fields: Any) -> Answer:
        """Answer a conversation."""
        found: Answer = self._ask(Question.chat(messages, fields, False))
        return found

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

    def infer(self, servable: str, inputs: Inputs, **options: Any) -> InferResult:
        """Arrays (or lists) by name to a servable, or a language model, and its outputs as arrays by name.

        ``options``: ``method``, ``version`` (a number or a label), ``outputs`` (names; all without), ``parameters``
        (``priority``, ``per_instance_errors``; fields of SamplingParams for a language model) and ``timeout_s``, for
        all tries together, which is told to the service, too.  Every array has the instances of a batch as its first
        dimension.
        """
        found: InferResult = self._call(self._inference("infer", servable, inputs, options))
        return found

    def infer_async(self, servable: str, inputs: Inputs, **options: Any) -> Future[InferResult]:
        """The same in the background; up to 64 at a time are under way, others wait."""
        return self._threads.submit(self._call, self._inference("infer_async", servable, inputs, options))

    def infer_many(
        self, servable: str, inputs: Iterable[Inputs], *, in_flight: int = 32, **options: Any
    ) -> Iterator[InferResult | ServiceError]:
        """One answer for each of ``inputs``, in their order, ``in_flight`` requests at a time (64 at most).

        A request that is refused gives its ServiceError in its place, and the others go on.
        """
        waiting: deque[Future[InferResult]] = deque()
        try:
            for one in inputs:
                call = self._inference("infer_many", servable, one, options)
                waiting.append(self._threads.submit(self._call, call))
                if len(waiting) >= in_flight:
                    yield _or_error(waiting.popleft())
            while waiting:
                yield _or_error(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    def stream_infer(self, servable: str, inputs: Inputs, **options: Any) -> Iterator[InferResult]:
        """The pieces of a language model's answer as they come; leaving the loop ends the request.

        Over HTTP to one prompt at a time; over gRPC to several, and a servable's answer is one piece.
        """
        call = self._inference("stream_infer", servable, inputs, options)
        return self._channel.stream(call) if self._address.is_grpc else self._pieces(Generated(call))

    def close(self) -> None:
        """Close the connections that are kept, once what is in the background has ended."""
        if (threads := self.__dict__.pop("_threads", None)) is not None:
            threads.shutdown()
        if (channel := self.__dict__.pop("_channel", None)) is not None:
            channel.close()
        while self._kept:
            self._kept.pop().close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, "penstock-client")

    @cached_property
    def _channel(self) -> Channel:
        from penstock.client.grpc import Channel

        return Channel(self._address)

    def _inference(self, caller: str, servable: str, inputs: Inputs, options: Mapping[str, Any]) -> Inference:
        return Inference.asked(f"Client.{caller}", servable, inputs, options, binary=self._is_binary)

    def _call(self, call: OipCall) -> Any:
        if not self._address.is_grpc:
            return self._ask(call.question(), Retries(self._address, call.timeout_s, call.is_asked_once))
        retries, rpc = Retries(self._address, call.timeout_s, call.is_asked_once), call.rpc()
        while True:
            try:
                return self._channel.ask(rpc, retries)
            except (OSError, ServiceError) as error:
                time.sleep(retries.pause(error))

    def _ask(self, question: Question, retries: Retries | None = None) -> Any:
        retries = retries or Retries(self._address)
        while True:
            try:
                connection, answer = self._begin(question, retries)
                try:
                    while not answer.is_complete:
                        connection.settimeout(retries.patience_s())
                        answer.feed(connection.recv(CHUNK))
                finally:
                    self._put_back(connection, answer)
                return question.read(answer)
            except (OSError, ServiceError) as error:
                time.sleep(retries.pause(error))

    def _pieces(self, generated: Generated) -> Iterator[InferResult]:
        question = generated.question()

        def pieces() -> Iterator[InferResult]:
            with closing(self._stream(question, generated.timeout_s)) as events:
                for event in events:
                    yield generated.piece(event)

        return pieces()

    def _stream(self, question: Question, timeout_s: float | None = None) -> Generator[Answer, None, None]:
        retries = Retries(self._address, timeout_s)
        while True:
            try:
                connection, answer = self._begin(question, retries)
                try:
                    events = Events(answer, retries)
                    while not events.is_over:
                        yield from events.take()
                        if not answer.is_complete:
                            connection.settimeout(retries.patience_s())
                            answer.feed(connection.recv(CHUNK))
                    return
                finally:
                    self._put_back(connection, answer)
            except (OSError, ServiceError) as error:
                time.sleep(retries.pause(error))

    def _begin(self, question: Question, retries: Retries) -> tuple[socket.socket, Parsed]:
        """A connection with the answer's first bytes; one that the service closed meanwhile does not count."""
        data = self._address.request(question)
        while True:
            is_kept = bool(self._kept)
            try:
                connection = self._kept.pop()
            except IndexError:
                connection = self._connect(retries)
            answer = Parsed()
            try:
                connection.settimeout(retries.patience_s())
                connection.sendall(data)
                answer.feed(connection.recv(CHUNK))
            except BaseException as error:
                connection.close()
                if is_kept and isinstance(error, ConnectionError):
                    continue
                raise
            return connection, answer

    def _connect(self, retries: Retries) -> socket.socket:
        address = self._address
        tls = address.tls
        connection = socket.create_connection((address.host, address.port), retries.patience_s())
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection if tls is None else tls.wrap_socket(connection, server_hostname=address.host)

    def _put_back(self, connection: socket.socket, answer: Parsed) -> None:
        if answer.may_be_kept:
            self._kept.append(connection)
        else:
            connection.close()


def _or_error(future: Future[InferResult]) -> InferResult | ServiceError:
    try:
        return future.result()
    except ServiceError as error:
        return error
