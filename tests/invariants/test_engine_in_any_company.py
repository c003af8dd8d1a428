"""Idea 5 through the engine: the same tokens and the same bits of their log-probabilities, however requests are
batched, chunked, ordered, preempted, cached, streamed or spread over threads; greedy, sampled with seeds, and with
penalties; of the answer's tokens and of the prompt's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from penstock.core.native import ALL_THREADS, Context, CoreProgram, Model, ProgramOptions
from penstock.engine.engine import Engine
from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import EngineOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.prompt_logits import PromptScores
from penstock.engine.request import Request
from penstock.graph.ir import KvLayout
from penstock.llm.embed import embed
from penstock.llm.stream import Stream
from penstock.runtime.program import ProgramInfo, ProgramLimits
from tests.invariants.steps import LEVELS, each_format

ModelOf = Callable[[str], Model]
ContextOf = Callable[[str, int], Context]
Answers = list[tuple[list[int], bytes, bytes]]

SHARED = np.random.default_rng(0).integers(0, 259, 70).tolist()
LENGTHS = (1, 31, 32, 33, 100)
PROMPTS = [
    *(np.random.default_rng(length).integers(0, 259, length).tolist() for length in LENGTHS),
    [*SHARED, 1, 2, 3],
    [*SHARED, 4, 5],
]
SAMPLING = [
    ResolvedSampling(max_tokens=30, num_logprobs=0),
    ResolvedSampling(max_tokens=40, num_logprobs=0, temperature=0.9, top_k=30, seed=1),
    ResolvedSampling(max_tokens=33, num_logprobs=0, temperature=1.3, top_p=0.9, seed=2**64 - 1),
    ResolvedSampling(max_tokens=25, num_logprobs=0, temperature=1.0, min_p=0.02, repetition_penalty=1.2, seed=3),
    ResolvedSampling(max_tokens=30, num_logprobs=0, allowed_token_ids=tuple(range(100, 140))),
    ResolvedSampling(
        max_tokens=30,
        num_logprobs=0,
        logit_bias=((7, 5.0), (201, -100.0)),
        min_tokens=20,
        end_ids=tuple(range(0, 259, 2)),
    ),
    ResolvedSampling(max_tokens=30, num_logprobs=0, temperature=1.2, typical_p=0.3, seed=5),
]
"""One for each prompt."""

UNSCORED = 3
"""The prompt that goes without log-probabilities among those that have them."""

pytestmark = each_format


class EveryThread(CoreProgram):
    """A core program that uses all threads for steps however short, with what the engine asks of a program."""

    def __init__(self, model: Model, context: Context, limits: ProgramLimits, kv: KvLayout) -> None:
        self.limits = limits
        rows = limits.max_rows or limits.max_requests
        sizes = (limits.max_tokens, limits.max_requests, rows, limits.num_pages, limits.max_requests)
        super().__init__(model, context, ProgramOptions(*sizes, kv, ALL_THREADS))
        windows = tuple(model.info.page_windows)
        self.info = ProgramInfo("tiny", "", "graph", 259, limits.context_len, windows, 1, 1, 1, "", None, 96)

    def end_exchanges(self) -> None:
        """Do nothing: there are no other ranks."""


class Bench:
    """Runs the requests through engines of different sizes."""

    def __init__(self, model: Model, context_of: ContextOf, kv: KvLayout) -> None:
        self.model, self.context_of, self.kv = model, context_of, kv

    def engine(self, threads: int = 2, cached: bool = False, **sizes: int) -> Engine:
        limits = ProgramLimits(**({"max_tokens": 64, "max_requests": 8, "num_pages": 64, "context_len": 256} | sizes))
        program = EveryThread(self.model, self.context_of(LEVELS[0], threads), limits, self.kv)
        return Engine(program, EngineOptions(prefix_cache=cached))

    def answers(
        self,
        prompts: Sequence[list[int]],
        *,
        threads: int = 2,
        cached: bool = False,
        rounds: int = 1,
        preempt_every: int = 0,
        scored: bool = False,
        check: Callable[[Engine, list[Request]], None] = lambda engine, requests: None,
        **sizes: int,
    ) -> Answers:
        engine = self.engine(threads, cached, **sizes)
        for _ in range(rounds):
            requests = [
                engine.submit(
                    prompt,
                    SAMPLING[PROMPTS.index(prompt) % len(SAMPLING)],
                    prompt_rows=PromptScores(2) if scored and PROMPTS.index(prompt) != UNSCORED else None,
                )
                for prompt in prompts
            ]
            while engine.has_work:
                engine.step()
                running = engine.scheduler.running
                if preempt_every and running and engine.num_steps % preempt_every == 0:
                    engine.scheduler.preempt(running[engine.num_steps % len(running)])
                engine.check_integrity()
        assert all(request.error is None for request in requests)
        check(engine, requests)
        engine.close()
        return [(r.output_ids, packed(r.logprobs), packed((r.prompt_logprobs or [])[1:])) for r in requests]


def packed(logprobs: Sequence[TokenLogprobs | None]) -> bytes:
    """Log-probabilities as bits: of the tokens and of the likeliest ones."""
    pairs = [(one.token_id, one.logprob) for one in logprobs if one is not None]
    pairs += [pair for one in logprobs if one is not None for pair in one.top]
    return np.array(pairs, np.float64).tobytes()


@pytest.fixture(scope="module")
def alone_of() -> dict[tuple[str, KvLayout], Answers]:
    return {}


@pytest.fixture
def bench(scheme: str, kv: KvLayout, model_of: ModelOf, context_of: ContextOf) -> Bench:
    return Bench(model_of(scheme), context_of, kv)


@pytest.fixture
def alone(scheme: str, kv: KvLayout, bench: Bench, alone_of: dict[tuple[str, KvLayout], Answers]) -> Answers:
    """Each request by itself, its prompt in one step, nothing shared."""
    if (scheme, kv) not in alone_of:
        alone_of[scheme, kv] = [bench.answers([p], max_requests=1, max_tokens=128)[0] for p in PROMPTS]
    return alone_of[scheme, kv]


def test_batch_matches_single(bench: Bench, alone: Answers) -> None:
    assert bench.answers(PROMPTS, max_tokens=512) == alone


def test_chunked_matches_whole(bench: Bench, alone: Answers) -> None:
    assert bench.answers(PROMPTS, max_tokens=9) == alone


def test_order_does_not_matter(bench: Bench, alone: Answers) -> None:
    assert bench.answers(PROMPTS[::-1], max_requests=3) == alone[::-1]


def test_cached_matches_uncached(bench: Bench, alone: Answers) -> None:
    def shared(_engine: Engine, requests: list[Request]) -> None:
        assert [r.num_cached for r in requests] == [(len(p) - 1) // 32 * 32 for p in PROMPTS]

    assert bench.answers(PROMPTS, cached=True, rounds=2, check=shared) == alone


def test_preempted_matches_uninterrupted(bench: Bench, alone: Answers) -> None:
    def preempted(engine: Engine, _requests: list[Request]) -> None:
        assert engine.figures().num_preemptions > 3

    assert bench.answers(PROMPTS, preempt_every=6, check=preempted) == alone
    assert bench.answers(PROMPTS, preempt_every=4, cached=True, check=preempted) == alone


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_streamed_matches_whole(bench: Bench, alone: Answers, threads: int) -> None:
    """Read in turns, each stream its next piece, while new ones come and one is dropped in the middle."""
    engine = bench.engine(threads, max_tokens=40)
    params = SamplingParams(logprobs=0)
    dropped = Stream(engine, engine.submit(PROMPTS[3], SAMPLING[1]), params)
    streams, pieces = [], [[] for _ in PROMPTS]
    for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True):
        streams.append(Stream(engine, engine.submit(prompt, sampling), params))
        next(dropped)
        for stream, own in zip(streams, pieces, strict=False):
            own.append(next(stream))
    dropped.abort()
    while not all(own[-1].finish_reason for own in pieces):
        for stream, own in zip(streams, pieces, strict=True):
            own.extend([piece for piece in [next(stream, None)] if piece is not None])
    engine.check_integrity()
    engine.close()
    ids = [[token for piece in own for token in piece.token_ids] for own in pieces]
    bits = [packed([one for piece in own for one in piece.logprobs]) for own in pieces]
    assert list(zip(ids, bits, strict=True)) == [answer[:2] for answer in alone]
    assert max(len(own) for own in pieces) > 30  # it came in pieces


def test_prompt_log_probabilities_are_the_same_in_any_company(bench: Bench, alone: Answers) -> None:
    whole = [bench.answers([p], scored=True, max_requests=1, max_rows=128, max_tokens=128)[0] for p in PROMPTS]
    assert [answer[:2] for answer in whole] == [answer[:2] for answer in alone]
    num_scored = [0 if index == UNSCORED else len(prompt) - 1 for index, prompt in enumerate(PROMPTS)]
    assert [len(answer[2]) for answer in whole] == [3 * 16 * number for number in num_scored]  # a token and its top 2
    assert bench.answers(PROMPTS, scored=True, threads=1, max_tokens=9) == whole
    assert bench.answers(PROMPTS, scored=True, threads=3, max_tokens=300, max_rows=128) == whole
    assert bench.answers(PROMPTS, scored=True, preempt_every=4, cached=True, rounds=2) == whole


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_match(bench: Bench, alone: Answers, threads: int) -> None:
    assert bench.answers(PROMPTS, threads=threads) == alone
    assert bench.answers(PROMPTS, threads=threads, max_tokens=9, preempt_every=5, cached=True) == alone


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_same_in_any_company(bench: Bench, pooling: str) -> None:
    def vectors(threads: int, cached: bool, **sizes: int) -> list[bytes]:
        engine = bench.engine(threads, cached, **({"max_tokens": 512} | sizes))
        found = [embed(engine, PROMPTS, pooling, False) for _ in range(2)]
        engine.close()
        assert [one.vector.tobytes() for one in found[0]] == [one.vector.tobytes() for one in found[1]]
        return [one.vector.tobytes() for one in found[0]]

    expected = vectors(1, False, max_requests=1)
    assert vectors(2, True, max_tokens=9) == expected
    assert vectors(3, True) == expected
