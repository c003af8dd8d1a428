"""EngineThread: many requests, delivered once per step, get what each would get alone."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.engine.options import BeamSettings, EngineOptions, RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import InternalError, InvalidArgumentError, QueueFullError
from penstock.llm import engine_thread as feed_module
from penstock.llm.engine_thread import IDLE_TURN_S, EngineThread
from tests.support.engine_requests import PARAMS, PROMPTS, run_alone
from tests.support.errors import raises
from tests.support.inbox import Inbox
from tests.support.waiting import until

ENDLESS = SamplingParams(max_tokens=90_000, temperature=0, ignore_eos=True)
ROOMY = {"context_len": 100_000, "num_pages": 3200}


def gated(engine_thread: EngineThread) -> tuple[threading.Event, threading.Event]:
    """Steps of its engine wait for the second event; the first tells that one waits."""
    program = engine_thread.llm.engine.program
    honest, entered, gate = program.step, threading.Event(), threading.Event()

    def step(*arguments):
        entered.set()
        gate.wait(600)
        return honest(*arguments)

    program.step = step
    return entered, gate


@pytest.fixture
def make_engine_thread(make_llm):
    made: list[EngineThread] = []

    def make(**options) -> tuple[EngineThread, Inbox]:
        inbox = Inbox()
        made.append(EngineThread(make_llm(**options), inbox))
        return made[-1], inbox

    yield make
    for engine_thread in made:
        engine_thread.close()


def test_concurrent_requests_match_single_ones(make_engine_thread, make_llm):
    engine_thread, inbox = make_engine_thread()
    for key, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        ids = engine_thread.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        engine_thread.submit(key, ids, params)
    inbox.wait_last(*range(len(PROMPTS)))
    tokens = [[t for one in inbox.of(key) for t in one.token_ids] for key in range(len(PROMPTS))]
    assert tokens == run_alone(make_llm)
    assert engine_thread.num_open == 0


def test_a_step_is_one_delivery(make_engine_thread):
    engine_thread, inbox = make_engine_thread()
    _, gate = gated(engine_thread)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    for key in range(6):
        engine_thread.submit(key, [5 + key, 6], params)
    gate.set()
    inbox.wait_last(*range(6))
    assert (
        len(inbox.calls) <= engine_thread.llm.engine.num_steps + 6
    )  # a first token may come before its request is known
    assert max(len(call) for call in inbox.calls) == 6


def test_a_resting_engine_begins_with_all_that_comes_together(make_llm, monkeypatch):
    monkeypatch.setattr(feed_module, "IDLE_TURN_S", 600.0)
    inbox, wakes = Inbox(), []
    engine_thread = EngineThread(make_llm(**ROOMY), inbox, wakes.append)
    try:
        until(lambda: engine_thread._work._cond._waiters)
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        for key in range(5):
            engine_thread.submit(key, [5 + key, 6], params)
        assert not inbox.calls
        assert engine_thread.llm.engine.num_steps == 0
        for wake in wakes:
            wake()
        inbox.wait_last(*range(5))
        assert engine_thread.llm.engine.num_steps == 4
        assert [len(call) for call in inbox.calls] == [5, 5, 5, 5]
    finally:
        engine_thread.close()


def test_the_loop_rests_after_a_first_token_among_few(make_engine_thread, monkeypatch):
    rests: list[float] = []
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=rests.append))
    engine_thread, inbox = make_engine_thread()
    entered, gate = gated(engine_thread)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine_thread.submit(0, [5, 6], params)
    assert entered.wait(600)
    for key in range(1, 6):  # all join the second step
        engine_thread.submit(key, [5 + key, 6], params)
    gate.set()
    inbox.wait_last(*range(6))
    assert [len(call) for call in inbox.calls[:2]] == [1, 6]
    assert len(rests) == 1


def test_started_comes_first_and_timings_last(make_engine_thread):
    engine_thread, inbox = make_engine_thread()
    params = SamplingParams(max_tokens=4, seed=7, temperature=1, ignore_eos=True, prompt_logprobs=1, logprobs=2)
    engine_thread.submit(0, [5, 6, 7], params)
    inbox.wait_last(0)
    events = inbox.of(0)
    started = events[0].started
    assert started is not None
    assert (started.seed, started.num_prompt_tokens) == (7, 3)
    assert [one is None for one in started.prompt_logprobs or []] == [True, False, False]
    assert all(one.started is None for one in events[1:])
    assert [one.finish_reason for one in events if one.finish_reason] == ["length"]
    assert events[-1].timings is not None
    assert events[-1].timings["total_s"] > 0
    assert [len(lp.top) for one in events for lp in one.logprobs or []] == [2] * 4


def test_several_answers_and_the_best_of_them(make_engine_thread, make_llm):
    engine_thread, inbox = make_engine_thread()
    several = SamplingParams(n=3, max_tokens=5, temperature=1, seed=3, ignore_eos=True)
    best = SamplingParams(n=2, best_of=4, max_tokens=5, temperature=1, seed=3, ignore_eos=True)
    engine_thread.submit(0, [9, 10, 11], several)
    engine_thread.submit(1, [9, 10, 11], best)
    inbox.wait_last(0, 1)
    tokens = defaultdict(list)
    for one in inbox.events:
        tokens[one.key, one.index] += one.token_ids
    with make_llm() as alone:
        for key, params in ((0, several), (1, best)):
            choices = alone.generate([9, 10, 11], params).choices
            assert [tokens[key, index] for index in range(params.n)] == [choice.token_ids for choice in choices]
            assert [one.started.seed for one in inbox.of(key) if one.started] == [choices[0].seed]
    assert all(len(one.token_ids) == 5 for one in inbox.of(1)), "the best come whole"


def test_scores_and_embeddings(make_engine_thread, make_llm):
    engine_thread, inbox = make_engine_thread(max_tokens=16)
    ids = list(range(5, 45))
    engine_thread.score(0, ids, 2)
    engine_thread.embed(1, ids, "mean", True)
    inbox.wait_last(0, 1)
    with make_llm() as alone:
        assert inbox.of(0)[-1].started.prompt_logprobs == alone.score(ids, 2).logprobs
        np.testing.assert_array_equal(inbox.of(1)[-1].vector, alone.embed(ids, "mean", True).vector)


def test_impossible_requests_are_refused_at_once(make_engine_thread):
    engine_thread, inbox = make_engine_thread(options=EngineOptions(max_waiting=1), max_requests=1, **ROOMY)
    with raises(InvalidArgumentError, param="prompt", match="10000"):
        engine_thread.submit(0, [5, 10_000], ENDLESS)
    engine_thread.submit(1, [5], ENDLESS)
    engine_thread.submit(2, [6], ENDLESS)
    with pytest.raises(QueueFullError):
        engine_thread.submit(3, [7], ENDLESS)
    with pytest.raises(QueueFullError):
        engine_thread.submit(4, [7], SamplingParams(n=2, max_tokens=4))
    assert engine_thread.num_open == 2
    engine_thread.abort(1)
    engine_thread.abort(1)  # a second time, and for an unknown key
    engine_thread.abort(77)
    inbox.wait_for(lambda: inbox.of(2))
    engine_thread.abort(2)
    assert not inbox.of(3)
    assert not inbox.of(4)


def test_a_search_without_room_takes_no_place(make_engine_thread):
    engine_thread, inbox = make_engine_thread(options=EngineOptions(max_waiting=2), max_requests=2, **ROOMY)
    submitted: list[int] = []
    submit = engine_thread.llm.engine.submit

    def note(*arguments, **options):
        submitted.append(1)
        return submit(*arguments, **options)

    engine_thread.llm.engine.submit = note
    engine_thread.submit(0, [5], ENDLESS)
    engine_thread.submit(1, [5], ENDLESS)
    params = SamplingParams(max_tokens=4, temperature=0)
    with raises(QueueFullError, code="queue_full"):
        engine_thread.submit(2, [6], params, beams=BeamSettings(3))
    assert len(submitted) == 2
    engine_thread.abort(0)
    inbox.wait_for(lambda: engine_thread.llm.engine.num_waiting == -1)
    engine_thread.submit(3, [6], params, beams=BeamSettings(3))
    inbox.wait_last(3)
    assert len(submitted) == 5
    engine_thread.abort(1)


def test_a_failing_step_ends_its_requests_and_not_the_feed(make_engine_thread):
    engine_thread, inbox = make_engine_thread()
    program = engine_thread.llm.engine.program
    honest = program.step

    def fail(*arguments):
        program.step = honest
        raise RuntimeError("planted")

    program.step = fail
    engine_thread.submit(0, [5, 6], SamplingParams(n=2, max_tokens=4, temperature=1))
    inbox.wait_last(0)
    assert [type(one.error) for one in inbox.of(0)] == [InternalError]
    engine_thread.submit(1, [5, 6], SamplingParams(max_tokens=4, ignore_eos=True))
    inbox.wait_last(1)
    assert inbox.of(1)[-1].finish_reason == "length"


def test_the_loop_turns_without_work_and_stands_in_a_step(make_engine_thread):
    engine_thread, inbox = make_engine_thread(**ROOMY)
    before = engine_thread.last_turn
    until(lambda: engine_thread.last_turn != before, "a turn of the idle loop")
    program = engine_thread.llm.engine.program
    honest, stuck, release = program.step, threading.Event(), threading.Event()

    def hang(*arguments):
        stuck.set()
        release.wait(600)
        return honest(*arguments)

    program.step = hang
    engine_thread.submit(0, [5, 6], SamplingParams(max_tokens=2, ignore_eos=True), RequestOptions())
    assert stuck.wait(600)
    stood = engine_thread.last_turn
    time.sleep(3 * IDLE_TURN_S)  # an idle loop would have turned meanwhile
    assert engine_thread.last_turn == stood
    release.set()
    inbox.wait_last(0)


def test_closing_tells_everybody(make_llm):
    inbox = Inbox()
    engine_thread = EngineThread(make_llm(**ROOMY), inbox)
    engine_thread.submit(0, [5], ENDLESS)
    inbox.wait_for(lambda: inbox.of(0))
    engine_thread.close()
    assert inbox.of(0)[-1].finish_reason == "abort"
    assert inbox.of(0)[-1].is_last
