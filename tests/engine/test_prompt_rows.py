"""Log-probabilities and logits of a prompt's positions, computed in the steps that all requests share."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions, RequestOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.prompt_logits import Places, PlaceScores, PromptLogits, PromptScores
from penstock.engine.request import Request, RequestStatus
from penstock.errors import InternalError, InvalidArgumentError
from tests.support.engine_requests import PROMPTS, prompt_of
from tests.support.errors import raises

NOTHING = ResolvedSampling(max_tokens=0)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def run(engine: Engine, *requests: Request) -> None:
    while any(request.status is not RequestStatus.FINISHED for request in requests):
        engine.step()
        engine.check_integrity()


def exact(logits, ids) -> list[float]:
    logits = logits.astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return [float(logits[i - 1, ids[i]]) for i in range(1, len(ids))]


@pytest.mark.parametrize("sizes", [{"max_tokens": 512}, {"max_tokens": 8}, {"max_rows": 64}, {"max_chunk": 5}])
@pytest.mark.parametrize("windows", [(0,), (0, 33)])
def test_scores_match_the_logits_for_any_chunking(make_llm, windows, sizes):
    llm = make_llm(windows=windows, **sizes)
    expected = make_llm(windows=windows, max_rows=512, max_tokens=512)
    scores = llm.score(PROMPTS, num_top=2)
    for prompt, score in zip(PROMPTS, scores, strict=True):
        assert score.logprobs[0] is None
        found = [one.logprob for one in score.logprobs[1:]]
        assert found == pytest.approx(exact(expected.logits(prompt), prompt), abs=1e-5)
        assert [one.token_id for one in score.logprobs[1:]] == prompt[1:]
        assert all(len(one.top) == 2 for one in score.logprobs[1:])
    assert scores == make_llm(windows=windows, max_rows=512, max_tokens=512).score(PROMPTS, num_top=2)


@pytest.mark.parametrize("token_ids", [(), tuple(range(99, 0, -1))])
@pytest.mark.parametrize("num_top", [1, 7, 50, 99, 100, 1000])
def test_the_likeliest_of_a_place_keep_the_order_of_ties(num_top, token_ids):
    logits = np.random.default_rng(0).integers(0, 6, (2, 100)).astype(np.float32)
    found = PlaceScores(Places((1,), token_ids), num_top)
    found.take(2, SimpleNamespace(logits=lambda: logits), None, range(2))
    expected = sorted(token_ids or range(100), key=lambda token: -logits[1, token])  # stable
    assert [token for token, _ in found.scores[1].top] == expected[:num_top]


def test_others_go_on_while_a_prompt_is_scored(make_llm):
    engine = make_llm().engine
    answer = engine.submit(prompt_of(10), ResolvedSampling(max_tokens=60))
    engine.step()
    scored = engine.submit(prompt_of(100, 1), NOTHING, prompt_rows=PromptScores(0))
    late = engine.submit(prompt_of(40, 2), ResolvedSampling(max_tokens=10))
    for made in range(2, 10):
        engine.step()
        assert len(answer.output_ids) == made
    assert scored.status is RequestStatus.RUNNING
    assert len(late.output_ids) > 5  # it arrived later, and its prompt was computed in the same steps
    run(engine, scored)
    assert len(scored.prompt_logprobs) == 100
    engine.abort(answer)
    engine.abort(late)


def test_known_pages_replace_only_positions_without_rows(make_llm):
    llm = make_llm(max_rows=64)
    program = llm.engine.program
    first = llm.generate(
        prompt_of(100), SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True)
    )
    assert program.num_tokens_run == 100 + 3
    again = llm.generate(
        prompt_of(100), SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True)
    )
    assert (again.num_cached_tokens, again.prompt_logprobs) == (0, first.prompt_logprobs)
    assert llm.generate(prompt_of(100), GREEDY).num_cached_tokens == 96  # scored pages are shared with later requests


def test_a_preempted_prompt_goes_on_where_its_scores_end(make_llm):
    expected = make_llm().score(prompt_of(200))
    engine = make_llm().engine
    request = engine.submit(prompt_of(200), NOTHING, prompt_rows=PromptScores(0))
    for _ in range(12):
        engine.step()
    known = len(request.prompt_logprobs)
    assert 64 < known < 200
    engine.scheduler.preempt(request)
    engine.step()
    assert request.num_computed >= known // 32 * 32  # its own pages have names
    run(engine, request)
    assert request.prompt_logprobs == expected.logprobs


def test_a_scored_prompt_leaves_a_row_for_everybody(make_llm):
    engine = make_llm(max_requests=4, max_tokens=64).engine
    scored = engine.submit(prompt_of(50), NOTHING, prompt_rows=PromptScores(0))
    others = [engine.submit(prompt_of(5, salt), ResolvedSampling(max_tokens=5)) for salt in (1, 2, 3)]
    run(engine, scored, *others)
    assert all(len(request.output_ids) == 5 for request in others)
    assert engine.num_steps < 50


def test_two_scored_prompts_at_once_and_logits_beside_them(make_llm):
    engine, vocab_size = make_llm().engine, 259
    prompts = [prompt_of(70, salt) for salt in range(3)]
    alone = make_llm()
    kinds = [PromptScores(1), PromptLogits(70, vocab_size), PromptScores(0)]
    requests = [engine.submit(p, NOTHING, prompt_rows=rows) for p, rows in zip(prompts, kinds, strict=True)]
    run(engine, *requests)
    assert requests[0].prompt_logprobs == alone.score(prompts[0], 1).logprobs
    assert np.array_equal(kinds[1].array, alone.logits(prompts[1]))
    assert requests[2].prompt_logprobs == alone.score(prompts[2]).logprobs


def test_a_row_that_is_not_finite_ends_a_scored_prompt(make_llm):
    engine = make_llm().engine
    request = engine.submit(prompt_of(50), NOTHING, prompt_rows=PromptScores(0))
    other = engine.submit(prompt_of(5), ResolvedSampling(max_tokens=5))
    engine.step()
    engine.program.spoil_row = 1  # after those of the answer
    run(engine, request, other)
    assert isinstance(request.error, InternalError)
    assert (other.error, len(other.output_ids)) == (None, 5)


def test_a_truncated_prompt_is_scored_as_it_runs(make_llm):
    llm = make_llm(context_len=128)
    prompt = prompt_of(300)
    params = SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=1, ignore_eos=True)
    stream = llm.stream(prompt, params, RequestOptions(truncate_prompt=True))
    list(stream)
    result = stream.result()
    assert result.prompt_token_ids == prompt[-108:]
    assert result.prompt_logprobs == llm.score(prompt[-108:], 1).logprobs


def test_best_of_returns_the_prompt_scores(make_llm):
    llm = make_llm()
    prompt = prompt_of(40)
    expected = llm.score(prompt).logprobs
    firsts = set()
    for seed in range(6):  # for any of the three as the best
        params = SamplingParams(max_tokens=4, temperature=1, seed=seed, best_of=3, prompt_logprobs=0, ignore_eos=True)
        result = llm.generate(prompt, params)
        assert result.prompt_logprobs == expected
        alone = SamplingParams(max_tokens=4, temperature=1, seed=seed, ignore_eos=True)
        firsts.add(result.token_ids == llm.generate(prompt, alone).token_ids)
    assert firsts == {True, False}


@pytest.mark.parametrize("num_top", [-1, 21, 1.5, True, None, "2"])
def test_how_many_likeliest_are_listed_is_checked_by_name(make_llm, num_top):
    with raises(InvalidArgumentError, param="num_top"):
        make_llm().score([5, 6], num_top)


def test_more_likeliest_than_tokens_are_refused(make_llm):
    with raises(InvalidArgumentError, param="num_top", match="got 13"):
        make_llm(vocab_size=12).score([5, 6], 13)


def test_more_prompts_than_may_wait_are_fed_as_room_comes(make_llm):
    plain = make_llm()
    llm = make_llm(max_requests=2, options=EngineOptions(max_waiting=3))
    assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == [
        plain.generate(p, GREEDY).token_ids for p in PROMPTS
    ]
    several = SamplingParams(max_tokens=3, temperature=1, seed=1, n=6, ignore_eos=True)
    assert llm.generate(PROMPTS[:3], several) != []
    found = dict(llm.generate_each((prompt, several) for prompt in PROMPTS))
    assert [len(found[i].choices) for i in range(len(PROMPTS))] == [6] * len(PROMPTS)
    assert llm.score(PROMPTS) == plain.score(PROMPTS)


def test_a_score_that_is_aborted_says_so(make_llm):
    llm = make_llm()
    llm.engine.observer = lambda news: llm.abort()
    with raises(InvalidArgumentError, param="prompt"):
        llm.score([prompt_of(4), prompt_of(500)])
