"""Ten thousand steps of the engine under random moves: submit (several answers to a prompt, scored prompts, embeddings,
deadlines, priorities, salts, impossible samplings), step, abort, preempt, let time pass, fail, forget.

After each step every page is accounted for; whatever ends has the tokens, log-probabilities and vectors that it gets
alone, or the beginning of them and a reason; in the end all pages are free.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.pages import PageKeys
from penstock.engine.params import ResolvedSampling
from penstock.engine.pooling import Pooling
from penstock.engine.prompt_logits import PromptScores
from penstock.engine.request import Request, RequestStatus
from penstock.errors import DeadlineError, InternalError, InvalidArgumentError, PenstockError, QueueFullError
from penstock.runtime.program import ProgramLimits
from tests.support.engine_requests import Later
from tests.support.fake_program import FakeProgram
from tests.support.properties import CHECKS

VOCAB = 97
MOST = 12
LENGTHS = (1, 33, 33, 5, 31, 32, 64, 70)
STOPS = frozenset(range(0, VOCAB, 6))
SAMPLING = {
    "greedy": ResolvedSampling(num_logprobs=0),
    "sampled": ResolvedSampling(num_logprobs=1, temperature=1.1, top_k=40, seed=7),
    "every field": ResolvedSampling(
        temperature=0.9, top_p=0.9, min_p=0.01, repetition_penalty=1.3, logit_bias=((3, 4.0),), bad_words=((3, 9),),
        min_tokens=4, end_ids=tuple(sorted(STOPS)), seed=2**64 - 1,
    ),
    "stops": ResolvedSampling(temperature=1.0, seed=3),
    "impossible": ResolvedSampling(allowed_token_ids=(5,), bad_words=((5,),)),
}  # fmt: skip
Outcome = tuple[list[int], list[object], list[object], bytes, str]


def prompt_of(family: int, length: int) -> list[int]:
    return [(5 * i + 1) % VOCAB if i else family for i in range(length)]


def submit(engine: Engine, prompt: list[int], kind: str, sampling: ResolvedSampling, scored: bool, **more) -> Request:
    """Submit a request; ``kind`` names a sampling, or the pooling of an embedding."""
    if kind in ("mean", "last"):
        return engine.submit(prompt, pooling=Pooling(kind), **more)
    rows = PromptScores(2) if scored else None
    stop_ids = STOPS if sampling.end_ids or kind == "stops" else frozenset()
    return engine.submit(prompt, sampling, stop_ids=stop_ids, prompt_rows=rows, **more)


def outcome_of(request: Request) -> Outcome:
    vector = b""
    if request.pooling is not None and request.finish_reason == "stop":
        vector = request.pooling.vector(False).tobytes()
    scores = list(request.prompt_logprobs or [])
    return list(request.output_ids), list(request.logprobs), scores, vector, request.finish_reason or ""


@cache
def alone(windows: tuple[int, ...], family: int, length: int, kind: str, sample: int, scored: bool) -> Outcome:
    """Return what the request gets alone, with its prompt in one step."""
    limits = ProgramLimits(max_tokens=128, max_requests=1, max_rows=128, num_pages=8)
    engine = Engine(FakeProgram(vocab_size=VOCAB, windows=windows, limits=limits), EngineOptions(prefix_cache=False))
    sampling = SAMPLING.get(kind, ResolvedSampling())
    sampling = ResolvedSampling(**(vars(sampling) | {"max_tokens": MOST})).answer(sample)
    request = submit(engine, prompt_of(family, length), kind, sampling, scored)
    while engine.has_work:
        engine.step()
    engine.close()
    return outcome_of(request)


class EngineMoves(RuleBasedStateMachine):
    """Submits to an engine over a program whose tokens depend on the content of its pages."""

    num_steps = 0
    moves: tuple[str, ...] = ()  # of the last example, which after a failure is the smallest

    @initialize(
        num_pages=st.sampled_from([8, 3, 5, 20]),
        windows=st.sampled_from([(0,), (40,), (0, 33)]),
        max_tokens=st.sampled_from([16, 7, 100]),
        max_requests=st.sampled_from([4, 1, 6]),
        cached=st.sampled_from([True, True, False]),
        max_waiting=st.sampled_from([0, 0, 3]),
        max_chunk=st.sampled_from([0, 0, 5]),
    )
    def begin(self, num_pages, windows, max_tokens, max_requests, cached, max_waiting, max_chunk):
        type(self).moves = ()
        Later.ahead = 0.0
        limits = ProgramLimits(max_tokens=max_tokens, max_requests=max_requests, num_pages=num_pages)
        self.program = FakeProgram(vocab_size=VOCAB, context_len=100, windows=windows, limits=limits)
        options = EngineOptions(max_chunk=max_chunk, prefix_cache=cached, max_waiting=max_waiting)
        self.engine = Engine(self.program, options)
        self.windows = windows
        self.live: list[tuple[Request, tuple[object, ...], float]] = []
        self.has_failed = False

    @rule(
        family=st.integers(0, 1),
        length=st.sampled_from(LENGTHS),
        kind=st.sampled_from([*SAMPLING, "mean", "last"]),
        num_answers=st.integers(1, 3),
        max_tokens=st.sampled_from([MOST, 5, 1, 0]),
        scored=st.booleans(),
        priority=st.sampled_from([0, 0, 1, -1]),
        salt=st.sampled_from(["", "", "other"]),
        deadline=st.sampled_from([None, None, 50.0]),
    )
    def add(self, family, length, kind, num_answers, max_tokens, scored, priority, salt, deadline):
        self.note("add")
        is_embedding = kind in ("mean", "last")
        length = min(length, self.engine.max_len - 1)
        scored = scored and not is_embedding
        max_tokens = max_tokens if scored or is_embedding else max(1, max_tokens)
        due = None if deadline is None else Later.ahead + deadline
        options = RequestOptions(priority=priority, cache_salt=salt, deadline_s=due)
        for sample in range(1 if is_embedding else num_answers):
            scored = scored and sample == 0
            fields = {"max_tokens": max_tokens if scored else max(1, max_tokens)}
            sampling = ResolvedSampling(**(vars(SAMPLING.get(kind, ResolvedSampling())) | fields)).answer(sample)
            try:
                request = submit(self.engine, prompt_of(family, length), kind, sampling, scored, options=options)
            except QueueFullError:
                assert self.engine.options.max_waiting
                return
            self.live.append((request, (family, length, kind, sample, scored), due or np.inf))

    @rule(count=st.integers(1, 16))
    def step(self, count):
        self.note("step")
        for _ in range(count):
            self.one_step()

    @rule(which=st.integers(0, 20))
    def abort(self, which):
        self.note("abort")
        if self.live:
            self.engine.abort(self.live[which % len(self.live)][0])

    @rule(which=st.integers(0, 20))
    def preempt(self, which):
        self.note("preempt")
        running = self.engine.scheduler.running
        if running:
            self.engine.scheduler.preempt(running[which % len(running)])

    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def time_passes(self, seconds):
        self.note("time_passes")
        Later.ahead += seconds

    @rule(how=st.sampled_from(["a row", "a step", "everybody leaves", "all names"]), luck=st.integers(0, 3))
    def fail(self, how, luck):
        self.note("fail")
        if luck:
            return
        if how == "everybody leaves":
            self.engine.abort_all()
        elif how == "all names":
            self.engine.forget_prefixes()
        elif how == "a step":
            self.program.fail_next, self.has_failed = RuntimeError("planted"), True
        else:
            self.program.spoil_row, self.has_failed = 0, True

    @invariant()
    def whatever_ended_has_what_it_gets_alone(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            for entry in [entry for entry in self.live if entry[0].status is RequestStatus.FINISHED]:
                self.live.remove(entry)
                self.judge(*entry)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            before = self.engine.num_steps
            self.one_step()
            assert self.engine.num_steps > before or not self.engine.has_work, "work is left but nothing is done"
        self.whatever_ended_has_what_it_gets_alone()
        assert not self.live, "a request is neither finished nor worked on"
        for pool in self.engine.scheduler.ledger.pools:
            assert pool.num_free == pool.num_pages
        figures = self.engine.figures()
        assert (figures.num_running, figures.num_waiting, figures.num_held_pages) == (0, 0, 0)
        self.engine.close()

    def one_step(self) -> None:
        before = self.engine.num_steps
        self.engine.step()
        self.engine.check_integrity()
        type(self).num_steps += self.engine.num_steps - before

    def note(self, move: str) -> None:
        type(self).moves += (move,)

    def judge(self, request: Request, what: tuple, due: float) -> None:
        ids, logprobs, scores, vector, reason = outcome_of(request)
        expected_ids, expected_logprobs, expected_scores, expected_vector, expected_reason = alone(self.windows, *what)
        assert request.pages is None
        assert request.slot == -1
        assert ids == expected_ids[: len(ids)]
        assert logprobs == expected_logprobs[: len(ids)]
        assert scores == expected_scores[: len(scores)]
        if reason == "error":
            self.check_error(request.error, what[2], due)
        elif reason != "abort":
            assert request.error is None
            assert vector == expected_vector
            assert len(scores) == len(expected_scores)
            assert len(ids) == min(len(expected_ids), request.max_tokens)
            is_whole = len(ids) == len(expected_ids) and request.max_tokens
            assert reason == (expected_reason if is_whole else "length")

    def check_error(self, error: PenstockError | None, kind: str, due: float) -> None:
        if isinstance(error, DeadlineError):
            assert Later.ahead > due - 60
        elif isinstance(error, InvalidArgumentError):
            assert kind == "impossible"
        else:
            assert isinstance(error, InternalError)
            assert self.has_failed


@pytest.fixture(autouse=True)
def _later(later):
    """Let time pass only by moves."""


def forget_aborted(monkeypatch):
    """Forget the pages of requests that are aborted while they run."""
    real = Engine._end

    def end(self, request, reason, error=None):
        if reason == "abort":
            request.pages = None
        real(self, request, reason, error)

    monkeypatch.setattr(Engine, "_end", end)


def mistake_beginnings(monkeypatch):
    """Give two prompts that differ in their first token equal page names."""
    real = PageKeys.extend

    def extend(self, keys, salt, tokens):
        real(self, keys, salt, tokens if keys else [0, *tokens[1:]])

    monkeypatch.setattr(PageKeys, "extend", extend)


def run_moves(
    max_examples: int, num_moves: int, *, machine: type[EngineMoves] = EngineMoves, shrinks: bool = True
) -> None:
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    fixed = settings(CHECKS, database=None, report_multiple_bugs=False, phases=phases)
    run_state_machine_as_test(
        machine, settings=settings(fixed, max_examples=max_examples, stateful_step_count=num_moves)
    )


def seeded(number: int) -> type[EngineMoves]:
    """The draws depend on the sources and on the machine too, so a single seed may find much or nothing."""
    return seed(number)(type("SeededMoves", (EngineMoves,), {"num_steps": 0}))


@pytest.mark.parametrize("least", [150, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_moves(least):
    num_steps = 0
    for number in range(100):
        machine = seeded(number)
        run_moves(30, 60, machine=machine)
        num_steps += machine.num_steps
        if num_steps >= least:
            break
    assert num_steps >= least


def run_seeds(max_examples: int, num_moves: int, **options: bool) -> None:
    """Run until some seed raises."""
    for number in range(50):
        machine = seeded(number)
        try:
            run_moves(max_examples, num_moves, machine=machine, **options)
        finally:
            EngineMoves.moves = machine.moves


@pytest.mark.long
def test_a_planted_leak_is_seen_in_three_moves(monkeypatch):
    forget_aborted(monkeypatch)
    with pytest.raises(InternalError, match="page pool"):
        run_seeds(100, 6)
    assert EngineMoves.moves == ("add", "step", "abort")


def test_pages_shared_by_mistake_are_seen(monkeypatch):
    mistake_beginnings(monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds(100, 30, shrinks=False)
