"""Prompts of many lengths, what to sample with, greedy and not; requests of an engine and the order of their ends."""

from __future__ import annotations

import time

from penstock.engine.options import RequestOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.request import RequestStatus

LENGTHS = [1, 2, 31, 32, 33, 64, 65, 100, 255, 257]
WINDOWS = [(0,), (40,), (0, 33)]


class Later:
    """The engine's clock, which a test can put forward."""

    ahead = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return time.perf_counter() + cls.ahead


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt) % 250 + 2 for i in range(length)]


def params_of(index: int, max_tokens: int = 40) -> SamplingParams:
    if index % 2 == 0:
        return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return SamplingParams(max_tokens=max_tokens, temperature=0.9, top_k=20, top_p=0.9, seed=index, ignore_eos=True)


PROMPTS = [prompt_of(length, salt) for salt, length in enumerate(LENGTHS)]


PARAMS = [params_of(index) for index in range(len(PROMPTS))]


def run_alone(make_llm, windows=(0,)) -> list[list[int]]:
    llm = make_llm(windows=windows, max_tokens=512)
    return [llm.generate(p, s).token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


def finish_order(engine, requests) -> list[int]:
    order: list[int] = []
    while engine.scheduler.has_work or engine.has_work:
        engine.step()
        engine.check_integrity()
        order += [i for i, r in enumerate(requests) if r.status is RequestStatus.FINISHED and i not in order]
    return order


def submit(engine, length=10, max_tokens=5, salt=0, **options):
    sampling = ResolvedSampling(max_tokens=max_tokens)
    return engine.submit(prompt_of(length, salt), sampling, options=RequestOptions(**options))
