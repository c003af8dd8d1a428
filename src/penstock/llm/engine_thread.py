"""An engine behind a service: a separate thread steps it, and each step's events are delivered together.

A service keeps many requests open, and must neither wake a task for each token nor wait for a step.  Here the caller
names each request by a key, and after each step one call delivers what is new for all requests.  The thread also proves
that it makes progress: ``last_turn`` is updated at every step and, without work, every quarter of a second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from penstock.engine.capabilities import check_scoring
from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import BeamSettings, RequestOptions, check_options
from penstock.engine.params import ResolvedSampling, SamplingParams, check_num_top
from penstock.engine.pooling import Pooling, check_embedding
from penstock.engine.prompt_logits import Places, PlaceScores, PromptScores
from penstock.engine.request import BegunAnswer, Request, RequestStatus, to_penstock_error
from penstock.errors import InvalidArgumentError, PenstockError, QueueFullError
from penstock.llm.beams import check_beams, new_search
from penstock.llm.result import all_finished, make_result

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.llm.llm import LLM

__all__ = ["IDLE_TURN_S", "EngineThread", "Started", "StepEvent"]

IDLE_TURN_S: Final = 0.25
_FIRST_TOKEN_PAUSE_S: Final = 0.001
"""Pause after the first token of a request: about the time that it takes to reach a client on the same machine.

