"""A limit on thoughts beside every other feature: the tokens are those that the request has alone."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest

from penstock import LLM
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.engine.request import BegunAnswer, RequestStatus
from penstock.runtime.program import ProgramLimits
from penstock.text.answer.budget import REASON
from tests.support.command import DEMO

LIMIT = 6
END = f"\n\n{REASON}\n</think>\n\n"
PROMPTS = [
    "<think>\n",
    "def add(a, b):\n" * 9 + "<think>\n",
    "def add(a, b):\n" * 9 + "x <think>\nbegun",
    "no thoughts",
]
WARM = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "thinking_format": "think"}
ITEMS = [
    (prompt, SamplingParams(**WARM, seed=index, thinking_token_budget=LIMIT + index % 3, **more))
    for index, (prompt, more) in enumerate(
        [
            (PROMPTS[0], {}),
            (PROMPTS[1], {"n": 2}),
            (PROMPTS[2], {"logprobs": 2, "repetition_penalty": 1.3}),
            (PROMPTS[3], {}),
            (PROMPTS[1], {"regex": rf"[a-z]*{re.escape(END)}[0-9]{{4}}"}),
            (PROMPTS[0], {"prompt_logprobs": 1, "n": 2}),
            (PROMPTS[1], {"allowed_token_ids": [*range(40, 300)]}),
        ]
    )
] + [(PROMPTS[1], SamplingParams(temperature=1.0, seed=9, max_tokens=30))]
FEW = {"max_tokens": 256, "max_requests": 5, "num_pages": 12, "context_len": 384}
COMPANY = {
    "chunks": ({"max_chunk": 5}, {}),
    "no prefix cache": ({"prefix_cache": False}, {}),
    "preemption": ({}, FEW),
    "one at a time": ({}, {"max_requests": 1}),
    "int8 keys and values": ({}, {"kv_layout": "int8"}),
    "int4, chunks, preemption": ({"max_chunk": 7}, FEW | {"kv_layout": "int4"}),
    "int8, chunks, preemption": ({"max_chunk": 7}, FEW | {"kv_layout": "int8"}),
}


@contextmanager
def opened(options=None, **limits):
    with LLM(DEMO, limits=ProgramLimits(**limits), **options or {}) as llm:
        yield llm
        llm.engine.check_integrity()
        assert not llm.engine.scheduler.has_work


def shown(result):
    return [(choice.token_ids, choice.finish_reason, choice.logprobs) for choice in result.choices]


@pytest.fixture(scope="module")
def alone():
    """The results of each request alone, by the type of keys and values."""
    found = {}
    for kind in ("auto", "int8", "int4"):
        with opened(kv_layout=kind) as llm:
            found[kind] = []
            for item in ITEMS:
                llm.engine.forget_prefixes()
                found[kind].append(llm.generate(*item))
    return found


def test_thoughts_end_where_their_limit_says(alone):
    for results in alone.values():
        for (_, params), result in zip(ITEMS[:6], results, strict=False):
            is_closed = [REASON in choice.text for choice in result.choices]
            assert all(is_closed) == (result is not results[3]), params
        assert re.fullmatch(f"[a-z]*{re.escape(END)}[0-9]{{4}}", results[4].text)
        assert REASON not in results[6].text  # its mask excludes the tokens that end the thoughts


@pytest.mark.parametrize("name", COMPANY)
def test_a_limit_on_thoughts_holds_in_any_company(alone, name):
    options, limits = COMPANY[name]
    expected = alone[limits.get("kv_layout", "auto")]
    with opened(options, **limits) as llm:
        aborted = [llm.stream(PROMPTS[index], **WARM, thinking_token_budget=9) for index in (0, 1, 1)]
        for stream in aborted:
            next(iter(stream))
        llm.engine.observer = lambda _: [s.abort() for s in aborted] if llm.engine.num_steps > 20 else None
        found = llm.generate(*map(list, zip(*ITEMS, strict=True)))
        assert [shown(one) for one in found] == [shown(one) for one in expected]
        assert [one.prompt_logprobs for one in found] == [one.prompt_logprobs for one in expected]
        assert not llm.engine.has_work
        if "preemption" in name:
            assert llm.engine.figures().num_preemptions > 0
        for item, one in zip(ITEMS, expected, strict=True):
            if item[1].n == 1:
                deltas = [*llm.stream(*item)]
                assert [token for delta in deltas for token in delta.token_ids] == one.token_ids
                assert "".join(delta.text for delta in deltas) == one.text


def test_a_limit_on_thoughts_goes_on_in_another_engine(alone):
    with opened() as llm:
        for index in (0, 2, 4):
            prompt, params = ITEMS[index]
            whole = alone["auto"][index]
            for num in (1, LIMIT + 1, LIMIT + 9, len(whole.token_ids) - 2):
                begun = {0: BegunAnswer(0, whole.token_ids[:num], 0)}
                (submit,) = llm.prepare(prompt, params, RequestOptions(), begun)
                request = submit()
                while llm.engine.wait(request, len(request.output_ids)):
                    pass
                assert request.status is RequestStatus.FINISHED
                assert request.output_ids == whole.token_ids
