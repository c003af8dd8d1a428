"""An engine behind a service: a thread of its own steps it, and each step's news come out together.

A service keeps many requests open and must neither wake a task per token nor wait for a step.  Here a request is known
by the caller's key; after each step one call hands over what is new for all of them.  The thread also proves that it
turns: ``last_turn`` moves at every step and, without work, every quarter of a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from penstock.engine.capabilities import check_scoring
from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import RequestOptions, check_options
from penstock.engine.params import ResolvedSampling, SamplingParams, check_num_top
from penstock.engine.pooling import Pooling, check_embedding
from penstock.engine.prompt_logits import PromptScores
from penstock.engine.request import Request, Status, to_penstock_error
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.llm.result import all_finished, make_result

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.llm.llm import LLM

__all__ = ["IDLE_TURN_S", "EngineThread", "Started", "StepEvent"]

IDLE_TURN_S: Final = 0.25
_REST_S: Final = 0.001
"""After the first token of a request: about as long as it takes to a client of the same machine."""
_MAX_RESTED: Final = 4
"""Among more answers nobody waits for one request's first token."""


@dataclass(frozen=True, slots=True)
class Started:
    """What is known of a request once its first answer begins.

    ``num_prompt_tokens`` is what was left of a prompt that was cut; ``num_cached_tokens`` of them were shared instead
    of computed.  ``prompt_logprobs`` has one entry per token of the prompt, None for the first, when it was asked for.
    """

    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class StepEvent:
    """What a step brought for one answer of a request.

    ``finish_reason``, ``timings`` (``Timings.summary``) and an embedding's ``vector`` [hidden_size] come with the
    answer's last; ``error`` ends the request, all its answers.  ``is_last`` marks the request's last news.  ``seed``
    comes with the first tokens of an answer after the first, whose own is in ``opening``.
    """

    key: int
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    opening: Started | None = None
    timings: dict[str, float] | None = None
    vector: NDArray[np.float32] | None = None
    error: PenstockError | None = None
    is_last: bool = False
    seed: int | None = None


@dataclass(eq=False)
class _Open:
    """A request of the caller's: one request of the engine's per answer."""

    key: int
    params: SamplingParams
    requests: list[Request] = field(default_factory=list)
    num_given: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    normalize: bool = False
    has_opened: bool = False

    @property
    def is_choice(self) -> bool:
        """Whether some answers are made to be dropped: then nothing is given before all are done."""
        return (self.params.best_of or 0) > self.params.n


