"""Answers with rows in Python, and beams, over the fake program: how they end, and what they leave behind."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from penstock import AutoModel, InvalidArgumentError, PenstockError
from penstock.engine.options import EngineOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.request import RequestStatus
from penstock.errors import QueueFullError
from penstock.llm.llm import LLM
from penstock.runtime.open import Opened
from penstock.runtime.program import ProgramLimits
from penstock.text.text_stream import TextStream
from tests.support.errors import raises
from tests.support.fake_model import FILES
from tests.support.fake_program import FakeProgram

PROMPT = [*range(5, 45)]
START = 7


def fail_at(num_tokens):
    """A criterion that raises once there are so many tokens."""
    return lambda ids, scores: 1 / 0 if ids.shape[1] >= num_tokens else False


class Broken:
    """A streamer that fails at the token ``last``."""

    def __init__(self, last):
        self.left = last + 1  # the prompt is the first

    def put(self, value):
        self.left -= 1
        if not self.left:
            raise ValueError("no more")

    def end(self):
        pass


def test_an_error_at_the_last_token_frees_the_request(make_llm):
    llm = make_llm(max_requests=2)
    model = AutoModel(llm)
    cases = [
        {"stopping_criteria": fail_at(4)},
        {"streamer": Broken(3), "output_scores": True},
        {"num_beams": 2, "stopping_criteria": fail_at(4)},
    ]
    for case in cases:
        with pytest.raises((PenstockError, ValueError)):
            model.generate([5], 3, do_sample=False, **case)
        llm.engine.check_integrity()
        assert not llm.engine.has_work, case
    assert llm.engine.figures().num_finished == {"error": 4}


def test_texts_that_fail_end_all_beams(make_llm, monkeypatch):
    llm, pushes = make_llm(), count()
    monkeypatch.setattr(TextStream, "push", lambda *_: 1 / 0 if next(pushes) == 4 else False)
    with pytest.raises(PenstockError):
        AutoModel(llm).generate([5], 3, do_sample=False, num_beams=3, num_return_sequences=3)
    llm.engine.check_integrity()
    assert not llm.engine.has_work


class LateError:
    """A hook that ends its request, and raises after that."""

    def __init__(self, has_group):
        self.group, self.has_group = [], has_group

    def join(self, request):
        self.group.append(request)
        return self.group if self.has_group else ()

    def process(self, request, row):
        return None

    def accept(self, request, token):
        for one in self.group:
            one.finish("length")
        raise ValueError("late")


@pytest.mark.parametrize("has_group", [False, True])
def test_an_error_after_the_end_frees_the_request(make_llm, has_group):
    llm = make_llm(max_requests=2)
    hook = LateError(has_group)
    requests = [llm.engine.submit([5], ResolvedSampling(max_tokens=3, hook=hook)) for _ in range(1 + has_group)]
    for request in requests:
        while llm.engine.wait(request, len(request.output_ids)):
            pass
        assert request.error is not None
    llm.engine.check_integrity()
    assert not llm.engine.has_work
    assert llm.engine.figures().num_finished == {"error": len(requests)}


def test_a_request_that_finds_no_place_joins_no_group(make_llm):
    llm = make_llm(max_requests=1, options=EngineOptions(max_waiting=1))
    requests = [llm.engine.submit([5]) for _ in range(2)]
    hook = LateError(True)
    with pytest.raises(QueueFullError):
        llm.engine.submit([5], ResolvedSampling(max_tokens=3, hook=hook))
    assert hook.group == []
    for request in requests:
        llm.engine.abort(request)


def test_searches_of_one_engine_take_turns(make_llm):
    llm, seen = make_llm(), []
    first, second = AutoModel(llm), AutoModel(llm)
    for model in (first, second):
        model.generate(
            [5],
            3,
            do_sample=False,
            num_beams=2,
            stopping_criteria=lambda *_: seen.append(llm.engine.search_lock.locked()),
        )
    assert seen
    assert all(seen)
    assert not llm.engine.search_lock.locked()


@pytest.mark.parametrize("num_pages", [128, 24])
def test_beams_do_not_wait_for_a_long_answer(make_llm, num_pages):
    """Those that have their rows make room for the others of their search."""
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 5, "num_return_sequences": 5}
    expected = AutoModel(make_llm()).generate([PROMPT], **options)
    llm = make_llm(max_requests=3, num_pages=num_pages)
    long = llm.engine.submit([9], ResolvedSampling(max_tokens=400))
    llm.engine.step()
    assert AutoModel(llm).generate([PROMPT], **options) == expected
    assert long.status is RequestStatus.RUNNING
    assert len(long.output_ids) < 100
    llm.engine.check_integrity()
    llm.engine.abort(long)


class WholePrompts(FakeProgram):
    """A network with an encoder, whose prompts run whole, in memory that cannot be reached."""

    @property
    def info(self):
        return replace(super().info, prefix_token=START)

    def page_memory(self):
        return []

    def _check(self, batch):
        super()._check(batch)
        for index, start in enumerate(batch.request_starts[:-1].tolist()):
            first = int(batch.positions[start])
            if first == 0:
                assert START in batch.token_ids[start : batch.request_starts[index + 1]]
            else:
                assert first > len(PROMPT), "a part of the prompt runs"


def of_fake(program, files=FILES):
    return LLM.of_program(Opened(program, files, Path("fake"), []), EngineOptions())


def test_beams_of_whole_prompts_run_them_whole(make_llm):
    options = {"max_new_tokens": 40, "do_sample": False, "num_beams": 3, "ignore_eos": True}
    ids = [one for one in PROMPT if one != START]
    ids.append(5)
    expected = AutoModel(make_llm()).generate([[*ids, START]], **options)
    limits = ProgramLimits(max_tokens=256, max_requests=3, num_pages=64)
    with of_fake(WholePrompts(vocab_size=259, context_len=256, limits=limits)) as llm:
        found = AutoModel(llm).generate([[*ids, START]], **options)
        assert found == [sequence[len(ids) :] for sequence in expected]  # those of the decoder
        assert llm.engine.figures().num_preemptions > 0
        llm.engine.check_integrity()


class Pipelined(FakeProgram):
    """Two stages: steps are launched, and their rows collected later."""

    def __init__(self, **options):
        super().__init__(**options)
        self._launched = deque()

    @property
    def info(self):
        return replace(super().info, num_stages=2)

    def launch(self, batch, sampling):
        self.run(batch)
        self._launched.append((None if sampling is None else self.sample(sampling), self._logits))

    def collect(self):
        sampled, self._logits = self._launched.popleft()
        return sampled


def test_scores_of_a_pipeline_are_those_of_one_process(make_llm):
    limits = ProgramLimits(max_tokens=64, max_requests=8, num_pages=128)
    cases = [
        {"do_sample": False},
        {"do_sample": True, "seed": 3, "top_k": 20, "repetition_penalty": 1.5, "num_return_sequences": 2},
        {"do_sample": True, "seed": 3, "regex": "[a-c]{4}"},
        {"do_sample": False, "thinking_token_budget": 2, "thinking_format": "think", "max_new_tokens": 70},
    ]
    prompts = ["the <think>\n", "on <think>"]
    with of_fake(Pipelined(vocab_size=259, context_len=512, limits=limits)) as llm:
        plain = make_llm()
        ids = [plain.tokenizer.encode(prompt) for prompt in prompts]
        for case in cases:
            options = {"max_new_tokens": 8, "output_scores": True, "output_logits": True} | case
            expected, found = (AutoModel(one).generate(ids, **options) for one in (plain, llm))
            assert found.sequences == expected.sequences
            for name in ("scores", "logits"):
                for rows, wanted in zip(found[name], expected[name], strict=True):
                    np.testing.assert_array_equal(rows, wanted)
        with raises(PenstockError, param="pipeline_parallel_size"):
            AutoModel(llm).generate(ids, 3, stopping_criteria=lambda *_: False)
        assert not llm.engine.has_work


def test_beams_refuse_what_they_would_ignore(make_llm):
    llm = make_llm()
    for name, value in (("thinking_token_budget", 3), ("logprobs", 1), ("prompt_logprobs", 0)):
        options = {name: value, "thinking_format": "think"}
        with raises(PenstockError, param=name):
            AutoModel(llm).generate([5], 3, do_sample=False, num_beams=2, **options)
        AutoModel(llm).generate([5], 3, do_sample=False, **options)


def test_rows_in_python_have_the_tokens_of_the_core(make_llm):
    """The thoughts' limit and grammars beside masks, biases and functions of the caller."""
    llm = make_llm()
    model, prompt = AutoModel(llm), llm.tokenizer.encode("the <think>\n")
    closing = llm.tokenizer.encode("</think>", add_special_tokens=False)
    letters = [*range(40, 90)]
    thoughts = {"thinking_token_budget": 3, "thinking_format": "think", "max_new_tokens": 150}
    cases = [
        thoughts,
        thoughts | {"allowed_token_ids": [one for one in letters if one not in closing]},
        thoughts | {"logit_bias": {closing[0]: -100.0}, "repetition_penalty": 1.5},
        thoughts | {"bad_words_ids": [closing[:1]], "min_new_tokens": 20},
        thoughts | {"regex": "[a-z]{12}"},
        thoughts | {"no_repeat_ngram_size": 1, "max_new_tokens": 20},
        {"regex": "[a-c]{6}", "max_new_tokens": 9},
    ]
    for case in cases:
        for warm in ({"do_sample": False}, {"do_sample": True, "seed": 4, "top_k": 9}):
            expected = model.generate([prompt], **warm, **case)
            found = model.generate([prompt], output_scores=True, **warm, **case)
            assert found.sequences == expected, case
            rows = found.scores[0]
            assert np.isfinite(rows[np.arange(len(rows)), expected[0][len(prompt) :]]).all()
            if "thinking_token_budget" not in case:
                assert np.isfinite(rows).sum(1).max() <= 3
            same = model.generate([prompt], logits_processor=lambda ids, scores: scores, **warm, **case)
            assert same == expected


