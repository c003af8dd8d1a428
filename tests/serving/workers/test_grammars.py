"""Structured outputs of a model that runs in a worker: the grammar travels with the request."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock import SamplingParams
from penstock.errors import InvalidArgumentError
from tests.support.worker_processes import DEMO, service

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


def test_a_worker_answers_by_the_grammar_of_the_request() -> None:
    async def run() -> None:
        async with service() as running:
            backend = await running.models.load(str(DEMO))
            hot = {"temperature": 1.0, "max_tokens": 60}

            async def text_of(seed: int, **grammar: object) -> str:
                answer = await backend.submit([5, 6, 7], SamplingParams(seed=seed, **hot, **grammar))
                return "".join([delta.text async for delta in answer])

            texts = await asyncio.gather(*(text_of(seed, json_schema=SCHEMA) for seed in range(4)), text_of(9))
            assert all(json.loads(text)["a"] in ("x", "y") for text in texts[:4])
            assert await text_of(1, choice=["yes", "no"]) in ("yes", "no")
            with pytest.raises(InvalidArgumentError) as refused:
                await text_of(1, regex="(")
            assert refused.value.param == "regex"
            for seed in range(5):  # aborted while its grammar is compiled, or soon after
                task = asyncio.ensure_future(text_of(seed, regex=f"([a-z]{{1,{900 + seed}}},){{900}}"))
                await asyncio.sleep(0)
                task.cancel()
            assert await text_of(2, choice=["yes", "no"]) in ("yes", "no")

    asyncio.run(run())
