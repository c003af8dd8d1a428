"""``penstock.AsyncLLM``: the same engine for asyncio.

A separate thread drives the engine's loop while there is work, and the event loop never waits for a step.  After each
step that thread wakes all streams with new tokens by one call into the event loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from penstock.engine.engine import Engine
from penstock.engine.options import RequestOptions, check_options
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.errors import InvalidArgumentError
from penstock.llm.classify import Classification, Pair, Ranked, classify_prompts, ids_of, rerank_documents
from penstock.llm.embed import EmbedSettings, embed_prompts
from penstock.llm.llm import LLM
from penstock.llm.open_requests import OpenRequests
from penstock.llm.prompts import Prompt
from penstock.llm.result import Delta, Embedding, Result, Score
from penstock.llm.score import score_prompts
from penstock.llm.stream import Stream
from penstock.text.grammar.source import GRAMMAR_FIELDS

__all__ = ["AsyncLLM", "AsyncStream"]

_Returned = TypeVar("_Returned")
_LONG_TEXT = 2000
"""Longer texts (in characters) are tokenized in a thread."""
_STEP_POLL_S = 0.001
"""Seconds between checks whether the step that an abort waits for has ended."""


class AsyncStream:
    """An answer as it grows: ``async for`` gives Deltas, each with everything that is new.

    A slow reader gets larger Deltas, and nothing piles up.  Cancelling the reader, leaving ``async with``, ``abort`` or
    dropping the stream ends the request and frees its memory.
    """

    def __init__(self, stream: Stream, work: threading.Event) -> None:
        self._stream = stream
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        """Return the next Delta: one token or more, or the end."""
        while not self._stream.is_ready:
            self._ready.clear()
            if self._stream.is_ready:  # the step ended in between
                break
            _check_loop(self._loop)
            try:
                await self._ready.wait()
            except asyncio.CancelledError:
                self.abort()
                raise
        try:
            return next(self._stream)
        except StopIteration:
            raise StopAsyncIteration from None

    def abort(self) -> None:
        """End the answer here.  Its memory is free when the running step ends."""
        self._stream.abort()
        self._work.set()

    def result(self) -> Result:
        """Return the whole answer once the stream has ended or was aborted; before that, raise InvalidArgumentError.

        Directly after ``abort`` it waits for the end of the running step.  After ``async with`` it does not wait.
        """
        return self._stream.result()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()
        while not self._stream.is_finished:  # until the running step ends, so that result and memory are ready
            await asyncio.sleep(_STEP_POLL_S)

    def wake(self) -> None:
        """Wake the reader, because the stream has something new.  Called in the event loop."""
        self._ready.set()


class Pending(Coroutine[Any, Any, _Returned]):
    """A coroutine that ``async with`` takes as well: it enters what the coroutine returns."""

    def __init__(self, coroutine: Coroutine[Any, Any, _Returned]) -> None:
        self._coroutine = coroutine
        self._value: Any = None

    def __await__(self) -> Generator[Any, Any, _Returned]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Resume the coroutine."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error in the coroutine."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """End the coroutine."""
        self._coroutine.close()

    async def __aenter__(self) -> _Returned:
        self._value = await self
        entered: _Returned = await self._value.__aenter__()
        return entered

    async def __aexit__(self, *error: object) -> None:
        await self._value.__aexit__(*error)


class PendingStream(Pending[AsyncStream]):
    """A stream that begins when it is awaited, entered or iterated."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async with self as stream:
            async for delta in stream:
                yield delta


