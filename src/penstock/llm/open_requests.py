"""Submit requests when the queue is full, and wait for many of them: for all calls with several prompts."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, RequestStatus
from penstock.errors import InvalidArgumentError, QueueFullError
from penstock.llm.prompts import of_prompt

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.options import RequestOptions
    from penstock.engine.prompt_logits import PromptRows
    from penstock.engine.request import Request

__all__ = ["OpenRequests", "PromptProgress", "finish_all", "run_prepared", "run_prompts", "submit_when_room"]


def submit_when_room(engine: Engine, submit: Callable[..., Request], *arguments: Any, **options: Any) -> Request:
    """Submit a request.  While the queue is full, drive the loop until it has room."""
    while True:
        engine.make_room()
        with suppress(QueueFullError):  # another thread took the place
            return submit(*arguments, **options)


class OpenRequests:
    """The requests of one call, which another thread may abort together, including those still to be submitted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: deque[Request] = deque()
        self._aborted = False

    def submit(self, *arguments: Any, **options: Any) -> Request:
        """Submit when there is room.  Raises InvalidArgumentError once all were aborted."""
        return submit_when_room(self._engine, self._submit, *arguments, **options)

    def _submit(self, *arguments: Any, **options: Any) -> Request:
        if self._aborted:
            raise InvalidArgumentError("The call was cancelled.")
        request = self._engine.submit(*arguments, **options)
        while self._requests and self._requests[0].status is RequestStatus.FINISHED:
            self._requests.popleft()
        self._requests.append(request)
        if self._aborted:  # by another thread, which may have missed this request
            self._engine.abort(request)
        return request

    def abort(self) -> None:
        """Abort all requests, from any thread."""
        self._aborted = True
        for request in self._requests.copy():
            self._engine.abort(request)


def finish_all(engine: Engine, requests: Sequence[Request], progress: bool = False) -> None:
    """Drive the loop until all requests have ended.  ``progress`` shows the progress on stderr."""
    shown = PromptProgress(requests) if progress else None
    for request in requests:
        while engine.wait(request, len(request.output_ids)):
            if shown is not None:
                shown.update()
    if shown is not None:
        shown.update(last=True)


def run_prepared(
    engine: Engine, prepared: Iterable[Iterable[Callable[[], Request]]], progress: bool = False
) -> list[list[Request]]:
    """Submit the requests of each prompt when there is room, and drive the loop until all have ended.

    An exception aborts all of them.
    """
    requests: list[list[Request]] = []
    try:
        for submits in prepared:
            requests.append([])
            for submit in submits:
                requests[-1].append(submit_when_room(engine, submit))
        finish_all(engine, [request for group in requests for request in group], progress and bool(requests))
    except BaseException:
        for group in requests:
            for request in group:
                engine.abort(request)
        raise
    return requests


def run_prompts(
    engine: Engine,
    prompts: Iterable[tuple[list[int], PromptRows]],
    is_one: bool,
    options: RequestOptions,
    opened: OpenRequests | None = None,
    first: int = 0,
) -> list[Request]:
    """Run prompts whose rows are collected and that have no answer.

    ``opened`` holds the requests, so that another thread can abort them.  Raises the error of the first request that
    failed, with the index of its prompt, counted from ``first``.
    """
    opened = opened or OpenRequests(engine)
    requests: list[Request] = []
    nothing = ResolvedSampling(max_tokens=0)
    try:
        for ids, rows in prompts:
            requests.append(opened.submit(ids, nothing, prompt_rows=rows, options=options))
        finish_all(engine, requests)
    except BaseException:
        for request in requests:
            engine.abort(request)
        raise
    for index, request in enumerate(requests, first):
        if request.error is not None:
            raise of_prompt(index, is_one, request.error)
        if request.finish_reason != "length":
            raise of_prompt(
                index, is_one, InvalidArgumentError("The prompt was aborted before its end.", param="prompt")
            )
    return requests


_REDRAW_SECONDS = 0.2


class PromptProgress:
    """Counts finished requests.

    On a terminal the line is redrawn five times a second; elsewhere it is written at the end.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._open = list(requests)
        self._total = len(requests)
        self._num_tokens = 0
        self._start = self._drawn = time.monotonic()

    def update(self, *, last: bool = False) -> None:
        """Look at the requests and draw the line, unless it was drawn a moment ago."""
        now = time.monotonic()
        if not last and (now - self._drawn < _REDRAW_SECONDS or not sys.stderr.isatty()):
            return
        self._drawn = now
        unfinished = [request for request in self._open if request.status is not RequestStatus.FINISHED]
        self._num_tokens += sum(len(r.output_ids) for r in self._open if r.status is RequestStatus.FINISHED)
        self._open = unfinished
        seconds = max(now - self._start, 1e-9)
        tokens = self._num_tokens + sum(len(request.output_ids) for request in unfinished)
        done = self._total - len(unfinished)
        line = f"{done:,}/{self._total:,} prompts, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, {seconds:.0f} s"
        end = "\n" if last else ""
        sys.stderr.write((f"\r{line:<78}" if sys.stderr.isatty() else line) + end)
        sys.stderr.flush()
