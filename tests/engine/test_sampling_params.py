"""Every sampling field through the engine: its effect on the answer, alone and in a batch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from penstock import LLM, ProgramLimits, SamplingParams
from penstock.engine.params import ResolvedSampling
from penstock.engine.prompt_logits import PromptScores
from penstock.errors import InvalidArgumentError, UnsupportedError
from tests.support.command import DEMO
from tests.support.errors import raises

PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, limits=ProgramLimits(max_requests=8, context_len=512)) as opened:
        yield opened


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | fields)


FIELDS = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.9, "min_p": 0.1, "seed": 3},
    {"temperature": 0.9, "typical_p": 0.6, "seed": 4},
    {"temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "seed": 5},
    {"logit_bias": {13: 8.0, 300: -100}},
    {"bad_words": [".", "replace", "\n\n"]},
    {"allowed_token_ids": list(range(100, 400)), "temperature": 1.0, "seed": 9},
    {"min_tokens": 20, "ignore_eos": False, "stop": ["("]},
]


def test_batch_matches_single_with_every_field(llm):
    """Penalties, biases, masks and bad words of neighbours do not touch a row; a seed gives its tokens again."""
    params = [greedy(**fields) for fields in FIELDS]
    alone = [llm.generate(PROMPT, one) for one in params]
    together = llm.generate([PROMPT] * len(params), params)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.text for r in together] == [r.text for r in alone]
    plain = llm.generate(PROMPT, greedy())
    differing = [r.token_ids for r in alone if r.token_ids != plain.token_ids]
    assert len(differing) >= len(FIELDS) - 1


def test_penalties_are_those_of_transformers(llm):
    """Each greedy token has the greatest logit after transformers' processor."""
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    result = llm.generate(PROMPT, greedy(repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.3))
    ids = result.prompt_token_ids + result.token_ids
    logits = llm.logits(ids)
    prompt_len = len(result.prompt_token_ids)
    for step, token in enumerate(result.token_ids):
        known = torch.tensor([ids[: prompt_len + step]])
        row = torch.from_numpy(logits[prompt_len + step - 1 : prompt_len + step].copy())
        scores = RepetitionPenaltyLogitsProcessor(1.4)(known, row)[0].numpy()
        counts = np.bincount(result.token_ids[:step], minlength=len(scores)).astype(np.float32)
        assert int((scores - np.float32(0.3) * counts - np.float32(0.8) * (counts > 0)).argmax()) == token


def test_bad_words_and_allowed_tokens_are_enforced(llm):
    plain = llm.generate(PROMPT, greedy()).text
    word = plain[3:6].strip() or plain.split()[0]
    assert word in plain
    assert word not in llm.generate(PROMPT, greedy(bad_words=[word, f"{word}s"])).text.split()
    allowed = [40, 41, 300]
    result = llm.generate(PROMPT, greedy(allowed_token_ids=allowed, temperature=1.5, seed=1))
    assert set(result.token_ids) <= set(allowed)


def test_a_sequence_of_bad_tokens_is_broken_at_its_last(llm):
    plain = llm.generate(PROMPT, greedy()).token_ids
    spelled = [(pair, llm.tokenizer.decode(pair)) for pair in pairwise(plain)]
    pair, text = next((pair, text) for pair, text in spelled if pair in llm.tokenizer.spellings(text))
    found = llm.generate(PROMPT, greedy(bad_words=[text])).token_ids
    assert pair not in set(pairwise(found))
    assert found[: plain.index(pair[1])] == plain[: plain.index(pair[1])]  # nothing was forbidden up to there


def test_end_tokens_wait_for_min_tokens(llm):
    plain = llm.generate(PROMPT, greedy()).token_ids
    end = plain[2]
    first = plain.index(end)
    ended = llm.generate(PROMPT, greedy(stop_token_ids=[end]))
    assert ended.token_ids == plain[: first + 1]
    assert ended.finish_reason == "stop"
    later = llm.generate(PROMPT, greedy(stop_token_ids=[end], min_tokens=first + 2))
    assert len(later.token_ids) >= first + 2
    assert end not in later.token_ids[: first + 2]


