"""``penstock.AsyncLLM``: the same engine for asyncio.

One thread of its own drives the engine's loop while there is work; the event loop never waits for a step.  Once a
step that thread wakes the streams that have news, all of them with one call into the event loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.engine.request import Request
from penstock.errors import InvalidArgumentError
from penstock.llm.embed import embed_prompts
from penstock.llm.llm import LLM
from penstock.llm.open_requests import OpenRequests
from penstock.llm.prompts import Prompt
from penstock.llm.result import Delta, Embedding, Result, Score
from penstock.llm.score import score_prompts
from penstock.llm.stream import Stream

__all__ = ["AsyncLLM", "AsyncStream"]

_Answer = TypeVar("_Answer")
_LONG_TEXT = 2000
"""Characters from which on a text is tokenized beside the event loop."""
_STEP_LOOK_S = 0.001
"""Between looks whether the step that an abort waits for has ended."""


class AsyncStream:
    """An answer as it grows: ``async for`` gives Deltas, each with all that is new.

    A reader who is slow gets larger pieces; nothing piles up.  Cancelling the reader, leaving ``async with``,
    ``abort`` or dropping the stream ends the request and frees its memory.
    """

    def __init__(self, stream: Stream, work: threading.Event) -> None:
        self._stream = stream
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        """The next piece: one token or more, or the end."""
        while not self._stream.has_news:
            self._news.clear()
            if self._stream.has_news:  # the step ended in between
                break
            _check_loop(self._loop)
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.abort()
                raise
        try:
            return next(self._stream)
        except StopIteration:
            raise StopAsyncIteration from None

    def abort(self) -> None:
        """End the answer here; its memory is free when the running step ends."""
        self._stream.abort()
        self._work.set()

    def result(self) -> Result:
        """The whole answer, once the stream has ended or was aborted; until then InvalidArgumentError.

        Straight after ``abort`` it waits for the end of the running step; behind ``async with`` nothing waits.
        """
        return self._stream.result()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        while not self._stream.is_finished:  # until the running step ends: who leaves finds the result and free memory
            await asyncio.sleep(_STEP_LOOK_S)

    def wake(self) -> None:
        """There is news.  Called in the event loop."""
        self._news.set()


class AsyncLLM:
    """A model for asyncio: many streams at once, each with the tokens it would get alone.

    ``llm`` is an open LLM, which this closes.  Its ``max_waiting`` bounds the queue: a request beyond it is
    refused with QueueFullError, which is the moment to tell a client to come back later.  It is used in the event loop
    that it was made in; another one may close it.
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise InvalidArgumentError(
                f"llm must be an open LLM, not {llm!r:.80}; `await AsyncLLM.open(model)` opens a bundle or a folder",
                param="llm",
            )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise InvalidArgumentError("an AsyncLLM is made in a running event loop, inside `async def`") from None
        if llm.engine.observer is not None:
            raise InvalidArgumentError("llm: one AsyncLLM drives it already", param="llm")
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
    async def open(cls, model: Any = "", **options: Any) -> AsyncLLM:
        """Open a model without holding up the event loop; arguments as ``LLM`` has them."""
        return cls(await asyncio.to_thread(LLM, model, **options))

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> AsyncStream:
        """Begin to continue one prompt, checked now.

        Raises what ``LLM.stream`` raises: InvalidArgumentError, UnsupportedError, QueueFullError.
        """
        self._check_open()
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            prompt = await asyncio.to_thread(self.llm.tokenizer.encode, prompt)
        plain = self.llm.stream(prompt, params, options)
        stream = AsyncStream(plain, self._work)
        self._streams[plain.id] = stream
        self._work.set()
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Result:
        """Continue one prompt by one answer (``n`` and ``best_of`` are LLM's); cancelling the caller aborts it."""
        stream = await self.stream(prompt, params, options)
        async for _ in stream:
            pass
        return stream.result()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Result:
        """Answer a conversation as ``LLM.chat`` does; cancelling the caller aborts it."""
        return await self.generate(await self._beside(self.llm.chat_prompt, messages), params, options)

    async def score(
        self, prompts: Prompt | Sequence[Prompt], num_top: int = 0, *, options: RequestOptions | None = None
    ) -> Score | list[Score]:
        """What ``LLM.score`` gives, computed beside the event loop; cancelling the caller aborts it."""
        return await self._all_of(score_prompts, prompts, num_top, options)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "mean",
        normalize: bool = False,
        *,
        options: RequestOptions | None = None,
    ) -> Embedding | list[Embedding]:
        """What ``LLM.embed`` gives, computed beside the event loop; cancelling the caller aborts it."""
        return await self._all_of(embed_prompts, prompts, pooling, normalize, options)

    async def _all_of(self, call: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """A call that opens requests of its own, which end when the caller is cancelled."""
        opened = OpenRequests(self.llm.engine)
        try:
            return await self._beside(call, self.llm.engine, self.llm.prompt_ids, *arguments, opened)
        except asyncio.CancelledError:
            opened.abort()
            self._work.set()
            raise

    def _check_open(self) -> None:
        self.llm.engine.check_process()
        if self._closing:
            raise InvalidArgumentError("the AsyncLLM is closed")
        _check_loop(self._loop)

    async def _beside(self, call: Callable[..., _Answer], *arguments: Any) -> _Answer:
        self._check_open()
        return await asyncio.to_thread(call, *arguments)

    async def close(self) -> None:
        """End every request with "abort" and give the memory back.  Returns when that is done, however many call it;
        cancelling a caller does not stop it.
        """
        if self._closed is None:
            self._closing = True
            self._work.set()
            loop = asyncio.get_running_loop()  # its own may be over
            self._closed = loop.run_in_executor(None, self._shut)  # goes on when nobody waits for it
        await asyncio.shield(self._closed)

    def _shut(self) -> None:
        self._thread.join()
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _drive(self) -> None:
        """The engine thread: steps while there is work, sleeps while there is none."""
        engine = self.llm.engine
        while not self._closing:
            self._work.clear()
            if engine.has_work:
                try:
                    engine.step()
                except Exception as error:  # requests' own never come out here: nobody else would end them
                    if not engine.is_closed:
                        engine.fail_all(error)
            if engine.is_closed:
                return
            if not engine.has_work:
                self._work.wait()

    def _observe(self, news: Sequence[Request]) -> None:
        """In the thread that stepped: hand the news to the event loop."""
        with suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._wake, [request.id for request in news])

    def _wake(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.wake()


def _check_loop(own: asyncio.AbstractEventLoop) -> None:
    """StepEvent come to one event loop: whoever waits in another one would wait for ever."""
    if asyncio.get_running_loop() is not own:
        raise InvalidArgumentError("the AsyncLLM is used in the event loop that it was made in; this is another one")