def test_a_function_may_forbid_the_end_of_thoughts(make_llm):
    llm = make_llm()
    prompt = llm.tokenizer.encode("the <think>\n")

    def forbid(ids, scores):
        scores[:, llm.tokenizer.encode("\n")] = -np.inf
        return scores

    options = {"thinking_token_budget": 3, "thinking_format": "think", "do_sample": False, "max_new_tokens": 20}
    found = AutoModel(llm).generate([prompt], logits_processor=forbid, ignore_eos=True, **options)
    without = {"do_sample": False, "max_new_tokens": 20}
    assert found == AutoModel(llm).generate([prompt], logits_processor=forbid, ignore_eos=True, **without)


def test_a_grammar_drops_the_models_own_ngram_size(make_llm):
    files = FILES | {"generation_config.json": b'{"no_repeat_ngram_size": 2, "eos_token_id": [1]}'}
    llm = make_llm(files=files)
    assert llm.generate("x", SamplingParams(regex="(ab){4}", temperature=0)).text == "abababab"
    own = SamplingParams(regex="[ab]{8}", no_repeat_ngram_size=2, temperature=0, max_tokens=4)
    assert len(llm.generate("x", own).token_ids) == 4
    with raises(InvalidArgumentError, param="forced_eos_token_id"):
        llm.generate("x", SamplingParams(regex="(ab){4}", forced_eos_token_id=3))