def test_stop_strings_and_ids_with_and_without_inclusion(llm):
    plain = llm.generate(PROMPT, greedy())
    stop = plain.text[6:9]
    at = plain.text.index(stop)
    assert llm.generate(PROMPT, greedy(stop=stop)).text == plain.text[:at]
    kept = greedy(stop=stop, include_stop_str_in_output=True)
    assert llm.generate(PROMPT, kept).text == plain.text[: at + len(stop)]
    assert "".join(delta.text for delta in llm.stream(PROMPT, kept)) == plain.text[: at + len(stop)]
    end = plain.token_ids[3]
    before = llm.generate(PROMPT, greedy(stop_token_ids=[end]))
    with_end = llm.generate(PROMPT, greedy(stop_token_ids=[end], include_stop_str_in_output=True))
    assert with_end.text == before.text + llm.tokenizer.decode([end])
    late = llm.generate(PROMPT, greedy(stop=stop, min_tokens=24))
    assert late.text == plain.text


def test_logprobs_are_those_of_the_logits(llm):
    result = llm.generate(PROMPT, greedy(temperature=1.0, seed=5, logprobs=3, prompt_logprobs=2, max_tokens=8))
    ids = result.prompt_token_ids + result.token_ids
    logits = llm.logits(ids).astype(np.float64)
    exact = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    assert result.prompt_logprobs[0] is None
    every = result.prompt_logprobs[1:] + result.logprobs
    assert len(every) == len(ids) - 1
    for position, found in enumerate(every):
        order = np.argsort(-exact[position], kind="stable")
        assert found.token_id == ids[position + 1]
        assert found.logprob == pytest.approx(exact[position, found.token_id], abs=1e-4)
        assert order[found.rank - 1] == found.token_id
        assert [i for i, _ in found.top] == order[: len(found.top)].tolist()
    assert [len(found.top) for found in every] == [2] * (len(result.prompt_token_ids) - 1) + [3] * 8
    streamed = [
        one for d in llm.stream(PROMPT, greedy(temperature=1.0, seed=5, logprobs=3, max_tokens=8)) for one in d.logprobs
    ]
    assert streamed == result.logprobs


def test_several_answers_differ_reproduce_and_are_ranked(llm):
    params = greedy(temperature=1.2, seed=11, n=4, logprobs=0)
    result = llm.generate(PROMPT, params)
    assert len(result.choices) == 4
    assert len({tuple(choice.token_ids) for choice in result.choices}) == 4
    assert result.choices[0].text == result.text
    assert llm.generate(PROMPT, params).choices == result.choices
    first = llm.generate(PROMPT, greedy(temperature=1.2, seed=11))
    assert first.token_ids == result.token_ids  # answer 0 is the one without n
    best = llm.generate(PROMPT, greedy(temperature=1.2, seed=11, n=2, best_of=4))
    ranked = sorted(result.choices, key=lambda c: -np.mean([one.logprob for one in c.logprobs]))
    assert [c.token_ids for c in best.choices] == [c.token_ids for c in ranked[:2]]
    assert best.choices[0].logprobs is None
    assert best.seed == best.choices[0].seed
    assert [c.seed for c in best.choices] == [c.seed for c in ranked[:2]]
    assert result.seed == 11
    for choice in result.choices:  # each answer alone, by the seed that it reports
        again = llm.generate(PROMPT, greedy(temperature=1.2, seed=choice.seed, logprobs=0))
        assert (again.token_ids, again.logprobs, again.seed) == (choice.token_ids, choice.logprobs, choice.seed)
    drawn = llm.generate(PROMPT, greedy(temperature=1.2, best_of=3))
    assert llm.generate(PROMPT, greedy(temperature=1.2, seed=drawn.seed)).token_ids == drawn.token_ids
    near = {choice.seed for seed in (11, 12) for choice in llm.generate(PROMPT, greedy(seed=seed, n=4)).choices}
    assert len(near) == 8  # adjacent seeds share no answer
    with raises(InvalidArgumentError, param="n"):
        llm.stream(PROMPT, params)


def test_echo_begins_with_the_prompt(llm):
    plain = llm.generate(PROMPT, greedy())
    assert llm.generate(PROMPT, greedy(echo=True)).text == PROMPT + plain.text
    assert "".join(delta.text for delta in llm.stream(PROMPT, greedy(echo=True))) == PROMPT + plain.text
    assert llm.generate(plain.prompt_token_ids, greedy(echo=True)).text == PROMPT + plain.text


