"""Structured outputs over several processes: the tokens of one."""

from __future__ import annotations

import pytest

from penstock import LLM, SamplingParams
from penstock.text.answer.budget import REASON
from tests.support.command import DEMO

FOLDER = DEMO.parent / "model"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}


@pytest.mark.long
def test_ranks_and_stages_give_the_tokens_of_one_process():
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=60, json_schema=SCHEMA, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=60, regex="[a-z]{4}-[0-9]{3}"),
        SamplingParams(temperature=1.0, seed=3, max_tokens=20),
        SamplingParams(
            temperature=1.0,
            seed=3,
            max_tokens=60,
            n=2,
            thinking_token_budget=6,
            thinking_format="think",
            ignore_eos=True,
        ),
    ]
    prompts = ["def f", "x", "y", "def add(a, b):\n" * 9 + "<think>\nx"]
    found = []
    for sizes in ({}, {"tensor_parallel_size": 2, "threads": 1}, {"pipeline_parallel_size": 2, "threads": 1}):
        with LLM(FOLDER, scheme="w8a8", **sizes) as llm:
            results = llm.generate(prompts, params)
            found.append([choice.token_ids for result in results for choice in result.choices])
            assert all(REASON in choice.text for choice in results[3].choices)
    assert found[0] == found[1] == found[2]
