"""An engine goes on with answers that another one began: the tokens, texts and log-probabilities of one engine."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.request import BegunAnswer
from penstock.errors import InvalidArgumentError, QueueFullError
from penstock.llm.engine_thread import EngineThread, StepEvent
from penstock.text.text_stream import StopRules, TextStream
from tests.support.engine_requests import prompt_of
from tests.support.errors import raises
from tests.support.fake_model import FILES
from tests.support.inbox import Inbox

PARAMS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0, seed=0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=40, temperature=1, seed=2**63 + 5, top_p=0.9, logprobs=2, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=40, temperature=1, seed=3, repetition_penalty=1.5, presence_penalty=1, ignore_eos=True
    ),
    "rules": SamplingParams(
        max_tokens=40, min_tokens=20, temperature=1, seed=4, bad_words=["a"], logit_bias={7: 3.0}, stop=["ab", "q"]
    ),
    "several": SamplingParams(n=3, max_tokens=25, temperature=1, seed=5, stop=["e"], prompt_logprobs=1),
    "echo": SamplingParams(max_tokens=12, temperature=1, seed=6, echo=True, prompt_logprobs=0, ignore_eos=True),
}


class Answers:
    """What events brought, by the index of the answer."""

    def __init__(self, events: list[StepEvent] = ()) -> None:
        self.ids, self.text, self.reasons = defaultdict(list), defaultdict(str), {}
        self.logprobs = defaultdict(list)
        self.started = []
        for event in events:
            self.add(event)

    def add(self, event: StepEvent) -> None:
        assert event.error is None, event.error
        self.ids[event.index] += event.token_ids
        self.text[event.index] += event.text
        self.logprobs[event.index] += event.logprobs or []
        if event.finish_reason:
            self.reasons[event.index] = event.finish_reason
        if event.started is not None:
            self.started.append(event.started)

    def begun(self) -> list[BegunAnswer]:
        return [BegunAnswer(i, ids, len(self.text[i]), i in self.reasons) for i, ids in self.ids.items()]

    def whole(self) -> tuple:
        return dict(self.ids), dict(self.text), dict(self.reasons), dict(self.logprobs)


@pytest.fixture
def make_thread(make_llm):
    made: list[EngineThread] = []

    def make(**options) -> tuple[EngineThread, Inbox]:
        inbox = Inbox()
        made.append(EngineThread(make_llm(**options), inbox))
        return made[-1], inbox

    yield make
    for thread in made:
        thread.close()


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("windows", [(0,), (0, 33)], ids=["full", "windowed"])
def test_another_engine_goes_on_with_the_same_answers(make_thread, params, windows) -> None:
    prompt = prompt_of(70, 3)
    first, inbox = make_thread(windows=windows)
    first.submit(0, prompt, params)
    inbox.wait_last(0)
    events = inbox.of(0)
    expected = Answers(events)
    second, received = make_thread(windows=windows)
    cuts = sorted({1, 2, len(events) // 3, len(events) - 1} - {0, len(events)})
    for key, cut in enumerate(cuts, 1):
        answers = Answers(events[:cut])
        second.submit(key, prompt, params, begun=answers.begun())
        received.wait_last(key)
        for event in received.of(key):
            answers.add(event)
        assert answers.whole() == expected.whole(), f"cut after {cut} events"
        assert len(answers.started) == 1, "the facts of the prompt come once"
        assert received.of(key)[-1].timings["per_token_s"] >= 0
    assert second.num_open == 0


def test_a_resumed_answer_may_run_into_its_limits(make_thread) -> None:
    thread, inbox = make_thread(context_len=64, options=EngineOptions(max_waiting=1), max_requests=1)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, seed=0)
    for begun in ([5] * 5, [5] * 6):
        with raises(InvalidArgumentError, param="prompt"):
            thread.submit(0, [5, 6], params, begun=[BegunAnswer(0, begun)])
    with raises(InvalidArgumentError, param="prompt", match="10000"):
        thread.submit(0, [5, 6], params, begun=[BegunAnswer(0, [10_000])])
    with raises(InvalidArgumentError, param="seed"):
        thread.submit(0, [5, 6], SamplingParams(max_tokens=5), begun=[BegunAnswer(0, [5])])
    assert thread.num_open == 0
    thread.submit(1, [5, 6], params, begun=[BegunAnswer(0, [5] * 4)])
    inbox.wait_last(1)
    assert [len(event.token_ids) for event in inbox.of(1)] == [1]
    thread.submit(2, [5] * 60, replace(params, max_tokens=90), begun=[BegunAnswer(0, [5] * 3)])
    inbox.wait_last(2)
    assert [event.finish_reason for event in inbox.of(2)] == ["length"], "the context is full"


def test_a_resumed_request_is_not_displaced(make_llm) -> None:
    """A full queue ends a waiting request of the client with most; one with output is no longer waiting."""
    engine = make_llm(options=EngineOptions(max_waiting=2), max_requests=1).engine
    sampling = ResolvedSampling(max_tokens=8)
    crowd = RequestOptions(client="crowd")
    begun = [engine.resume([5, 6], BegunAnswer(0, [7]), sampling, options=crowd) for _ in range(3)]
    with pytest.raises(QueueFullError):
        engine.submit([5], sampling, options=RequestOptions(client="other"))
    while engine.has_work:
        engine.step()
    assert [(one.finish_reason, len(one.output_ids), one.num_sampled) for one in begun] == [("length", 8, 7)] * 3


def test_text_that_was_given_out_is_left_out(make_llm) -> None:
    tokenizer = make_llm(files=FILES).tokenizer
    ids = tokenizer.encode("snow in März: 雪")
    whole = TextStream(tokenizer, StopRules(["xyz"]))
    pieces = []
    for token in ids:
        whole.push(token)
        pieces.append(whole.take())
    for cut in range(len(ids)):
        given = "".join(pieces[: cut + 1])
        again = TextStream(tokenizer, StopRules(["xyz"]))
        assert not again.replay(ids[:cut], len(given)), "one character of a token that is not replayed was given out"
        rest = ""
        for token in ids[cut:]:
            again.push(token)
            rest += again.take()
        assert given + rest == "".join(pieces)
    assert TextStream(tokenizer, StopRules(["in M"])).replay(ids, 0)
