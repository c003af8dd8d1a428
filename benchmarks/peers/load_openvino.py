"""OpenVINO GenAI for load.py: the continuous-batching pipeline, its loop driven from here, on token ids."""

from __future__ import annotations

from typing import Any

from play import play_steps, serve_traces
from protocol import Launch
from run_openvino import greedy
from traces import CACHE_GIB, MAX_BATCH, STEP_TOKENS, Event, Request


class OpenVino:
    def __init__(self, launch: Launch) -> None:
        import openvino_genai

        self.scheduler = openvino_genai.SchedulerConfig()
        self.scheduler.cache_size = CACHE_GIB
        self.scheduler.max_num_seqs = MAX_BATCH
        self.scheduler.max_num_batched_tokens = STEP_TOKENS
        self.scheduler.enable_prefix_caching = True
        self.scheduler.dynamic_split_fuse = True
        self.properties = {"INFERENCE_NUM_THREADS": launch.threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(launch.model), self.scheduler, "CPU", self.properties
        )
        self.running: dict[int, Any] = {}
        self.left: dict[int, int] = {}
        self.num_asked = 0

    def submit(self, number: int, request: Request) -> None:
        import numpy as np
        import openvino

        ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        self.num_asked += 1
        self.running[number] = self.pipeline.add_request(self.num_asked, ids, greedy(request.num_new))
        self.left[number] = request.num_new

    def step(self) -> list[tuple[int, int]]:
        self.pipeline.step()
        news = []
        for number, handle in list(self.running.items()):
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            if count:
                news.append((number, count))
                self.left[number] -= count
                if self.left[number] <= 0:
                    del self.running[number], self.left[number]
        return news

    def play(self, requests: list[Request]) -> list[Event]:
        return play_steps(self, requests)

    def forget(self) -> None:
        """Do nothing: a process measures one trace, so no prompt occurred before."""

    def figures(self) -> dict[str, object]:
        return {}


if __name__ == "__main__":
    serve_traces(OpenVino)