Without it the next step takes the cores that the token's way needs: the first text came after 12.1 instead of 10.6 ms
(``python benchmarks/serving_shortcuts.py MODEL.psm --threads 0 --shortcuts pause --loads first``; docs/history/log.md).
"""
_UNBEGUN: Final = BegunAnswer(0)
_MAX_PAUSED_EVENTS: Final = 4
"""The largest number of answers in a step after which the loop pauses for a first token."""


@dataclass(frozen=True, slots=True)
class Started:
    """The facts about a request that are known once its first answer begins.

    ``num_prompt_tokens`` counts the prompt as it runs, possibly cut.  ``num_cached_tokens`` of them were shared and not
    computed.  ``prompt_logprobs`` has one entry for each token of the prompt, None for the first, if they were
    requested.  ``queued_s`` and ``prefill_s`` are those of ``Timings.summary``.
    """

    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    queued_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(slots=True)
class StepEvent:
    """The output of a step for one answer of a request.

    ``finish_reason``, ``timings`` (``Timings.summary``) and an embedding's ``vector`` [hidden_size] come with the last
    event of an answer.  ``error`` ends the request with all its answers.  ``is_last`` marks the request's last event.
    ``seed`` comes with the first tokens of an answer other than the first, whose seed is in ``started``.
    """

    key: int
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    started: Started | None = None
    timings: dict[str, float] | None = None
    vector: NDArray[np.float32] | None = None
    error: PenstockError | None = None
    is_last: bool = False
    seed: int | None = None


@dataclass(eq=False)
class _Open:
    """A request of the caller, which has one request of the engine for each answer.

    ``indices`` are those of the answers; one that another engine has completed has no request.  A beam search
    has a request for each beam, and the first ones get the answers.
    """

    key: int
    params: SamplingParams
    requests: list[Request] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    num_given: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    normalize: bool = False
    has_started: bool = False
    num_beams: int = 1

    @property
    def is_choice(self) -> bool:
        """True if some answers are generated to be dropped.  Then nothing is delivered before all are done."""
        return (self.params.best_of or 0) > self.params.n or self.num_beams > 1


class EngineThread:
    """Drives the engine of an LLM.

    ``deliver`` is called with the events of a step, in order, in the thread of the step or of a ``submit``, one call at
    a time.  It must return soon, not raise, and not call this object.  Any thread may send requests.

    ``soon`` schedules a function to be called when the submitter has handed over everything that came with a request.
    A resting engine begins only then.  By default it begins at once, so that the first of many requests has a step of
    its own.
    """

    def __init__(
        self,
        llm: LLM,
        deliver: Callable[[list[StepEvent]], None],
        soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        if llm.engine.observer is not None:
            raise InvalidArgumentError("llm is already in use by another front end", param="llm")
        self.llm = llm
        self._deliver = deliver
        self._open: dict[int, _Open] = {}
        self._owners: dict[int, tuple[_Open, int]] = {}
        self._lock = threading.Lock()  # guards what was delivered; never held while the engine is called
        self._failed: list[Request] = []
        self._work = threading.Event()
        self._soon = soon
        self._closing = False
        self._calls: deque[Callable[[], None]] = deque()
        self._has_first = False
        self.last_turn = time.monotonic()
        llm.engine.observer = self._observe
        self._thread = threading.Thread(target=self._drive, name="penstock-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        key: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        begun: Sequence[BegunAnswer] = (),
        beams: BeamSettings | None = None,
    ) -> None:
        """Check a prompt and begin all its answers.  Raises the errors of ``LLM.stream``.

        ``begun``: what another engine has delivered of the answers, which go on after that.  ``params`` must then have
        the seed with which that engine began them.  ``beams``: the answers are the best ones of a search, and come
        whole.
        """
        if beams is not None and beams.num_beams > 1:
            self._search(key, prompt_ids, params, check_options(options), beams)
            return
        fixed, begun_by_index = check_options(options), {answer.index: answer for answer in begun}
        if begun and params.seed is None:
            raise InvalidArgumentError("seed: expected that of the begun answers, got none", param="seed")
        if 0 in begun_by_index:  # already sent in its first event
            params = replace(params, prompt_logprobs=None)
        submits = self.llm.prepare(list(prompt_ids), params, fixed, begun_by_index)
        opened = _Open(key, params, has_started=0 in begun_by_index)
        indices = range(params.best_of or params.n)
        open_indices = [index for index in indices if not begun_by_index.get(index, _UNBEGUN).has_ended]
        try:
            for index, submit in zip(open_indices, submits, strict=True):
                self._add(opened, submit(), index)
        except BaseException:
            self._abort_all(opened)
            raise
        self._begin(opened)

    def _search(
        self, key: int, prompt_ids: Sequence[int], params: SamplingParams, options: RequestOptions, beams: BeamSettings
    ) -> None:
        """Begin a beam search: a request for each beam, which end together.

        Raises QueueFullError unless all of them have room, so that a search takes no places that it cannot use.
        """
        check_beams(params, beams.num_beams)
        opened, engine = _Open(key, params, num_beams=beams.num_beams), self.llm.engine

        def samplings(sampling: ResolvedSampling) -> list[ResolvedSampling]:
            return new_search(engine, sampling, params.n, beams).samplings

        submits = self.llm.prepare(list(prompt_ids), params, options, hook=samplings)
        if engine.options.max_waiting and engine.num_waiting + len(submits) > engine.options.max_waiting:
            raise QueueFullError(f"The request queue has no room for {len(submits)} beams. Retry later.")
        try:
            for index, submit in enumerate(submits):
                self._add(opened, submit(), index)
        except BaseException:
            self._abort_all(opened)
            raise
        self._begin(opened)

    def score(
        self,
        key: int,
        prompt_ids: Sequence[int],
        num_top: int,
        options: RequestOptions | None = None,
        places: Places | None = None,
    ) -> None:
        """Begin to score a prompt.  Its only event has ``prompt_logprobs``.  Raises the errors of ``LLM.score``.

        With ``places`` that event has None and an entry for each of these positions; see ``PlaceScores``.
        """
        engine, vocab_size = self.llm.engine, self.llm.info.vocab_size
        fixed = check_scoring(self.llm.info.tail, options)
        rows: PromptScores | PlaceScores
        if places is None:
            rows = PromptScores(check_num_top(num_top, vocab_size))
        else:
            rows = PlaceScores(places.checked(len(prompt_ids), vocab_size), num_top)
        opened = _Open(key, SamplingParams())
        nothing = ResolvedSampling(max_tokens=0)
        self._add(opened, engine.submit(prompt_ids, nothing, prompt_rows=rows, options=fixed))
        self._begin(opened)

    def embed(
        self, key: int, prompt_ids: Sequence[int], pooling: str, normalize: bool, options: RequestOptions | None = None
    ) -> None:
        """Begin to embed a prompt.  Its only event has the ``vector``.  Raises the errors of ``LLM.embed``."""
        check_embedding(pooling, normalize)
        opened = _Open(key, SamplingParams(), normalize=normalize)
        pooled = Pooling(pooling, self.llm.engine.pooling_head)
        self._add(opened, self.llm.engine.submit(prompt_ids, pooling=pooled, options=options))
        self._begin(opened)

    def abort(self, key: int) -> None:
        """End a request without another event.  A request that has ended, or an unknown key, is ignored."""
        with self._lock:
            opened = self._open.get(key)
            if opened is None:
                return
            self._forget(opened)
        self._abort_all(opened)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the engine's thread, between two steps.  It must return soon and not raise."""
        self._calls.append(function)
        self._work.set()

    def close(self) -> None:
        """End every request with "abort", deliver that, and free the memory of the model."""
        self._closing = True
        self._work.set()
        self._thread.join()
        self.llm.close()

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self._open)

    def _add(self, opened: _Open, request: Request, index: int = 0) -> None:
        opened.requests.append(request)
        opened.indices.append(index)
        opened.num_given.append(request.num_resumed)
        opened.ended.append(False)

    def _abort_all(self, opened: _Open) -> None:
        for request in opened.requests:
            self.llm.engine.abort(request)
        self._work.set()

    def _begin(self, opened: _Open) -> None:
        """Register the request, and deliver what a step produced before that."""
        with self._lock:
            self._open[opened.key] = opened
            self._owners.update({request.id: (opened, place) for place, request in enumerate(opened.requests)})
            early = [i for i, r in enumerate(opened.requests) if r.num_sampled or r.status is RequestStatus.FINISHED]
            events = [event for place in early for event in self._events_of(opened, place)]
            if events:
                self._deliver(events)
        self._abort_failed()
        if self._soon is None:
            self._work.set()
        else:
            self._soon(self._work.set)

    def _forget(self, opened: _Open) -> None:
        self._open.pop(opened.key, None)
        for request in opened.requests:
            self._owners.pop(request.id, None)

    def _observe(self, requests: Sequence[Request]) -> None:
        """Deliver what is new.  Called in the thread that made the step."""
        with self._lock:
            events: list[StepEvent] = []
            for request in requests:
                owner = self._owners.get(request.id)
                if owner is not None:
                    events += self._events_of(*owner)
            if events:
                self._deliver(events)
                self._has_first = len(events) <= _MAX_PAUSED_EVENTS and any(
                    event.started is not None for event in events
                )
        self._abort_failed()

    def _abort_failed(self) -> None:
        while self._failed:
            self.llm.engine.abort(self._failed.pop())

    def _events_of(self, opened: _Open, place: int) -> list[StepEvent]:
        request, index = opened.requests[place], opened.indices[place]
        if opened.ended[place]:
            return []
        finished = request.status is RequestStatus.FINISHED
        opened.ended[place] = finished
        if request.error is not None:
            self._fail(opened)
            return [StepEvent(opened.key, error=request.error, is_last=True)]
        if opened.is_choice:
            return self._best(opened)
        start = opened.num_given[place]
        ids = request.output_ids[start:]
        opened.num_given[place] = start + len(ids)
        event = StepEvent(opened.key, index, "" if request.text is None else request.text.take(), ids)
        if opened.params.logprobs is not None:
            first = start - request.num_resumed
            event.logprobs = request.logprobs[first : first + len(ids)]
        if index == 0 and not opened.has_started:
            opened.has_started = True
            event.started = _started(request)
        elif index and not start:
            event.seed = request.sampling.seed
        if finished:
            self._finish(opened, request, event)
        return [event]

    def _finish(self, opened: _Open, request: Request, event: StepEvent) -> None:
        event.finish_reason = request.finish_reason
        event.timings = request.timings.summary(request.num_sampled)
        event.is_last = all(opened.ended)
        if request.pooling is not None and request.finish_reason == "stop":
            event.vector = request.pooling.vector(opened.normalize)
        if event.is_last:
            self._forget(opened)

    def _fail(self, opened: _Open) -> None:
        """One answer failed: end the others without an event."""
        self._forget(opened)
        self._failed += [request for request in opened.requests if request.status is not RequestStatus.FINISHED]

    def _best(self, opened: _Open) -> list[StepEvent]:
        if not all_finished(opened.requests):
            return []
        self._forget(opened)
        try:
            requests = opened.requests if opened.num_beams == 1 else opened.requests[: opened.params.n]
            result = make_result(requests, opened.params)
        except PenstockError as error:
            return [StepEvent(opened.key, error=error, is_last=True)]
        events = [
            StepEvent(
                opened.key, index, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason,
                seed=choice.seed if index else None,
            )
            for index, choice in enumerate(result.choices)
        ]  # fmt: skip
        started = replace(_started(opened.requests[0]), seed=result.seed)
        events[0].started, events[0].timings, events[-1].is_last = started, result.timings, True
        return events

    def _drive(self) -> None:
        """Run the engine thread: step while there is work, and turn now and then while there is none."""
        engine = self.llm.engine
        while not self._closing and not engine.is_closed:
            self._work.clear()
            self.last_turn = time.monotonic()
            while self._calls:
                self._calls.popleft()()
            if not engine.has_work:
                self._work.wait(IDLE_TURN_S)
                continue
            self._has_first = False
            try:
                engine.step()
                if self._has_first:  # else its transport waits for the interpreter lock and for a core
                    time.sleep(_FIRST_TOKEN_PAUSE_S)
            except Exception as error:  # not a request's own error: nothing else would end the requests
                if not engine.is_closed:
                    engine.fail_all(to_penstock_error("The step", error))


def _started(request: Request) -> Started:
    return Started(
        seed=request.sampling.seed,
        num_prompt_tokens=len(request.prompt_ids),
        num_cached_tokens=request.num_cached,
        prompt_logprobs=request.prompt_logprobs,
        queued_s=request.timings.queued_s,
        prefill_s=request.timings.prefill_s,
    )
