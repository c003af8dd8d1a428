"""OpenVINO GenAI for run.py: the continuous-batching pipeline, the plain one for the start.

A step is timed from outside (``step()``).  The steps of the prompts, and the first of those after them, are left out.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from protocol import START_TEXT, Launch, prompt, serve

UNTIMED_STEPS = 6
"""Of the steps after the prompts; as many are made in addition."""


def open_pipeline(launch: Launch) -> Any:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_NUM_THREADS": launch.threads}
    return openvino_genai.ContinuousBatchingPipeline(str(launch.model), scheduler, "CPU", properties)


def greedy(num_tokens: int) -> Any:
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


class OpenVino:
    def __init__(self, launch: Launch) -> None:
        self.pipeline = open_pipeline(launch)
        self._steps([prompt(16, 0)], 4)

    def _steps(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        """Return the seconds of each step until every prompt has its answer."""
        import numpy as np
        import openvino

        handles = [
            self.pipeline.add_request(row, openvino.Tensor(np.array([ids], dtype=np.int64)), greedy(num_tokens))
            for row, ids in enumerate(prompts)
        ]
        times = []
        while self.pipeline.has_non_finished_requests():
            start = time.perf_counter()
            self.pipeline.step()
            times.append(time.perf_counter() - start)
        for handle in handles:
            handle.read_all()
        return times

    def prefill_s(self, ids: list[int]) -> float:
        return self._steps([ids], 2)[0]

    def decode_step_s(self, prompts: list[list[int]], num_steps: int) -> float:
        # Those before compute prompts.  Prompts come 512 tokens a step, so the first answers end some steps before the
        # last: a few of 32's steps have less to do, and the median is a little better than a whole batch's.
        return statistics.median(self._steps(prompts, num_steps + UNTIMED_STEPS)[-num_steps:])


def first_token(launch: Launch) -> None:
    """Use the plain pipeline with its compile cache, which starts sooner than the continuous-batching one."""
    import openvino_genai

    cache = launch.model.with_name(f"{launch.model.name}-cache")
    properties = {"INFERENCE_NUM_THREADS": launch.threads, "CACHE_DIR": str(cache), "ATTENTION_BACKEND": "SDPA"}
    openvino_genai.LLMPipeline(str(launch.model), "CPU", **properties).generate(START_TEXT, greedy(1))


if __name__ == "__main__":
    serve(OpenVino, first_token)