class EngineThread:
    """Drives an LLM's engine.

    ``deliver`` is called with the news of a step, in order, in the thread of the step or of a ``submit``, one call at a
    time; it must return soon, raise nothing and not call the feed.  Requests may come from any thread.

    ``soon`` calls what it is given when the submitter has handed over what came with a request; a resting engine begins
    then.  At once unless given: then the first of many has a step of its own.
    """

    def __init__(
        self,
        llm: LLM,
        deliver: Callable[[list[StepEvent]], None],
        soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        if llm.engine.observer is not None:
            raise InvalidArgumentError("llm: another front end drives it already", param="llm")
        self.llm = llm
        self._deliver = deliver
        self._open: dict[int, _Open] = {}
        self._owners: dict[int, tuple[_Open, int]] = {}
        self._lock = threading.Lock()  # over what was given; never held while the engine is called
        self._doomed: list[Request] = []
        self._work = threading.Event()
        self._soon = soon
        self._closing = False
        self._has_first = False
        self.last_turn = time.monotonic()
        llm.engine.observer = self._observe
        self._thread = threading.Thread(target=self._drive, name="penstock-engine", daemon=True)
        self._thread.start()

    def submit(
        self, key: int, prompt_ids: Sequence[int], params: SamplingParams, options: RequestOptions | None = None
    ) -> None:
        """Begin all answers to a prompt, checked now; raises what ``LLM.stream`` raises."""
        fixed = check_options(options)
        submits = self.llm.prepare(list(prompt_ids), params, fixed)
        one = _Open(key, params)
        try:
            for submit in submits:
                self._add(one, submit())
        except BaseException:
            self._drop(one)
            raise
        self._begin(one)

    def score(self, key: int, prompt_ids: Sequence[int], num_top: int, options: RequestOptions | None = None) -> None:
        """Begin to score a prompt, whose ``prompt_logprobs`` come with the only news; raises as ``LLM.score``."""
        engine = self.llm.engine
        fixed = check_scoring(self.llm.info.tail, options)
        rows = PromptScores(check_num_top(num_top, self.llm.info.vocab_size))
        one = _Open(key, SamplingParams())
        nothing = ResolvedSampling(max_tokens=0)
        self._add(one, engine.submit(prompt_ids, nothing, prompt_rows=rows, options=fixed))
        self._begin(one)

    def embed(
        self, key: int, prompt_ids: Sequence[int], pooling: str, normalize: bool, options: RequestOptions | None = None
    ) -> None:
        """Begin to embed a prompt, whose ``vector`` comes with the only news; raises as ``LLM.embed``."""
        check_embedding(pooling, normalize)
        one = _Open(key, SamplingParams(), normalize=normalize)
        self._add(one, self.llm.engine.submit(prompt_ids, pooling=Pooling(pooling), options=options))
        self._begin(one)

    def abort(self, key: int) -> None:
        """End a request, of which nothing more is told; one that has ended or is not known is left alone."""
        with self._lock:
            one = self._open.get(key)
            if one is None:
                return
            self._forget(one)
        self._drop(one)

    def close(self) -> None:
        """End every request with "abort", which is told, and give the model's memory back."""
        self._closing = True
        self._work.set()
        self._thread.join()
        self.llm.close()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def _add(self, one: _Open, request: Request) -> None:
        one.requests.append(request)
        one.num_given.append(0)
        one.ended.append(False)

    def _drop(self, one: _Open) -> None:
        for request in one.requests:
            self.llm.engine.abort(request)
        self._work.set()

    def _begin(self, one: _Open) -> None:
        """Know the request from now on; what a step brought in between is told here."""
        with self._lock:
            self._open[one.key] = one
            self._owners.update({request.id: (one, index) for index, request in enumerate(one.requests)})
            early = [i for i, r in enumerate(one.requests) if r.output_ids or r.status is Status.FINISHED]
            news = [piece for index in early for piece in self._news_of(one, index)]
            if news:
                self._deliver(news)
        self._end_doomed()
        if self._soon is None:
            self._work.set()
        else:
            self._soon(self._work.set)

    def _forget(self, one: _Open) -> None:
        self._open.pop(one.key, None)
        for request in one.requests:
            self._owners.pop(request.id, None)

    def _observe(self, requests: Sequence[Request]) -> None:
        """In the thread that stepped: what is new."""
        with self._lock:
            news: list[StepEvent] = []
            for request in requests:
                owner = self._owners.get(request.id)
                if owner is not None:
                    news += self._news_of(*owner)
            if news:
                self._deliver(news)
                self._has_first = len(news) <= _MAX_RESTED and any(one.opening is not None for one in news)
        self._end_doomed()

    def _end_doomed(self) -> None:
        while self._doomed:
            self.llm.engine.abort(self._doomed.pop())

    def _news_of(self, one: _Open, index: int) -> list[StepEvent]:
        request = one.requests[index]
        if one.ended[index]:
            return []
        finished = request.status is Status.FINISHED
        one.ended[index] = finished
        if request.error is not None:
            self._fail(one)
            return [StepEvent(one.key, error=request.error, is_last=True)]
        if one.is_choice:
            return self._best(one)
        start = one.num_given[index]
        ids = request.output_ids[start:]
        one.num_given[index] = start + len(ids)
        piece = StepEvent(one.key, index, "" if request.text is None else request.text.take(), ids)
        if one.params.logprobs is not None:
            piece.logprobs = request.logprobs[start : start + len(ids)]
        if index == 0 and not one.has_opened:
            one.has_opened = True
            piece.opening = _opening(request)
        elif index and not start:
            piece.seed = request.sampling.seed
        if finished:
            self._finish(one, index, piece)
        return [piece]

    def _finish(self, one: _Open, index: int, piece: StepEvent) -> None:
        request = one.requests[index]
        piece.finish_reason = request.finish_reason
        piece.timings = request.timings.summary(len(request.output_ids))
        piece.is_last = all(one.ended)
        if request.pooling is not None and request.finish_reason == "stop":
            piece.vector = request.pooling.vector(one.normalize)
        if piece.is_last:
            self._forget(one)

    def _fail(self, one: _Open) -> None:
        """One answer failed: the others end, too, and nobody hears of them."""
        self._forget(one)
        self._doomed += [request for request in one.requests if request.status is not Status.FINISHED]

    def _best(self, one: _Open) -> list[StepEvent]:
        if not all_finished(one.requests):
            return []
        self._forget(one)
        try:
            result = make_result(one.requests, one.params)
        except PenstockError as error:
            return [StepEvent(one.key, error=error, is_last=True)]
        news = [
            StepEvent(
                one.key, index, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason,
                seed=choice.seed if index else None,
            )
            for index, choice in enumerate(result.choices)
        ]  # fmt: skip
        opening = replace(_opening(one.requests[0]), seed=result.seed)
        news[0].opening, news[0].timings, news[-1].is_last = opening, result.timings, True
        return news

    def _drive(self) -> None:
        """The engine thread: steps while there is work, and turns now and then while there is none."""
        engine = self.llm.engine
        while not self._closing and not engine.is_closed:
            self._work.clear()
            self.last_turn = time.monotonic()
            if not engine.has_work:
                self._work.wait(IDLE_TURN_S)
                continue
            self._has_first = False
            try:
                engine.step()
                if self._has_first:  # else those who carry it wait for the interpreter, and for cores that all compute
                    time.sleep(_REST_S)
            except Exception as error:  # requests' own never come out here: nobody else would end them
                if not engine.is_closed:
                    engine.fail_all(to_penstock_error("the step", error))


def _opening(request: Request) -> Started:
    return Started(
        seed=request.sampling.seed,
        num_prompt_tokens=len(request.prompt_ids),
        num_cached_tokens=request.num_cached,
        prompt_logprobs=request.prompt_logprobs,
    )