class AsyncLLM:
    """A model for asyncio: many streams at once, each with the tokens it would get alone.

    ``llm``: an open LLM, which this object closes, or a model to open with the ``options`` of LLM; the event loop then
    waits for it, which ``AsyncLLM.open`` avoids.  Its ``max_waiting`` limits the queue; a request beyond the limit is
    refused with QueueFullError, and the client should retry later.  Use the object in the event loop that created it;
    another one may close it.
    """

    def __init__(self, llm: LLM | Path | str, **options: Any) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise InvalidArgumentError(
                "No running event loop. Create AsyncLLM inside `async def`.", code="no_event_loop"
            ) from None
        if not isinstance(llm, LLM):
            llm = LLM(llm, **options)
        elif options:
            name = next(iter(options))
            raise InvalidArgumentError(f"{name}: cannot be set for a model that is already open", param=name)
        if llm.engine.observer is not None:
            raise InvalidArgumentError("llm is already in use by an AsyncLLM", param="llm")
        self.llm = llm
        self._loop = loop
        self._streams: weakref.WeakValueDictionary[int, AsyncStream] = weakref.WeakValueDictionary()
        self._work = threading.Event()
        self._closing = False
        self._closed: asyncio.Future[None] | None = None
        llm.engine.observer = self._observe
        self._thread = threading.Thread(target=self._drive, name="penstock-engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, model: Any = "", **options: Any) -> Pending[AsyncLLM]:
        """Open a model without blocking the event loop.  The arguments are those of ``LLM``.

        ``await`` it, or use ``async with AsyncLLM.open(model) as llm``.
        """

        async def opened() -> AsyncLLM:
            return cls(await asyncio.to_thread(LLM, model, **options))

        return Pending(opened())

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **sampling: Any,
    ) -> PendingStream:
        """Begin to continue one prompt.  ``await`` it to have the prompt checked, or iterate with ``async for``.

        ``sampling``: as in ``LLM.generate``.  Raises the errors of ``LLM.stream``: InvalidArgumentError,
        UnsupportedError, QueueFullError.
        """
        return PendingStream(self._stream(prompt, params, options, sampling))

    async def _stream(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, sampling: dict[str, Any]
    ) -> AsyncStream:
        self._check_open()
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            prompt = await asyncio.to_thread(self.llm.tokenizer.encode, prompt)
        wanted = params
        if params is None and not sampling.keys().isdisjoint(GRAMMAR_FIELDS):
            wanted = SamplingParams(**sampling)
        compiling = self.llm.compile_grammar(wanted) if isinstance(wanted, SamplingParams) else None
        if compiling is not None:
            _grammar = await asyncio.wrap_future(compiling)  # kept until it is found again
        plain = self.llm.stream(prompt, params, options, **sampling)
        stream = AsyncStream(plain, self._work)
        self._streams[plain.id] = stream
        self._work.set()
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **sampling: Any,
    ) -> Result:
        """Continue one prompt by one answer; for ``n`` and ``best_of`` use LLM.  Cancelling the caller aborts it.

        ``sampling``: as in ``LLM.generate``.
        """
        stream = await self.stream(prompt, params, options, **sampling)
        async for _ in stream:
            pass
        return stream.result()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        continue_final_message: bool = False,
        **sampling: Any,
    ) -> Result:
        """Answer a conversation as ``LLM.chat`` does.  Cancelling the caller aborts it."""
        prompt_of = partial(self.llm.chat_prompt, continue_final_message=continue_final_message)
        return await self.generate(await self._in_thread(prompt_of, messages), params, options, **sampling)

    async def score(
        self, prompts: Prompt | Sequence[Prompt], num_top: int = 0, *, options: RequestOptions | None = None
    ) -> Score | list[Score]:
        """Score prompts as ``LLM.score`` does, in a thread.  Cancelling the caller aborts it."""
        return await self._call_with_requests(score_prompts, prompts, num_top, options)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "auto",
        normalize: bool | None = None,
        *,
        options: RequestOptions | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> Embedding | list[Embedding]:
        """Embed prompts as ``LLM.embed`` does, in a thread.  Cancelling the caller aborts it."""
        settings = EmbedSettings(pooling, normalize, prompt_name, dimensions)
        return await self._call_with_requests(embed_prompts, prompts, settings, options)

    async def classify(
        self, prompts: Prompt | Pair | Sequence[Prompt | Pair], *, options: RequestOptions | None = None
    ) -> Classification | list[Classification]:
        """Return the classes of texts as ``LLM.classify`` does, in a thread.  Cancelling the caller aborts it."""
        max_len = self.llm.engine.max_len if check_options(options).truncate_prompt else None
        encode = partial(ids_of, lambda: self.llm.tokenizer, max_len=max_len)

        def call(engine: Engine, _: object, opened: OpenRequests) -> Classification | list[Classification]:
            return classify_prompts(engine, encode, prompts, options, opened)

        return await self._call_with_requests(call)

    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_n: int | None = None,
        options: RequestOptions | None = None,
        instruction: str | None = None,
    ) -> list[Ranked]:
        """Return documents by relevance as ``LLM.rerank`` does, in a thread.  Cancelling the caller aborts it."""

        def call(engine: Engine, _: object, opened: OpenRequests) -> list[Ranked]:
            return rerank_documents(engine, self.llm.tokenizer, query, documents, top_n, options, instruction, opened)

        return await self._call_with_requests(call)

    async def _call_with_requests(self, call: Callable[..., _Returned], *arguments: Any) -> _Returned:
        """Run a call that opens requests in a thread, and abort them if the caller is cancelled."""
        opened = OpenRequests(self.llm.engine)
        try:
            return await self._in_thread(call, self.llm.engine, self.llm.prompt_ids, *arguments, opened)
        except asyncio.CancelledError:
            opened.abort()
            self._work.set()
            raise

    def _check_open(self) -> None:
        self.llm.engine.check_process()
        if self._closing:
            raise InvalidArgumentError("The AsyncLLM is closed.", code="closed")
        _check_loop(self._loop)

    async def _in_thread(self, call: Callable[..., _Returned], *arguments: Any) -> _Returned:
        self._check_open()
        return await asyncio.to_thread(call, *arguments)

    async def close(self) -> None:
        """End every request with "abort" and free the memory.

        Returns when that is done, also if several tasks call it.  Cancelling a caller does not stop it.
        """
        if self._closed is None:
            self._closing = True
            self._work.set()
            loop = asyncio.get_running_loop()  # the loop that created it may be closed
            self._closed = loop.run_in_executor(None, self._shut)  # goes on if no caller waits for it
        await asyncio.shield(self._closed)

    def _shut(self) -> None:
        self._thread.join()
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _drive(self) -> None:
        """Run the engine thread: step while there is work, and sleep while there is none."""
        engine = self.llm.engine
        while not self._closing:
            self._work.clear()
            if engine.has_work:
                try:
                    engine.step()
                except Exception as error:  # not a request's own error: nothing else would end the requests
                    if not engine.is_closed:
                        engine.fail_all(error)
            if engine.is_closed:
                return
            if not engine.has_work:
                self._work.wait()

    def _observe(self, changed: Sequence[Request]) -> None:
        """Tell the event loop which requests changed.  Called in the thread that made the step."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._wake, [request.id for request in changed])

    def _wake(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.wake()


def _check_loop(own: asyncio.AbstractEventLoop) -> None:
    """Refuse to wait in an event loop other than the one that new tokens are delivered to."""
    if asyncio.get_running_loop() is not own:
        raise InvalidArgumentError(
            "AsyncLLM: called from another event loop than the one that created it", code="other_event_loop"
        )