def test_token_ids_beyond_the_vocabulary_are_refused_by_name(llm):
    for fields in ({"logit_bias": {4096: 1}}, {"allowed_token_ids": [4096]}, {"stop_token_ids": [4096]}):
        with raises(InvalidArgumentError, param=next(iter(fields)), match="0 to 4095, got 4096"):
            llm.generate(PROMPT, greedy(**fields))


@pytest.mark.parametrize(
    ("vocab_size", "fields", "message"),
    [
        (258, {"bad_words": ["a", "plain"]}, "bad_words: expected token ids from 0 to 257, got 258"),
        (12, {"logprobs": 13}, "logprobs: the model has only 12 tokens"),
        (12, {"prompt_logprobs": 13}, "prompt_logprobs: the model has only 12 tokens"),
    ],
)
def test_tokens_beyond_the_vocabulary_end_only_their_request(make_llm, vocab_size, fields, message):
    """The tokenizer has an added token behind the model's vocabulary."""
    llm = make_llm(vocab_size=vocab_size)
    found = dict(llm.generate_each([([5, 6], greedy()), ([5, 6], greedy(**fields))]))
    assert len(found[0].token_ids) == 24
    assert isinstance(found[1], InvalidArgumentError)
    assert message == str(found[1])


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": ((4096, 1.0),)},
        {"allowed_token_ids": (3, 10**6)},
        {"bad_words": ((3, 4096),)},
    ],
)
def test_the_engine_refuses_what_would_end_other_requests(llm, fields):
    healthy = llm.stream(PROMPT, greedy(max_tokens=6))
    num_tokens = len(next(healthy).token_ids)
    with raises(InvalidArgumentError, param=next(iter(fields)), match="0 to 4095"):
        llm.engine.submit([5, 6], ResolvedSampling(max_tokens=4, **fields))
    with raises(InvalidArgumentError, param="num_top"):
        llm.engine.submit([5, 6], ResolvedSampling(max_tokens=4), prompt_rows=PromptScores(10**6))
    with raises(InvalidArgumentError, param="sampling", match="ResolvedSampling"):
        llm.engine.submit([5, 6], greedy())
    assert num_tokens + sum(len(delta.token_ids) for delta in healthy) == 6


def test_text_fields_need_a_tokenizer(make_llm):
    bare = make_llm(files={})
    for fields in ({"stop": "x"}, {"bad_words": ["x"]}, {"echo": True}):
        with raises(UnsupportedError, param=next(iter(fields))):
            bare.generate([5, 6], SamplingParams(**fields))


def test_progress_is_one_line(llm, capsys):
    llm.generate([PROMPT, "x = 1"], greedy(), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("2/2 prompts, 48 tokens, ")
    assert captured.err.count("\n") == 1


def test_a_multiple_choice_task_is_scored(llm):
    """As lm-eval's loglikelihood: the sum over the continuation, and whether greedy decoding generates it."""
    context = "import os\nimport "
    scores = {}
    for choice in ("sys\n", "0 == banana("):
        start = len(llm.tokenizer.encode(context))
        ids = llm.tokenizer.encode(context) + llm.tokenizer.encode(choice, add_special_tokens=False)
        score = llm.score(ids)
        exact = llm.logits(ids).astype(np.float64)
        exact -= exact.max(1, keepdims=True)
        exact -= np.log(np.exp(exact).sum(1, keepdims=True))
        assert score.total(start) == pytest.approx(sum(exact[i - 1, ids[i]] for i in range(start, len(ids))), abs=1e-3)
        assert score.is_greedy(start) == all(exact[i - 1].argmax() == ids[i] for i in range(start, len(ids)))
        scores[choice] = score.total(start) / len(choice)
    assert scores["sys\n"] > scores["0 == banana("]
    assert [s.token_ids for s in llm.score([context, "x"])] == [llm.tokenizer.encode(t) for t in (context, "x")]
    answer = llm.generate(context, greedy(max_tokens=5))
    assert llm.score(answer.prompt_token_ids + answer.token_ids).is_greedy(len(answer.prompt_token_ids))
