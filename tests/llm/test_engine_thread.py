"""EngineThread: what the engine makes of many requests, handed over once a step, is what each would get alone."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import InternalError, InvalidArgumentError, QueueFullError
from penstock.llm import engine_thread as feed_module
from penstock.llm.engine_thread import IDLE_TURN_S, EngineThread, StepEvent
from tests.support.engine_requests import PARAMS, PROMPTS, run_alone

ENDLESS = SamplingParams(max_tokens=90_000, temperature=0, ignore_eos=True)
ROOMY = {"context_len": 100_000, "num_pages": 3200}


class Inbox:
    """Takes deliveries; ``wait_for`` blocks until a condition over them holds."""

    def __init__(self) -> None:
        self.calls: list[list[StepEvent]] = []
        self._changed = threading.Condition()

    def __call__(self, news: list[StepEvent]) -> None:
        with self._changed:
            self.calls.append(news)
            self._changed.notify_all()

    @property
    def news(self) -> list[StepEvent]:
        return [one for call in self.calls for one in call]

    def of(self, key: int) -> list[StepEvent]:
        return [one for one in self.news if one.key == key]

    def wait_for(self, condition, seconds: float = 600.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, seconds), "it did not come true"

    def wait_last(self, *keys: int) -> None:
        self.wait_for(lambda: all(any(one.is_last for one in self.of(key)) for key in keys))


def gated(feed: EngineThread) -> tuple[threading.Event, threading.Event]:
    """Steps of its engine wait for the second event; the first says that one does."""
    program = feed.llm.engine.program
    honest, entered, gate = program.step, threading.Event(), threading.Event()

    def step(*arguments):
        entered.set()
        gate.wait(600)
        return honest(*arguments)

    program.step = step
    return entered, gate


@pytest.fixture
def make_feed(make_llm):
    made: list[EngineThread] = []

    def make(**options) -> tuple[EngineThread, Inbox]:
        inbox = Inbox()
        made.append(EngineThread(make_llm(**options), inbox))
        return made[-1], inbox

    yield make
    for feed in made:
        feed.close()


def test_each_gets_the_tokens_it_would_get_alone(make_feed, make_llm):
    feed, inbox = make_feed()
    for key, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        ids = feed.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        feed.submit(key, ids, params)
    inbox.wait_last(*range(len(PROMPTS)))
    tokens = [[t for one in inbox.of(key) for t in one.token_ids] for key in range(len(PROMPTS))]
    assert tokens == run_alone(make_llm)
    assert feed.num_open == 0


def test_a_step_is_one_delivery(make_feed):
    feed, inbox = make_feed()
    _, gate = gated(feed)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    for key in range(6):
        feed.submit(key, [5 + key, 6], params)
    gate.set()
    inbox.wait_last(*range(6))
    assert len(inbox.calls) <= feed.llm.engine.num_steps + 6  # a first token may come before its request is known
    assert max(len(call) for call in inbox.calls) == 6


def test_a_resting_engine_begins_with_all_that_comes_together(make_llm, monkeypatch):
    monkeypatch.setattr(feed_module, "IDLE_TURN_S", 600.0)
    inbox, wakes = Inbox(), []
    feed = EngineThread(make_llm(**ROOMY), inbox, wakes.append)
    try:
        while not feed._work._cond._waiters:  # until its thread rests
            time.sleep(0.001)
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        for key in range(5):
            feed.submit(key, [5 + key, 6], params)
        assert not inbox.calls
        assert feed.llm.engine.num_steps == 0
        for wake in wakes:
            wake()
        inbox.wait_last(*range(5))
        assert feed.llm.engine.num_steps == 4
        assert [len(call) for call in inbox.calls] == [5, 5, 5, 5]
    finally:
        feed.close()


def test_the_loop_rests_after_a_first_token_among_few(make_feed, monkeypatch):
    rests: list[float] = []
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=rests.append))
    feed, inbox = make_feed()
    entered, gate = gated(feed)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    feed.submit(0, [5, 6], params)
    assert entered.wait(600)
    for key in range(1, 6):  # all come into the second step
        feed.submit(key, [5 + key, 6], params)
    gate.set()
    inbox.wait_last(*range(6))
    assert [len(call) for call in inbox.calls[:2]] == [1, 6]
    assert len(rests) == 1


def test_opening_comes_first_and_timings_last(make_feed):
    feed, inbox = make_feed()
    params = SamplingParams(max_tokens=4, seed=7, temperature=1, ignore_eos=True, prompt_logprobs=1, logprobs=2)
    feed.submit(0, [5, 6, 7], params)
    inbox.wait_last(0)
    news = inbox.of(0)
    opening = news[0].opening
    assert opening is not None
    assert (opening.seed, opening.num_prompt_tokens) == (7, 3)
    assert [one is None for one in opening.prompt_logprobs or []] == [True, False, False]
    assert all(one.opening is None for one in news[1:])
    assert [one.finish_reason for one in news if one.finish_reason] == ["length"]
    assert news[-1].timings is not None
    assert news[-1].timings["total_s"] > 0
    assert [len(lp.top) for one in news for lp in one.logprobs or []] == [2] * 4


def test_several_answers_and_the_best_of_them(make_feed, make_llm):
    feed, inbox = make_feed()
    several = SamplingParams(n=3, max_tokens=5, temperature=1, seed=3, ignore_eos=True)
    best = SamplingParams(n=2, best_of=4, max_tokens=5, temperature=1, seed=3, ignore_eos=True)
    feed.submit(0, [9, 10, 11], several)
    feed.submit(1, [9, 10, 11], best)
    inbox.wait_last(0, 1)
    tokens = defaultdict(list)
    for one in inbox.news:
        tokens[one.key, one.index] += one.token_ids
    with make_llm() as alone:
        for key, params in ((0, several), (1, best)):
            choices = alone.generate([9, 10, 11], params).choices
            assert [tokens[key, index] for index in range(params.n)] == [choice.token_ids for choice in choices]
            assert [one.opening.seed for one in inbox.of(key) if one.opening] == [choices[0].seed]
    assert all(len(one.token_ids) == 5 for one in inbox.of(1)), "the best come whole"


def test_scores_and_embeddings(make_feed, make_llm):
    feed, inbox = make_feed(max_tokens=16)
    ids = list(range(5, 45))
    feed.score(0, ids, 2)
    feed.embed(1, ids, "mean", True)
    inbox.wait_last(0, 1)
    with make_llm() as alone:
        assert inbox.of(0)[-1].opening.prompt_logprobs == alone.score(ids, 2).logprobs
        np.testing.assert_array_equal(inbox.of(1)[-1].vector, alone.embed(ids, "mean", True).vector)


def test_what_cannot_be_done_is_refused_at_once(make_feed):
    feed, inbox = make_feed(options=EngineOptions(max_waiting=1), max_requests=1, **ROOMY)
    with pytest.raises(InvalidArgumentError, match="10000"):
        feed.submit(0, [5, 10_000], ENDLESS)
    feed.submit(1, [5], ENDLESS)
    feed.submit(2, [6], ENDLESS)
    with pytest.raises(QueueFullError):
        feed.submit(3, [7], ENDLESS)
    with pytest.raises(QueueFullError):
        feed.submit(4, [7], SamplingParams(n=2, max_tokens=4))
    assert feed.num_open == 2
    feed.abort(1)
    feed.abort(1)  # again, and of one that is not there
    feed.abort(77)
    inbox.wait_for(lambda: inbox.of(2))
    feed.abort(2)
    assert not inbox.of(3)
    assert not inbox.of(4)


def test_a_failing_step_ends_its_requests_and_not_the_feed(make_feed):
    feed, inbox = make_feed()
    program = feed.llm.engine.program
    honest = program.step

    def fail(*arguments):
        program.step = honest
        raise RuntimeError("planted")

    program.step = fail
    feed.submit(0, [5, 6], SamplingParams(n=2, max_tokens=4, temperature=1))
    inbox.wait_last(0)
    assert [type(one.error) for one in inbox.of(0)] == [InternalError]
    feed.submit(1, [5, 6], SamplingParams(max_tokens=4, ignore_eos=True))
    inbox.wait_last(1)
    assert inbox.of(1)[-1].finish_reason == "length"


def test_the_loop_turns_without_work_and_stands_in_a_step(make_feed):
    feed, inbox = make_feed(**ROOMY)
    before = feed.last_turn
    for _ in range(2000):
        if feed.last_turn != before:  # the idle loop proves itself
            break
        time.sleep(IDLE_TURN_S / 5)
    assert feed.last_turn != before
    program = feed.llm.engine.program
    honest, stuck, release = program.step, threading.Event(), threading.Event()

    def hang(*arguments):
        stuck.set()
        release.wait(600)
        return honest(*arguments)

    program.step = hang
    feed.submit(0, [5, 6], SamplingParams(max_tokens=2, ignore_eos=True), RequestOptions())
    assert stuck.wait(600)
    stood = feed.last_turn
    time.sleep(3 * IDLE_TURN_S)  # an idle loop would have turned meanwhile
    assert feed.last_turn == stood
    release.set()
    inbox.wait_last(0)


def test_closing_tells_everybody(make_llm):
    inbox = Inbox()
    feed = EngineThread(make_llm(**ROOMY), inbox)
    feed.submit(0, [5], ENDLESS)
    inbox.wait_for(lambda: inbox.of(0))
    feed.close()
    assert inbox.of(0)[-1].finish_reason == "abort"
    assert inbox.of(0)[-1].is_last
