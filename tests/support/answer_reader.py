"""Reads the answers of a model in workers, to compare them with those of an engine that runs each alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from penstock.engine.logprobs import TokenLogprobs
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.llm.result import Result
from penstock.serving.workers.remote_model import RemoteBackend


class AnswerReader:
    """Reads one answer as a stream."""

    def __init__(self, backend: RemoteBackend, prompt: list[int], params: SamplingParams, **options: Any) -> None:
        self.num_deltas = 0
        self.text: defaultdict[int, str] = defaultdict(str)
        self.ids: defaultdict[int, list[int]] = defaultdict(list)
        self.logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        self.reasons: dict[int, str | None] = {}
        self.version = 0
        self._prompt, self._params, self._options = prompt, params, RequestOptions(**options)
        self.task = asyncio.ensure_future(self._read(backend))

    async def _read(self, backend: RemoteBackend) -> None:
        async with await backend.submit(self._prompt, self._params, self._options) as answer:
            self.version = answer.version
            async for delta in answer:
                self.num_deltas += 1
                self.text[delta.index] += delta.text
                self.ids[delta.index] += delta.token_ids
                self.logprobs[delta.index] += delta.logprobs or []
                self.reasons[delta.index] = delta.finish_reason
        self.version, self.seeds, self.timings = answer.version, answer.seeds, answer.timings
        self.prompt_logprobs, self.num_prompt_tokens = answer.prompt_logprobs, answer.num_prompt_tokens

    def check(self, result: Result, name: str = "") -> None:
        """Compare what was read with the result of an engine in this process."""
        for index, choice in enumerate(result.choices):
            assert self.ids[index] == choice.token_ids, f"request {name}, answer {index}"
            assert self.text[index] == choice.text
            assert self.logprobs[index] == (choice.logprobs or [])
            assert self.reasons[index] == choice.finish_reason
        assert self.prompt_logprobs == result.prompt_logprobs
        assert self.num_prompt_tokens == len(result.prompt_token_ids)
        if len(self.ids[0]) > 1:
            decode_s = self.timings["total_s"] - self.timings["first_token_s"]
            assert self.timings["per_token_s"] * (len(self.ids[0]) - 1) == pytest.approx(decode_s)
